// Prints docs/support.md's tables: which kernels run what on which cards, as their rows in the
// kernel table say. tests/support_matrix.py puts them into the page.
#include <algorithm>
#include <array>
#include <iostream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gemm/plan.hpp"

namespace tgemm {
namespace {

struct Column {
  const char* title;
  Device device;
};

// What selection asks of a card, from the CUDA programming guide's table of compute capabilities;
// the remaining figures only weigh times, and do not matter here.
Device card(int compute_capability, int block_kib, int sm_kib) {
  return {"", compute_capability, 100, block_kib << 10, sm_kib << 10, 40 << 20, 1.5, 1e6};
}

const std::vector<Column>& columns() {
  static const std::vector<Column> all = {
      {"7.5", card(75, 64, 64)},   {"8.0", card(80, 163, 164)},   {"8.6, 8.9", card(86, 99, 100)},
      {"9.0", card(90, 227, 228)}, {"10.0", card(100, 227, 228)}, {"12.0", card(120, 99, 100)},
  };
  return all;
}

struct Mode {
  const char* title;
  DType dtype;
  Precision precision;
};

constexpr Mode kModes[] = {
    {"FP16", DType::kFloat16, Precision::kIeee},
    {"BF16", DType::kBFloat16, Precision::kIeee},
    {"FP32, `ieee`", DType::kFloat32, Precision::kIeee},
    {"FP32, `tf32`", DType::kFloat32, Precision::kTf32},
    {"FP32, `3xtf32`", DType::kFloat32, Precision::k3xTf32},
    {"FP32, `bf16`", DType::kFloat32, Precision::kBf16},
    {"FP32, `fp16`", DType::kFloat32, Precision::kFp16},
};

enum class Alignment { kWhole, kOdd };

// x @ weight.T with sizes and strides that TMA and 16-byte copies can read, or not.
Problem problem_of(const Mode& mode, const std::string& layout, Alignment alignment) {
  Problem problem;
  problem.m = 16;
  problem.n = alignment == Alignment::kWhole ? 512 : 511;
  problem.k = alignment == Alignment::kWhole ? 512 : 509;
  const int bytes = alignment == Alignment::kWhole ? 16 : bytes_per_element(mode.dtype);
  const auto matrix = [&](int64_t rows, int64_t cols, bool row_major) {
    return row_major ? Matrix{mode.dtype, cols, 1, {}, bytes}
                     : Matrix{mode.dtype, 1, rows, {}, bytes};
  };
  problem.a = matrix(problem.m, problem.k, layout[0] == 'n');
  problem.b = matrix(problem.k, problem.n, layout[1] == 'n');
  problem.out = matrix(problem.m, problem.n, true);
  problem.precision = mode.precision;
  return problem;
}

bool runs(const KernelEntry& entry, const Problem& problem, const Device& device) {
  return select(problem, device, entry.name).plan.has_value();
}

// The kernels that selection has to choose from.
std::string kernels(const Problem& problem, const Device& device) {
  std::string names;
  for (const KernelEntry& entry : kernel_table()) {
    if (!entry.automatic || !runs(entry, problem, device)) continue;
    if (!names.empty()) names += ", ";
    names.append("`").append(entry.name).append("`");
  }
  return names.empty() ? "-" : names;
}

// One line for each mode, and for the layouts that differ from each other.
void table(Alignment alignment) {
  std::cout << "| operands | layouts |";
  for (const Column& column : columns()) std::cout << ' ' << column.title << " |";
  std::cout << "\n|---|---|";
  for (size_t i = 0; i < columns().size(); ++i) std::cout << "---|";
  std::cout << '\n';
  for (const Mode& mode : kModes) {
    std::vector<std::pair<std::string, std::string>>
        lines;  // cells, and the layouts that have them
    for (const char* layout : {"nn", "nt", "tn", "tt"}) {
      std::string cells;
      for (const Column& column : columns()) {
        cells.append(" ").append(kernels(problem_of(mode, layout, alignment), column.device));
        cells += " |";
      }
      const auto same = std::find_if(lines.begin(), lines.end(),
                                     [&](const auto& line) { return line.first == cells; });
      if (same == lines.end()) {
        lines.emplace_back(cells, layout);
      } else {
        same->second += std::string(", ") + layout;
      }
    }
    for (const auto& [cells, layouts] : lines) {
      std::cout << "| " << mode.title << " | " << (lines.size() == 1 ? "all" : layouts) << " |"
                << cells << '\n';
    }
  }
}

// On which cards a kernel that is never chosen runs operands in all layouts.
std::string cards(const KernelEntry& entry, const Mode& mode) {
  std::string titles;
  size_t count = 0;
  for (const Column& column : columns()) {
    const bool all = std::ranges::all_of(std::array{"nn", "nt", "tn", "tt"}, [&](auto layout) {
      return runs(entry, problem_of(mode, layout, Alignment::kWhole), column.device);
    });
    if (!all) continue;
    ++count;
    if (!titles.empty()) titles += ", ";
    titles += column.title;
  }
  return count == columns().size() ? "all" : count == 0 ? "-" : titles;
}

void ladder() {
  std::cout << "| kernel |";
  for (const Mode& mode : kModes) std::cout << ' ' << mode.title << " |";
  std::cout << "\n|---|";
  for (size_t i = 0; i < std::size(kModes); ++i) std::cout << "---|";
  std::cout << '\n';
  for (const KernelEntry& entry : kernel_table()) {
    if (entry.automatic) continue;
    std::cout << "| `" << entry.name << "` |";
    for (const Mode& mode : kModes) std::cout << ' ' << cards(entry, mode) << " |";
    std::cout << '\n';
  }
}

void kernel_list() {
  std::cout << "| kernel | what | chosen | splits K | two weights |\n|---|---|---|---|---|\n";
  for (const KernelEntry& entry : kernel_table()) {
    const bool few_rows = entry.automatic_rows < std::numeric_limits<int64_t>::max();
    const std::string chosen =
        !entry.automatic        ? "by name alone"
        : few_rows              ? "up to " + std::to_string(entry.automatic_rows) + " rows"
        : entry.automatic_k > 0 ? "from K = " + std::to_string(entry.automatic_k) + " on"
                                : "yes";
    std::cout << "| `" << entry.name << "` | " << entry.description << " | " << chosen << " | "
              << (entry.splits_k ? "yes" : "no") << " | " << (entry.gated ? "yes" : "no") << " |\n";
  }
}

}  // namespace
}  // namespace tgemm

int main() {
  std::cout << "## Kernels\n\n";
  tgemm::kernel_list();
  std::cout << "\n## Aligned operands\n\n";
  tgemm::table(tgemm::Alignment::kWhole);
  std::cout << "\n## Odd sizes, strides or addresses\n\n";
  tgemm::table(tgemm::Alignment::kOdd);
  std::cout << "\n## The ladder, by name alone\n\n";
  tgemm::ladder();
}
