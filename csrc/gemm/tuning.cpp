#include "gemm/tuning.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tgemm {
namespace {

struct Table {
  std::mutex mutex;
  std::unordered_map<std::string, std::string> ways;  // by card and key
  std::atomic<uint64_t> version{0};
};

Table& table() {
  static Table instance;
  return instance;
}

std::string card_key(std::string_view card, int sm_count, std::string_view key) {
  std::string text(card);
  text.append("\n").append(std::to_string(sm_count)).append("\n").append(key);
  return text;
}

std::string way_of(const Problem& problem, const Device& device) {
  Table& all = table();
  // Most processes load no file: spare them the key.
  if (all.version.load(std::memory_order_acquire) == 0) return {};
  const std::string key = card_key(device.name, device.sm_count, problem_key(problem));
  const std::lock_guard lock(all.mutex);
  const auto found = all.ways.find(key);
  return found == all.ways.end() ? std::string() : found->second;
}

void append_number(std::string& text, float value) {
  char digits[32];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

void append_matrix(std::string& text, const char* name, const Matrix& matrix, int batch_dims) {
  text.append("; ").append(name).append(" ").append(to_string(matrix.dtype)).append(" ");
  text.append(std::to_string(matrix.row_stride)).append(",");
  text.append(std::to_string(matrix.col_stride));
  for (int i = 0; i < batch_dims; ++i) {
    text.append(",").append(std::to_string(matrix.batch_stride[i]));
  }
  if (matrix.address_alignment != 16) {
    text.append(" @").append(std::to_string(matrix.address_alignment));
  }
}

}  // namespace

std::string problem_key(const Problem& problem) {
  const Epilogue& epilogue = problem.epilogue;
  std::string text = to_string(problem);
  const auto append = [&](const char* name, const Matrix& matrix) {
    append_matrix(text, name, matrix, problem.batch_dims);
  };
  append("a", problem.a);
  append("b", problem.b);
  if (problem.gated) append("up", problem.up);
  append("out", problem.out);
  if (epilogue.has_bias) append("bias", epilogue.bias);
  if (problem.has_up_bias) append("up bias", problem.up_bias);
  if (epilogue.has_residual) append("residual", epilogue.residual);
  if (epilogue.has_preact) append("pre-activation", epilogue.preact);
  if (epilogue.alpha != 1.0f) append_number(text += "; alpha ", epilogue.alpha);
  if (epilogue.has_residual && epilogue.beta != 1.0f)
    append_number(text += "; beta ", epilogue.beta);
  return text;
}

bool aten_computes(const Problem& problem) {
  const Epilogue& epilogue = problem.epilogue;
  const DType dtype = problem.a.dtype;
  return dtype != DType::kFloat32 && problem.out.dtype == dtype && !problem.gated &&
         epilogue.activation == Activation::kNone && !epilogue.has_residual &&
         !epilogue.has_preact && epilogue.alpha == 1.0f &&
         (!epilogue.has_bias || epilogue.bias.dtype == dtype);
}

std::string add_tuning(std::string_view card, int sm_count, std::string_view text) {
  std::vector<std::pair<std::string, std::string>> added;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const size_t tab = line.find('\t');
    if (tab == std::string_view::npos) return "a line of the tuning table has no problem";
    const std::string_view way = line.substr(0, tab);
    if (way != kAtenWay && way != kTwoGemmsWay) {
      std::string error = untunable_plan(way);
      if (!error.empty()) return error;
    }
    added.emplace_back(card_key(card, sm_count, line.substr(tab + 1)), way);
  }
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  for (auto& [key, way] : added) all.ways.insert_or_assign(std::move(key), std::move(way));
  all.version.fetch_add(1, std::memory_order_release);
  return {};
}

void clear_tuning() {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  all.ways.clear();
  all.version.fetch_add(1, std::memory_order_release);
}

uint64_t tuning_version() { return table().version.load(std::memory_order_acquire); }

Choice choose(const Problem& problem, const Device& device, std::vector<Candidate>* report) {
  const std::string way = way_of(problem, device);
  Choice choice{.selection = select(problem, device, {}, report)};
  if (way == kAtenWay) {
    choice.tuned = choice.aten = aten_computes(problem);
  } else if (way == kTwoGemmsWay) {
    choice.tuned = problem.gated;
    if (choice.tuned) choice.selection = {{}, "two GEMMs were measured to be faster"};
  } else if (!way.empty()) {
    Selection measured = select(problem, device, way);
    choice.tuned = measured.plan.has_value();
    if (choice.tuned) choice.selection = std::move(measured);
    // A way that is not chosen by itself, a kernel for fewer rows for one, is a candidate here.
    if (choice.tuned && report) {
      const Plan& plan = *choice.selection.plan;
      const auto same = [&](const Candidate& candidate) {
        return candidate.reason.empty() && to_string(candidate.plan) == to_string(plan);
      };
      if (std::ranges::none_of(*report, same)) report->push_back({plan, {}});
    }
  }
  return choice;
}

}  // namespace tgemm
