// What a kernel is in each tier; the processor chooses the tier, set_tier a lower one.
//
// A family's header declares its kernels with NPU_KERNEL; its body, compiled once a tier, defines them in the tier's namespace
// (NPU_TIER). There is no list of kernels anywhere: one that a tier above avx2 has no file for is that of the tier below, one that
// scalar or avx2 lacks does not link.
#pragma once

#include <cstdint>

#include "dispatch/parallel.h"

namespace npu_ops {

enum class Dtype : int { bf16, fp16, fp32 };
enum class Tier : int { scalar, avx2, avx512, avx512_bf16, amx, count };

Tier current_tier();
const char* tier_name(Tier tier);
// Highest tier that this build holds and this machine runs by itself.
Tier highest_tier();
// Whether set_tier takes it: the machine runs it, or this build emulates what the machine lacks (NPU_EMULATE_TIERS, for tests).
bool can_run(Tier tier);
// Chooses a tier by name; false when the name is unknown or it cannot run here.
bool set_tier(const char* name);
// The tier of that name, Tier::count if there is none.
Tier tier_of(const char* name);

template <class Function>
struct Tiers {
  Function* of[static_cast<int>(Tier::count)];  // null: as in the tier below

  // The one of the chosen tier.
  Function& chosen() const {
    int i = static_cast<int>(current_tier());
    while (!of[i]) --i;
    return *of[i];
  }
};

#if defined(NPU_X86_TIERS)
#define NPU_IN_EACH_TIER(name, result, ...)                                            \
  namespace scalar { result name(__VA_ARGS__); }                                       \
  namespace avx2 { result name(__VA_ARGS__); }                                         \
  namespace avx512 { __attribute__((weak)) result name(__VA_ARGS__); }                 \
  namespace avx512_bf16 { __attribute__((weak)) result name(__VA_ARGS__); }            \
  namespace amx { __attribute__((weak)) result name(__VA_ARGS__); }                    \
  inline constexpr Tiers<result(__VA_ARGS__)> name##_tiers{                            \
      {&scalar::name, &avx2::name, &avx512::name, &avx512_bf16::name, &amx::name}};
#else
#define NPU_IN_EACH_TIER(name, result, ...)      \
  namespace scalar { result name(__VA_ARGS__); } \
  inline constexpr Tiers<result(__VA_ARGS__)> name##_tiers{{&scalar::name}};
#endif

// Declares void name(const Params&, const Parallel&) in each tier, and name_tiers, which launch<name_tiers> runs.
#define NPU_KERNEL(name, Params) NPU_IN_EACH_TIER(name, void, const Params&, const Parallel&)

}  // namespace npu_ops
