// SPDX-License-Identifier: Apache-2.0
#include "resources.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace kvkeep::cuda::model {
namespace {

constexpr int kRegisters = 65536;  ///< of a block, on every chip since sm_50

/// The cells of a row of Markdown, without what is around them.
std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> found;
  for (std::size_t at = line.find('|'), end = 0; (end = line.find('|', at + 1)) != std::string::npos; at = end) {
    const std::string cell = line.substr(at + 1, end - at - 1);
    const std::size_t first = cell.find_first_not_of(" `"), last = cell.find_last_not_of(" `");
    found.push_back(first == std::string::npos ? "" : cell.substr(first, last + 1 - first));
  }
  return found;
}

int number(const std::string& cell) {
  int value = 0;
  std::from_chars(cell.data(), cell.data() + cell.size(), value);
  return value;  // 0 for "-": not compiled for that chip
}

std::map<std::string, Resources, std::less<>> read_table() {
  std::map<std::string, Resources, std::less<>> kernels;
  std::ifstream file(KVKEEP_KERNEL_RESOURCES);
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("<!-- kernel resources:")) inside = line.find("begin") != std::string::npos;
    const std::vector<std::string> row = inside ? cells(line) : std::vector<std::string>();
    if (row.size() < 5 || !row[0].ends_with(".cu")) continue;
    std::string name = row[1].substr(0, row[1].find('<'));
    name = name.substr(name.rfind(':') + 1);
    Resources& most = kernels[name.substr(0, name.rfind("_kernel"))];
    for (std::size_t c = 2; c + 2 < row.size(); c += 3) {
      most.registers = std::max(most.registers, number(row[c]));
      most.shared_bytes = std::max(most.shared_bytes, static_cast<std::size_t>(number(row[c + 2])));
    }
  }
  if (kernels.empty())
    throw std::runtime_error("cuda_model: no table of kernel resources in " KVKEEP_KERNEL_RESOURCES
                             "; bench/kernel_resources.py --write makes it");
  return kernels;
}

}  // namespace

const std::map<std::string, Resources, std::less<>>& kernel_resources() {
  static const auto table = read_table();
  return table;
}

const Resources* resources_of(std::string_view name) {
  for (;; name = name.substr(0, name.rfind('_'))) {
    if (const auto found = kernel_resources().find(name); found != kernel_resources().end()) return &found->second;
    if (name.rfind('_') == std::string_view::npos) return nullptr;
  }
}

bool has_room(std::string_view name, int threads, std::size_t dynamic_bytes, std::size_t most_shared) {
  const Resources* const of = resources_of(name);
  if (of == nullptr) return true;
  // A warp gets registers by the 256, and warps come by four.
  const int of_warp = (of->registers * 32 + 255) / 256 * 256, warps = (threads / 32 + 3) / 4 * 4;
  return of_warp * warps <= kRegisters && of->shared_bytes + dynamic_bytes <= most_shared;
}

}  // namespace kvkeep::cuda::model
