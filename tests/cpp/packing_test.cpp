// What is packed, where it goes and in which layout; no kernel runs.
#include "gemm/packing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "device/tf32_parts.hpp"

namespace tgemm {
namespace {

// A K-major, B as given by its strides.
Problem problem_of(int64_t m, int64_t n, int64_t k, DType dtype,
                   Precision precision = Precision::kIeee) {
  Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {dtype, k, 1, {}, 2};
  problem.b = {dtype, 1, k, {}, 2};
  problem.out = {dtype, n, 1, {}, 16};
  problem.precision = precision;
  return problem;
}

Problem with_batches(Problem problem, std::vector<int64_t> sizes, std::vector<int64_t> a_strides,
                     std::vector<int64_t> b_strides) {
  problem.batch_dims = static_cast<int>(sizes.size());
  int64_t out_stride = problem.m * problem.n;
  for (int i = problem.batch_dims - 1; i >= 0; --i) {
    problem.batch_size[i] = sizes[i];
    problem.a.batch_stride[i] = a_strides[i];
    problem.b.batch_stride[i] = b_strides[i];
    problem.out.batch_stride[i] = out_stride;
    out_stride *= sizes[i];
  }
  return problem;
}

constexpr Packing kBoth{.a = true, .b = true};

// The element of the source, counted from its pointer, that each element of the target is copied
// from, as the kernel copies it.
std::map<int64_t, int64_t> run(const PackedCopy& copy) {
  std::map<int64_t, int64_t> target;
  for (int64_t batch = 0; batch < copy.batch_count; ++batch) {
    int64_t base = 0, rest = batch;
    for (int i = copy.batch_dims - 1; i >= 0; --i) {
      base += rest % copy.batch_size[i] * copy.batch_stride[i];
      rest /= copy.batch_size[i];
    }
    for (int64_t line = 0; line < copy.lines; ++line) {
      for (int64_t i = 0; i < copy.width; ++i) {
        const int64_t to = i + (line + batch * copy.lines) * copy.pitch;
        EXPECT_TRUE(
            target.emplace(to, base + i * copy.unit_stride + line * copy.line_stride).second)
            << "written twice";
      }
    }
  }
  return target;
}

int64_t entry_offset(const Problem& problem, const Matrix& matrix, int64_t batch) {
  int64_t offset = 0;
  for (int i = problem.batch_dims - 1; i >= 0; --i) {
    offset += batch % problem.batch_size[i] * matrix.batch_stride[i];
    batch /= problem.batch_size[i];
  }
  return offset;
}

// Every element that the kernel addresses in the packed problem is the one that it would have
// addressed before, and lies in the operand's part of the workspace.
void expect_same_elements(const Problem& problem, Packing packing) {
  SCOPED_TRACE(to_string(problem));
  const Problem seen = packed(problem, packing);
  ASSERT_EQ(seen.batch_count(), problem.batch_count());
  const PackedOffsets offsets = packed_offsets(problem, packing);
  const std::vector<PackedCopy> copies = packed_copies(problem, packing, {});
  ASSERT_EQ(copies.size(), size_t{packing.a} + size_t{packing.b});
  size_t next = 0;
  for (const bool is_a : {true, false}) {
    const Matrix& before = is_a ? problem.a : problem.b;
    const Matrix& after = is_a ? seen.a : seen.b;
    if (!(is_a ? packing.a : packing.b)) {
      EXPECT_EQ(after.row_stride, before.row_stride);
      EXPECT_EQ(after.col_stride, before.col_stride);
      continue;
    }
    const PackedCopy& copy = copies[next++];
    const std::map<int64_t, int64_t> target = run(copy);
    const int64_t rows = is_a ? problem.m : problem.k, columns = is_a ? problem.k : problem.n;
    EXPECT_EQ(after.dtype, copy.target_dtype);
    EXPECT_EQ(after.address_alignment, 16);
    EXPECT_EQ(std::max(after.row_stride, after.col_stride) * bytes_per_element(after.dtype) % 128,
              0);
    for (int64_t batch = 0; batch < problem.batch_count(); ++batch) {
      const int64_t from = entry_offset(problem, before, batch);
      const int64_t to = entry_offset(seen, after, batch);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          const auto found = target.find(to + i * after.row_stride + j * after.col_stride);
          ASSERT_NE(found, target.end()) << "not written";
          ASSERT_EQ(found->second, from + i * before.row_stride + j * before.col_stride);
        }
      }
    }
    const int64_t room = is_a ? offsets.b - offsets.a : offsets.end - offsets.b;
    EXPECT_LT(target.rbegin()->first * bytes_per_element(after.dtype), room);
  }
}

TEST(Packed, KeepsWhatIsNotPacked) {
  const Problem problem = problem_of(100, 200, 301, DType::kBFloat16);
  EXPECT_EQ(packed(problem, {}), problem);
  EXPECT_EQ(packed_offsets(problem, {}).end, 0);
  const Problem seen = packed(problem, {.a = false, .b = true});
  EXPECT_EQ(seen.a, problem.a);
  EXPECT_EQ(seen.out, problem.out);
  EXPECT_EQ(seen.b.col_stride, 320);
  EXPECT_EQ(seen.b.row_stride, 1);
}

TEST(Packed, AWeightThatIsPackedIsNotStatic) {
  Problem problem = problem_of(10, 20, 31, DType::kFloat16);
  problem.static_weight = true;
  EXPECT_TRUE(packed(problem, {.a = true}).static_weight);
  EXPECT_FALSE(packed(problem, {.b = true}).static_weight);
}

TEST(Packed, SixteenBitOperandsKeepTheirLayout) {
  Problem problem = problem_of(100, 201, 301, DType::kFloat16);
  problem.a = {DType::kFloat16, 1, 100, {}, 16};
  problem.b = {DType::kFloat16, 201, 1, {}, 16};
  const Problem seen = packed(problem, kBoth);
  EXPECT_TRUE(seen.a_m_major());
  EXPECT_EQ(seen.a.col_stride, 128);
  EXPECT_TRUE(seen.b_n_major());
  EXPECT_EQ(seen.b.row_stride, 256);
  EXPECT_EQ(seen.a.dtype, DType::kFloat16);
}

TEST(Packed, WithoutUnitStrideOperandsBecomeKMajor) {
  Problem problem = problem_of(100, 201, 64, DType::kFloat16);
  problem.a = {DType::kFloat16, 3, 900, {}, 16};
  problem.b = {DType::kFloat16, 500, 2, {}, 16};
  const Problem seen = packed(problem, kBoth);
  EXPECT_EQ(seen.a.row_stride, 64);
  EXPECT_TRUE(seen.a_k_major() && seen.b_k_major());
}

TEST(Packed, Tf32BecomesKMajorAndStaysFloat32) {
  Problem problem = problem_of(100, 200, 33, DType::kFloat32, Precision::kTf32);
  problem.a = {DType::kFloat32, 1, 100, {}, 16};
  problem.b = {DType::kFloat32, 200, 1, {}, 16};
  const Problem seen = packed(problem, kBoth);
  EXPECT_EQ(seen.a.dtype, DType::kFloat32);
  EXPECT_EQ(seen.a.row_stride, 64);
  EXPECT_EQ(seen.b.col_stride, 64);
  EXPECT_TRUE(seen.a_k_major() && seen.b_k_major());
}

TEST(Packed, Float32IsRoundedToWhatIsAskedFor) {
  for (const auto& [precision, dtype] :
       {std::pair{Precision::kBf16, DType::kBFloat16}, {Precision::kFp16, DType::kFloat16}}) {
    const Problem problem = problem_of(64, 64, 64, DType::kFloat32, precision);
    const Problem seen = packed(problem, kBoth);
    EXPECT_EQ(seen.a.dtype, dtype);
    EXPECT_EQ(seen.b.dtype, dtype);
    EXPECT_EQ(seen.out.dtype, DType::kFloat32);
    EXPECT_EQ(seen.a.row_stride, 64);
    const std::vector<PackedCopy> copies = packed_copies(problem, kBoth, {});
    EXPECT_EQ(copies[0].source_dtype, DType::kFloat32);
    EXPECT_EQ(copies[1].target_dtype, dtype);
  }
}

TEST(Packed, ElementsStayWhereTheyBelong) {
  for (const auto& [dtype, precision] : {std::pair{DType::kFloat16, Precision::kIeee},
                                         {DType::kFloat32, Precision::kTf32},
                                         {DType::kFloat32, Precision::kBf16}}) {
    for (const int64_t m : {1, 3, 65}) {
      for (const int64_t n : {1, 66}) {
        for (const int64_t k : {1, 2, 33}) {
          for (int layout = 0; layout < 9; ++layout) {
            Problem problem = problem_of(m, n, k, dtype, precision);
            const auto matrix = [&, dtype = dtype](int kind, int64_t rows, int64_t columns) {
              if (kind == 0) return Matrix{dtype, columns + 3, 1};
              if (kind == 1) return Matrix{dtype, 1, rows + 5};
              return Matrix{dtype, 2, 2 * rows + 1};
            };
            problem.a = matrix(layout % 3, m, k);
            problem.b = matrix(layout / 3, k, n);
            expect_same_elements(problem, kBoth);
            expect_same_elements(problem, {.a = true, .b = false});
            expect_same_elements(with_batches(problem, {2, 3}, {0, 100000}, {70000, 10000}), kBoth);
          }
        }
      }
    }
  }
}

// Where both parts of each element lie, as the kernel multiplies them: tiles of kPartsK in turn,
// low parts of A with high ones of B, then the other way round.
TEST(Packed, PartsOfBothOperandsMeet) {
  for (const int64_t k : {1, 31, 32, 33, 100}) {
    Problem problem = problem_of(3, 5, k, DType::kFloat32, Precision::k3xTf32);
    problem.b = {DType::kFloat32, 5, 1, {}, 4};
    const Problem seen = packed(problem, kBoth);
    EXPECT_EQ(seen.k, 2 * ((k + 31) / 32 * 32));
    EXPECT_EQ(seen.a.row_stride, seen.k);
    EXPECT_EQ(seen.b.col_stride, seen.k);
    EXPECT_TRUE(seen.a_k_major() && seen.b_k_major());
    EXPECT_EQ(seen.a.dtype, DType::kFloat32);
    const std::vector<PackedCopy> copies = packed_copies(problem, kBoth, {});
    ASSERT_EQ(copies.size(), 2u);
    EXPECT_EQ(copies[0].parts, PackedParts::kLowHigh);
    EXPECT_EQ(copies[1].parts, PackedParts::kHighLow);
    EXPECT_EQ(copies[0].lines, 3);
    EXPECT_EQ(copies[1].lines, 5);
    EXPECT_EQ(copies[0].width, k);
    EXPECT_EQ(copies[0].pitch, seen.k);
    EXPECT_EQ(packed_offsets(problem, kBoth).end,
              (3 * seen.k * 4 + 255) / 256 * 256 + (5 * seen.k * 4 + 255) / 256 * 256);
  }
  const Problem other = problem_of(3, 5, 33, DType::kFloat32, Precision::kTf32);
  EXPECT_EQ(packed(other, kBoth).k, 33);
  EXPECT_EQ(packed_copies(other, kBoth, {})[0].parts, PackedParts::kNone);
}

TEST(Tf32Parts, AddUpToTheNumber) {
  const auto value_of = [](uint32_t bits) { return std::bit_cast<float>(bits); };
  std::mt19937 random(1);
  const float largest = std::numeric_limits<float>::max();
  std::vector<float> values = {0.0f,
                               -0.0f,
                               1.0f,
                               -1.0f,
                               1.0f / 3,
                               largest,
                               -largest,
                               0x1p-126f,
                               0x1.fffffep-126f,
                               0x1p-149f,
                               0x1.555554p-100f,
                               0x1.ffdffep127f,
                               0x1.ffep127f};
  while (values.size() < 100000) {
    const float value = value_of(static_cast<uint32_t>(random()));
    if (std::isfinite(value)) values.push_back(value);
  }
  for (const float value : values) {
    const Tf32Parts parts = tf32_parts(value);
    ASSERT_EQ((parts.high | parts.low) & 0x1FFFu, 0u) << value;
    const double high = value_of(parts.high), low = double{value_of(parts.low)} / kLowPartScale;
    const double size = std::abs(double{value});
    ASSERT_GE(high * value, 0.0);
    ASSERT_LE(std::abs(high + low), largest) << value;
    ASSERT_LE(std::abs(low * kLowPartScale), std::max(size / 2, 0x1p-127)) << value;
    // TF32 has 11 significant bits, and as subnormals multiples of 2^-136. The largest numbers are
    // truncated, others rounded.
    const bool truncates = size >= 0x1p127;
    ASSERT_LE(std::abs(value - high), std::max(size * (truncates ? 0x1p-10 : 0x1p-11), 0x1p-137))
        << value;
    ASSERT_LE(std::abs(value - (high + low)),
              std::max(size * (truncates ? 0x1p-21 : 0x1p-23), 0x1p-147))
        << value;
  }
}

TEST(Tf32Parts, OfInfinitiesAndNans) {
  const auto value_of = [](uint32_t bits) { return std::bit_cast<float>(bits); };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value : {kInfinity, -kInfinity}) {
    const Tf32Parts parts = tf32_parts(value);
    EXPECT_EQ(value_of(parts.low), value);
    EXPECT_EQ(value_of(parts.high), std::copysign(1.0f, value));
  }
  for (const uint32_t bits : {0x7FC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
    const Tf32Parts parts = tf32_parts(value_of(bits));
    EXPECT_TRUE(std::isnan(value_of(parts.low)));
    EXPECT_TRUE(std::isnan(value_of(parts.high)));
    EXPECT_EQ(parts.low & 0x1FFFu, 0u);
  }
}

TEST(Packed, RepeatedBatchesAreCopiedOnce) {
  const Problem problem = with_batches(problem_of(10, 20, 31, DType::kBFloat16), {4, 5, 6},
                                       {0, 310, 0}, {6 * 620, 0, 620});
  const Problem seen = packed(problem, kBoth);
  ASSERT_EQ(seen.batch_dims, 3);
  EXPECT_EQ(seen.a.batch_stride[0], 0);
  EXPECT_EQ(seen.a.batch_stride[1], 64 * 10);
  EXPECT_EQ(seen.a.batch_stride[2], 0);
  EXPECT_EQ(seen.b.batch_stride[0], 64 * 20 * 6);
  EXPECT_EQ(seen.b.batch_stride[1], 0);
  EXPECT_EQ(seen.b.batch_stride[2], 64 * 20);
  const PackedOffsets offsets = packed_offsets(problem, kBoth);
  EXPECT_EQ(offsets.b - offsets.a, 5 * 10 * 64 * 2);
  EXPECT_EQ(offsets.end - offsets.b, 4 * 6 * 20 * 64 * 2);
  expect_same_elements(problem, kBoth);
}

TEST(Packed, BatchDimensionsThatNestAreMerged) {
  // a with its batch dimensions in another order, which kept all five apart.
  const Problem problem =
      with_batches(problem_of(2, 3, 5, DType::kFloat16), {2, 3, 2, 3, 2}, {10, 20, 60, 120, 360},
                   {15 * 36, 15 * 12, 15 * 6, 15 * 2, 15});
  const Problem seen = packed(problem, kBoth);
  EXPECT_EQ(seen.batch_dims, 1);
  EXPECT_EQ(seen.batch_size[0], 72);
  EXPECT_EQ(seen.out.batch_stride[0], 6);
  EXPECT_EQ(seen.batch_size[1], 0);
  expect_same_elements(problem, kBoth);
  // With b as it is, which nests as well, and with a residual that does not.
  EXPECT_EQ(packed(problem, {.a = true, .b = false}).batch_dims, 1);
  Problem other = problem;
  other.epilogue.has_residual = true;
  other.epilogue.residual = {DType::kFloat16, 3, 1, {6, 12, 36, 72, 216}};
  EXPECT_EQ(packed(other, kBoth).batch_dims, 5);
}

TEST(PackedOffsets, AreWholeLinesOf256Bytes) {
  const Problem problem = problem_of(3, 5, 65, DType::kFloat16);
  const PackedOffsets offsets = packed_offsets(problem, kBoth);
  EXPECT_EQ(offsets.a, 0);
  EXPECT_EQ(offsets.b, 3 * 256);
  EXPECT_EQ(offsets.end, 3 * 256 + 5 * 256);
  const PackedOffsets narrow = packed_offsets(problem_of(3, 5, 64, DType::kFloat16), kBoth);
  EXPECT_EQ(narrow.b, 512) << "3 lines of 128 bytes, rounded up";
  EXPECT_EQ(narrow.end, 512 + 768);
  EXPECT_EQ(packed_offsets(problem, {.a = false, .b = true}).b, 0);
}

TEST(PackedOffsets, NothingIsCopiedOfNothing) {
  EXPECT_EQ(packed_offsets(problem_of(64, 64, 0, DType::kFloat16), kBoth).end, 0);
  EXPECT_EQ(packed_offsets(problem_of(0, 64, 64, DType::kFloat16), kBoth).end, 0);
}

TEST(PackedOffsets, SaturateInsteadOfOverflowing) {
  constexpr int64_t kHuge = int64_t{1} << 31;
  const Problem problem =
      with_batches(problem_of(kHuge, kHuge, kHuge, DType::kFloat32, Precision::kTf32),
                   {kHuge, kHuge}, {1, 1}, {1, 1});
  EXPECT_EQ(packed_offsets(problem, kBoth).end, kMaxPackedBytes);
  EXPECT_LE(packed(problem, kBoth).a.batch_stride[0], kMaxPackedBytes);
  EXPECT_EQ(packed_offsets(problem_of(1 << 20, 1 << 20, 1 << 20, DType::kFloat16), kBoth).end,
            int64_t{4} << 40);
}

TEST(PackedOperands, LieInTheWorkspaceBeforeThePartialSums) {
  const Problem problem = problem_of(3, 5, 65, DType::kFloat16);
  alignas(256) static std::byte workspace[4096];
  int a = 0, b = 0, out = 0;
  Operands operands;
  operands.a = &a;
  operands.b = &b;
  operands.out = &out;
  operands.workspace = workspace;
  const Operands both = packed_operands(problem, kBoth, operands);
  EXPECT_EQ(both.a, workspace);
  EXPECT_EQ(both.b, workspace + 768);
  EXPECT_EQ(both.workspace, workspace + 768 + 1280);
  EXPECT_EQ(both.out, &out);
  const std::vector<PackedCopy> copies = packed_copies(problem, kBoth, operands);
  EXPECT_EQ(copies[0].source, &a);
  EXPECT_EQ(copies[0].target, workspace);
  EXPECT_EQ(copies[1].source, &b);
  EXPECT_EQ(copies[1].target, workspace + 768);
  const Operands one = packed_operands(problem, {.a = false, .b = true}, operands);
  EXPECT_EQ(one.a, &a);
  EXPECT_EQ(one.b, workspace);
}

TEST(PackingCost, GrowsWithBytes) {
  const Device device{
      .name = "H200", .compute_capability = 90, .sm_count = 132, .memory_bytes_per_us = 4.45e6};
  const Problem problem = problem_of(1024, 4096, 4095, DType::kBFloat16);
  EXPECT_EQ(packing_us(problem, {}, device), 0.0);
  const double a = packing_us(problem, {.a = true, .b = false}, device);
  const double both = packing_us(problem, kBoth, device);
  // Reading alone takes this long.
  EXPECT_GT(a, 1024.0 * 4095 * 2 / 4.45e6);
  EXPECT_GT(both, 5 * 1024.0 * 4095 * 2 / 4.45e6);
  EXPECT_LT(both, 5 * a) << "one launch for both";
  Problem full = problem;
  full.a.dtype = full.b.dtype = DType::kFloat32;
  full.precision = Precision::kBf16;
  EXPECT_GT(packing_us(full, kBoth, device), both) << "twice as much to read";
}

}  // namespace
}  // namespace tgemm
