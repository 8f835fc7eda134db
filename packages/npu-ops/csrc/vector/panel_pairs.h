// Products of rows of floats by panels of pairs of bf16 on AVX2, in assembly: what the compiler makes of it takes a third longer.
#pragma once

#if defined(__AVX2__) && !defined(NPU_AVX512)

#include "vector/vec.h"

namespace npu_ops {
namespace {

#define NPU_PAIRS_ROW(at, x, n, m)                    \
  "vbroadcastss " at ", %%ymm" x "\n\t"               \
  "vfmadd231ps %%ymm12, %%ymm" x ", %%ymm" n "\n\t"   \
  "vfmadd231ps %%ymm13, %%ymm" x ", %%ymm" m "\n\t"
#define NPU_PAIRS_FIVE(at)                                                                                                          \
  NPU_PAIRS_ROW(at "(%[a])", "14", "0", "1") NPU_PAIRS_ROW(at "(%[a],%[lda])", "15", "2", "3")                                      \
  NPU_PAIRS_ROW(at "(%[a],%[lda],2)", "14", "4", "5") NPU_PAIRS_ROW(at "(%[a3])", "15", "6", "7") NPU_PAIRS_ROW(at "(%[a3],%[lda])", "14", "8", "9")
#define NPU_PAIRS_SIX(at) NPU_PAIRS_FIVE(at) NPU_PAIRS_ROW(at "(%[a3],%[lda],2)", "15", "10", "11")
#define NPU_PAIRS_NEXT "add $8, %[a]\n\tadd $8, %[a3]\n\t"
#define NPU_LANES_FIVE(a, b, c, d, e)                                                               \
  NPU_PAIRS_ROW(a "(%[a])", "14", "0", "1") NPU_PAIRS_ROW(b "(%[a])", "15", "2", "3")               \
  NPU_PAIRS_ROW(c "(%[a])", "14", "4", "5") NPU_PAIRS_ROW(d "(%[a])", "15", "6", "7") NPU_PAIRS_ROW(e "(%[a])", "14", "8", "9")
#define NPU_LANES_SIX(a, b, c, d, e, f) NPU_LANES_FIVE(a, b, c, d, e) NPU_PAIRS_ROW(f "(%[a])", "15", "10", "11")
#define NPU_LANES_NEXT "add $48, %[a]\n\t"
#define NPU_PAIRS_LOAD(at, n, m) "vmovups " at ", %%ymm" n "\n\tvmovups 32" at ", %%ymm" m "\n\t"
#define NPU_PAIRS_STORE(at, n, m) "vmovups %%ymm" n ", " at "\n\tvmovups %%ymm" m ", 32" at "\n\t"
#define NPU_PAIRS_C5(DO) \
  DO("(%[c])", "0", "1") DO("(%[c],%[ldc])", "2", "3") DO("(%[c],%[ldc],2)", "4", "5") DO("(%[c3])", "6", "7") DO("(%[c3],%[ldc])", "8", "9")
#define NPU_PAIRS_C6(DO) NPU_PAIRS_C5(DO) DO("(%[c3],%[ldc],2)", "10", "11")
#define NPU_PAIRS_ZERO(at, n, m) "vxorps %%ymm" n ", %%ymm" n ", %%ymm" n "\n\tvxorps %%ymm" m ", %%ymm" m ", %%ymm" m "\n\t"
#define NPU_PAIRS_LOOP(SUMS, START, FIRST, SECOND, NEXT)                                                                          \
  asm volatile(SUMS(START)                                                                                                        \
               ".p2align 5\n\t1:\n\t"                                                                                             \
               "vmovdqu (%[b]), %%ymm12\n\tvmovdqu 32(%[b]), %%ymm13\n\t"                                                         \
               "vpslld $16, %%ymm12, %%ymm12\n\tvpslld $16, %%ymm13, %%ymm13\n\t" FIRST                                           \
               "vpblendw $0xaa, (%[b]), %%ymm12, %%ymm12\n\tvpblendw $0xaa, 32(%[b]), %%ymm13, %%ymm13\n\t" SECOND NEXT           \
               "add $64, %[b]\n\tdec %[pairs]\n\tjne 1b\n\t" SUMS(NPU_PAIRS_STORE)                                               \
               : [a] "+r"(a), [a3] "+r"(a3), [b] "+r"(b), [pairs] "+r"(pairs)                                                     \
               : [c] "r"(c), [c3] "r"(c3), [lda] "r"(lda), [ldc] "r"(ldc)                                                         \
               : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",         \
                 "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

// The products of M rows, in registers from the first to the last, into c. Zeros that came from memory just written would be waited for.
#define NPU_PAIRS_PRODUCT(FIRST, SECOND, FIRST_OF_FIVE, SECOND_OF_FIVE, NEXT)                                      \
  if constexpr (M == 6) {                                                                                          \
    if (add) NPU_PAIRS_LOOP(NPU_PAIRS_C6, NPU_PAIRS_LOAD, FIRST, SECOND, NEXT);                                    \
    else NPU_PAIRS_LOOP(NPU_PAIRS_C6, NPU_PAIRS_ZERO, FIRST, SECOND, NEXT);                                        \
  } else {                                                                                                         \
    if (add) NPU_PAIRS_LOOP(NPU_PAIRS_C5, NPU_PAIRS_LOAD, FIRST_OF_FIVE, SECOND_OF_FIVE, NEXT);                    \
    else NPU_PAIRS_LOOP(NPU_PAIRS_C5, NPU_PAIRS_ZERO, FIRST_OF_FIVE, SECOND_OF_FIVE, NEXT);                        \
  }

// c[M][16] = (or +=) a[M][2 * pairs] * b; M is 5 or 6, pairs positive, strides in floats.
template <int M>
NPU_INLINE void multiply_pairs(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t pairs, bool add) {
  static_assert(M == 5 || M == 6);
  const float* a3 = a + 3 * lda;
  float* c3 = c + 3 * ldc;
  lda *= sizeof(float);
  ldc *= sizeof(float);
  NPU_PAIRS_PRODUCT(NPU_PAIRS_SIX(""), NPU_PAIRS_SIX("4"), NPU_PAIRS_FIVE(""), NPU_PAIRS_FIVE("4"), NPU_PAIRS_NEXT)
}

// The same, where the rows' elements lie side by side: a[2 * pairs][kRows].
template <int M>
NPU_INLINE void multiply_lanes(float* c, int64_t ldc, const float* a, const float* b, int64_t pairs, bool add) {
  static_assert(M == 5 || M == 6);
  constexpr int64_t lda = 0;
  const float* a3 = a;
  float* c3 = c + 3 * ldc;
  ldc *= sizeof(float);
  NPU_PAIRS_PRODUCT(NPU_LANES_SIX("0", "4", "8", "12", "16", "20"), NPU_LANES_SIX("24", "28", "32", "36", "40", "44"),
                    NPU_LANES_FIVE("0", "4", "8", "12", "16"), NPU_LANES_FIVE("24", "28", "32", "36", "40"), NPU_LANES_NEXT)
}

#undef NPU_PAIRS_PRODUCT
#undef NPU_PAIRS_ROW
#undef NPU_PAIRS_FIVE
#undef NPU_PAIRS_SIX
#undef NPU_PAIRS_NEXT
#undef NPU_LANES_FIVE
#undef NPU_LANES_SIX
#undef NPU_LANES_NEXT
#undef NPU_PAIRS_LOAD
#undef NPU_PAIRS_STORE
#undef NPU_PAIRS_C5
#undef NPU_PAIRS_C6
#undef NPU_PAIRS_LOOP
#undef NPU_PAIRS_ZERO

}  // namespace
}  // namespace npu_ops

#endif
