#include "dispatch/tiers.h"

#include <atomic>
#include <cstring>

#include "dispatch/cpu_features.h"

namespace npu_ops {
namespace {

constexpr const char* kNames[] = {"scalar", "avx2", "avx512"};

std::atomic<Tier>& chosen() {
  static std::atomic<Tier> tier{highest_tier()};
  return tier;
}

}  // namespace

Tier current_tier() { return chosen().load(std::memory_order_relaxed); }
const char* tier_name(Tier tier) { return kNames[static_cast<int>(tier)]; }

Tier highest_tier() {
  static const Tier tier = detect_tier();
  return tier;
}

bool set_tier(const char* name) {
  for (int i = 0; i <= static_cast<int>(highest_tier()); ++i)
    if (!std::strcmp(name, kNames[i])) {
      chosen() = static_cast<Tier>(i);
      return true;
    }
  return false;
}

}  // namespace npu_ops
