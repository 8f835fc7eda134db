// What a kernel is in each tier; the processor chooses the tier, set_tier a lower one.
//
// A family's header declares its kernels with NPU_KERNEL; its body, compiled once a tier, defines them in the tier's namespace
// (NPU_TIER). There is no list of kernels anywhere: a kernel takes the last tier that has a body of it, of those whose instructions are
// there. One that lacks a body which every family must have does not link.
#pragma once

#include <cstdint>

#include "dispatch/padding.h"
#include "dispatch/parallel.h"
#if defined(NPU_X86_TIERS)
#include "dispatch/tiers_x86_64.h"
#elif defined(NPU_AARCH64_TIERS)
#include "dispatch/tiers_aarch64.h"
#else
#include "dispatch/tiers_any.h"
#endif

namespace npu_ops {

enum class Dtype : int { bf16, fp16, fp32 };

#define NPU_TIER_NAME(name, ...) name,
enum class Tier : int { NPU_TIERS(NPU_TIER_NAME) count };
#undef NPU_TIER_NAME
constexpr int kTiers = static_cast<int>(Tier::count);

struct TierFacts {
  const char* name;
  const char* instructions;  // with spaces between
  const char* timed_on;      // "": on no processor yet
};
const TierFacts& facts_of(Tier tier);

// The last of those in use.
Tier current_tier();
// The last that this build holds and this machine runs by itself.
Tier highest_tier();
// Whether set_tier takes it: the machine runs it, or this build emulates what the machine lacks (NPU_EMULATE_TIERS, for tests).
bool can_run(Tier tier);
// Whether the machine runs it by itself.
bool has_instructions_of(Tier tier);
// Chooses by name what a processor would run that has a tier's instructions alone; false when the name is unknown or it cannot run here.
bool set_tier(const char* name);
// The tier of that name, Tier::count if there is none.
Tier tier_of(const char* name);
// A bit for each tier in use: that of current_tier, and those which need no other instructions.
uint32_t tiers_in_use();
// Of these the ones for calls that multiply more than they read: without those whose products the tier below does faster on this processor
// (kernels/products), unless set_tier chose. The same as tiers_in_use in batch-invariant mode, which has one way for any number of rows.
uint32_t tiers_for_products();
// The last of them.
Tier product_tier();

// Whether a call with these parameters multiplies more than it reads. A kernel's header tells it of its own, where tiers differ in that.
template <class Params>
constexpr bool multiplies(const Params&) {
  return false;
}

template <class Function>
struct Tiers {
  Function* of[kTiers];  // null: no body

  Function& chosen(bool for_products = false) const {
    const uint32_t in_use = for_products ? tiers_for_products() : tiers_in_use();
    int i = kTiers - 1;
    while (!(in_use >> i & 1 && of[i])) --i;  // the first has every body, and needs nothing
    return *of[i];
  }
};

#define NPU_BODY_every
#define NPU_BODY_some __attribute__((weak))
#define NPU_DECLARE_IN(tier, whose, instructions, timed, name, result, ...) \
  namespace tier { NPU_BODY_##whose result name(__VA_ARGS__); }
#define NPU_ADDRESS_IN(tier, whose, instructions, timed, name) &tier::name,
#define NPU_IN_EACH_TIER(name, result, ...)                    \
  NPU_TIERS(NPU_DECLARE_IN, name, result, __VA_ARGS__)         \
  inline constexpr Tiers<result(__VA_ARGS__)> name##_tiers{{NPU_TIERS(NPU_ADDRESS_IN, name)}};

// Declares void name(const Params&, const Parallel&) in each tier, and name_tiers, which launch<name_tiers> runs.
#define NPU_KERNEL(name, Params) NPU_IN_EACH_TIER(name, void, const Params&, const Parallel&)

}  // namespace npu_ops
