// The tuning table: what counts as the same problem, what it changes in the choice, and what it
// refuses.
#include "gemm/tuning.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "gemm/plan.hpp"
#include "h200.hpp"

namespace tgemm {
namespace {

// As nn.Linear: both operands K-major.
Problem linear_problem(int64_t m, int64_t n, int64_t k, DType dtype = DType::kBFloat16) {
  Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {dtype, k, 1};
  problem.b = {dtype, 1, k};
  problem.out = {dtype, n, 1};
  return problem;
}

Problem gated_problem() {
  Problem problem = linear_problem(2048, 4096, 1024);
  problem.gated = true;
  problem.up = problem.b;
  problem.epilogue.activation = Activation::kSilu;
  return problem;
}

std::string line(std::string_view way, const Problem& problem) {
  return std::string(way) + "\t" + problem_key(problem) + "\n";
}

std::string chosen(const Problem& problem, const Device& device = h200()) {
  const Choice choice = choose(problem, device);
  return choice.selection.plan ? to_string(*choice.selection.plan) : choice.selection.error;
}

class Tuning : public ::testing::Test {
 protected:
  void TearDown() override { clear_tuning(); }

  static void add(const std::string& table) {
    const Device card = h200();
    EXPECT_EQ(add_tuning(card.name, card.sm_count, table), "");
  }
};

TEST(ProblemKey, TellsApartWhateverDiffers) {
  const std::vector<std::function<void(Problem&)>> changes = {
      [](Problem&) {},
      [](Problem& p) { ++p.m; },
      [](Problem& p) { ++p.n; },
      [](Problem& p) { ++p.k; },
      [](Problem& p) { p.batch_dims = 1, p.batch_size[0] = 3; },
      [](Problem& p) { p.batch_dims = 1, p.batch_size[0] = 3, p.a.batch_stride[0] = 8; },
      [](Problem& p) { p.batch_dims = 1, p.batch_size[0] = 3, p.out.batch_stride[0] = 8; },
      [](Problem& p) { p.a.row_stride += 8; },
      [](Problem& p) { p.a.col_stride = 2; },
      [](Problem& p) { p.a.address_alignment = 8; },
      [](Problem& p) { p.b.col_stride += 8; },
      [](Problem& p) { p.b.address_alignment = 8; },
      [](Problem& p) { p.out.row_stride += 8; },
      [](Problem& p) { p.out.dtype = DType::kFloat32; },
      [](Problem& p) { p.a.dtype = p.b.dtype = DType::kFloat16; },
      [](Problem& p) { p.a.dtype = p.b.dtype = DType::kFloat32; },
      [](Problem& p) {
        p.a.dtype = p.b.dtype = DType::kFloat32;
        p.precision = Precision::kTf32;
      },
      [](Problem& p) { p.epilogue.activation = Activation::kRelu; },
      [](Problem& p) { p.epilogue.has_bias = true; },
      [](Problem& p) { p.epilogue.has_bias = true, p.epilogue.bias.col_stride = 1; },
      [](Problem& p) { p.epilogue.has_bias = true, p.epilogue.bias.dtype = DType::kFloat16; },
      [](Problem& p) { p.epilogue.has_residual = true; },
      [](Problem& p) { p.epilogue.has_residual = true, p.epilogue.beta = 0.5f; },
      [](Problem& p) { p.epilogue.has_residual = p.epilogue.multiplies = true; },
      [](Problem& p) { p.epilogue.has_preact = true; },
      [](Problem& p) { p.epilogue.alpha = 0.1f; },
      [](Problem& p) { p.epilogue.alpha = 0.2f; },
      [](Problem& p) { p.gated = true; },
      [](Problem& p) { p.gated = true, p.up.col_stride = 7; },
      [](Problem& p) { p.gated = p.has_up_bias = true; },
      [](Problem& p) { p.static_weight = true; },
  };
  std::set<std::string> keys;
  for (const auto& change : changes) {
    Problem problem = linear_problem(64, 512, 256);
    change(problem);
    const std::string key = problem_key(problem);
    EXPECT_TRUE(keys.insert(key).second) << key;
    EXPECT_EQ(key.find_first_of("\t\n"), std::string::npos);
    EXPECT_EQ(problem_key(problem), key);
  }
}

TEST_F(Tuning, ChoosesWhatWasMeasured) {
  const Problem problem = linear_problem(2048, 4096, 4096);
  const std::string predicted = chosen(problem);
  EXPECT_FALSE(choose(problem, h200()).tuned);
  ASSERT_NE(predicted, "mma_sync:128x128");

  const uint64_t before = tuning_version();
  add(line("mma_sync:128x128", problem));
  EXPECT_NE(tuning_version(), before);
  EXPECT_EQ(chosen(problem), "mma_sync:128x128");
  EXPECT_TRUE(choose(problem, h200()).tuned);
  // All that could have been chosen is still reported.
  std::vector<Candidate> report, untuned;
  choose(problem, h200(), &report);
  select(problem, h200(), {}, &untuned);
  EXPECT_EQ(report.size(), untuned.size());

  add(line("gemv", problem));  // which is not chosen by itself for so many rows
  report.clear();
  choose(problem, h200(), &report);
  EXPECT_EQ(report.size(), untuned.size() + 1);
  EXPECT_EQ(to_string(report.back().plan), chosen(problem));

  // Other problems and other cards go by prediction, with the same name too.
  const Problem other = linear_problem(2048, 4096, 4104);
  EXPECT_FALSE(choose(other, h200()).tuned);
  Device cut = h200();
  cut.sm_count = 78;
  EXPECT_FALSE(choose(problem, cut).tuned);
  Device renamed = h200();
  renamed.name = "H100";
  EXPECT_EQ(chosen(problem, renamed), predicted);

  // A later line holds; those for other problems stay.
  add(line("simt:16x128_staged", problem));
  EXPECT_EQ(chosen(problem), "simt:16x128_staged");
  add(line("simt:16x128_staged", other));
  EXPECT_EQ(chosen(problem), "simt:16x128_staged");
  clear_tuning();
  EXPECT_EQ(chosen(problem), predicted);
}

TEST_F(Tuning, RefusesATableAsAWhole) {
  const Problem problem = linear_problem(2048, 4096, 4096);
  const std::string predicted = chosen(problem);
  const std::string good = line("simt:128x128", problem);
  const Device card = h200();
  for (const std::string& bad : {line("cutlass", problem), line("simt:1x1", problem),
                                 line("simt:128x128,split_k=0", problem), line("", problem),
                                 std::string("simt:128x128\n"), std::string("\n")}) {
    EXPECT_NE(add_tuning(card.name, card.sm_count, good + bad), "") << bad;
    EXPECT_EQ(chosen(problem), predicted) << bad;
  }
  EXPECT_EQ(add_tuning(card.name, card.sm_count, line("cutlass", problem))
                .find("there is no kernel named \"cutlass\"; the kernels are skinny, sm90"),
            0);
  EXPECT_EQ(add_tuning(card.name, card.sm_count, good + line("tiled", problem)),
            "tiled runs only where force_kernel names it: a tuning table cannot choose it");
  EXPECT_EQ(chosen(problem), predicted);
}

TEST_F(Tuning, PassesOverWhatCannotRun) {
  const Problem problem = linear_problem(2048, 4096, 4096, DType::kFloat32);
  const std::string predicted = chosen(problem);
  add(line("sm90:128x128", problem));  // multiplies 16 bits
  EXPECT_EQ(chosen(problem), predicted);
  EXPECT_FALSE(choose(problem, h200()).tuned);
  add(line(kAtenWay, problem));  // FP32 is not torch's either
  EXPECT_FALSE(choose(problem, h200()).aten);
  add(line(kTwoGemmsWay, problem));  // nor is it two
  EXPECT_EQ(chosen(problem), predicted);
}

TEST_F(Tuning, LeavesProductsToAten) {
  const Problem problem = linear_problem(2048, 4096, 4096);
  const std::string predicted = chosen(problem);
  add(line(kAtenWay, problem));
  const Choice choice = choose(problem, h200());
  EXPECT_TRUE(choice.tuned);
  EXPECT_TRUE(choice.aten);
  EXPECT_EQ(to_string(*choice.selection.plan), predicted);  // for whom ATen is no way out

  Problem bias = problem;
  bias.epilogue.has_bias = true;
  bias.epilogue.bias = {DType::kBFloat16, 0, 1};
  EXPECT_TRUE(aten_computes(bias));
  bias.epilogue.bias.dtype = DType::kFloat32;
  EXPECT_FALSE(aten_computes(bias));
  Problem activated = problem;
  activated.epilogue.activation = Activation::kRelu;
  EXPECT_FALSE(aten_computes(activated));
  Problem wide = problem;
  wide.out.dtype = DType::kFloat32;
  EXPECT_FALSE(aten_computes(wide));
}

TEST_F(Tuning, OfAGatedProblem) {
  const Problem problem = gated_problem();
  ASSERT_TRUE(choose(problem, h200()).selection.plan);
  add(line(kTwoGemmsWay, problem));
  const Choice two = choose(problem, h200());
  EXPECT_TRUE(two.tuned);
  EXPECT_FALSE(two.selection.plan);
  add(line("sm90:128x128_pingpong", problem));
  EXPECT_EQ(chosen(problem), "sm90:128x128_pingpong");
}

}  // namespace
}  // namespace tgemm
