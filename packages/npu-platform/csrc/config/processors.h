// The processors of the machine that this process may use, and the memory that each is beside.
#pragma once

#include <string>
#include <vector>

namespace npu {

// Their numbers, ascending; never empty.
std::vector<int> processors_allowed();

// "0-3,8,10-11", as Linux writes sets of processors; what is no number is left out.
std::vector<int> processors_in(const std::string& list);

// Those of `allowed`, a list for each memory node that has any: one list on a machine that has one memory, or does not tell.
std::vector<std::vector<int>> processors_by_node(const std::vector<int>& allowed, const std::string& nodes = "/sys/devices/system/node");

// From now on the calling thread, and what it starts, runs on these alone. False where the system refuses.
bool stay_on(const std::vector<int>& processors);

}  // namespace npu
