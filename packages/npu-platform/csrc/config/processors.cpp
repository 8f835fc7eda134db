#include "config/processors.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

namespace npu {
namespace {

constexpr size_t kMostWords = 1 << 14;
constexpr int kBits = 64;  // of a word

}  // namespace

// Linux refuses a mask smaller than its own, which has a bit for each processor that the machine may ever have: cpu_set_t ends at 1024.
std::vector<int> processors_allowed() {
  std::vector<int> allowed;
  for (std::vector<uint64_t> mask(16); mask.size() <= kMostWords; mask.resize(2 * mask.size())) {
    if (sched_getaffinity(0, mask.size() * sizeof mask[0], reinterpret_cast<cpu_set_t*>(mask.data())) == 0) {
      for (int i = 0; i < int(mask.size()) * kBits; ++i) {
        if (mask[size_t(i / kBits)] >> i % kBits & 1) allowed.push_back(i);
      }
      break;
    }
    if (errno != EINVAL) break;
  }
  for (int i = 0; allowed.empty() && i < std::max(1, int(sysconf(_SC_NPROCESSORS_ONLN))); ++i) allowed.push_back(i);
  return allowed;
}

std::vector<int> processors_in(const std::string& list) {
  std::vector<int> found;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    std::istringstream range(item);
    int first = 0, last = 0;
    char dash = 0;
    if (!(range >> first)) continue;
    if (!(range >> dash >> last)) last = first;
    for (int i = first; i <= last; ++i) found.push_back(i);
  }
  return found;
}

std::vector<std::vector<int>> processors_by_node(const std::vector<int>& allowed, const std::string& nodes) {
  std::map<int, std::vector<int>> by_node;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(nodes, none)) {
    const std::string name = entry.path().filename();
    if (name.rfind("node", 0) != 0 || name.find_first_not_of("0123456789", 4) != std::string::npos || name.size() == 4) continue;
    std::string list;
    std::getline(std::ifstream(entry.path() / "cpulist"), list);
    for (const int processor : processors_in(list)) {
      if (std::binary_search(allowed.begin(), allowed.end(), processor)) by_node[std::stoi(name.substr(4))].push_back(processor);
    }
  }
  std::vector<std::vector<int>> lists;
  for (auto& [node, processors] : by_node) lists.push_back(std::move(processors));
  if (lists.empty()) lists.push_back(allowed);
  return lists;
}

bool stay_on(const std::vector<int>& processors) {
  const int last = *std::max_element(processors.begin(), processors.end());
  std::vector<uint64_t> mask(size_t(last / kBits + 1));
  for (const int i : processors) mask[size_t(i / kBits)] |= uint64_t(1) << i % kBits;
  return sched_setaffinity(0, mask.size() * sizeof mask[0], reinterpret_cast<cpu_set_t*>(mask.data())) == 0;
}

}  // namespace npu
