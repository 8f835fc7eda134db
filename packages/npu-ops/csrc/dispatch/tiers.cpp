#include "dispatch/tiers.h"

#include <atomic>
#include <cstring>

#include "dispatch/batch_invariance.h"
#include "dispatch/features.h"
#include "kernels/products/products.h"

namespace npu_ops {
namespace {

#define NPU_TIER_FACTS(name, whose, instructions, timed, ...) {#name, instructions, timed},
constexpr TierFacts kFacts[] = {NPU_TIERS(NPU_TIER_FACTS)};
#define NPU_TIER_NEEDS(name, whose, instructions, ...) features_named(instructions),
constexpr Features kNeeds[] = {NPU_TIERS(NPU_TIER_NEEDS)};

uint32_t with(Features there) {
  uint32_t tiers = 0;
  for (int i = 0; i < kTiers; ++i) tiers |= uint32_t{(kNeeds[i] & ~there) == 0} << i;
  return tiers;
}

// What kernels may use: what the machine has, and where a build emulates instructions, all that tiers need on top of what it is compiled for.
Features usable() {
#if defined(NPU_EMULATED)
  Features all = features();
  if ((kNeeds[static_cast<int>(Tier::avx2)] & ~all) == 0) {
    for (const Features needs : kNeeds) all |= needs;
  }
  return all;
#else
  return features();
#endif
}

std::atomic<uint32_t>& in_use() {
  static std::atomic<uint32_t> tiers{with(features())};
  return tiers;
}

uint32_t fast_at_products(uint32_t tiers) {
  for (int i = 0; i < kTiers; ++i) {
    const auto pays = products_pay_tiers.of[i];
    if (tiers >> i & 1 && pays && !pays()) tiers &= ~(uint32_t{1} << i);
  }
  return tiers;
}

std::atomic<uint32_t>& in_use_for_products() {
  static std::atomic<uint32_t> tiers{fast_at_products(with(features()))};
  return tiers;
}

Tier last_of(uint32_t tiers) {
  int i = kTiers - 1;
  while (!(tiers >> i & 1)) --i;
  return static_cast<Tier>(i);
}

}  // namespace

uint32_t tiers_in_use() { return in_use().load(std::memory_order_relaxed); }
uint32_t tiers_for_products() { return batch_invariant() ? tiers_in_use() : in_use_for_products().load(std::memory_order_relaxed); }
Tier current_tier() { return last_of(tiers_in_use()); }
Tier product_tier() { return last_of(tiers_for_products()); }
const TierFacts& facts_of(Tier tier) { return kFacts[static_cast<int>(tier)]; }
Tier highest_tier() { return last_of(with(features())); }
bool has_instructions_of(Tier tier) { return with(features()) >> static_cast<int>(tier) & 1; }
bool can_run(Tier tier) { return with(usable()) >> static_cast<int>(tier) & 1; }

Tier tier_of(const char* name) {
  int i = 0;
  while (i < kTiers && std::strcmp(name, kFacts[i].name)) ++i;
  return static_cast<Tier>(i);
}

bool set_tier(const char* name) {
  const Tier tier = tier_of(name);
  if (tier == Tier::count || !can_run(tier)) return false;
  in_use() = in_use_for_products() = with(kNeeds[static_cast<int>(tier)]);
  return true;
}

}  // namespace npu_ops
