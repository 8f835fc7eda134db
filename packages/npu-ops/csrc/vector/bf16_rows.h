// Products of rows of bf16 by packed rows on AVX2, in assembly: they need all 16 registers, and a sum that the compiler keeps in memory
// instead costs half the speed.
#pragma once

#if defined(__AVX2__) && !defined(NPU_AVX512)

#include "vector/vec.h"

namespace npu_ops {
namespace {

// Even elements are shifted to where a float has them; for the odd ones the even halves are cleared, by blending with the shifted ones.
#define NPU_BF16_CLEAR(row) "vpblendw $0xaa, (%[" row "],%[i]), %%ymm15, %%ymm15\n\t"
#define NPU_BF16_ROW(row, odd, a, b, c)               \
  "vmovdqu (%[" row "],%[i]), %%ymm15\n\t"            \
  "vpslld $16, %%ymm15, %%ymm15\n\t" odd             \
  "vfmadd231ps %%ymm12, %%ymm15, %%ymm" a "\n\t"      \
  "vfmadd231ps %%ymm13, %%ymm15, %%ymm" b "\n\t"      \
  "vfmadd231ps %%ymm14, %%ymm15, %%ymm" c "\n\t"
#define NPU_BF16_EVEN(row, a, b, c) NPU_BF16_ROW(row, "", a, b, c)
#define NPU_BF16_ODD(row, a, b, c) NPU_BF16_ROW(row, NPU_BF16_CLEAR(row), a, b, c)
#define NPU_BF16_STEP                        \
  "vmovups (%[x0],%[i],2), %%ymm12\n\t"      \
  "vmovups (%[x1],%[i],2), %%ymm13\n\t"      \
  "vmovups (%[x2],%[i],2), %%ymm14\n\t"      \
  NPU_BF16_EVEN("w0", "0", "1", "2")         \
  NPU_BF16_EVEN("w1", "3", "4", "5")         \
  NPU_BF16_EVEN("w2", "6", "7", "8")         \
  NPU_BF16_EVEN("w3", "9", "10", "11")       \
  "vmovups 32(%[x0],%[i],2), %%ymm12\n\t"    \
  "vmovups 32(%[x1],%[i],2), %%ymm13\n\t"    \
  "vmovups 32(%[x2],%[i],2), %%ymm14\n\t"    \
  NPU_BF16_ODD("w0", "0", "1", "2")          \
  NPU_BF16_ODD("w1", "3", "4", "5")          \
  NPU_BF16_ODD("w2", "6", "7", "8")          \
  NPU_BF16_ODD("w3", "9", "10", "11")
#define NPU_BF16_LOAD(n, at) "vmovups " at "(%[sums]), %%ymm" n "\n\t"
#define NPU_BF16_STORE(n, at) "vmovups %%ymm" n ", " at "(%[sums])\n\t"
#define NPU_BF16_ALL(DO)                                                                                             \
  DO("0", "0") DO("1", "32") DO("2", "64") DO("3", "96") DO("4", "128") DO("5", "160") DO("6", "192") DO("7", "224") \
  DO("8", "256") DO("9", "288") DO("10", "320") DO("11", "352")

// acc[r][m] += w[r][0, k) * x[m]: k a positive multiple of 16, x packed by RowDot<bf16>. Fetches what lies `ahead` bytes further in
// the rows of w (0: nothing).
NPU_INLINE void bf16_row_products(F (&acc)[4][3], const bf16* const (&w)[4], const float* const (&x)[3], int64_t k, int64_t ahead) {
  int64_t i = -2 * k;  // bytes of w up to the end
  const bf16 *w0 = w[0] + k, *w1 = w[1] + k, *w2 = w[2] + k, *w3 = w[3] + k;
  const float *x0 = x[0] + k, *x1 = x[1] + k, *x2 = x[2] + k;
  if (ahead) {
    asm volatile(NPU_BF16_ALL(NPU_BF16_LOAD)
                 "1:\n\t"
                 "prefetcht1 (%[w0],%[ahead])\n\t"
                 "prefetcht1 (%[w1],%[ahead])\n\t"
                 "prefetcht1 (%[w2],%[ahead])\n\t"
                 "prefetcht1 (%[w3],%[ahead])\n\t" NPU_BF16_STEP
                 "add $32, %[ahead]\n\t"
                 "add $32, %[i]\n\t"
                 "jne 1b\n\t" NPU_BF16_ALL(NPU_BF16_STORE)
                 : [i] "+r"(i), [ahead] "+r"(ahead)
                 : [w0] "r"(w0), [w1] "r"(w1), [w2] "r"(w2), [w3] "r"(w3), [x0] "r"(x0), [x1] "r"(x1), [x2] "r"(x2), [sums] "r"(&acc[0][0])
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
                   "xmm13", "xmm14", "xmm15");
    return;
  }
  asm volatile(NPU_BF16_ALL(NPU_BF16_LOAD)
               "1:\n\t" NPU_BF16_STEP
               "add $32, %[i]\n\t"
               "jne 1b\n\t" NPU_BF16_ALL(NPU_BF16_STORE)
               : [i] "+r"(i)
               : [w0] "r"(w0), [w1] "r"(w1), [w2] "r"(w2), [w3] "r"(w3), [x0] "r"(x0), [x1] "r"(x1), [x2] "r"(x2), [sums] "r"(&acc[0][0])
               : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
                 "xmm13", "xmm14", "xmm15");
}

#undef NPU_BF16_STEP
// ---- 3 rows held in ymm12 to ymm14, by 3 or 4 packed rows: fewer conversions a product ----
#define NPU_BF16_HOLD(row, n) "vmovdqu (%[" row "],%[i]), %%ymm" n "\n\tvpslld $16, %%ymm" n ", %%ymm" n "\n\t"
#define NPU_BF16_TURN(row, n) "vpblendw $0xaa, (%[" row "],%[i]), %%ymm" n ", %%ymm" n "\n\t"
#define NPU_BF16_COLUMN(at, a, b, c)             \
  "vmovups " at ", %%ymm15\n\t"                  \
  "vfmadd231ps %%ymm12, %%ymm15, %%ymm" a "\n\t" \
  "vfmadd231ps %%ymm13, %%ymm15, %%ymm" b "\n\t" \
  "vfmadd231ps %%ymm14, %%ymm15, %%ymm" c "\n\t"
#define NPU_BF16_STEP(COLUMNS)                                                                    \
  NPU_BF16_HOLD("w0", "12") NPU_BF16_HOLD("w1", "13") NPU_BF16_HOLD("w2", "14") COLUMNS("")    \
  NPU_BF16_TURN("w0", "12") NPU_BF16_TURN("w1", "13") NPU_BF16_TURN("w2", "14") COLUMNS("32")
#define NPU_BF16_THREE(at)                                                                                   \
  NPU_BF16_COLUMN(at "(%[x0],%[i],2)", "0", "3", "6") NPU_BF16_COLUMN(at "(%[x1],%[i],2)", "1", "4", "7") \
  NPU_BF16_COLUMN(at "(%[x2],%[i],2)", "2", "5", "8")
#define NPU_BF16_FOUR(at)                                                                                    \
  NPU_BF16_COLUMN(at "(%[x0],%[i],2)", "0", "4", "8") NPU_BF16_COLUMN(at "(%[x1],%[i],2)", "1", "5", "9") \
  NPU_BF16_COLUMN(at "(%[x2],%[i],2)", "2", "6", "10") NPU_BF16_COLUMN(at "(%[x3],%[i],2)", "3", "7", "11")
#define NPU_BF16_NINE(DO)                                                                                            \
  DO("0", "0") DO("1", "32") DO("2", "64") DO("3", "96") DO("4", "128") DO("5", "160") DO("6", "192") DO("7", "224") \
  DO("8", "256")
#define NPU_BF16_FETCH            \
  "prefetcht1 (%[w0],%[ahead])\n\t" \
  "prefetcht1 (%[w1],%[ahead])\n\t" \
  "prefetcht1 (%[w2],%[ahead])\n\t" \
  "add $32, %[ahead]\n\t"
#define NPU_BF16_ZERO(n, at) "vxorps %%ymm" n ", %%ymm" n ", %%ymm" n "\n\t"
#define NPU_BF16_LOOP(SUMS, START, FETCH, COLUMNS)                                                                                         \
  asm volatile(SUMS(START) "1:\n\t" FETCH NPU_BF16_STEP(COLUMNS) "add $32, %[i]\n\tjne 1b\n\t" SUMS(NPU_BF16_STORE)               \
               : [i] "+r"(i), [ahead] "+r"(ahead)                                                                                          \
               : [w0] "r"(w0), [w1] "r"(w1), [w2] "r"(w2), [x0] "r"(x0), [x1] "r"(x1), [x2] "r"(x2), [x3] "r"(x3), [sums] "r"(sums)        \
               : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
                 "xmm13", "xmm14", "xmm15")

// sums[3][M] (vectors) = (or +=) w[r][0, k) * x[m]: k a positive multiple of 16, x packed by RowDot<bf16>, ldx apart; M is 3 or 4. Fetches
// what lies `ahead` bytes further in the rows of w (0: nothing). Zeros that came from memory just written would be waited for.
template <int M>
NPU_INLINE void bf16_tile(float* sums, const bf16* const (&w)[3], const float* x, int64_t ldx, int64_t k, int64_t ahead, bool add) {
  static_assert(M == 3 || M == 4);
  int64_t i = -2 * k;  // bytes of w up to the end
  const bf16 *w0 = w[0] + k, *w1 = w[1] + k, *w2 = w[2] + k;
  const float *x0 = x + k, *x1 = x0 + ldx, *x2 = x1 + ldx, *x3 = M == 4 ? x2 + ldx : x2;
  if (ahead) {
    ahead += i;
    if constexpr (M == 4) {
      if (add) NPU_BF16_LOOP(NPU_BF16_ALL, NPU_BF16_LOAD, NPU_BF16_FETCH, NPU_BF16_FOUR);
      else NPU_BF16_LOOP(NPU_BF16_ALL, NPU_BF16_ZERO, NPU_BF16_FETCH, NPU_BF16_FOUR);
    } else {
      if (add) NPU_BF16_LOOP(NPU_BF16_NINE, NPU_BF16_LOAD, NPU_BF16_FETCH, NPU_BF16_THREE);
      else NPU_BF16_LOOP(NPU_BF16_NINE, NPU_BF16_ZERO, NPU_BF16_FETCH, NPU_BF16_THREE);
    }
  } else if constexpr (M == 4) {
    if (add) NPU_BF16_LOOP(NPU_BF16_ALL, NPU_BF16_LOAD, , NPU_BF16_FOUR);
    else NPU_BF16_LOOP(NPU_BF16_ALL, NPU_BF16_ZERO, , NPU_BF16_FOUR);
  } else {
    if (add) NPU_BF16_LOOP(NPU_BF16_NINE, NPU_BF16_LOAD, , NPU_BF16_THREE);
    else NPU_BF16_LOOP(NPU_BF16_NINE, NPU_BF16_ZERO, , NPU_BF16_THREE);
  }
}

#undef NPU_BF16_CLEAR
#undef NPU_BF16_ROW
#undef NPU_BF16_EVEN
#undef NPU_BF16_ODD
#undef NPU_BF16_STEP
#undef NPU_BF16_HOLD
#undef NPU_BF16_TURN
#undef NPU_BF16_COLUMN
#undef NPU_BF16_THREE
#undef NPU_BF16_FOUR
#undef NPU_BF16_NINE
#undef NPU_BF16_FETCH
#undef NPU_BF16_LOOP
#undef NPU_BF16_ZERO
#undef NPU_BF16_LOAD
#undef NPU_BF16_STORE
#undef NPU_BF16_ALL

}  // namespace
}  // namespace npu_ops

#endif
