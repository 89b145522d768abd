#include "gemm/validate.hpp"

#include <gtest/gtest.h>

#include <array>

#include "h200.hpp"

namespace tgemm {
namespace {

Problem linear_problem(int64_t m, int64_t n, int64_t k) {
  Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {.dtype = DType::kFloat16, .row_stride = k, .col_stride = 1};
  problem.b = {.dtype = DType::kFloat16, .row_stride = 1, .col_stride = k};
  problem.out = {.dtype = DType::kFloat16, .row_stride = n, .col_stride = 1};
  return problem;
}

// A valid problem after one change.
template <class Change>
std::string error_after(Change change) {
  Problem problem = linear_problem(64, 128, 256);
  EXPECT_EQ(validate(problem), "");
  change(problem);
  return validate(problem);
}

TEST(Validate, TakesWhatKernelsTake) {
  EXPECT_EQ(validate(linear_problem(0, 128, 256)), "");
  EXPECT_EQ(validate(linear_problem(64, 128, 0)), "");
  EXPECT_EQ(validate(linear_problem(1, 1, 1)), "");
  // Overlapping operands, expanded batches and padded outputs are fine.
  EXPECT_EQ(error_after([](Problem& p) { p.a.row_stride = 1; }), "");
  EXPECT_EQ(error_after([](Problem& p) { p.out.row_stride = 1000; }), "");
  EXPECT_EQ(error_after([](Problem& p) {
              p.batch_dims = 1;
              p.batch_size[0] = 3;
              p.out.batch_stride[0] = 64 * 128;
            }),
            "");
  EXPECT_EQ(error_after([](Problem& p) {
              p.gated = true;
              p.up = p.b;
            }),
            "");
}

TEST(Validate, NamesWhatIsWrong) {
  EXPECT_EQ(error_after([](Problem& p) { p.n = -1; }),
            "m, n and k must not be negative, and are 64, -1 and 256");
  EXPECT_EQ(error_after([](Problem& p) { p.batch_dims = 7; }),
            "batch_dims is 7, and must be from 0 to 6");
  EXPECT_EQ(error_after([](Problem& p) { p.b.dtype = DType::kFloat32; }),
            "a is float16 and b is float32: operands must have one dtype");
  EXPECT_EQ(error_after([](Problem& p) { p.a.row_stride = -1; }),
            "a has a negative stride: strides count elements, from 0 on");
  EXPECT_EQ(error_after([](Problem& p) { p.b.address_alignment = 12; }),
            "b has an address_alignment of 12: it must be a power of two from the size of an "
            "element to 16 bytes");
  EXPECT_EQ(error_after([](Problem& p) { p.out = {DType::kFloat16, 1, 64, {}, 16}; }),
            "out has a column stride of 64: it must be row-major; for a column-major one compute "
            "its transpose, B.T @ A.T");
  EXPECT_EQ(error_after([](Problem& p) { p.out.row_stride = 127; }),
            "out has a row stride of 127 for 128 columns: its rows overlap");
  EXPECT_EQ(error_after([](Problem& p) {
              p.batch_dims = 1;
              p.batch_size[0] = 2;
            }),
            "out has a batch stride of 0: its matrices overlap");
  EXPECT_EQ(error_after([](Problem& p) {
              p.epilogue.has_bias = true;
              p.epilogue.bias = p.out;
            }),
            "bias is a vector: one of its strides must be 0");
  EXPECT_EQ(error_after([](Problem& p) {
              p.gated = p.epilogue.has_residual = true;
              p.up = p.b;
            }),
            "a gated product has nothing but activation and biases in its epilogue");
}

TEST(Validate, MissingAndUnalignedPointers) {
  const Problem problem = linear_problem(64, 128, 256);
  const Selection split = select(problem, h200(), "mma_sync:64x64,split_k=2");
  ASSERT_TRUE(split.plan);
  ASSERT_GT(split.plan->workspace_bytes, 0u);
  alignas(256) std::array<char, 512> memory{};
  Operands operands{.a = &memory[16], .b = &memory[32], .out = &memory[48]};
  const auto error = [&] { return validate(*split.plan, problem, operands); };
  EXPECT_EQ(error(), "workspace is a null pointer, and the plan needs " +
                         std::to_string(split.plan->workspace_bytes) + " bytes");
  operands.workspace = &memory[128];
  EXPECT_EQ(error(), "workspace is not aligned to 256 bytes");
  operands.workspace = &memory[256];
  EXPECT_EQ(error(), "");
  operands.b = &memory[8];
  EXPECT_EQ(error(), "b is not aligned to the 16 bytes that the problem promises");
  operands.b = nullptr;
  EXPECT_EQ(error(), "b is a null pointer, and the problem has it");
  Problem empty = problem;
  empty.m = 0;
  EXPECT_EQ(validate(*split.plan, empty, {}), "");
}

}  // namespace
}  // namespace tgemm
