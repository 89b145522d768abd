// select() on cards that need not be in this machine: who runs what, why the others do not, and
// that the choice is a function of the problem and the card alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "device/params.hpp"
#include "gemm/packing.hpp"
#include "gemm/plan.hpp"
#include "h200.hpp"

namespace tgemm {
namespace {

constexpr int kKiB = 1024;

// As h200(), from the same sources.
Device h100_pcie() {
  return {"H100 PCIe", 90, 114, 227 * kKiB, 228 * kKiB, 50 << 20, 1.755, 1.9e6};
}
Device h20() { return {"H20", 90, 78, 227 * kKiB, 228 * kKiB, 60 << 20, 1.98, 3.8e6}; }
Device a100() { return {"A100", 80, 108, 163 * kKiB, 164 * kKiB, 40 << 20, 1.41, 1.4e6}; }
Device rtx3090() { return {"RTX 3090", 86, 82, 99 * kKiB, 100 * kKiB, 6 << 20, 1.695, 0.85e6}; }
Device t4() { return {"T4", 75, 40, 64 * kKiB, 64 * kKiB, 4 << 20, 1.59, 0.27e6}; }
Device v100() { return {"V100", 70, 80, 96 * kKiB, 96 * kKiB, 6 << 20, 1.53, 0.8e6}; }

// As nn.Linear: both operands K-major, aligned.
Problem linear_problem(int64_t m, int64_t n, int64_t k, DType dtype,
                       Precision precision = Precision::kIeee) {
  Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {dtype, k, 1, {}, 16};
  problem.b = {dtype, 1, k, {}, 16};
  problem.out = {dtype, n, 1, {}, 16};
  problem.precision = precision;
  return problem;
}

Problem f16(int64_t m, int64_t n, int64_t k) { return linear_problem(m, n, k, DType::kFloat16); }
Problem f32(int64_t m, int64_t n, int64_t k) { return linear_problem(m, n, k, DType::kFloat32); }

std::string chosen(const Problem& problem, const Device& device, std::string_view force = {}) {
  const Selection selection = select(problem, device, force);
  EXPECT_TRUE(selection.plan.has_value()) << selection.error;
  EXPECT_EQ(selection.error, "");
  return selection.plan ? std::string(selection.plan->kernel->name) : "";
}

std::string refusal(const Problem& problem, const Device& device, std::string_view force = {}) {
  const Selection selection = select(problem, device, force);
  EXPECT_FALSE(selection.plan.has_value()) << to_string(*selection.plan);
  // One sentence: no line breaks, and not empty.
  EXPECT_NE(selection.error, "");
  EXPECT_EQ(selection.error.find('\n'), std::string::npos);
  return selection.error;
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

const KernelEntry& kernel(std::string_view name) {
  for (const KernelEntry& entry : kernel_table()) {
    if (entry.name == name) return entry;
  }
  ADD_FAILURE() << "no kernel " << name;
  return kernel_table()[0];
}

// --- The table
// -------------------------------------------------------------------------------------

TEST(KernelTable, RowsAreComplete) {
  std::set<std::string_view> names;
  for (const KernelEntry& entry : kernel_table()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name << " is there twice";
    EXPECT_NE(entry.description, "");
    EXPECT_NE(entry.rejects, nullptr);
    EXPECT_NE(entry.cost_us, nullptr);
    EXPECT_NE(entry.launch, nullptr);
    EXPECT_FALSE(entry.configs.empty());
    std::set<std::string_view> configs;
    for (const TileConfig& config : entry.configs) {
      SCOPED_TRACE(std::string(entry.name) + ":" + std::string(config.name));
      EXPECT_TRUE(configs.insert(config.name).second) << "there twice";
      EXPECT_EQ(config.threads % 32, 0);
      EXPECT_GT(config.threads, 0);
      EXPECT_LE(config.threads, 1024);
      EXPECT_GE(config.stages, 1);
      EXPECT_GE(config.ctas_per_sm, 1);
      EXPECT_GT(config.mac_per_cycle, 0.0);
      EXPECT_GE(config.shared_memory_bytes, 0);  // 0: static, which a launch need not ask for
      // The largest that any card grants, with what the runtime reserves per CTA (1 KiB).
      EXPECT_LE(config.shared_memory_bytes, 227 * kKiB);
      EXPECT_LE(config.ctas_per_sm * (config.shared_memory_bytes + kKiB), 228 * kKiB);
      EXPECT_LE(config.ctas_per_sm * config.threads, 2048);
      // "128x256...": the tile comes first in the name.
      const std::string tile =
          std::to_string(config.block_m) + "x" + std::to_string(config.block_n);
      EXPECT_TRUE(config.name.starts_with(tile)) << "names another tile than " << tile;
      EXPECT_EQ(config.name.find_first_of(",: "), std::string_view::npos)
          << "force_kernel could not name it";
    }
  }
  EXPECT_TRUE(names.contains("simt"));
  EXPECT_TRUE(names.contains("mma_sync"));
}

TEST(KernelTable, TilesSpanTheRangeThatWasAskedFor) {
  std::set<std::pair<int, int>> tiles;
  for (const TileConfig& config : kernel("mma_sync").configs)
    tiles.insert({config.block_m, config.block_n});
  EXPECT_TRUE(tiles.contains({64, 64}));
  EXPECT_TRUE(tiles.contains({128, 256}));
}

// --- Who runs what
// ---------------------------------------------------------------------------------

TEST(Select, HalfPrecisionRunsOnTensorCores) {
  for (const Device& device : {h200(), h100_pcie(), h20(), a100(), rtx3090()}) {
    SCOPED_TRACE(device.name);
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const bool hopper = device.compute_capability == 90;
      EXPECT_EQ(chosen(linear_problem(4096, 4096, 4096, dtype), device),
                hopper ? "sm90" : "mma_sync");
      EXPECT_NE(chosen(linear_problem(1, 4096, 4096, dtype), device), "simt");
      // Rows of an odd length: TMA cannot read them.
      EXPECT_EQ(chosen(linear_problem(4096, 4096, 4095, dtype), device),
                hopper ? "sm90_packed" : "mma_sync");
    }
  }
}

TEST(Select, SplitsWithinAClusterNeedNoWorkspace) {
  const Problem problem = linear_problem(128, 4096, 14336, DType::kBFloat16);
  for (const auto& [force, within] : {std::pair{"sm90:128x64,split_k=8", true},
                                      {"sm90:128x64,split_k=12", false},
                                      {"sm90:128x128_pingpong,split_k=2", false},
                                      {"sm90:128x256_cluster,split_k=2", false},
                                      {"mma_sync:128x128,split_k=2", false}}) {
    const Selection selection = select(problem, h200(), force);
    ASSERT_TRUE(selection.plan) << selection.error;
    EXPECT_EQ(selection.plan->workspace_bytes == 0, within) << force;
  }
}

// N and K of the linear layers of Llama-3.1 8B.
constexpr std::pair<int64_t, int64_t> kLlama[] = {
    {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};

TEST(Select, FewRowsRunOnSkinnyAndMoreNever) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const auto& [n, k] : kLlama) {
      for (int64_t m : {1, 2, 4, 7, 8, 9, 16}) {
        const Problem problem = linear_problem(m, n, k, dtype);
        SCOPED_TRACE(to_string(problem));
        const Selection selection = select(problem, h200());
        ASSERT_TRUE(selection.plan) << selection.error;
        EXPECT_EQ(selection.plan->kernel->name, "skinny");
        EXPECT_GE(selection.plan->config->block_m, m) << "reads the weight more than once";
        EXPECT_LE(selection.plan->config->block_m, 2 * std::max<int64_t>(m, 4));
        EXPECT_EQ(selection.plan->workspace_bytes, 0u);
      }
      for (int64_t m : {33, 64, 65, 100, 256}) {
        EXPECT_NE(chosen(linear_problem(m, n, k, dtype), h200()), "skinny") << m;
      }
    }
  }
  // Also where no tile is full.
  for (int64_t m : {33, 100, 1000}) EXPECT_NE(chosen(f16(m, 8, 8), h200()), "skinny");
  EXPECT_EQ(chosen(f16(100, 4096, 4096), h200(), "skinny:64x128"), "skinny") << "when forced";
  EXPECT_NE(chosen(f16(1, 4096, 4096), a100()), "skinny");
}

// However many the columns, memory is faster where several CTAs read the same rows of the weight.
TEST(Select, SkinnySplitsKWithinClusters) {
  for (int64_t n : {4096, 28672, 128256}) {
    const Plan plan = *select(f16(1, n, 4096), h200()).plan;
    EXPECT_GT(plan.split_k, 1) << n;
    EXPECT_EQ(plan.workspace_bytes, 0u) << n;
  }
}

TEST(Select, SharedBatchEntriesAreReadOnce) {
  Problem problem = f16(1, 2048, 128);
  problem.batch_dims = 1;
  problem.batch_size[0] = 256;
  problem.a.batch_stride[0] = 128;
  problem.out.batch_stride[0] = 2048;
  problem.b.batch_stride[0] = 2048 * 128;
  const double apart = select(problem, h200()).plan->predicted_us;
  problem.b.batch_stride[0] = 0;
  EXPECT_LT(select(problem, h200()).plan->predicted_us, apart);
}

TEST(Select, SkinnyReadsXAlongKAlone) {
  Problem problem = f16(8, 4096, 4096);
  problem.a.row_stride = 1;
  problem.a.col_stride = 8;
  EXPECT_CONTAINS(refusal(problem, h200(), "skinny"), "TMA cannot read a along K");
  problem = f16(8, 4096, 4096);
  problem.b = {DType::kFloat16, 4096, 1, {}, 16};
  EXPECT_EQ(chosen(problem, h200()), "skinny") << "the weight in either order";
}

TEST(Select, SkinnyGatesInOneKernelAndSplitsItsK) {
  const auto gated = [](int64_t m, int64_t n, int64_t k) {
    Problem problem = f16(m, n, k);
    problem.gated = true;
    problem.up = problem.b;
    problem.epilogue.activation = Activation::kSilu;
    return problem;
  };
  const Selection large = select(gated(1, 14336, 4096), h200());
  ASSERT_TRUE(large.plan) << large.error;
  EXPECT_EQ(large.plan->config->name, "8x128");
  EXPECT_EQ(large.plan->workspace_bytes, 0u);
  const Selection small = select(gated(4, 1024, 8192), h200());
  ASSERT_TRUE(small.plan) << small.error;
  EXPECT_EQ(small.plan->kernel->name, "skinny");
  EXPECT_GT(small.plan->split_k, 1);
  EXPECT_EQ(small.plan->workspace_bytes, 0u) << "sums of two weights meet within a cluster";
  EXPECT_CONTAINS(refusal(gated(4, 1024, 8192), h200(), "skinny:8x128,split_k=9"), "cluster");
  EXPECT_CONTAINS(refusal(gated(4, 1024, 8192), h200(), "skinny:8x64"), "two weights");
  EXPECT_CONTAINS(refusal(gated(4, 1024, 8192), h200(), "sm90:128x128,split_k=2"),
                  "cannot split K");
}

TEST(Select, TinyRunsBatchesOfSmallProducts) {
  const auto batch = [](int64_t count, int64_t size, int64_t k) {
    Problem problem = f16(size, size, k);
    problem.batch_dims = 1;
    problem.batch_size[0] = count;
    problem.a.batch_stride[0] = problem.b.batch_stride[0] = size * k;
    problem.out.batch_stride[0] = size * size;
    return problem;
  };
  const auto plan = [](const Problem& problem, const Device& device) {
    const Selection selection = select(problem, device);
    EXPECT_TRUE(selection.plan) << selection.error;
    return to_string(*selection.plan);
  };
  for (const Device& device : {h200(), a100()}) {
    SCOPED_TRACE(device.name);
    EXPECT_EQ(plan(batch(70000, 8, 8), device), "tiny:8x8");
    EXPECT_EQ(plan(batch(4096, 16, 16), device), "tiny:16x16");
    EXPECT_EQ(plan(batch(1024, 32, 32), device), "tiny:32x32");
    EXPECT_NE(chosen(batch(64, 1024, 1024), device), "tiny");
    EXPECT_NE(chosen(f16(4096, 4096, 4096), device), "tiny");
  }
  Problem single = batch(1024, 32, 32);
  single.a.dtype = single.b.dtype = single.out.dtype = DType::kFloat32;
  EXPECT_CONTAINS(refusal(single, h200(), "tiny"), "FP16 and BF16");
  EXPECT_CONTAINS(refusal(batch(4, 8, 8), h200(), "tiny:8x8,split_k=2"), "cannot split K");
}

TEST(Select, AStaticWeightDoesNotChangeThePlan) {
  for (const auto& [n, k] : kLlama) {
    Problem problem = f16(4, n, k);
    const std::string before = to_string(*select(problem, h200()).plan);
    problem.static_weight = true;
    EXPECT_EQ(to_string(*select(problem, h200()).plan), before);
  }
}

TEST(Select, SmallProblemsDoNotTakeLargeTiles) {
  const auto tile = [](int64_t m, int64_t n, int64_t k) {
    return *select(linear_problem(m, n, k, DType::kBFloat16), h200()).plan->config;
  };
  EXPECT_LE(tile(1024, 1024, 1024).block_n, 128);
  EXPECT_GE(tile(8192, 8192, 8192).block_m * tile(8192, 8192, 8192).block_n, 128 * 128);
}

TEST(Select, FullPrecisionStaysOnTheFmaPipes) {
  for (const Device& device : {h200(), h20(), a100(), rtx3090(), t4()}) {
    SCOPED_TRACE(device.name);
    EXPECT_EQ(chosen(f32(4096, 4096, 4096), device), "simt");
    EXPECT_EQ(chosen(f32(3, 5, 7), device), "simt");
  }
}

TEST(Select, LowerPrecisionsOfFloat32RunOnTensorCores) {
  for (Precision precision : {Precision::kTf32, Precision::kBf16, Precision::kFp16}) {
    SCOPED_TRACE(to_string(precision));
    EXPECT_EQ(chosen(linear_problem(4096, 4096, 4096, DType::kFloat32, precision), h200()),
              precision == Precision::kTf32 ? "sm90_tf32" : "sm90_packed");
    EXPECT_EQ(chosen(linear_problem(511, 513, 127, DType::kFloat32, precision), a100()),
              "mma_sync");
  }
}

TEST(Select, ThreeProductsOfTf32RunWhereTheyAreFasterThanFp32AndAsAccurate) {
  const auto problem = [](int64_t m, int64_t n, int64_t k) {
    return linear_problem(m, n, k, DType::kFloat32, Precision::k3xTf32);
  };
  EXPECT_EQ(chosen(problem(4096, 4096, 4096), h200()), "sm90_3xtf32");
  EXPECT_EQ(chosen(problem(1021, 2039, 4093), h200()), "sm90_3xtf32");
  EXPECT_EQ(chosen(problem(4096, 4096, 127), h200()), "simt") << "small K";
  EXPECT_EQ(chosen(problem(1, 4096, 4096), h200()), "simt") << "packing would cost too much";
  EXPECT_EQ(chosen(problem(4096, 4096, 64), h200(), "sm90_3xtf32"), "sm90_3xtf32") << "when forced";
  for (const Device& device : {a100(), rtx3090(), t4()}) {
    EXPECT_EQ(chosen(problem(4096, 4096, 4096), device), "simt") << device.name;
  }
  // Never for other precisions.
  for (Precision precision : {Precision::kIeee, Precision::kTf32, Precision::kBf16}) {
    EXPECT_CONTAINS(
        refusal(linear_problem(512, 512, 512, DType::kFloat32, precision), h200(), "sm90_3xtf32"),
        "three products of TF32");
  }
  EXPECT_CONTAINS(refusal(f16(512, 512, 512), h200(), "sm90_3xtf32"), "three products of TF32");
  EXPECT_CONTAINS(refusal(problem(512, 512, 512), a100(), "sm90_3xtf32"), "9.0");
  EXPECT_CONTAINS(refusal(problem(512, 512, 512), h200(), "mma_sync"), "takes three");
  EXPECT_CONTAINS(refusal(problem(512, 512, 512), h200(), "sm90_tf32"), "as TF32");
}

TEST(Select, PartsOfTf32AreInTheWorkspaceAndInTheTime) {
  const Problem problem = linear_problem(100, 201, 8191, DType::kFloat32, Precision::k3xTf32);
  const auto bytes = [&](const std::string& force) {
    const Selection selection = select(problem, h200(), force);
    EXPECT_TRUE(selection.plan) << selection.error;
    return selection.plan ? selection.plan->workspace_bytes : 0;
  };
  const size_t packed = size_t{301} * 8192 * 2 * 4;
  EXPECT_EQ(bytes("sm90_3xtf32:128x128,split_k=1"), packed);
  EXPECT_EQ(bytes("sm90_3xtf32:128x128,split_k=2"), packed) << "adds up within a cluster";
  EXPECT_EQ(bytes("sm90_3xtf32:128x128,split_k=16"), packed + 16 * 100 * 204 * 4);
  const Selection selection = select(problem, h200(), "sm90_3xtf32");
  ASSERT_TRUE(selection.plan);
  EXPECT_TRUE(selection.plan->packing.a && selection.plan->packing.b);
  EXPECT_GT(selection.plan->predicted_us,
            packing_us(problem, selection.plan->packing, h200()) + 100.0 * 201 * 8191 * 2 / 450e6);
}

TEST(Select, TuringHasNoTensorCoreKernel) {
  std::vector<Candidate> report;
  const Selection selection = select(f16(512, 512, 512), t4(), "", &report);
  ASSERT_TRUE(selection.plan.has_value()) << selection.error;
  EXPECT_EQ(selection.plan->kernel->name, "simt");
  int refused = 0;
  for (const Candidate& candidate : report) {
    if (candidate.plan.kernel->name != "mma_sync") continue;
    EXPECT_CONTAINS(candidate.reason, "8.0");
    ++refused;
  }
  EXPECT_EQ(refused, static_cast<int>(kernel("mma_sync").configs.size()));
}

TEST(Select, WhatHasNoKernelIsOneSentence) {
  const std::string tf32 =
      refusal(linear_problem(512, 512, 512, DType::kFloat32, Precision::kTf32), t4());
  EXPECT_CONTAINS(tf32, "tf32");
  EXPECT_CONTAINS(tf32, "512x512x512");
  EXPECT_CONTAINS(tf32, "T4");
  const std::string old = refusal(f32(512, 512, 512), v100());
  EXPECT_CONTAINS(old, "7.5");
  EXPECT_CONTAINS(old, "V100");
  // TF32 on a card without it.
  EXPECT_CONTAINS(refusal(linear_problem(8, 8, 8, DType::kFloat32, Precision::kTf32), t4()), "T4");
}

TEST(Select, EveryShapeStrideAndAlignmentHasAPlan) {
  for (const Device& device : {h200(), h20(), a100(), rtx3090(), t4()}) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (int64_t m : {1, 7, 64, 1000, 3000000}) {
        for (int64_t n : {1, 5, 768, 50257}) {
          for (int64_t k : {0, 1, 63, 4095, 65536}) {
            for (int alignment : {2, 8, 16}) {
              Problem problem = linear_problem(m, n, k, dtype);
              problem.a.address_alignment = std::max(alignment, bytes_per_element(dtype));
              problem.b.row_stride = 3;  // every third element: no unit stride at all
              problem.b.col_stride = 3 * k;
              EXPECT_TRUE(select(problem, device).plan) << device.name << " " << to_string(problem);
              problem.a = {dtype, 1, m, {}, alignment};
              problem.b = {dtype, n, 1, {}, 16};
              EXPECT_TRUE(select(problem, device).plan) << device.name << " " << to_string(problem);
            }
          }
        }
      }
    }
  }
}

TEST(Select, PlansFitTheDevice) {
  for (const Device& device : {h200(), a100(), rtx3090(), t4()}) {
    for (const Problem& problem :
         {f16(4096, 4096, 4096), f32(4096, 4096, 4096), f16(1021, 2039, 4093)}) {
      std::vector<Candidate> report;
      select(problem, device, "", &report);
      for (const Candidate& candidate : report) {
        if (!candidate.reason.empty()) continue;
        EXPECT_LE(candidate.plan.config->shared_memory_bytes, device.max_shared_memory_per_block)
            << to_string(candidate.plan) << " on " << device.name;
      }
    }
  }
}

// --- The report
// ------------------------------------------------------------------------------------

TEST(Select, ReportsEveryConfigurationWithATimeOrAReason) {
  for (const Problem& problem : {f16(4096, 4096, 4096), f32(100, 100, 100), f16(33, 35, 37)}) {
    std::vector<Candidate> report;
    const Selection selection = select(problem, h200(), "", &report);
    ASSERT_TRUE(selection.plan.has_value());
    std::set<std::pair<const KernelEntry*, const TileConfig*>> seen;
    double best = INFINITY;
    for (const Candidate& candidate : report) {
      ASSERT_NE(candidate.plan.kernel, nullptr);
      ASSERT_NE(candidate.plan.config, nullptr);
      seen.insert({candidate.plan.kernel, candidate.plan.config});
      if (candidate.reason.empty()) {
        EXPECT_GT(candidate.plan.predicted_us, 0.0);
        EXPECT_TRUE(std::isfinite(candidate.plan.predicted_us));
        best = std::min(best, candidate.plan.predicted_us);
      }
    }
    size_t configs = 0;
    for (const KernelEntry& entry : kernel_table()) {
      if (entry.automatic) configs += entry.configs.size();
    }
    EXPECT_EQ(seen.size(), configs);
    EXPECT_EQ(selection.plan->predicted_us, best) << "the cheapest is taken";
  }
}

TEST(Select, PredictsNothingFasterThanTheMemory) {
  for (const Device& device : {h200(), a100()}) {
    for (const Problem& problem : {f16(16, 14336, 4096), f16(1, 4096, 4096), f32(64, 64, 65536)}) {
      const Selection selection = select(problem, device);
      ASSERT_TRUE(selection.plan.has_value());
      const double bytes =
          bytes_per_element(problem.a.dtype) *
          double(problem.m * problem.k + problem.k * problem.n + problem.m * problem.n);
      EXPECT_GE(selection.plan->predicted_us, bytes / device.memory_bytes_per_us);
    }
  }
}

TEST(Select, MoreSmsAreNeverPredictedSlower) {
  for (const Problem& problem :
       {f16(4096, 4096, 4096), f16(512, 4096, 4096), f32(2048, 2048, 2048)}) {
    double previous = INFINITY;
    for (int sms : {78, 114, 132}) {
      Device device = h200();
      device.sm_count = sms;
      const Selection selection = select(problem, device);
      ASSERT_TRUE(selection.plan.has_value());
      EXPECT_LE(selection.plan->predicted_us, previous) << sms << " SMs, " << to_string(problem);
      previous = selection.plan->predicted_us;
    }
  }
}

// --- Determinism
// -----------------------------------------------------------------------------------

TEST(Select, SameProblemSamePlan) {
  for (int sms : {78, 114, 132}) {
    Device device = h200();
    device.sm_count = sms;
    for (const Problem& problem :
         {f16(4096, 4096, 4096), f16(64, 64, 65536), f32(128, 512, 32768)}) {
      const Selection first = select(problem, device);
      std::vector<Candidate> report;
      const Selection second = select(problem, device, "", &report);
      ASSERT_TRUE(first.plan && second.plan);
      EXPECT_EQ(first.plan->kernel, second.plan->kernel);
      EXPECT_EQ(first.plan->config, second.plan->config);
      EXPECT_EQ(first.plan->split_k, second.plan->split_k);
      EXPECT_EQ(first.plan->workspace_bytes, second.plan->workspace_bytes);
      // Forcing a plan by the name it prints gives that plan.
      const Selection forced = select(problem, device, to_string(*first.plan));
      ASSERT_TRUE(forced.plan.has_value()) << forced.error;
      EXPECT_EQ(forced.plan->config, first.plan->config);
      EXPECT_EQ(forced.plan->workspace_bytes, first.plan->workspace_bytes);
      EXPECT_EQ(to_string(*forced.plan), to_string(*first.plan));
    }
  }
}

TEST(Select, GatedProductsGoToKernelsOfTwoWeightsAlone) {
  Problem problem = f16(4096, 4096, 4096);
  problem.gated = true;
  problem.up = problem.b;
  std::vector<Candidate> report;
  const Selection selection = select(problem, h200(), {}, &report);
  ASSERT_FALSE(report.empty());
  for (const Candidate& candidate : report) {
    if (!candidate.plan.kernel->gated) {
      EXPECT_EQ(candidate.reason, "it multiplies one weight");
    }
  }
  EXPECT_TRUE(!selection.plan || selection.plan->kernel->gated);
  EXPECT_CONTAINS(refusal(problem, h200(), "naive"), "it multiplies one weight");
}

TEST(Select, EpilogueAndScalarsDoNotChangeThePrecisionOfTheSum) {
  // alpha and beta are values, not shapes: the plan, and so the order of summation, ignores them.
  Problem problem = f16(64, 64, 65536);
  const std::string before = to_string(*select(problem, h200()).plan);
  problem.epilogue.alpha = 0.25f;
  problem.epilogue.beta = 3.0f;
  EXPECT_EQ(to_string(*select(problem, h200()).plan), before);
}

// --- Split-K
// ---------------------------------------------------------------------------------------

TEST(SplitK, FillsTheCardWhenThereAreFewTiles) {
  for (int sms : {78, 114, 132}) {
    Device device = h200();
    device.sm_count = sms;
    for (const Problem& problem :
         {f16(64, 64, 65536), f16(128, 512, 32768), f16(256, 256, 16384)}) {
      const Selection selection = select(problem, device);
      ASSERT_TRUE(selection.plan.has_value());
      EXPECT_GT(selection.plan->split_k, 1) << sms << " SMs, " << to_string(problem);
      const int64_t tiles =
          ((problem.m + selection.plan->config->block_m - 1) / selection.plan->config->block_m) *
          ((problem.n + selection.plan->config->block_n - 1) / selection.plan->config->block_n);
      EXPECT_LE(tiles * selection.plan->split_k, int64_t{sms} * selection.plan->config->ctas_per_sm)
          << "more splits than the card holds at once";
    }
  }
}

TEST(SplitK, IsNotUsedWhenTheTilesFillTheCardOrKIsShort) {
  for (const Problem& problem : {f16(4096, 4096, 4096), f16(8192, 8192, 8192), f16(128, 128, 64),
                                 f32(4096, 4096, 4096), f16(64, 64, 0)}) {
    const Selection selection = select(problem, h200());
    ASSERT_TRUE(selection.plan.has_value());
    EXPECT_EQ(selection.plan->split_k, 1) << to_string(problem);
    EXPECT_EQ(selection.plan->workspace_bytes, 0u) << to_string(problem);
  }
}

TEST(SplitK, WorkspaceHoldsOnePartialSumPerSplit) {
  Problem problem = f16(100, 101, 8192);
  problem.batch_dims = 1;
  problem.batch_size = {3};
  problem.a.batch_stride = {100 * 8192};
  problem.b.batch_stride = {101 * 8192};
  problem.out.batch_stride = {100 * 101};
  const std::string name(kernel("mma_sync").configs.back().name);
  const Selection selection = select(problem, h200(), "mma_sync:" + name + ",split_k=4");
  ASSERT_TRUE(selection.plan.has_value()) << selection.error;
  EXPECT_EQ(selection.plan->split_k, 4);
  // FP32, rows padded to four columns.
  EXPECT_EQ(selection.plan->workspace_bytes, size_t{4} * 3 * 100 * 104 * sizeof(float));
}

TEST(SplitK, WorkspaceOfLargeOutputsIsCountedInSixtyFourBits) {
  const Selection selection = select(f16(65536, 65536, 4096), h200(), "mma_sync,split_k=2");
  ASSERT_TRUE(selection.plan.has_value()) << selection.error;
  EXPECT_EQ(selection.plan->workspace_bytes, size_t{2} * 65536 * 65536 * 4);
}

TEST(SplitK, SlicesCoverKExactlyOnceInWholeTiles) {
  Operands operands;
  for (int64_t k : {1, 63, 64, 65, 1000, 4096, 4097, 65536}) {
    for (int split_k : {2, 3, 7, 16, 128}) {
      const Problem problem = f16(64, 64, k);
      const Selection selection =
          select(problem, h200(), "mma_sync,split_k=" + std::to_string(split_k));
      ASSERT_TRUE(selection.plan.has_value()) << selection.error;
      const GemmParams params = make_params(*selection.plan, problem, operands);
      EXPECT_EQ(params.split_k, split_k);
      EXPECT_EQ(params.k_per_split % selection.plan->config->block_k, 0);
      EXPECT_GE(params.k_per_split * split_k, k) << "the end of K would be left out";
      EXPECT_EQ(params.workspace_pitch % 4, 0);
      EXPECT_GE(params.workspace_pitch, problem.n);
    }
  }
}

// --- Packed operands
// -----------------------------------------------------------------------------------

Problem b_row_major(Problem problem) {
  std::swap(problem.b.row_stride, problem.b.col_stride);
  problem.b.row_stride = problem.n;
  return problem;
}

Problem a_transposed(Problem problem) {
  problem.a.row_stride = 1;
  problem.a.col_stride = problem.m;
  return problem;
}

TEST(Packing, WhatTmaCannotReadIsPackedAndNothingElse) {
  const auto bf16 = [](int64_t m, int64_t n, int64_t k) {
    return linear_problem(m, n, k, DType::kBFloat16);
  };
  const auto fp32 = [](Precision precision) {
    return linear_problem(2048, 4096, 4096, DType::kFloat32, precision);
  };
  Problem address = bf16(1024, 4096, 4096);
  address.a.address_alignment = 8;
  Problem strided = bf16(1024, 4096, 4096);
  strided.b = {DType::kBFloat16, 2, 8192, {}, 16};
  Problem batched = bf16(1024, 1024, 4096);
  batched.batch_dims = 1;
  batched.batch_size = {4};
  batched.a.batch_stride = {1024 * 4096};
  batched.b.batch_stride = {1024 * 4096 + 4};
  batched.out.batch_stride = {1024 * 1024};
  const std::pair<Problem, Packing> cases[] = {
      {bf16(1024, 4096, 4095), {true, true}},
      {bf16(1021, 2039, 4093), {true, true}},
      {b_row_major(bf16(1024, 4097, 4096)), {false, true}},
      {a_transposed(bf16(100, 4096, 4096)), {true, false}},
      {address, {true, false}},
      {strided, {false, true}},
      {batched, {false, true}},
      {fp32(Precision::kBf16), {true, true}},
      {fp32(Precision::kFp16), {true, true}},
      {b_row_major(fp32(Precision::kTf32)), {false, true}},
      {a_transposed(fp32(Precision::kTf32)), {true, false}},
      {linear_problem(2048, 4096, 4095, DType::kFloat32, Precision::kTf32), {true, true}},
  };
  for (const auto& [problem, packing] : cases) {
    SCOPED_TRACE(to_string(problem));
    const Selection selection = select(problem, h200());
    ASSERT_TRUE(selection.plan);
    EXPECT_EQ(selection.plan->kernel->name, "sm90_packed");
    EXPECT_EQ(selection.plan->packing.a, packing.a);
    EXPECT_EQ(selection.plan->packing.b, packing.b);
    EXPECT_GT(selection.plan->predicted_us, packing_us(problem, packing, h200()));
    EXPECT_FALSE(select(problem, a100()).plan->packing.any());
  }
}

TEST(Packing, IsNotDoneWhereItCostsMoreThanItSaves) {
  // The copy of the weight takes longer than the product, which mma_sync can read as it is.
  EXPECT_EQ(
      chosen(b_row_major(linear_problem(1, 4096, 4096, DType::kFloat32, Precision::kTf32)), h200()),
      "mma_sync");
  // N alone is odd: only the outputs are affected.
  EXPECT_EQ(chosen(f16(1024, 4097, 4096), h200()), "sm90");
}

TEST(Packing, IsRefusedWhereNothingHasToBePacked) {
  EXPECT_CONTAINS(refusal(f16(512, 512, 512), h200(), "sm90_packed"), "no operand to pack");
  EXPECT_CONTAINS(refusal(linear_problem(512, 512, 512, DType::kFloat32, Precision::kTf32), h200(),
                          "sm90_packed"),
                  "no operand to pack");
  EXPECT_CONTAINS(refusal(f32(512, 512, 511), h200(), "sm90_packed"), "TF32");
  EXPECT_CONTAINS(refusal(f16(512, 512, 511), a100(), "sm90_packed"), "9.0");
}

TEST(Packing, OfGatedProductsIsRefused) {
  Problem problem = f16(512, 512, 511);
  problem.gated = true;
  problem.up = problem.b;
  EXPECT_CONTAINS(refusal(problem, h200(), "sm90_packed"), "one weight");
}

TEST(Packing, SharesTheWorkspaceWithPartialSums) {
  const Problem problem = f16(100, 101, 8191);
  const auto bytes = [&](const std::string& force) {
    const Selection selection = select(problem, h200(), force);
    EXPECT_TRUE(selection.plan) << selection.error;
    return selection.plan ? selection.plan->workspace_bytes : 0;
  };
  const size_t packed = size_t{201} * 8192 * 2;
  EXPECT_EQ(bytes("sm90_packed:128x128_pingpong,split_k=1"), packed);
  EXPECT_EQ(bytes("sm90_packed:128x128,split_k=2"), packed) << "adds up within a cluster";
  EXPECT_EQ(bytes("sm90_packed:128x128_pingpong,split_k=3"), packed + 3 * 100 * 104 * 4);
}

TEST(Packing, TakesALotOfMemoryOnlyWhenForced) {
  // An activation that is one row, expanded.
  Problem problem = f16(1 << 20, 4096, 4095);
  problem.a.row_stride = 0;
  EXPECT_EQ(chosen(problem, h200()), "mma_sync");
  const Selection forced = select(problem, h200(), "sm90_packed");
  ASSERT_TRUE(forced.plan) << forced.error;
  EXPECT_GT(forced.plan->workspace_bytes, size_t{8} << 30);
  problem.m = int64_t{1} << 30;
  problem.n = int64_t{1} << 30;
  problem.k = (int64_t{1} << 30) - 1;
  EXPECT_CONTAINS(refusal(problem, h200(), "sm90_packed"), "memory");
}

TEST(Packing, OfMoreBatchDimensionsThanAMapHasWorksWhereTheyCanBeMerged) {
  Problem problem = f16(128, 128, 128);
  problem.batch_dims = 4;
  problem.batch_size = {2, 3, 4, 5};
  problem.out.batch_stride = {60 << 14, 20 << 14, 5 << 14, 1 << 14};
  problem.b.batch_stride = problem.out.batch_stride;
  problem.a.batch_stride = {1 << 14, 2 << 14, 6 << 14, 24 << 14};  // in reverse order
  EXPECT_CONTAINS(refusal(problem, h200(), "sm90"), "TMA cannot read a");
  const Selection merged = select(problem, h200(), "sm90_packed");
  ASSERT_TRUE(merged.plan) << merged.error;
  EXPECT_TRUE(merged.plan->packing.a);
  // An output in that order keeps them apart.
  problem.out.batch_stride = {1 << 14, 2 << 14, 6 << 14, 24 << 14};
  EXPECT_CONTAINS(refusal(problem, h200(), "sm90_packed"), "TMA cannot read a");
}

// --- What reaches the kernels
// ----------------------------------------------------------------------

TEST(Params, VectorEpilogueOnlyWhereEverythingIsAligned) {
  const auto vectorises = [](const Problem& problem) {
    const Selection selection = select(problem, h200());
    EXPECT_TRUE(selection.plan.has_value()) << selection.error;
    return make_params(*selection.plan, problem, Operands{}).vector_epilogue;
  };
  Problem problem = f16(64, 64, 64);
  EXPECT_TRUE(vectorises(problem));
  problem.n = 63;
  EXPECT_FALSE(vectorises(problem)) << "odd n";
  problem = f16(64, 64, 64);
  problem.out.row_stride = 66;
  EXPECT_FALSE(vectorises(problem)) << "odd leading stride";
  problem = f16(64, 64, 64);
  problem.out.address_alignment = 4;
  EXPECT_FALSE(vectorises(problem)) << "address";
  problem = f16(64, 64, 64);
  problem.batch_dims = 1;
  problem.batch_size = {2};
  problem.out.batch_stride = {64 * 64 + 2};
  EXPECT_FALSE(vectorises(problem)) << "batch stride";
  problem = f16(64, 64, 64);
  problem.epilogue.has_bias = true;
  problem.epilogue.bias = {DType::kFloat16, 0, 1, {}, 2};
  EXPECT_FALSE(vectorises(problem)) << "address of the bias";
  problem.epilogue.bias.address_alignment = 8;
  EXPECT_TRUE(vectorises(problem));
  problem.epilogue.has_residual = true;
  problem.epilogue.residual = {DType::kFloat32, 64, 1, {}, 8};
  EXPECT_FALSE(vectorises(problem)) << "address of the residual";
}

TEST(Params, AbsentOperandsAreNull) {
  const Problem problem = f16(64, 64, 64);
  const Selection selection = select(problem, h200());
  int memory = 0;
  Operands operands;
  operands.a = operands.b = operands.bias = operands.residual = &memory;
  operands.out = operands.preact = &memory;
  const GemmParams params = make_params(*selection.plan, problem, operands);
  EXPECT_EQ(params.a.pointer, &memory);
  EXPECT_EQ(params.bias.pointer, nullptr) << "the epilogue has no bias";
  EXPECT_EQ(params.residual.pointer, nullptr);
  EXPECT_EQ(params.preact.pointer, nullptr);
}

// --- force_kernel
// ----------------------------------------------------------------------------------

TEST(Force, NarrowsTheChoice) {
  const Problem problem = f16(512, 512, 512);
  EXPECT_EQ(chosen(problem, h200(), "simt"), "simt");
  EXPECT_EQ(chosen(problem, h200(), "mma_sync"), "mma_sync");
  for (const TileConfig& config : kernel("mma_sync").configs) {
    const std::string force = "mma_sync:" + std::string(config.name);
    const Selection selection = select(problem, h200(), force);
    ASSERT_TRUE(selection.plan.has_value()) << selection.error;
    EXPECT_EQ(selection.plan->config, &config);
    const Selection split = select(problem, h200(), force + ",split_k=4");
    ASSERT_TRUE(split.plan.has_value()) << split.error;
    EXPECT_EQ(split.plan->config, &config);
    EXPECT_EQ(split.plan->split_k, 4);
    EXPECT_EQ(to_string(*split.plan), force + ",split_k=4");
    const Selection whole = select(problem, h200(), force + ",split_k=1");
    ASSERT_TRUE(whole.plan.has_value()) << whole.error;
    EXPECT_EQ(whole.plan->split_k, 1);
    EXPECT_EQ(to_string(*whole.plan), force);
  }
}

TEST(Force, ReportsOnlyWhatWasAsked) {
  std::vector<Candidate> report;
  select(f16(512, 512, 512), h200(), "simt", &report);
  EXPECT_FALSE(report.empty());
  for (const Candidate& candidate : report) EXPECT_EQ(candidate.plan.kernel->name, "simt");
}

TEST(Force, SaysWhyAKernelCannotRun) {
  const std::string on_turing = refusal(f16(512, 512, 512), t4(), "mma_sync");
  EXPECT_CONTAINS(on_turing, "mma_sync cannot run 512x512x512");
  EXPECT_CONTAINS(on_turing, "8.0");
  EXPECT_CONTAINS(refusal(f32(512, 512, 512), h200(), "mma_sync"), "mma_sync cannot run");
  const Problem tf32 = linear_problem(512, 512, 512, DType::kFloat32, Precision::kTf32);
  EXPECT_CONTAINS(refusal(tf32, h200(), "simt"), "tf32");
}

TEST(Force, NamesWhatExistsWhenANameIsUnknown) {
  const std::string kernels = refusal(f16(512, 512, 512), h200(), "wgmmma");
  EXPECT_CONTAINS(kernels, "\"wgmmma\"");
  EXPECT_CONTAINS(kernels, "mma_sync");
  EXPECT_CONTAINS(kernels, "simt");
  const std::string configs = refusal(f16(512, 512, 512), h200(), "mma_sync:1x1");
  EXPECT_CONTAINS(configs, "\"1x1\"");
  for (const TileConfig& config : kernel("mma_sync").configs) EXPECT_CONTAINS(configs, config.name);
}

TEST(Force, RefusesWhatItCannotParse) {
  const std::string config(kernel("mma_sync").configs.front().name);
  for (const std::string& force :
       {std::string("mma_sync:"), std::string(":128x128"), std::string("mma_sync,"),
        "mma_sync:" + config + ",", "mma_sync:" + config + ",split_k",
        "mma_sync:" + config + ",split_k=", "mma_sync:" + config + ",split_k=0",
        "mma_sync:" + config + ",split_k=-1", "mma_sync:" + config + ",split_k=two",
        "mma_sync:" + config + ",split_k=2x", "mma_sync:" + config + ",split_k=99999999999",
        "mma_sync:" + config + ",stages=3", std::string(",split_k=2")}) {
    const std::string error = refusal(f16(512, 512, 512), h200(), force);
    EXPECT_CONTAINS(error, "\"" + force + "\"");
    EXPECT_CONTAINS(error, "form");
  }
}

}  // namespace
}  // namespace tgemm
