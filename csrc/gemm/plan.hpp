// How a Problem is computed: the kernel, its configuration and split-K, and how that choice was
// made.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/problem.hpp"

struct CUstream_st;

namespace tgemm {

// What selection needs to know of a GPU. Filled from cudaGetDeviceProperties, or by hand for a card
// that is not in this machine.
struct Device {
  std::string name;
  int compute_capability = 0;  // 90 for sm_90
  int sm_count = 0;
  int max_shared_memory_per_block = 0;  // opt-in limit, bytes
  int max_shared_memory_per_sm = 0;     // bytes
  int64_t l2_bytes = 0;
  double clock_ghz = 0.0;            // boost clock of the SMs
  double memory_bytes_per_us = 0.0;  // read bandwidth
  // Clusters of 1 to 8 CTAs, each with an SM to itself, that run at once, as a share of those that
  // all SMs would hold: the SMs of a part of the chip that are too few for a cluster idle. An
  // H200's, as cudaOccupancyMaxActiveClusters gives them.
  std::array<double, 8> cluster_shares = {1.0, 1.0, 0.886, 0.909, 0.833, 0.773, 0.795, 0.909};
};

// One way to run a kernel family: a CTA tile and how it is pipelined.
struct TileConfig {
  std::string_view name;  // "128x256"
  int block_m = 0;
  int block_n = 0;
  int block_k = 0;
  int threads = 0;
  int stages = 0;
  int shared_memory_bytes = 0;
  int ctas_per_sm = 1;  // resident CTAs that registers and shared memory allow
  double mac_per_cycle =
      0.0;  // multiply-adds per SM and cycle that the mainloop sustains (measured)
  int max_cluster_split = 1;  // up to here split-K adds up within a cluster, without a workspace
  int tiles_per_cta = 1;  // that a CTA computes at once: more where warps have tiles of their own
};

struct Plan;

// The operands that a kernel reads from a copy in the workspace, made just before it runs.
struct Packing {
  bool a = false;
  bool b = false;

  bool any() const { return a || b; }
  friend bool operator==(const Packing&, const Packing&) = default;
};

// What a kernel takes of an SM.
struct Resources {
  int registers = 0;  // per thread
  int threads = 0;
  int static_shared_bytes = 0;
  int dynamic_shared_bytes = 0;
  int local_bytes = 0;  // per thread: spills and stack
  int ctas_per_sm = 0;
  double occupancy = 0.0;  // resident warps as a share of those that an SM can hold
};

// Where a kernel goes: onto a stream, or, where `resources` is set, nowhere: what it would take is
// written there instead.
struct LaunchTarget {
  CUstream_st* stream = nullptr;
  Resources* resources = nullptr;
};

// One row of the kernel table. Everything selection, explain and launch need to know of a kernel.
struct KernelEntry {
  std::string_view name;
  std::string_view description;
  bool automatic = true;  // false: runs only when forced by name
  bool splits_k = false;
  std::span<const TileConfig> configs;
  // Null if this configuration can run the problem on the device, otherwise why not, as the end of
  // a sentence: "mma_sync cannot run this problem: <reason>".
  const char* (*rejects)(const Problem&, const Device&, const TileConfig&);
  // Kernel time without launch overhead, microseconds.
  double (*cost_us)(const Problem&, const Device&, const TileConfig&, int split_k);
  // Enqueues the kernel, or describes it. Returns an empty string, or what went wrong.
  std::string (*launch)(const Plan&, const Problem&, const Operands&, const LaunchTarget& target);
  // Multiplies gated products (Problem::gated); the others never see one.
  bool gated = false;
  // And adds up those whose K is split within a cluster.
  bool splits_gated = false;
  // Rows of the output beyond which it runs only when forced by name.
  int64_t automatic_rows = std::numeric_limits<int64_t>::max();
  // K below which it runs only when forced by name.
  int64_t automatic_k = 0;
  // What has to be packed before the kernel can run; null: nothing, ever. The functions above then
  // see the problem with packed operands.
  Packing (*packs)(const Problem&) = nullptr;
};

// All kernels, in the order in which they are listed and, at equal cost, preferred.
std::span<const KernelEntry> kernel_table();

struct Plan {
  const KernelEntry* kernel = nullptr;
  const TileConfig* config = nullptr;
  int split_k = 1;
  size_t workspace_bytes = 0;
  double predicted_us = 0.0;
  Packing packing;
};

std::string to_string(const Plan& plan);  // "mma_sync:128x256,split_k=2"

struct Candidate {
  Plan plan;           // kernel and config always set
  std::string reason;  // why it was rejected; empty if it was scored
};

struct Selection {
  std::optional<Plan> plan;
  std::string error;  // set when there is no plan: one sentence
};

// Chooses the cheapest plan for `problem` on `device`: enumerate the table, drop what cannot run,
// score the rest. `force` restricts the choice: "mma_sync", "mma_sync:128x128" or
// "mma_sync:128x128,split_k=4"; empty means any automatic kernel. `report`, if given, receives
// every candidate with its predicted time or the reason it was dropped.
Selection select(const Problem& problem, const Device& device, std::string_view force = {},
                 std::vector<Candidate>* report = nullptr);

// Runs `plan` on the current device. Returns an empty string, or what went wrong.
std::string launch(const Plan& plan, const Problem& problem, const Operands& operands,
                   CUstream_st* stream);

// What the plan's GEMM kernel takes of an SM of the current device; none if CUDA does not say.
std::optional<Resources> resources(const Plan& plan, const Problem& problem);

}  // namespace tgemm
