// Writing JSON, as far as the introspection ops need it.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace tgemm {

// An object or array under construction: add the members, then take str().
class Json {
 public:
  static Json object() { return Json('{', '}'); }
  static Json array() { return Json('[', ']'); }

  template <class Value>
  Json& member(std::string_view key, const Value& value) {
    separate();
    append_string(key);
    text_ += ": ";
    append(value);
    return *this;
  }
  template <class Value>
  Json& element(const Value& value) {
    separate();
    append(value);
    return *this;
  }
  std::string str() const { return text_ + close_; }

 private:
  Json(char open, char close) : text_(1, open), close_(close) {}

  void separate() {
    if (text_.size() > 1) text_ += ", ";
  }
  void append(const Json& value) { text_ += value.str(); }
  void append(std::string_view value) { append_string(value); }
  void append(const char* value) { append_string(value); }
  void append(const std::string& value) { append_string(value); }
  void append(bool value) { text_ += value ? "true" : "false"; }
  void append(std::integral auto value) { text_ += std::to_string(value); }
  void append(std::floating_point auto value) {
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
    text_.append(digits, end);
  }
  void append_string(std::string_view value) {
    text_ += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') text_ += '\\';
      if (static_cast<unsigned char>(c) >= 0x20) text_ += c;
    }
    text_ += '"';
  }

  std::string text_;
  char close_;
};

}  // namespace tgemm
