#include "dispatch/cpu_features.h"

#if defined(NPU_X86_TIERS)
#include <cpuid.h>
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

}  // namespace

Tier detect_tier() {
  // __builtin_cpu_supports also asks whether the operating system saves the registers
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && bit(cpuid(1, 0).c, 29))) return Tier::scalar;
  const bool bf16 = bit(cpuid(7, 1).a, 5);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && bf16;
  return avx512 ? Tier::avx512 : Tier::avx2;
}
#else
Tier detect_tier() { return Tier::scalar; }
#endif

}  // namespace npu_ops
