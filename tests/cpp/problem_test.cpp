#include "gemm/problem.hpp"

#include <gtest/gtest.h>

namespace tgemm {
namespace {

// A row-major, B column-major (nn.Linear), as 16-bit floats unless told otherwise.
Problem linear_problem(int64_t m, int64_t n, int64_t k, DType dtype = DType::kFloat16) {
  Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {dtype, k, 1, {}, 16};
  problem.b = {dtype, 1, k, {}, 16};
  problem.out = {dtype, n, 1, {}, 16};
  return problem;
}

TEST(Problem, PrintsSizesLayoutsAndEpilogue) {
  Problem problem = linear_problem(4096, 2048, 1024);
  EXPECT_EQ(to_string(problem), "4096x2048x1024 nt float16 -> float16");
  problem.epilogue.has_bias = true;
  problem.epilogue.activation = Activation::kGelu;
  EXPECT_EQ(to_string(problem), "4096x2048x1024 nt float16 -> float16, bias, gelu");
  problem.epilogue.has_residual = true;
  problem.epilogue.has_preact = true;
  EXPECT_EQ(to_string(problem),
            "4096x2048x1024 nt float16 -> float16, bias, gelu, residual, pre-activation");
  problem.epilogue.multiplies = true;
  EXPECT_EQ(to_string(problem),
            "4096x2048x1024 nt float16 -> float16, bias, gelu, times residual, pre-activation");
  problem.epilogue.has_residual = problem.epilogue.has_preact = false;
  problem.gated = true;
  EXPECT_EQ(to_string(problem), "4096x2048x1024 nt float16 -> float16, bias, gelu, gated");
}

TEST(Problem, PrintsThePrecisionOfFloat32Alone) {
  Problem problem = linear_problem(8, 8, 8, DType::kFloat32);
  problem.precision = Precision::kTf32;
  EXPECT_EQ(to_string(problem), "8x8x8 nt float32 (tf32) -> float32");
  problem = linear_problem(8, 8, 8, DType::kBFloat16);
  problem.precision = Precision::kTf32;
  EXPECT_EQ(to_string(problem), "8x8x8 nt bfloat16 -> bfloat16");
}

TEST(Problem, PrintsBatchesAndGeneralStrides) {
  Problem problem = linear_problem(8, 4, 2);
  problem.batch_dims = 2;
  problem.batch_size = {3, 5};
  EXPECT_EQ(to_string(problem), "3x5 x 8x4x2 nt float16 -> float16");
  EXPECT_EQ(problem.batch_count(), 15);
  problem = linear_problem(8, 4, 2);
  problem.a = {DType::kFloat16, 1, 8, {}, 16};
  problem.b = {DType::kFloat16, 4, 1, {}, 16};
  EXPECT_EQ(to_string(problem), "8x4x2 tn float16 -> float16");
  problem.a = {DType::kFloat16, 6, 3, {}, 16};
  EXPECT_EQ(to_string(problem), "8x4x2 sn float16 -> float16");
}

TEST(Problem, IsEmptyOnlyWithoutOutputs) {
  EXPECT_FALSE(linear_problem(1, 1, 0).empty());
  EXPECT_TRUE(linear_problem(0, 1, 1).empty());
  EXPECT_TRUE(linear_problem(1, 0, 1).empty());
  Problem batch = linear_problem(1, 1, 1);
  batch.batch_dims = 1;
  batch.batch_size = {0};
  EXPECT_TRUE(batch.empty());
  // A batch size beyond batch_dims counts for nothing.
  batch.batch_dims = 0;
  EXPECT_FALSE(batch.empty());
}

TEST(Problem, CountsBatchesInSixtyFourBits) {
  Problem problem = linear_problem(1, 1, 1);
  problem.batch_dims = 2;
  problem.batch_size = {1 << 20, 1 << 20};
  EXPECT_EQ(problem.batch_count(), int64_t{1} << 40);
}

TEST(Problem, NamesEveryValue) {
  EXPECT_STREQ(to_string(DType::kFloat16), "float16");
  EXPECT_STREQ(to_string(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(to_string(DType::kFloat32), "float32");
  EXPECT_STREQ(to_string(Precision::kIeee), "ieee");
  EXPECT_STREQ(to_string(Precision::kTf32), "tf32");
  EXPECT_STREQ(to_string(Precision::k3xTf32), "3xtf32");
  EXPECT_STREQ(to_string(Precision::kBf16), "bf16");
  EXPECT_STREQ(to_string(Precision::kFp16), "fp16");
  EXPECT_STREQ(to_string(Activation::kNone), "none");
  EXPECT_STREQ(to_string(Activation::kRelu), "relu");
  EXPECT_STREQ(to_string(Activation::kGelu), "gelu");
  EXPECT_STREQ(to_string(Activation::kGeluTanh), "gelu_tanh");
  EXPECT_STREQ(to_string(Activation::kSilu), "silu");
}

}  // namespace
}  // namespace tgemm
