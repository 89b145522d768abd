#include "ops/tensor.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace tgemm {
namespace {

// torch >= 2.13 keeps the message of the last failed call; an older one only says that it failed.
const char* last_torch_message() {
  using Getter = const char* (*)();
  static const Getter getter =
      reinterpret_cast<Getter>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  return getter == nullptr ? nullptr : getter();
}

}  // namespace

void check_torch(AOTITorchError error, const char* action) {
  if (error == 0) [[likely]]
    return;
  std::string sentence = std::string("tgemm: torch could not ") + action;
  if (const char* message = last_torch_message()) sentence.append(": ").append(message);
  throw std::runtime_error(sentence);
}

Tensor Tensor::share() const {
  AtenTensorHandle copy = nullptr;
  check_torch(aoti_torch_new_tensor_handle(handle_, &copy), "share a tensor");
  return Tensor(copy);
}

std::span<const int64_t> Tensor::sizes() const {
  int64_t dims = 0;
  int64_t* sizes = nullptr;
  check_torch(aoti_torch_get_dim(handle_, &dims), "read the shape of a tensor");
  check_torch(aoti_torch_get_sizes(handle_, &sizes), "read the shape of a tensor");
  return {sizes, static_cast<size_t>(dims)};
}

std::span<const int64_t> Tensor::strides() const {
  int64_t dims = 0;
  int64_t* strides = nullptr;
  check_torch(aoti_torch_get_dim(handle_, &dims), "read the strides of a tensor");
  check_torch(aoti_torch_get_strides(handle_, &strides), "read the strides of a tensor");
  return {strides, static_cast<size_t>(dims)};
}

int32_t Tensor::dtype() const {
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dtype(handle_, &dtype), "read the dtype of a tensor");
  return dtype;
}

const void* Tensor::data() const {
  const void* pointer = nullptr;
  check_torch(torch_get_const_data_ptr(handle_, &pointer), "read the address of a tensor");
  return pointer;
}

void* Tensor::mutable_data() const {
  void* pointer = nullptr;
  check_torch(torch_get_mutable_data_ptr(handle_, &pointer), "read the address of a tensor");
  return pointer;
}

Text::Text(std::optional<StringHandle> handle) {
  if (!handle.has_value()) return;
  handle_ = *handle;
  size_t length = 0;
  const char* data = nullptr;
  torch_string_length(handle_, &length);
  torch_string_c_str(handle_, &data);
  view_ = {data, length};
}

Tensor empty(std::span<const int64_t> sizes, int32_t dtype, int32_t device_type,
             int32_t device_index) {
  constexpr size_t kInline = 8;
  int64_t inline_strides[kInline];
  std::vector<int64_t> heap_strides;
  int64_t* strides = inline_strides;
  if (sizes.size() > kInline) {
    heap_strides.resize(sizes.size());
    strides = heap_strides.data();
  }
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    // torch's contiguous strides count an empty dimension as one.
    if (sizes[i] > 1) stride *= sizes[i];
  }
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides,
                                       dtype, device_type, device_index, &handle),
              "allocate a tensor");
  return Tensor(handle);
}

DispatcherCall& DispatcherCall::push(StableIValue value) {
  stack_[count_++] = value;
  return *this;
}

DispatcherCall& DispatcherCall::add(const Tensor& tensor) {
  return push(torch::stable::detail::from(tensor.share().release()));
}

DispatcherCall& DispatcherCall::add_optional(const Tensor& tensor) {
  if (!tensor) return add_none();
  return push(
      torch::stable::detail::from(std::optional<AtenTensorHandle>(tensor.share().release())));
}

DispatcherCall& DispatcherCall::add_sizes(std::span<const int64_t> sizes) {
  return push(torch::stable::detail::from(
      torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size())));
}

DispatcherCall& DispatcherCall::add_string(std::string_view text) {
  StringHandle handle = nullptr;
  check_torch(torch_new_string_handle(text.data(), text.size(), &handle), "make a string");
  return push(torch::stable::detail::from(handle));
}

Tensor DispatcherCall::call() {
  const std::string action = std::string("compute ") + name_;
  check_torch(torch_call_dispatcher(name_, overload_, stack_, TORCH_ABI_VERSION), action.c_str());
  return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack_[0]));
}

}  // namespace tgemm
