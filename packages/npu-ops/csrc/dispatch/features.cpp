#include "dispatch/features.h"

#if defined(NPU_X86_TIERS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(NPU_AARCH64_TIERS)
#include <sys/auxv.h>
#endif

namespace npu_ops {
namespace {

#if defined(NPU_X86_TIERS)
uint32_t cpuid(uint32_t leaf, uint32_t subleaf, Register in) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d);
  const uint32_t all[] = {a, b, c, d};
  return all[static_cast<int>(in)];
}

// What the operating system saves: bits of XCR0.
uint64_t saved() {
  if (!(cpuid(1, 0, Register::c) >> 27 & 1)) return 0;  // OSXSAVE: xgetbv exists
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// The operating system lets this process use tiles: without its permission, which the process and its children keep, the first
// instruction on a tile is an illegal one.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool is_there(const Feature& feature, uint64_t saves) {
  const uint64_t needs = static_cast<uint64_t>(feature.needs);
  if (!(cpuid(feature.leaf, feature.subleaf, feature.in) >> feature.bit & 1) || (saves & needs) != needs) return false;
  return feature.needs != Saved::tiles || may_use_tiles();
}
#elif defined(NPU_AARCH64_TIERS)
uint64_t saved() { return 0; }
bool is_there(const Feature& feature, uint64_t) { return getauxval(feature.word) >> feature.bit & 1; }
#else
uint64_t saved() { return 0; }
bool is_there(const Feature&, uint64_t) { return false; }
#endif

Features detect() {
  Features all = 0;
  const uint64_t saves = saved();
  int i = 0;
  for (const Feature& feature : kFeatures) all |= Features{is_there(feature, saves)} << i++;
  return all;
}

}  // namespace

Features features() {
  static const Features all = detect();
  return all;
}

}  // namespace npu_ops
