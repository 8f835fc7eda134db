#include "dispatch/kernel_table.h"

#include <atomic>
#include <cstring>

#include "dispatch/cpu_features.h"

#define NPU_FAMILIES(X, tier) X(layernorm, tier) X(rotary, tier) X(activation, tier) X(linear, tier) X(attention, tier) X(cache, tier) X(embedding, tier) X(sampling, tier)

namespace npu_ops {

#define NPU_DECLARE(family, tier) void add_##family##_##tier(KernelTable& table);
#define NPU_ADD(family, tier) add_##family##_##tier(table);
NPU_FAMILIES(NPU_DECLARE, scalar)
#if defined(NPU_X86_TIERS)
NPU_FAMILIES(NPU_DECLARE, avx2)
NPU_FAMILIES(NPU_DECLARE, avx512)
#endif

namespace {

struct Tables {
  KernelTable of[static_cast<int>(Tier::count)];
  Tier highest = Tier::scalar;

  Tables() {
    {
      KernelTable& table = of[static_cast<int>(Tier::scalar)];
      NPU_FAMILIES(NPU_ADD, scalar)
    }
#if defined(NPU_X86_TIERS)
    {
      KernelTable& table = of[static_cast<int>(Tier::avx2)];
      NPU_FAMILIES(NPU_ADD, avx2)
    }
    {
      KernelTable& table = of[static_cast<int>(Tier::avx512)];
      NPU_FAMILIES(NPU_ADD, avx512)
    }
#endif
    highest = detect_tier();
  }
};

const Tables& tables() {
  static const Tables t;
  return t;
}

constexpr const char* kNames[] = {"scalar", "avx2", "avx512"};

std::atomic<Tier>& chosen() {
  static std::atomic<Tier> tier{tables().highest};
  return tier;
}

}  // namespace

const KernelTable& kernels() { return tables().of[static_cast<int>(chosen().load(std::memory_order_relaxed))]; }
Tier current_tier() { return chosen().load(); }
Tier highest_tier() { return tables().highest; }
const char* tier_name(Tier tier) { return kNames[static_cast<int>(tier)]; }

bool set_tier(const char* name) {
  for (int i = 0; i <= static_cast<int>(tables().highest); ++i)
    if (!std::strcmp(name, kNames[i])) {
      chosen() = static_cast<Tier>(i);
      return true;
    }
  return false;
}

}  // namespace npu_ops
