#include "dispatch/tiers.h"

#include <atomic>
#include <cstring>

#include "dispatch/cpu_features.h"

namespace npu_ops {
namespace {

constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

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

bool can_run(Tier tier) {
#if defined(NPU_EMULATED)
  const Tier most = highest_tier() < Tier::avx2 ? highest_tier() : Tier::amx;  // emulation is compiled for AVX2
#else
  const Tier most = highest_tier();
#endif
  return tier <= most;
}

Tier tier_of(const char* name) {
  int i = 0;
  while (i < static_cast<int>(Tier::count) && std::strcmp(name, kNames[i])) ++i;
  return static_cast<Tier>(i);
}

bool set_tier(const char* name) {
  const Tier tier = tier_of(name);
  if (tier == Tier::count || !can_run(tier)) return false;
  chosen() = tier;
  return true;
}

}  // namespace npu_ops
