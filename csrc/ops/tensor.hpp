// Owning handles over torch's stable C interface, lighter than torch::stable::Tensor (no
// shared_ptr, no allocation): an op call takes and gives back a handful of them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

namespace tgemm {

// Throws std::runtime_error("tgemm: torch could not <action>[: torch's own message]") when a call
// into torch failed. The message is torch's where torch >= 2.13 hands it out.
void check_torch(AOTITorchError error, const char* action);

// One reference to a tensor of torch. Null when absent.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  // A second reference to the same tensor.
  Tensor share() const;

  std::span<const int64_t> sizes() const;
  std::span<const int64_t> strides() const;
  int32_t dtype() const;
  const void* data() const;
  void* mutable_data() const;

 private:
  AtenTensorHandle handle_ = nullptr;
};

// A string argument of an op. `present` tells None from "".
class Text {
 public:
  Text() = default;
  explicit Text(std::optional<StringHandle> handle);
  Text(Text&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), view_(std::exchange(other.view_, {})) {}
  Text& operator=(Text&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(view_, other.view_);
    return *this;
  }
  ~Text() {
    if (handle_ != nullptr) torch_delete_string(handle_);
  }

  bool present() const { return handle_ != nullptr; }
  std::string_view view() const { return view_; }

 private:
  StringHandle handle_ = nullptr;
  std::string_view view_;
};

// An uninitialised contiguous tensor.
Tensor empty(std::span<const int64_t> sizes, int32_t dtype, int32_t device_type,
             int32_t device_index);

// The arguments of one call through torch's dispatcher, in the order of its schema, defaults
// included.
class DispatcherCall {
 public:
  explicit DispatcherCall(const char* name, const char* overload = "")
      : name_(name), overload_(overload) {}

  DispatcherCall& add(const Tensor& tensor);
  DispatcherCall& add_optional(const Tensor& tensor);  // an empty Tensor is None
  DispatcherCall& add_sizes(std::span<const int64_t> sizes);
  DispatcherCall& add_string(std::string_view text);
  DispatcherCall& add_dtype(int32_t dtype) { return push(torch::stable::detail::from(dtype)); }
  DispatcherCall& add_bool(bool value) { return push(torch::stable::detail::from(value)); }
  DispatcherCall& add_int(int64_t value) { return push(torch::stable::detail::from(value)); }
  DispatcherCall& add_none() { return push(torch::stable::detail::from(std::nullopt)); }
  // Calls the op, which must return one tensor.
  Tensor call();

 private:
  DispatcherCall& push(StableIValue value);

  static constexpr int kMaxArguments = 8;
  const char* name_;
  const char* overload_;
  StableIValue stack_[kMaxArguments] = {};
  int count_ = 0;
};

}  // namespace tgemm
