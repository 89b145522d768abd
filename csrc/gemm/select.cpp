#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>

#include "gemm/packing.hpp"
#include "gemm/plan.hpp"
#include "gemm/tuning.hpp"

namespace tgemm {
namespace {

// With less K per split (elements) there is next to no mainloop left.
constexpr int64_t kMinKPerSplit = 128;
constexpr int64_t kClusterWaves = 24;
constexpr int kSplitCandidates[] = {2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128};
// Partial sums beyond this no longer stay in L2 and cost more than they save (bytes).
constexpr double kMaxAutomaticWorkspace = 64e6;
// A copy of an operand that takes more memory is a surprise, whatever time it saves (bytes).
constexpr int64_t kMaxAutomaticPacking = int64_t{4} << 30;

struct Force {
  std::string_view kernel;
  std::string_view config;
  int split_k = 0;  // 0: free
  std::string error;
};

Force parse_force(std::string_view text) {
  Force force;
  const std::string_view original = text;
  const auto fail = [&] {
    force.error =
        "force_kernel \"" + std::string(original) +
        "\" is not of the form \"kernel\", \"kernel:config\" or \"kernel:config,split_k=N\"";
    return force;
  };
  if (const size_t comma = text.find(','); comma != std::string_view::npos) {
    constexpr std::string_view kKey = "split_k=";
    std::string_view option = text.substr(comma + 1);
    text = text.substr(0, comma);
    if (!option.starts_with(kKey)) return fail();
    option.remove_prefix(kKey.size());
    const auto [end, status] =
        std::from_chars(option.data(), option.data() + option.size(), force.split_k);
    if (status != std::errc() || end != option.data() + option.size() || force.split_k < 1 ||
        force.split_k > 1024) {
      return fail();
    }
  }
  if (const size_t colon = text.find(':'); colon != std::string_view::npos) {
    force.config = text.substr(colon + 1);
    text = text.substr(0, colon);
    if (force.config.empty()) return fail();
  }
  if (text.empty()) return fail();
  force.kernel = text;
  return force;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

size_t partial_sums_bytes(const Problem& problem, const TileConfig& config, int split_k) {
  if (split_k <= config.max_cluster_split) return 0;
  const size_t pitch = static_cast<size_t>(ceil_div(problem.n, 4) * 4);
  return sizeof(float) * split_k * problem.batch_count() * problem.m * pitch;
}

std::string names(std::span<const KernelEntry> table) {
  std::string text;
  for (const KernelEntry& entry : table) {
    if (!text.empty()) text += ", ";
    text += entry.name;
  }
  return text;
}

// Empty if the table has the row and the configuration that `force` names.
std::string unknown_name(const Force& force) {
  const auto table = kernel_table();
  const auto row = std::ranges::find(table, force.kernel, &KernelEntry::name);
  if (row == table.end()) {
    return "there is no kernel named \"" + std::string(force.kernel) + "\"; the kernels are " +
           names(table);
  }
  if (force.config.empty() ||
      std::ranges::find(row->configs, force.config, &TileConfig::name) != row->configs.end()) {
    return {};
  }
  std::string sentence = std::string(force.kernel) + " has no configuration \"" +
                         std::string(force.config) + "\"; it has";
  const char* separator = " ";
  for (const TileConfig& config : row->configs) {
    sentence += separator + std::string(config.name);
    separator = ", ";
  }
  return sentence;
}

// Why a row of the table cannot run the problem in any configuration, or null.
const char* row_rejects(const KernelEntry& entry, const Problem& problem, bool forced,
                        int64_t packed_bytes) {
  if (problem.gated && (!entry.gated || entry.packs)) return "it multiplies one weight";
  if (packed_bytes >= kMaxPackedBytes) return "its packed operands would not fit in any memory";
  if (!forced && problem.m > entry.automatic_rows) return "it is made for fewer rows";
  if (!forced && problem.k < entry.automatic_k) return "it is made for a larger K";
  if (!forced && packed_bytes > kMaxAutomaticPacking) {
    return "its packed operands would take more than 4 GiB";
  }
  return nullptr;
}

}  // namespace

std::string to_string(const Plan& plan) {
  std::string text(plan.kernel->name);
  text += ":";
  text += plan.config->name;
  if (plan.split_k > 1) text += ",split_k=" + std::to_string(plan.split_k);
  return text;
}

std::string untunable_plan(std::string_view text) {
  const Force force = parse_force(text);
  if (!force.error.empty()) return force.error;
  if (std::string error = unknown_name(force); !error.empty()) return error;
  if (std::ranges::find(kernel_table(), force.kernel, &KernelEntry::name)->automatic) return {};
  return std::string(force.kernel) +
         " runs only where force_kernel names it: a tuning table cannot choose it";
}

Selection select(const Problem& problem, const Device& device, std::string_view force_text,
                 std::vector<Candidate>* report) {
  Selection selection;
  Force force;
  if (!force_text.empty()) {
    force = parse_force(force_text);
    selection.error = force.error.empty() ? unknown_name(force) : force.error;
    if (!selection.error.empty()) return selection;
  }

  const char* last_reason = nullptr;  // why a forced or the last automatic candidate was dropped
  std::optional<Plan> best;

  for (const KernelEntry& entry : kernel_table()) {
    const bool forced = !force.kernel.empty();
    if (forced ? entry.name != force.kernel : !entry.automatic) continue;
    const Packing packing = entry.packs ? entry.packs(problem) : Packing{};
    const int64_t packed_bytes = packed_offsets(problem, packing).end;
    const Problem seen = packed(problem, packing);  // by the kernel
    const double packed_us = packing_us(problem, packing, device);
    const char* row_reason = row_rejects(entry, problem, forced, packed_bytes);
    for (const TileConfig& config : entry.configs) {
      if (!force.config.empty() && config.name != force.config) continue;
      const char* reason = row_reason ? row_reason : entry.rejects(seen, device, config);
      if (!reason && entry.packs && !packing.any()) reason = "it has no operand to pack";
      // The sums of two weights have to meet before anything is added to either.
      const int gated_split = entry.splits_gated ? config.max_cluster_split : 1;
      const int max_split = !entry.splits_k ? 1 : problem.gated ? gated_split : INT_MAX;
      if (!reason && force.split_k > max_split) {
        reason = max_split > 1 ? "it splits K of two weights within a cluster alone"
                               : "it cannot split K";
      }
      if (reason) {
        last_reason = reason;
        if (report) report->push_back({{&entry, &config, 1, 0, 0.0, {}}, reason});
        continue;
      }
      const auto consider = [&](int split_k) {
        const Plan plan{.kernel = &entry,
                        .config = &config,
                        .split_k = split_k,
                        .workspace_bytes = static_cast<size_t>(packed_bytes) +
                                           partial_sums_bytes(problem, config, split_k),
                        .predicted_us = packed_us + entry.cost_us(seen, device, config, split_k),
                        .packing = packing};
        if (report) report->push_back({plan, {}});
        if (!best || plan.predicted_us < best->predicted_us) best = plan;
      };
      if (force.split_k > 0) {
        consider(problem.k == 0 ? 1 : force.split_k);
        continue;
      }
      consider(1);
      // Splitting helps only while the tiles leave SMs idle; within a cluster it is cheap enough to
      // even out a few waves.
      const int64_t columns = problem.gated ? 2 * problem.n : problem.n;
      const int64_t tiles = ceil_div(problem.m, config.block_m) *
                            ceil_div(columns, config.block_n) * problem.batch_count();
      const int64_t slots = int64_t{device.sm_count} * config.ctas_per_sm;
      for (int split_k : kSplitCandidates) {
        const int64_t most = split_k <= config.max_cluster_split ? kClusterWaves * slots : slots;
        if (split_k > max_split || tiles * split_k > most || problem.k < split_k * kMinKPerSplit) {
          break;
        }
        if (static_cast<double>(partial_sums_bytes(problem, config, split_k)) >
            kMaxAutomaticWorkspace)
          break;
        consider(split_k);
      }
    }
  }

  if (best) {
    selection.plan = best;
    return selection;
  }
  if (!force.kernel.empty()) {
    selection.error =
        std::string(force_text) + " cannot run " + to_string(problem) + ": " + last_reason;
  } else {
    selection.error = "no kernel can run " + to_string(problem) + " on " + device.name + ": " +
                      (last_reason ? last_reason : "none is built");
  }
  return selection;
}

}  // namespace tgemm
