// lower(): named cases state what a Problem must look like; the random ones compute the Problem by
// following its strides and compare with torch.matmul's definition.
#include "gemm/lowering.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <random>

#include "tensor.hpp"

namespace tgemm {
namespace {

using testing::contiguous_strides;
using testing::for_each_index;
using testing::Sizes;
using testing::Tensor;

Sizes shape_of(const Tensor& a, const Tensor& b) {
  Sizes shape;
  std::string error;
  EXPECT_TRUE(matmul_shape(a.sizes, b.sizes, &shape, &error)) << error;
  return shape;
}

// Refers to the tensors: they must outlive it.
LoweringRequest request(const Tensor& a, const Tensor& b, const Tensor& out) {
  LoweringRequest request;
  request.a = a;
  request.b = b;
  request.out = out;
  return request;
}

// --- Shapes
// ----------------------------------------------------------------------------------------

std::string error_of(const Sizes& a, const Sizes& b) {
  Sizes shape;
  std::string error;
  EXPECT_FALSE(matmul_shape(a, b, &shape, &error)) << shape_string(shape);
  return error;
}

TEST(MatmulShape, FollowsTorch) {
  const struct {
    Sizes a, b, out;
  } cases[] = {
      {{3}, {3}, {}},
      {{3}, {3, 4}, {4}},
      {{2, 3}, {3}, {2}},
      {{2, 3}, {3, 4}, {2, 4}},
      {{5, 2, 3}, {3, 4}, {5, 2, 4}},
      {{5, 2, 3}, {3}, {5, 2}},
      {{3}, {5, 3, 4}, {5, 4}},
      {{2, 3}, {5, 3, 4}, {5, 2, 4}},
      {{7, 1, 2, 3}, {5, 3, 4}, {7, 5, 2, 4}},
      {{1, 6, 2, 3}, {5, 1, 3, 4}, {5, 6, 2, 4}},
      {{0, 3}, {3, 4}, {0, 4}},
      {{2, 0}, {0, 4}, {2, 4}},
      {{0, 2, 3}, {1, 3, 4}, {0, 2, 4}},
      {{1, 2, 3}, {0, 3, 4}, {0, 2, 4}},
  };
  for (const auto& c : cases) {
    Sizes shape;
    std::string error;
    EXPECT_TRUE(matmul_shape(c.a, c.b, &shape, &error)) << error;
    EXPECT_EQ(shape, c.out) << shape_string(c.a) << " @ " << shape_string(c.b);
  }
}

TEST(MatmulShape, SaysWhatDoesNotFit) {
  EXPECT_EQ(error_of({3, 4}, {5, 6}),
            "a is (3, 4) and b is (5, 6): the inner sizes 4 and 5 differ");
  EXPECT_EQ(error_of({3}, {4}), "a is (3,) and b is (4,): the inner sizes 3 and 4 differ");
  EXPECT_EQ(error_of({2, 3, 4}, {5, 4, 6}),
            "a is (2, 3, 4) and b is (5, 4, 6): the batch sizes 2 and 5 do not broadcast");
  EXPECT_EQ(error_of({0, 3, 4}, {2, 4, 6}),
            "a is (0, 3, 4) and b is (2, 4, 6): the batch sizes 0 and 2 do not broadcast");
  EXPECT_EQ(error_of({}, {4}), "a is () and b is (4,): both need at least one dimension");
  EXPECT_EQ(error_of({4}, {}), "a is (4,) and b is (): both need at least one dimension");
}

TEST(ShapeString, PrintsLikeTorch) {
  EXPECT_EQ(shape_string(Sizes{}), "()");
  EXPECT_EQ(shape_string(Sizes{3}), "(3,)");
  EXPECT_EQ(shape_string(Sizes{2, 3}), "(2, 3)");
}

// --- Named cases
// -----------------------------------------------------------------------------------

TEST(Lower, PlainMatrices) {
  const Tensor a({64, 32}), b({32, 48}), out({64, 48});
  const Lowered lowered = lower(request(a, b, out));
  ASSERT_EQ(lowered.error, "");
  EXPECT_FALSE(lowered.swapped);
  EXPECT_EQ(lowered.problem.m, 64);
  EXPECT_EQ(lowered.problem.n, 48);
  EXPECT_EQ(lowered.problem.k, 32);
  EXPECT_EQ(lowered.problem.batch_dims, 0);
  EXPECT_EQ(lowered.problem.batch_count(), 1);
  EXPECT_TRUE(lowered.problem.a_k_major());
  EXPECT_TRUE(lowered.problem.b_n_major());
  EXPECT_EQ(lowered.problem.a.row_stride, 32);
  EXPECT_EQ(lowered.problem.out.row_stride, 48);
}

TEST(Lower, TransposedOperandsKeepTheirMemory) {
  const Tensor a = Tensor({32, 64}).transposed(0, 1);
  const Tensor b = Tensor({48, 32}).transposed(0, 1);
  const Lowered lowered = lower(request(a, b, Tensor({64, 48})));
  ASSERT_EQ(lowered.error, "");
  EXPECT_TRUE(lowered.problem.a_m_major());
  EXPECT_EQ(lowered.problem.a.col_stride, 64);
  EXPECT_TRUE(lowered.problem.b_k_major());
  EXPECT_EQ(lowered.problem.b.col_stride, 32);
}

TEST(Lower, BatchOfLinearFoldsIntoRows) {
  const Tensor x({8, 16, 32});
  const Tensor weight = Tensor({48, 32}).transposed(0, 1);
  const Tensor out({8, 16, 48}), bias({48}), residual({8, 16, 48}), preact({8, 16, 48});
  LoweringRequest linear = request(x, weight, out);
  linear.bias = bias;
  linear.residual = residual;
  linear.preact = preact;
  const Lowered lowered = lower(linear);
  ASSERT_EQ(lowered.error, "");
  EXPECT_EQ(lowered.problem.m, 8 * 16);
  EXPECT_EQ(lowered.problem.batch_dims, 0);
  EXPECT_EQ(lowered.problem.a.row_stride, 32);
  EXPECT_EQ(lowered.problem.out.row_stride, 48);
  EXPECT_EQ(lowered.problem.epilogue.bias.row_stride, 0);
  EXPECT_EQ(lowered.problem.epilogue.bias.col_stride, 1);
  EXPECT_EQ(lowered.problem.epilogue.residual.row_stride, 48);
  EXPECT_EQ(lowered.problem.epilogue.preact.row_stride, 48);
}

TEST(Lower, SlicedBatchDoesNotFold) {
  // x[:, :16] of a (8, 20, 32) tensor: the rows of one matrix do not continue in the next.
  const Tensor x({8, 16, 32}, {20 * 32, 32, 1});
  const Lowered lowered = lower(request(x, Tensor({32, 48}), Tensor({8, 16, 48})));
  ASSERT_EQ(lowered.error, "");
  EXPECT_EQ(lowered.problem.m, 16);
  ASSERT_EQ(lowered.problem.batch_dims, 1);
  EXPECT_EQ(lowered.problem.batch_size[0], 8);
  EXPECT_EQ(lowered.problem.a.batch_stride[0], 20 * 32);
  EXPECT_EQ(lowered.problem.b.batch_stride[0], 0);
}

TEST(Lower, AttentionHeadsMergeWhatNests) {
  // (batch, sequence, heads, 64).transpose(1, 2): batch and heads cannot merge, and nothing is
  // copied.
  const Tensor q = Tensor({2, 128, 12, 64}).transposed(1, 2);
  const Tensor k = q.transposed(2, 3);
  const Lowered lowered = lower(request(q, k, Tensor({2, 12, 128, 128})));
  ASSERT_EQ(lowered.error, "");
  ASSERT_EQ(lowered.problem.batch_dims, 2);
  EXPECT_EQ(lowered.problem.batch_size[0], 2);
  EXPECT_EQ(lowered.problem.batch_size[1], 12);
  EXPECT_EQ(lowered.problem.a.row_stride, 12 * 64);
  EXPECT_EQ(lowered.problem.a.batch_stride[1], 64);
  EXPECT_TRUE(lowered.problem.a_k_major());
  EXPECT_TRUE(lowered.problem.b_k_major());

  // Contiguous heads are one batch dimension.
  const Lowered merged =
      lower(request(Tensor({2, 12, 128, 64}), Tensor({2, 12, 64, 128}), Tensor({2, 12, 128, 128})));
  ASSERT_EQ(merged.problem.batch_dims, 1);
  EXPECT_EQ(merged.problem.batch_size[0], 24);
  EXPECT_EQ(merged.problem.a.batch_stride[0], 128 * 64);
}

TEST(Lower, BroadcastOperandsRepeatWithStrideZero) {
  const Tensor a({7, 1, 4, 8}), b({5, 8, 3});
  const Lowered lowered = lower(request(a, b, Tensor({7, 5, 4, 3})));
  ASSERT_EQ(lowered.error, "");
  ASSERT_EQ(lowered.problem.batch_dims, 2);
  EXPECT_EQ(lowered.problem.a.batch_stride[0], 32);
  EXPECT_EQ(lowered.problem.a.batch_stride[1], 0);
  EXPECT_EQ(lowered.problem.b.batch_stride[0], 0);
  EXPECT_EQ(lowered.problem.b.batch_stride[1], 24);
}

TEST(Lower, VectorsAreMatricesOfOneRowOrColumn) {
  const Lowered dot = lower(request(Tensor({32}), Tensor({32}), Tensor(Sizes{})));
  ASSERT_EQ(dot.error, "");
  EXPECT_EQ(dot.problem.m, 1);
  EXPECT_EQ(dot.problem.n, 1);
  EXPECT_EQ(dot.problem.k, 32);

  const Lowered from_left = lower(request(Tensor({32}), Tensor({32, 8}), Tensor({8})));
  ASSERT_EQ(from_left.error, "");
  EXPECT_EQ(from_left.problem.m, 1);
  EXPECT_EQ(from_left.problem.n, 8);
  EXPECT_TRUE(from_left.problem.a_k_major());
  EXPECT_TRUE(from_left.problem.b_n_major());

  const Lowered from_right = lower(request(Tensor({8, 32}), Tensor({32}), Tensor({8})));
  ASSERT_EQ(from_right.error, "");
  // Either as it is or transposed: one of the output's sizes is 8, the other 1.
  EXPECT_EQ(from_right.problem.m * from_right.problem.n, 8);
  EXPECT_EQ(from_right.problem.k, 32);
}

TEST(Lower, ColumnMajorOutputSwapsTheOperands) {
  const Tensor a({64, 32}), b({32, 48});
  const Tensor out = Tensor({48, 64}).transposed(0, 1);
  LoweringRequest columns = request(a, b, out);
  const Tensor bias({48});
  const Tensor residual({64, 48});
  columns.bias = bias;
  columns.residual = residual;
  const Lowered lowered = lower(columns);
  ASSERT_EQ(lowered.error, "");
  EXPECT_TRUE(lowered.swapped);
  EXPECT_EQ(lowered.problem.m, 48);
  EXPECT_EQ(lowered.problem.n, 64);
  EXPECT_EQ(lowered.problem.out.row_stride, 64);
  EXPECT_EQ(lowered.problem.out.col_stride, 1);
  // a is now b's transpose: columns of b, adjacent in memory.
  EXPECT_TRUE(lowered.problem.a_m_major());
  EXPECT_TRUE(lowered.problem.b_k_major());
  // The bias runs along the rows of the transposed output.
  EXPECT_EQ(lowered.problem.epilogue.bias.row_stride, 1);
  EXPECT_EQ(lowered.problem.epilogue.bias.col_stride, 0);
  EXPECT_EQ(lowered.problem.epilogue.residual.row_stride, 1);
  EXPECT_EQ(lowered.problem.epilogue.residual.col_stride, 48);
}

TEST(Lower, AStaticWeightIsTheSecondOperandOrForgotten) {
  const Tensor a({64, 32}), b({32, 48}), rows({64, 48}),
      columns = Tensor({48, 64}).transposed(0, 1);
  LoweringRequest asked = request(a, b, rows);
  EXPECT_FALSE(lower(asked).problem.static_weight);
  asked.static_weight = true;
  EXPECT_TRUE(lower(asked).problem.static_weight);
  asked.out = columns;
  EXPECT_FALSE(lower(asked).problem.static_weight);
}

TEST(Lower, SizeOneDimensionsMayHaveAnyStride) {
  // torch gives dimensions of size 1 whatever stride it likes; it must not decide the layout.
  const Tensor odd({1, 32}, {1, 1});
  const Lowered lowered = lower(request(odd, Tensor({32, 48}), Tensor({1, 48}, {7, 1})));
  ASSERT_EQ(lowered.error, "");
  EXPECT_TRUE(lowered.problem.a_k_major());
  EXPECT_FALSE(lowered.problem.a_m_major());
  EXPECT_EQ(lowered.problem.a.row_stride % 16, 0) << "an aligned leading stride keeps wide copies";
  EXPECT_EQ(lowered.problem.out.row_stride % 16, 0);

  const Tensor column({64, 1}, {1, 5});  // k = 1, rows adjacent
  const Lowered outer = lower(request(column, Tensor({1, 48}), Tensor({64, 48})));
  ASSERT_EQ(outer.error, "");
  EXPECT_TRUE(outer.problem.a_m_major());
}

TEST(Lower, EmptyInnerSizeIsAProblemWithoutK) {
  const Lowered lowered = lower(request(Tensor({4, 0}), Tensor({0, 5}), Tensor({4, 5})));
  ASSERT_EQ(lowered.error, "");
  EXPECT_EQ(lowered.problem.k, 0);
  EXPECT_FALSE(lowered.problem.empty());
  EXPECT_EQ(lowered.problem.m, 4);
  EXPECT_EQ(lowered.problem.n, 5);
}

TEST(Lower, EmptyOutputsAreEmptyProblems) {
  const struct {
    Sizes a, b;
  } cases[] = {{{0, 3}, {3, 4}},
               {{4, 3}, {3, 0}},
               {{0, 2, 3}, {3, 4}},
               {{0, 2, 3}, {0, 3, 4}},
               {{2, 0, 2, 3}, {2, 1, 3, 4}},
               {{0, 0}, {0, 0}}};
  for (const auto& c : cases) {
    const Tensor a(c.a), b(c.b), out(shape_of(a, b));
    const Lowered lowered = lower(request(a, b, out));
    EXPECT_EQ(lowered.error, "") << shape_string(c.a) << " @ " << shape_string(c.b);
    EXPECT_TRUE(lowered.problem.empty()) << shape_string(c.a) << " @ " << shape_string(c.b);
  }
}

TEST(Lower, StridesBeyondThirtyTwoBits) {
  const int64_t large = int64_t{3} << 31;
  const Tensor a({3, 70000, 64}, {large * 2, large / 70000 * 2, 1});
  const Tensor b({3, 64, 70000});
  const Lowered lowered = lower(request(a, b, Tensor({3, 70000, 70000})));
  ASSERT_EQ(lowered.error, "");
  EXPECT_EQ(lowered.problem.m, 70000);
  EXPECT_EQ(lowered.problem.a.batch_stride[0], large * 2);
  EXPECT_EQ(lowered.problem.out.batch_stride[0], int64_t{70000} * 70000);

  // Rows that fold to more than 2^31.
  const Tensor rows({1 << 16, 1 << 16, 1});
  const Lowered folded = lower(request(rows, Tensor({1, 1}), Tensor({1 << 16, 1 << 16, 1})));
  ASSERT_EQ(folded.error, "");
  EXPECT_EQ(folded.problem.m * folded.problem.n * folded.problem.batch_count(), int64_t{1} << 32);
}

TEST(Lower, ReportsTheAlignmentOfEachAddress) {
  Tensor a({64, 32}), b({32, 48}), out({64, 48});
  a.address = 0x1002;
  b.address = 0x1008;
  out.address = 0x1000;
  const Problem problem = lower(request(a, b, out)).problem;
  EXPECT_EQ(problem.a.address_alignment, 2);
  EXPECT_EQ(problem.b.address_alignment, 8);
  EXPECT_EQ(problem.out.address_alignment, 16);
}

TEST(Lower, CarriesDtypesAndEpilogue) {
  Tensor a({64, 32}), b({32, 48}), out({64, 48}), bias({48});
  a.dtype = b.dtype = DType::kBFloat16;
  out.dtype = DType::kFloat32;
  bias.dtype = DType::kFloat16;
  LoweringRequest full = request(a, b, out);
  full.bias = bias;
  full.activation = Activation::kSilu;
  full.precision = Precision::kTf32;
  full.alpha = 0.5f;
  full.beta = 2.0f;
  const Problem problem = lower(full).problem;
  EXPECT_EQ(problem.a.dtype, DType::kBFloat16);
  EXPECT_EQ(problem.out.dtype, DType::kFloat32);
  EXPECT_EQ(problem.epilogue.bias.dtype, DType::kFloat16);
  EXPECT_TRUE(problem.epilogue.has_bias);
  EXPECT_FALSE(problem.epilogue.has_residual);
  EXPECT_FALSE(problem.epilogue.has_preact);
  EXPECT_EQ(problem.epilogue.activation, Activation::kSilu);
  EXPECT_EQ(problem.precision, Precision::kTf32);
  EXPECT_EQ(problem.epilogue.alpha, 0.5f);
  EXPECT_EQ(problem.epilogue.beta, 2.0f);
}

TEST(Lower, TooManyBatchDimensionsIsOneSentence) {
  // Eight dimensions, each sliced, so that no two of them nest.
  Sizes sizes(8, 2), strides(8);
  int64_t stride = 64;
  for (int i = 7; i >= 0; --i) {
    strides[i] = stride;
    stride *= 3;
  }
  sizes.insert(sizes.end(), {4, 8});
  strides.insert(strides.end(), {8, 1});
  Sizes out_sizes(8, 2);
  out_sizes.insert(out_sizes.end(), {4, 4});
  const Tensor a(sizes, strides), out(out_sizes);
  const Lowered lowered = lower(request(a, Tensor({8, 4}), out));
  EXPECT_NE(lowered.error.find("batch dimensions"), std::string::npos) << lowered.error;
}

TEST(Lower, ScatteredOutputIsOneSentence) {
  const Lowered lowered = lower(request(Tensor({4, 8}), Tensor({8, 6}), Tensor({4, 6}, {100, 3})));
  EXPECT_NE(lowered.error.find("(100, 3)"), std::string::npos) << lowered.error;
}

TEST(Lower, ABiasIsTheSameForAllRowsAlsoOfOne) {
  for (int64_t rows : {0, 1, 5}) {
    const Tensor a({rows, 8}), b({8, 6}), out({rows, 6}), bias({6});
    LoweringRequest biased = request(a, b, out);
    biased.bias = biased.up_bias = bias;
    const Problem& problem = lower(biased).problem;
    for (const Matrix& row : {problem.epilogue.bias, problem.up_bias}) {
      EXPECT_EQ(row.row_stride, 0) << rows;
      EXPECT_EQ(row.col_stride, 1) << rows;
    }
  }
}

// --- Gated products
// ----------------------------------------------------------------------------------

TEST(Lower, GatedProductsHaveASecondWeight) {
  const Tensor x({2, 8, 32}), out({2, 8, 48}), bias({48}), up_bias({48});
  // The halves of a packed (2N, K) weight.
  Tensor gate = Tensor({48, 32}).transposed(0, 1), up = gate;
  up.address = gate.address + 4 * 48 * 32 + 2;
  LoweringRequest gated = request(x, gate, out);
  gated.bias = bias;
  gated.up = up;
  gated.up_bias = up_bias;
  gated.activation = Activation::kSilu;
  const Lowered lowered = lower(gated);
  ASSERT_EQ(lowered.error, "");
  EXPECT_FALSE(lowered.swapped);
  const Problem& problem = lowered.problem;
  EXPECT_TRUE(problem.gated);
  EXPECT_EQ(problem.m, 16);
  EXPECT_EQ(problem.up.row_stride, 1);
  EXPECT_EQ(problem.up.col_stride, 32);
  EXPECT_EQ(problem.up.address_alignment, 2);
  EXPECT_TRUE(problem.has_up_bias);
  EXPECT_EQ(problem.up_bias.row_stride, 0);
  EXPECT_EQ(problem.up_bias.col_stride, 1);
  EXPECT_FALSE(lower(request(x, gate, out)).problem.gated);
}

TEST(SplitGated, TheFirstStepWritesTheGateInFp32) {
  const Tensor x({2, 8, 32}, {400, 32, 1}), gate({32, 45}), up({32, 45}), out({2, 8, 45});
  const Tensor bias({45}), up_bias({45}), preact({2, 8, 45});
  LoweringRequest gated = request(x, gate, out);
  gated.a.dtype = gated.b.dtype = gated.out.dtype = DType::kBFloat16;
  gated.up = up;
  gated.up->dtype = DType::kBFloat16;
  gated.bias = bias;
  gated.up_bias = up_bias;
  gated.preact = preact;
  gated.activation = Activation::kGelu;
  gated.precision = Precision::kTf32;
  const Lowered lowered = lower(gated);
  ASSERT_EQ(lowered.error, "");
  ASSERT_EQ(lowered.problem.batch_dims, 1);
  const GatedSteps steps = split_gated(lowered);
  // Rows of 48 floats, 45 of them used.
  EXPECT_EQ(steps.between_elements, 2 * 8 * 48);
  EXPECT_EQ(steps.gate.out.dtype, DType::kFloat32);
  EXPECT_EQ(steps.gate.out.row_stride, 48);
  EXPECT_EQ(steps.gate.out.col_stride, 1);
  EXPECT_EQ(steps.gate.out.batch_stride[0], 8 * 48);
  EXPECT_EQ(steps.gate.epilogue.activation, Activation::kGelu);
  EXPECT_FALSE(steps.gate.epilogue.has_residual);
  EXPECT_EQ(steps.up.out, lowered.problem.out);
  EXPECT_EQ(steps.up.epilogue.residual, steps.gate.out);
  EXPECT_TRUE(steps.up.epilogue.has_residual);
  EXPECT_TRUE(steps.up.epilogue.multiplies);
  EXPECT_EQ(steps.up.epilogue.activation, Activation::kNone);
  for (const Problem* step : {&steps.gate, &steps.up}) {
    EXPECT_FALSE(step->gated);
    EXPECT_FALSE(step->has_up_bias);
    EXPECT_EQ(step->up, Matrix());
    EXPECT_EQ(step->precision, Precision::kTf32);
    EXPECT_TRUE(step->epilogue.has_bias);
    EXPECT_TRUE(step->epilogue.has_preact);
    EXPECT_EQ(step->a, lowered.problem.a);
  }

  gated.up_bias.reset();
  EXPECT_FALSE(split_gated(lower(gated)).up.epilogue.has_bias);
  EXPECT_TRUE(split_gated(lower(gated)).gate.epilogue.has_bias);
}

// --- Random shapes and strides against the definition
// ----------------------------------------------

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit));
  }
  bool chance(int percent) { return below(100) < percent; }

  // A tensor of these sizes with permuted, padded or expanded memory, filled with small integers.
  Tensor tensor(const Sizes& sizes, bool writable) {
    std::vector<int> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    if (chance(50)) std::shuffle(order.begin(), order.end(), engine_);
    Sizes strides(sizes.size(), 0);
    int64_t stride = 1;
    for (int i = static_cast<int>(sizes.size()) - 1; i >= 0; --i) {
      const int dim = order[i];
      if (!writable && chance(10)) continue;  // expanded
      strides[dim] = sizes[dim] == 1 && chance(50) ? below(50) : stride;
      stride *= std::max<int64_t>(sizes[dim], 1) + (chance(20) ? below(3) : 0);
    }
    Tensor result(sizes, strides);
    fill(&result);
    return result;
  }

  void fill(Tensor* tensor) {
    tensor->values.resize(tensor->reach());
    for (double& value : tensor->values) value = static_cast<double>(below(13)) - 6;
  }

  // One that broadcasts to `sizes`: leading dimensions dropped, others 1.
  Sizes broadcastable(Sizes sizes) {
    const int64_t drop = below(static_cast<int64_t>(sizes.size()) + 1);
    if (chance(50)) sizes.erase(sizes.begin(), sizes.begin() + drop);
    for (int64_t& size : sizes) {
      if (chance(25)) size = 1;
    }
    return sizes;
  }

  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

double at(const Tensor& tensor, const Sizes& index) { return tensor.values[tensor.offset(index)]; }

// out = alpha * (a @ b) + bias + beta * residual, by torch.matmul's definition. NaN stays wherever
// nothing is written.
void define(const Tensor& a, const Tensor& b, const Tensor* bias, const Tensor* residual,
            double alpha, double beta, Tensor* out) {
  const bool has_rows = a.sizes.size() > 1, has_cols = b.sizes.size() > 1;
  const int64_t k = a.sizes.back();
  for_each_index(out->sizes, [&](const Sizes& index) {
    Sizes batch = index;
    int64_t row = 0, col = 0;
    if (has_cols) col = batch.back(), batch.pop_back();
    if (has_rows) row = batch.back(), batch.pop_back();
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      Sizes a_index = batch, b_index = batch;
      if (has_rows) a_index.push_back(row);
      a_index.push_back(i);
      b_index.push_back(i);
      if (has_cols) b_index.push_back(col);
      sum += at(a, a_index) * at(b, b_index);
    }
    double value = alpha * sum;
    if (bias) value += at(*bias, index);
    if (residual) value += beta * at(*residual, index);
    out->values[out->offset(index)] = value;
  });
}

// What a kernel does with a Problem: follows its sizes and strides.
void compute(const Lowered& lowered, const double* a, const double* b, const double* bias,
             const double* residual, double* out) {
  const Problem& problem = lowered.problem;
  if (lowered.swapped) std::swap(a, b);
  const auto offset = [](const Matrix& matrix, const Sizes& batch, int64_t row, int64_t col) {
    int64_t result = row * matrix.row_stride + col * matrix.col_stride;
    for (size_t i = 0; i < batch.size(); ++i) result += batch[i] * matrix.batch_stride[i];
    return result;
  };
  Sizes sizes(problem.batch_size.begin(), problem.batch_size.begin() + problem.batch_dims);
  sizes.insert(sizes.end(), {problem.m, problem.n});
  for_each_index(sizes, [&](Sizes index) {
    const int64_t n = index.back();
    index.pop_back();
    const int64_t m = index.back();
    index.pop_back();
    double sum = 0;
    for (int64_t k = 0; k < problem.k; ++k) {
      sum += a[offset(problem.a, index, m, k)] * b[offset(problem.b, index, k, n)];
    }
    double value = problem.epilogue.alpha * sum;
    if (bias) value += bias[offset(problem.epilogue.bias, index, m, n)];
    if (residual) {
      const double other = residual[offset(problem.epilogue.residual, index, m, n)];
      value = problem.epilogue.multiplies ? value * other : value + problem.epilogue.beta * other;
    }
    out[offset(problem.out, index, m, n)] = value;
  });
}

TEST(Lower, RandomProblemsComputeTorchMatmul) {
  int swapped = 0, folded = 0, batched = 0, refused = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    Random random(seed);
    const auto size = [&] {
      return random.chance(5) ? 0 : random.chance(20) ? 1 : 1 + random.below(5);
    };
    const int64_t m = size(), n = size(), k = size();
    Sizes batch(random.below(4));
    for (int64_t& b : batch) b = size();
    Sizes a_sizes = random.broadcastable(batch), b_sizes = random.broadcastable(batch);
    if (random.chance(10)) {
      a_sizes = {k};
    } else {
      a_sizes.insert(a_sizes.end(), {m, k});
    }
    if (random.chance(10)) {
      b_sizes = {k};
    } else {
      b_sizes.insert(b_sizes.end(), {k, n});
    }
    const Tensor a = random.tensor(a_sizes, false), b = random.tensor(b_sizes, false);
    Tensor out = random.tensor(shape_of(a, b), true);
    std::fill(out.values.begin(), out.values.end(), std::nan(""));
    Tensor expected = out;

    LoweringRequest req = request(a, b, out);
    std::optional<Tensor> bias, residual;
    if (random.chance(50))
      req.bias = bias.emplace(random.tensor(random.broadcastable(out.sizes), false));
    if (random.chance(50)) {
      req.residual = residual.emplace(random.tensor(random.broadcastable(out.sizes), false));
    }
    req.alpha = static_cast<float>(random.below(3));
    req.beta = static_cast<float>(random.below(3));

    const Lowered lowered = lower(req);
    if (!lowered.error.empty()) {
      // The only reason here: out's matrices are neither row- nor column-major.
      ASSERT_NE(lowered.error.find("neither"), std::string::npos) << lowered.error;
      ++refused;
      continue;
    }
    ASSERT_TRUE(lowered.problem.empty() || lowered.problem.out.col_stride == 1)
        << "kernels store rows; seed " << seed;
    define(a, b, bias ? &*bias : nullptr, residual ? &*residual : nullptr, req.alpha, req.beta,
           &expected);
    compute(lowered, a.values.data(), b.values.data(), bias ? bias->values.data() : nullptr,
            residual ? residual->values.data() : nullptr, out.values.data());
    for (size_t i = 0; i < out.values.size(); ++i) {
      ASSERT_TRUE(out.values[i] == expected.values[i] ||
                  (std::isnan(out.values[i]) && std::isnan(expected.values[i])))
          << "seed " << seed << ": " << shape_string(a.sizes) << " @ " << shape_string(b.sizes)
          << " differs at element " << i << ": " << out.values[i] << " is not "
          << expected.values[i];
    }
    swapped += lowered.swapped;
    batched += lowered.problem.batch_dims > 0;
    folded += lowered.problem.m > m && !lowered.swapped && a.sizes.size() > 2;
  }
  // The loop above must have met each of these often for its silence to mean something.
  EXPECT_GT(swapped, 100);
  EXPECT_GT(folded, 100);
  EXPECT_GT(batched, 500);
  EXPECT_LT(refused, 2000);
}

TEST(SplitGated, RandomProblemsComputeTheDefinition) {
  int swapped = 0, batched = 0, refused = 0;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const auto size = [&] { return random.chance(5) ? 0 : 1 + random.below(5); };
    Sizes sizes(random.below(4));
    for (int64_t& b : sizes) b = size();
    const int64_t n = size(), k = size();
    Sizes x_sizes = sizes;
    x_sizes.push_back(k);
    sizes.push_back(n);
    const Tensor x = random.tensor(x_sizes, false);
    const Tensor gate = random.tensor({k, n}, false), up = random.tensor({k, n}, false);
    const Tensor bias = random.tensor({n}, false), up_bias = random.tensor({n}, false);
    Tensor out = random.tensor(sizes, true);
    std::fill(out.values.begin(), out.values.end(), std::nan(""));

    LoweringRequest req = request(x, gate, out);
    req.up = up;
    req.bias = bias;
    if (random.chance(50)) req.up_bias = up_bias;
    const Lowered lowered = lower(req);
    if (!lowered.error.empty()) {
      ++refused;
      continue;
    }
    const GatedSteps steps = split_gated(lowered);
    ASSERT_TRUE(steps.up.empty() || steps.up.out.col_stride == 1) << "seed " << seed;

    Tensor expected = out, factor = out;
    define(x, gate, &bias, nullptr, 1, 0, &expected);
    define(x, up, req.up_bias ? &up_bias : nullptr, nullptr, 1, 0, &factor);
    for (size_t i = 0; i < expected.values.size(); ++i) expected.values[i] *= factor.values[i];

    std::vector<double> between(steps.between_elements, std::nan(""));
    compute({steps.gate, lowered.swapped, {}}, x.values.data(), gate.values.data(),
            bias.values.data(), nullptr, between.data());
    compute({steps.up, lowered.swapped, {}}, x.values.data(), up.values.data(),
            req.up_bias ? up_bias.values.data() : nullptr, between.data(), out.values.data());
    for (size_t i = 0; i < out.values.size(); ++i) {
      ASSERT_TRUE(out.values[i] == expected.values[i] ||
                  (std::isnan(out.values[i]) && std::isnan(expected.values[i])))
          << "seed " << seed << ": " << shape_string(x.sizes) << " differs at element " << i << ": "
          << out.values[i] << " is not " << expected.values[i];
    }
    swapped += lowered.swapped;
    batched += lowered.problem.batch_dims > 0;
  }
  EXPECT_GT(swapped, 100);
  EXPECT_GT(batched, 100);
  EXPECT_LT(refused, 1200);
}

}  // namespace
}  // namespace tgemm
