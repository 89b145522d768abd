// What is to be computed: one (possibly batched) GEMM with its epilogue, described by sizes,
// strides and dtypes alone. No pointers live here, so that a plan can be made, cached and explained
// without data. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace tgemm {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32 };

// How FP32 operands are multiplied. FP16/BF16 operands always multiply exactly as they are, with
// FP32 accumulation, and ignore this.
enum class Precision : uint8_t {
  kIeee,    // true FP32 multiply-add
  kTf32,    // operands rounded to TF32 for the Tensor Cores
  k3xTf32,  // FP32-accurate product from three TF32 products
  kBf16,    // operands rounded to BF16 on the way to shared memory
  kFp16,    // operands rounded to FP16 on the way to shared memory
};

enum class Activation : uint8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

const char* to_string(DType dtype);
const char* to_string(Precision precision);
const char* to_string(Activation activation);

constexpr int bytes_per_element(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Batch dimensions that cannot be merged into fewer keep their own size and strides, up to this
// many.
constexpr int kMaxBatchDims = 6;
using BatchArray = std::array<int64_t, kMaxBatchDims>;

// One strided matrix per batch index. Strides are in elements; a stride of 0 repeats the same row,
// column or matrix.
struct Matrix {
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  BatchArray batch_stride{};
  // Largest power of two, at most 16, that divides the address of the first element.
  int address_alignment = 16;

  friend bool operator==(const Matrix&, const Matrix&) = default;
};

// out = activation(alpha * (A @ B) + bias) + beta * residual, rounded once to out's dtype; or,
// where it multiplies, ... * residual. With a pre-activation output, alpha * (A @ B) + bias is
// written as well.
struct Epilogue {
  Activation activation = Activation::kNone;
  bool has_bias = false;
  bool has_residual = false;
  bool has_preact = false;
  bool multiplies = false;
  float alpha = 1.0f;
  float beta = 1.0f;
  Matrix bias;      // broadcast: one of its strides is 0
  Matrix residual;  // any strides, zeros included
  Matrix preact;    // same shape as out

  friend bool operator==(const Epilogue&, const Epilogue&) = default;
};

struct Problem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int batch_dims = 0;       // how many entries of batch_size are used, outermost first
  BatchArray batch_size{};  // sizes of the batch dimensions
  Matrix a;                 // (m, k)
  Matrix b;                 // (k, n)
  Matrix out;               // (m, n)
  Precision precision = Precision::kIeee;
  Epilogue epilogue;

  // A gated product has a second B, and nothing but activation and biases in its epilogue:
  // out = activation(A @ B + bias) * (A @ up + up_bias).
  bool gated = false;
  bool has_up_bias = false;
  Matrix up;       // (k, n)
  Matrix up_bias;  // as the bias

  // No kernel that still runs writes B (and `up`): a kernel that starts before the one before it
  // has ended may read them at once.
  bool static_weight = false;

  // Entries of the batch.
  int64_t batch_count() const {
    int64_t count = 1;
    for (int i = 0; i < batch_dims; ++i) count *= batch_size[i];
    return count;
  }
  // Those of a matrix, each counted once.
  int64_t distinct_batches(const Matrix& matrix) const {
    int64_t count = 1;
    for (int i = 0; i < batch_dims; ++i) {
      if (matrix.batch_stride[i] != 0) count *= batch_size[i];
    }
    return count;
  }
  // Where the last element of a matrix ends, in elements from its first on; none of its sizes is 0.
  int64_t end_of(const Matrix& matrix, int64_t rows, int64_t columns) const {
    int64_t last = (rows - 1) * matrix.row_stride + (columns - 1) * matrix.col_stride;
    for (int i = 0; i < batch_dims; ++i) last += (batch_size[i] - 1) * matrix.batch_stride[i];
    return last + 1;
  }
  bool empty() const { return m == 0 || n == 0 || batch_count() == 0; }
  // An operand is K-major when consecutive k are adjacent in memory (the layout of both operands of
  // nn.Linear), MN-major when consecutive rows of A (columns of B) are.
  bool a_k_major() const { return a.col_stride == 1; }
  bool a_m_major() const { return a.row_stride == 1; }
  bool b_k_major() const { return b.row_stride == 1; }
  bool b_n_major() const { return b.col_stride == 1; }

  friend bool operator==(const Problem&, const Problem&) = default;
};

// "4096x4096x4096 nt float16 -> float16, bias, gelu": sizes MxNxK, then the layouts of A and B.
std::string to_string(const Problem& problem);

// Pointers to go with a Problem. Absent operands are null.
struct Operands {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  const void* residual = nullptr;
  const void* up = nullptr;
  const void* up_bias = nullptr;
  void* preact = nullptr;
  void* out = nullptr;
  void* workspace = nullptr;  // Plan::workspace_bytes, 256-byte aligned
};

}  // namespace tgemm
