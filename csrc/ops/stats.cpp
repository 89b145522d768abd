#include "ops/stats.hpp"

#include <map>
#include <mutex>
#include <vector>

#include "ops/json.hpp"

namespace tgemm {
namespace {

struct LaunchCount {
  const KernelEntry* kernel;
  const TileConfig* config;
  int split_k;
  int64_t count;
};

struct Counters {
  std::mutex mutex;
  // A process uses few plans, so that a scan over pointers beats hashing a string on every launch.
  std::vector<LaunchCount> launches;
  std::map<std::string, int64_t> fallbacks;
};

Counters& counters() {
  static Counters instance;
  return instance;
}

}  // namespace

void count_launch(const Plan& plan) {
  Counters& all = counters();
  const std::lock_guard lock(all.mutex);
  for (LaunchCount& entry : all.launches) {
    if (entry.config == plan.config && entry.split_k == plan.split_k &&
        entry.kernel == plan.kernel) {
      ++entry.count;
      return;
    }
  }
  all.launches.push_back({plan.kernel, plan.config, plan.split_k, 1});
}

void count_fallback(const std::string& what) {
  Counters& all = counters();
  const std::lock_guard lock(all.mutex);
  ++all.fallbacks[what];
}

void reset_stats() {
  Counters& all = counters();
  const std::lock_guard lock(all.mutex);
  all.launches.clear();
  all.fallbacks.clear();
}

std::string stats_json() {
  Counters& all = counters();
  const std::lock_guard lock(all.mutex);
  Json kernels = Json::object();
  for (const LaunchCount& entry : all.launches) {
    const Plan plan{entry.kernel, entry.config, entry.split_k};
    kernels.member(to_string(plan), entry.count);
  }
  Json fallbacks = Json::object();
  for (const auto& [what, count] : all.fallbacks) fallbacks.member(what, count);
  return Json::object().member("kernels", kernels).member("fallbacks", fallbacks).str();
}

}  // namespace tgemm
