// out = gelu(x @ weight.T + bias) in FP16, without torch: plans it, says why, runs it, checks it.
//
//   cpp_gemm [M N K [KERNEL]]        default: 256 4096 4096 and the kernel that is cheapest
//
// Without a GPU it plans for an H200 and stops there.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <tgemm.hpp>
#include <tuple>
#include <vector>

namespace {

[[noreturn]] void fail(int status, const std::string& sentence) {
  std::fprintf(stderr, "cpp_gemm: %s\n", sentence.c_str());
  std::exit(status);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) fail(1, cudaGetErrorString(error));
}

// Sizes, strides and types; no data. x is (M, K) and weight (N, K), both row-major, so that B,
// which is weight.T, has its strides exchanged.
tgemm::Problem describe(int64_t m, int64_t n, int64_t k) {
  constexpr auto kType = tgemm::DType::kFloat16;
  tgemm::Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {.dtype = kType, .row_stride = k, .col_stride = 1};
  problem.b = {.dtype = kType, .row_stride = 1, .col_stride = k};
  problem.out = {.dtype = kType, .row_stride = n, .col_stride = 1};
  problem.epilogue.has_bias = true;
  problem.epilogue.bias = {.dtype = kType, .row_stride = 0, .col_stride = 1};
  problem.epilogue.activation = tgemm::Activation::kGelu;
  return problem;
}

// A card that need not be in this machine: the figures of its data sheet.
tgemm::Device h200() {
  return {.name = "NVIDIA H200 (described by hand)",
          .compute_capability = 90,
          .sm_count = 132,
          .max_shared_memory_per_block = 227 << 10,
          .max_shared_memory_per_sm = 228 << 10,
          .l2_bytes = 50 << 20,
          .clock_ghz = 1.98,
          .memory_bytes_per_us = 4.45e6};
}

// The cheapest plan, and on stdout the candidates that it was chosen from.
tgemm::Plan explain(const tgemm::Problem& problem, const tgemm::Device& device,
                    std::string_view force) {
  std::vector<tgemm::Candidate> candidates;
  const tgemm::Selection selection = tgemm::select(problem, device, force, &candidates);
  if (!selection.plan) fail(2, selection.error);
  const tgemm::Plan& plan = *selection.plan;
  std::printf("%s on %s\n  %s, %.1f us predicted, %zu bytes of workspace\n",
              tgemm::to_string(problem).c_str(), device.name.c_str(),
              tgemm::to_string(plan).c_str(), plan.predicted_us, plan.workspace_bytes);
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.reason.empty() && (!b.reason.empty() || a.plan.predicted_us < b.plan.predicted_us);
  });
  std::printf("candidates:\n");
  for (const auto& [candidate, reason] : candidates) {
    const std::string name = tgemm::to_string(candidate);
    if (reason.empty()) {
      std::printf("  %-42s %8.1f us\n", name.c_str(), candidate.predicted_us);
    } else {
      std::printf("  %-42s cannot run: %s\n", name.c_str(), reason.c_str());
    }
  }
  return plan;
}

// Device memory that is filled from, or can be read into, a vector.
template <class T>
struct Buffer {
  explicit Buffer(size_t count) : count(count) {
    check(cudaMalloc(&data, std::max<size_t>(count, 1) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& from) : Buffer(from.size()) {
    check(cudaMemcpy(data, from.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }

  std::vector<T> read() const {
    std::vector<T> to(count);
    check(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }

  T* data = nullptr;
  size_t count;
};

std::vector<__half> random_halves(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<__half> values(count);
  for (__half& value : values) value = __float2half(normal(generator));
  return values;
}

void run(const tgemm::Plan& plan, const tgemm::Problem& problem) {
  const auto [m, n, k] = std::tuple(problem.m, problem.n, problem.k);
  const std::vector<__half> x = random_halves(m * k, 1), weight = random_halves(n * k, 2),
                            bias = random_halves(n, 3);
  const Buffer<__half> device_x(x), device_weight(weight), device_bias(bias), device_out(m * n);
  const Buffer<char> workspace(plan.workspace_bytes);  // cudaMalloc aligns it to 256 bytes
  const tgemm::Operands operands{.a = device_x.data,
                                 .b = device_weight.data,
                                 .bias = device_bias.data,
                                 .out = device_out.data,
                                 .workspace = workspace.data};
  if (std::string error = tgemm::validate(plan, problem, operands); !error.empty()) fail(1, error);
  if (std::string error = tgemm::launch(plan, problem, operands, /*stream=*/nullptr);
      !error.empty()) {
    fail(1, error);
  }
  check(cudaDeviceSynchronize());
  const std::vector<__half> out = device_out.read();

  // Up to 4096 outputs, spread over the matrix, against FP64, within what the library promises (see
  // docs/numerics.md): one rounding to FP16, and c * 2^-24 of the sum of the products' magnitudes,
  // which gelu passes on by its slope, at most 1.13.
  const double c = 1.13 * std::max(8.0, 6.0 + std::sqrt(static_cast<double>(k)) / 4.0);
  const int64_t step = std::max<int64_t>(1, m * n / 4096) | 1;
  double worst = 0.0;
  for (int64_t i = 0; i < m * n; i += step) {
    const int64_t row = i / n, column = i % n;
    double sum = 0.0, magnitude = 0.0;
    for (int64_t j = 0; j < k; ++j) {
      const double product =
          static_cast<double>(__half2float(x[row * k + j])) * __half2float(weight[column * k + j]);
      sum += product;
      magnitude += std::abs(product);
    }
    const double z = sum + __half2float(bias[column]);
    const double expected = 0.5 * z * (1.0 + std::erf(z / std::sqrt(2.0)));
    const double rounding = 1.02 * std::max(std::abs(expected) * 0x1p-11, 0x1p-25);
    const double allowed = rounding + c * 0x1p-24 * (magnitude + std::abs(z));
    worst = std::max(worst, std::abs(__half2float(out[i]) - expected) / allowed);
  }
  std::printf("checked against FP64: the largest error is %.2f of what is allowed\n", worst);
  if (!(worst <= 1.0)) fail(1, "the result is wrong");
}

int64_t size_of(std::string_view text) {
  int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc() || end != text.data() + text.size() || value < 1 || value > 1 << 20) {
    fail(2, "\"" + std::string(text) + "\" is not a size from 1 to 1048576");
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 1 && argc != 4 && argc != 5) fail(2, "usage: cpp_gemm [M N K [KERNEL]]");
  const bool sizes = argc >= 4;
  const tgemm::Problem problem =
      describe(sizes ? size_of(argv[1]) : 256, sizes ? size_of(argv[2]) : 4096,
               sizes ? size_of(argv[3]) : 4096);
  if (std::string error = tgemm::validate(problem); !error.empty()) fail(2, error);

  tgemm::Device device;
  const std::string no_gpu = tgemm::describe_device(0, &device);
  if (!no_gpu.empty()) device = h200();
  const tgemm::Plan plan = explain(problem, device, argc == 5 ? argv[4] : "");
  if (!no_gpu.empty()) {
    std::printf("not run: %s\n", no_gpu.c_str());
    return 0;
  }
  run(plan, problem);
}
