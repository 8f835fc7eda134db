// Dot products of bf16 pairs beside two fused multiply-adds of floats, in registers. A Zen 4 is twice as fast by them; on a Xeon of the
// fifth generation they take nearly twice as long (docs/benchmarks).
#include <immintrin.h>

#include "kernels/products/products.h"

namespace npu_ops::NPU_TIER {
#if defined(NPU_EMULATED)

bool products_pay() { return true; }

#else
namespace {

constexpr int kSums = 16, kTurns = 256, kSamples = 8;

// Cycles of the counter. Volatile: neither order nor number of the instructions is the compiler's.
template <class Step>
uint64_t cycles(const Step& step) {
  __m512 sums[kSums] = {};
  const uint64_t began = __rdtsc();
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) step(sums[i]);
  }
  const uint64_t took = __rdtsc() - began;
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) asm volatile("" ::"v"(sums[i]));
  return took;
}

}  // namespace

bool products_pay() {
  const __m512 x = {};
  const auto dot = [&](__m512& sum) __attribute__((always_inline)) { asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(x)); };
  const auto multiply_adds = [&](__m512& sum) __attribute__((always_inline)) {
    asm volatile("vfmadd231ps %1, %1, %0\n\tvfmadd231ps %1, %1, %0" : "+v"(sum) : "v"(x));
  };
  uint64_t dots = ~uint64_t{0}, floats = dots;
  for (int sample = 0; sample < kSamples; ++sample) {
    const uint64_t d = cycles(dot), f = cycles(multiply_adds);
    dots = d < dots ? d : dots;
    floats = f < floats ? f : floats;
  }
  return dots <= floats + floats / 8;  // which bf16 must be widened for
}

#endif
}  // namespace npu_ops::NPU_TIER
