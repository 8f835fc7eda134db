#include "dispatch/cpu_features.h"

#if defined(NPU_X86_TIERS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace npu_ops {

#if defined(NPU_X86_TIERS)
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned sub) {
  Registers r;
  __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool bit(unsigned value, int i) { return (value >> i) & 1; }

// The operating system saves the tiles' registers, and lets this process use them: without its permission, which the process and its
// children keep, the first instruction on a tile is an illegal one.
bool may_use_tiles() {
  if (!bit(cpuid(1, 0).c, 27)) return false;  // OSXSAVE: xgetbv exists
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileConfig = 17, kTileData = 18;  // components of XCR0
  constexpr long kRequestPermission = 0x1023;           // ARCH_REQ_XCOMP_PERM, Linux 5.16
  return bit(low, kTileConfig) && bit(low, kTileData) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

Tier detect_tier() {
  // __builtin_cpu_supports also asks whether the operating system saves the registers
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && bit(cpuid(1, 0).c, 29))) return Tier::scalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!avx512) return Tier::avx2;
  if (!bit(cpuid(7, 1).a, 5)) return Tier::avx512;
  const unsigned amx = cpuid(7, 0).d;
  const bool tiles = bit(amx, 24) && bit(amx, 22) && bit(amx, 25);  // AMX-TILE, AMX-BF16, AMX-INT8
  return tiles && may_use_tiles() ? Tier::amx : Tier::avx512_bf16;
}
#else
Tier detect_tier() { return Tier::scalar; }
#endif

}  // namespace npu_ops
