// What a kernel is in each tier; the processor chooses the tier, set_tier a lower one.
//
// A family's header declares its kernels with NPU_KERNEL; its body, compiled once a tier, defines them in the tier's namespace
// (NPU_TIER). There is no list of kernels anywhere: a kernel that a tier lacks does not link.
#pragma once

#include <cstdint>

#include "dispatch/parallel.h"

namespace npu_ops {

enum class Dtype : int { bf16, fp16, fp32 };
enum class Tier : int { scalar, avx2, avx512, count };

Tier current_tier();
const char* tier_name(Tier tier);
// Highest tier that this build holds and this machine runs.
Tier highest_tier();
// Chooses a tier by name; false when the name is unknown or the machine cannot run it.
bool set_tier(const char* name);

template <class Function>
struct Tiers {
  Function* of[static_cast<int>(Tier::count)];

  // The one of the chosen tier.
  Function& chosen() const { return *of[static_cast<int>(current_tier())]; }
};

#if defined(NPU_X86_TIERS)
#define NPU_IN_EACH_TIER(name, result, ...)                \
  namespace scalar { result name(__VA_ARGS__); }           \
  namespace avx2 { result name(__VA_ARGS__); }             \
  namespace avx512 { result name(__VA_ARGS__); }           \
  inline constexpr Tiers<result(__VA_ARGS__)> name##_tiers{{&scalar::name, &avx2::name, &avx512::name}};
#else
#define NPU_IN_EACH_TIER(name, result, ...)      \
  namespace scalar { result name(__VA_ARGS__); } \
  inline constexpr Tiers<result(__VA_ARGS__)> name##_tiers{{&scalar::name}};
#endif

// Declares void name(const Params&, const Parallel&) in each tier, and name_tiers, which launch<name_tiers> runs.
#define NPU_KERNEL(name, Params) NPU_IN_EACH_TIER(name, void, const Params&, const Parallel&)

}  // namespace npu_ops
