// The AVX-512 intrinsics that the kernels use, in plain code after Intel's documented operations: so that the tests can run the tiers
// of AVX-512 on a machine that has only AVX2 (NPU_EMULATE_TIERS). An intrinsic that is not here does not compile there: add it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace npu_ops {
namespace {
namespace emulated {

#define NPU_EMULATED_INLINE inline __attribute__((always_inline))
#define NPU_EMULATED_CALL __attribute__((noinline))  // what is long: the library compiles in half the time

typedef float F32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));

template <class To, class From>
NPU_EMULATED_INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &x, sizeof to);
  return to;
}

// N elements of a register
template <class T, int N>
struct Elements {
  T of[N];
  T& operator[](int i) { return of[i]; }
};
template <class T, class V>
NPU_EMULATED_INLINE auto elements(V v) {
  return as<Elements<T, sizeof(V) / sizeof(T)>>(v);
}

// The two halves of a register, for what AVX2 and F16C have themselves.
template <class Half, class V>
NPU_EMULATED_INLINE Half half(V v, int i) {
  Half h;
  memcpy(&h, reinterpret_cast<const char*>(&v) + i * sizeof h, sizeof h);
  return h;
}
template <class V, class Half>
NPU_EMULATED_INLINE V whole(Half low, Half high) {
  V v;
  memcpy(&v, &low, sizeof low);
  memcpy(reinterpret_cast<char*>(&v) + sizeof low, &high, sizeof high);
  return v;
}

// ---- loads, constants, moves ----
NPU_EMULATED_INLINE __m512i loadu_si512(const void* p) {
  __m512i v;
  memcpy(&v, p, sizeof v);
  return v;
}
NPU_EMULATED_INLINE void stream_si512(void* p, __m512i v) { memcpy(p, &v, sizeof v); }
NPU_EMULATED_INLINE __m512i set_epi32(int p, int o, int n, int m, int l, int k, int j, int i, int h, int g, int f, int e, int d, int c, int b, int a) {
  return (__m512i)I32{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
NPU_EMULATED_INLINE __m512i set1_epi64(long long x) { return __m512i{x, x, x, x, x, x, x, x}; }
NPU_EMULATED_INLINE __m512i broadcast_i32x4(__m128i x) {
  const __m256i two = whole<__m256i>(x, x);
  return whole<__m512i>(two, two);
}
NPU_EMULATED_INLINE __m512i broadcast_i64x4(__m256i x) { return whole<__m512i>(x, x); }
NPU_EMULATED_INLINE __m256 castps512_ps256(__m512 x) { return half<__m256>(x, 0); }
NPU_EMULATED_INLINE __m256 extractf32x8_ps(__m512 x, int i) { return half<__m256>(x, i); }
NPU_EMULATED_INLINE __m512i zextsi256_si512(__m256i x) { return whole<__m512i>(x, __m256i{}); }

// ---- between widths ----
NPU_EMULATED_INLINE __m512i cvtepi8_epi32(__m128i x) {
  return whole<__m512i>(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
NPU_EMULATED_INLINE __m512i cvtepi8_epi16(__m256i x) {
  return whole<__m512i>(_mm256_cvtepi8_epi16(half<__m128i>(x, 0)), _mm256_cvtepi8_epi16(half<__m128i>(x, 1)));
}
NPU_EMULATED_INLINE __m512i cvtepu16_epi32(__m256i x) {
  return whole<__m512i>(_mm256_cvtepu16_epi32(half<__m128i>(x, 0)), _mm256_cvtepu16_epi32(half<__m128i>(x, 1)));
}
NPU_EMULATED_INLINE __m128i low_halves(__m256i x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(half<__m128i>(low, 0), half<__m128i>(low, 1));
}
NPU_EMULATED_INLINE __m256i cvtepi32_epi16(__m512i x) { return whole<__m256i>(low_halves(half<__m256i>(x, 0)), low_halves(half<__m256i>(x, 1))); }
NPU_EMULATED_CALL __m128i cvtepi32_epi8(__m512i x) {
  auto from = elements<uint32_t>(x);
  Elements<uint8_t, 16> to;
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>(from[i]);
  return as<__m128i>(to);
}
NPU_EMULATED_INLINE __m512 cvtepi32_ps(__m512i x) {
  return whole<__m512>(_mm256_cvtepi32_ps(half<__m256i>(x, 0)), _mm256_cvtepi32_ps(half<__m256i>(x, 1)));
}
NPU_EMULATED_INLINE __m512i cvtps_epi32(__m512 x) {
  return whole<__m512i>(_mm256_cvtps_epi32(half<__m256>(x, 0)), _mm256_cvtps_epi32(half<__m256>(x, 1)));
}
NPU_EMULATED_INLINE __m512 cvtph_ps(__m256i x) {
  return whole<__m512>(_mm256_cvtph_ps(half<__m128i>(x, 0)), _mm256_cvtph_ps(half<__m128i>(x, 1)));
}
template <int kRounding>
NPU_EMULATED_INLINE __m256i cvtps_ph(__m512 x) {
  return whole<__m256i>(_mm256_cvtps_ph(half<__m256>(x, 0), kRounding & 7), _mm256_cvtps_ph(half<__m256>(x, 1), kRounding & 7));
}

// ---- arithmetic ----
NPU_EMULATED_INLINE __m512 max_ps(__m512 a, __m512 b) {
  return whole<__m512>(_mm256_max_ps(half<__m256>(a, 0), half<__m256>(b, 0)), _mm256_max_ps(half<__m256>(a, 1), half<__m256>(b, 1)));
}
NPU_EMULATED_INLINE __m512 min_ps(__m512 a, __m512 b) {
  return whole<__m512>(_mm256_min_ps(half<__m256>(a, 0), half<__m256>(b, 0)), _mm256_min_ps(half<__m256>(a, 1), half<__m256>(b, 1)));
}
// x less the multiple of 1 below it: kMode 9, rounded down, no exceptions
template <int kMode>
NPU_EMULATED_CALL __m512 reduce_ps(__m512 x) {
  static_assert(kMode == 9);
  auto e = elements<float>(x);
  for (int i = 0; i < 16; ++i) e[i] = __builtin_isinf(e[i]) ? 0.f : e[i] - __builtin_floorf(e[i]);
  return as<__m512>(e);
}
// a * 2^floor(b)
NPU_EMULATED_CALL __m512 scalef_ps(__m512 a, __m512 b) {
  auto e = elements<float>(a), by = elements<float>(b);
  for (int i = 0; i < 16; ++i) {
    const float n = __builtin_floorf(by[i]);
    e[i] = n != n ? n : __builtin_ldexpf(e[i], n < -1000.f ? -1000 : n > 1000.f ? 1000 : static_cast<int>(n));
  }
  return as<__m512>(e);
}
// in the order of GCC's own: a half to the other, and so on
NPU_EMULATED_CALL float reduce_add_ps(__m512 x) {
  auto e = elements<float>(x);
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) e[i] = e[i + n] + e[i];
  return e[0];
}
NPU_EMULATED_CALL float reduce_max_ps(__m512 x) {
  auto e = elements<float>(x);
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) e[i] = e[i + n] > e[i] ? e[i + n] : e[i];
  return e[0];
}
NPU_EMULATED_INLINE __m512i dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  const __m256i low = _mm256_add_epi32(half<__m256i>(sum, 0), _mm256_madd_epi16(half<__m256i>(a, 0), half<__m256i>(b, 0)));
  const __m256i high = _mm256_add_epi32(half<__m256i>(sum, 1), _mm256_madd_epi16(half<__m256i>(a, 1), half<__m256i>(b, 1)));
  return whole<__m512i>(low, high);
}
// four products of a byte without a sign by one with it, exact in 32 bits
NPU_EMULATED_CALL __m512i dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto to = elements<int32_t>(sum);
  auto x = elements<uint8_t>(a);
  auto y = elements<int8_t>(b);
  for (int i = 0; i < 64; ++i) to[i / 4] += x[i] * y[i];
  return as<__m512i>(to);
}

// ---- shuffles and masks ----
// within 128 bits each, as on AVX2
NPU_EMULATED_INLINE __m512i unpacklo_epi16(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_unpacklo_epi16(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_unpacklo_epi16(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
NPU_EMULATED_INLINE __m512i unpackhi_epi16(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_unpackhi_epi16(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_unpackhi_epi16(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
NPU_EMULATED_INLINE __m512i unpacklo_epi8(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_unpacklo_epi8(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_unpacklo_epi8(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
NPU_EMULATED_INLINE __m512i unpackhi_epi8(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_unpackhi_epi8(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_unpackhi_epi8(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
NPU_EMULATED_INLINE __m512i unpacklo_epi64(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_unpacklo_epi64(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_unpacklo_epi64(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
NPU_EMULATED_INLINE __m512i unpackhi_epi64(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_unpackhi_epi64(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_unpackhi_epi64(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
// two quarters of the first register, then two of the second, each by two bits of the choice
NPU_EMULATED_CALL __m512i shuffle_i64x2(__m512i a, __m512i b, int choice) {
  auto first = elements<int64_t>(a), second = elements<int64_t>(b);
  Elements<int64_t, 8> to;
  for (int i = 0; i < 8; ++i) to[i] = (i < 4 ? first : second)[(choice >> i / 2 * 2 & 3) * 2 + i % 2];
  return as<__m512i>(to);
}
// of two registers' bytes, by the lower seven bits of an index
NPU_EMULATED_CALL __m512i permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
  auto at = elements<uint8_t>(index), first = elements<uint8_t>(a), second = elements<uint8_t>(b);
  Elements<uint8_t, 64> to;
  for (int i = 0; i < 64; ++i) to[i] = at[i] & 64 ? second[at[i] & 63] : first[at[i] & 63];
  return as<__m512i>(to);
}
NPU_EMULATED_CALL __m512i permutexvar_epi32(__m512i index, __m512i x) {
  auto at = elements<uint32_t>(index), from = elements<uint32_t>(x);
  Elements<uint32_t, 16> to;
  for (int i = 0; i < 16; ++i) to[i] = from[at[i] & 15];
  return as<__m512i>(to);
}
NPU_EMULATED_CALL __m512i permutexvar_epi16(__m512i index, __m512i x) {
  auto at = elements<uint16_t>(index), from = elements<uint16_t>(x);
  Elements<uint16_t, 32> to;
  for (int i = 0; i < 32; ++i) to[i] = from[at[i] & 31];
  return as<__m512i>(to);
}
NPU_EMULATED_INLINE __m512i subs_epu16(__m512i a, __m512i b) {
  return whole<__m512i>(_mm256_subs_epu16(half<__m256i>(a, 0), half<__m256i>(b, 0)), _mm256_subs_epu16(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}
NPU_EMULATED_INLINE uint64_t testn_epi8_mask(__m512i a, __m512i b) {
  typedef uint8_t U8 __attribute__((vector_size(64)));
  auto both = elements<uint8_t>((__m512i)((U8)a & (U8)b));
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(both[i] == 0) << i;
  return mask;
}
NPU_EMULATED_INLINE __m512i shuffle_epi8(__m512i x, __m512i index) {  // within 128 bits each
  return whole<__m512i>(_mm256_shuffle_epi8(half<__m256i>(x, 0), half<__m256i>(index, 0)), _mm256_shuffle_epi8(half<__m256i>(x, 1), half<__m256i>(index, 1)));
}
NPU_EMULATED_CALL __m512i mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
  auto x = elements<uint16_t>(a), y = elements<uint16_t>(b);
  for (int i = 0; i < 32; ++i) x[i] = mask >> i & 1 ? y[i] : x[i];
  return as<__m512i>(x);
}
NPU_EMULATED_CALL __mmask16 test_epi32_mask(__m512i a, __m512i b) {
  auto both = elements<uint32_t>((__m512i)((U32)a & (U32)b));
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(both[i] != 0) << i;
  return static_cast<__mmask16>(mask);
}

// ---- bf16: denormals count as zero, whatever MXCSR says ----
NPU_EMULATED_INLINE U32 without_denormals(U32 x) { return (x & 0x7f800000u) != 0 ? x : x & 0x80000000u; }

NPU_EMULATED_CALL __m256i cvtneps_pbh(__m512 x) {
  const U32 u = without_denormals((U32)x);
  const U32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
  const U32 r = (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
  return cvtepi32_epi16((__m512i)r);
}
NPU_EMULATED_CALL __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
  return as<__m512bh>(whole<__m512i>(cvtneps_pbh(lower), cvtneps_pbh(upper)));
}
// two fused products a lane, the upper one first
NPU_EMULATED_CALL __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const U32 x = as<U32>(a), y = as<U32>(b);
  const F32 x1 = (F32)without_denormals(x & 0xffff0000u), y1 = (F32)without_denormals(y & 0xffff0000u);
  const F32 x0 = (F32)without_denormals(x << 16), y0 = (F32)without_denormals(y << 16);
  F32 r = (F32)without_denormals((U32)sum);
  r = (F32)without_denormals((U32)(x1 * y1 + r));  // contracted: AVX2 comes with FMA
  return (__m512)without_denormals((U32)(x0 * y0 + r));
}

#undef NPU_EMULATED_INLINE
#undef NPU_EMULATED_CALL

}  // namespace emulated
}  // namespace
}  // namespace npu_ops

// GCC declares the names, but only for functions compiled with the instructions.
#define _mm512_loadu_si512 npu_ops::emulated::loadu_si512
#define _mm512_stream_si512 npu_ops::emulated::stream_si512
#define _mm512_set_epi32 npu_ops::emulated::set_epi32
#define _mm512_set1_epi64 npu_ops::emulated::set1_epi64
#define _mm512_broadcast_i32x4 npu_ops::emulated::broadcast_i32x4
#define _mm512_broadcast_i64x4 npu_ops::emulated::broadcast_i64x4
#define _mm512_castps512_ps256 npu_ops::emulated::castps512_ps256
#undef _mm512_extractf32x8_ps  // macros where nothing is optimised
#define _mm512_extractf32x8_ps npu_ops::emulated::extractf32x8_ps
#define _mm512_zextsi256_si512 npu_ops::emulated::zextsi256_si512
#define _mm512_cvtepi8_epi32 npu_ops::emulated::cvtepi8_epi32
#define _mm512_cvtepi8_epi16 npu_ops::emulated::cvtepi8_epi16
#define _mm512_cvtepu16_epi32 npu_ops::emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 npu_ops::emulated::cvtepi32_epi16
#define _mm512_cvtepi32_ps npu_ops::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 npu_ops::emulated::cvtps_epi32
#define _mm512_cvtph_ps npu_ops::emulated::cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) npu_ops::emulated::cvtps_ph<(rounding)>(x)
#define _mm512_max_ps npu_ops::emulated::max_ps
#define _mm512_min_ps npu_ops::emulated::min_ps
#undef _mm512_reduce_ps
#define _mm512_reduce_ps(x, mode) npu_ops::emulated::reduce_ps<(mode)>(x)
#define _mm512_scalef_ps npu_ops::emulated::scalef_ps
#define _mm512_reduce_add_ps npu_ops::emulated::reduce_add_ps
#define _mm512_reduce_max_ps npu_ops::emulated::reduce_max_ps
#define _mm512_unpacklo_epi16 npu_ops::emulated::unpacklo_epi16
#define _mm512_unpackhi_epi16 npu_ops::emulated::unpackhi_epi16
#define _mm512_unpacklo_epi8 npu_ops::emulated::unpacklo_epi8
#define _mm512_unpackhi_epi8 npu_ops::emulated::unpackhi_epi8
#define _mm512_unpacklo_epi64 npu_ops::emulated::unpacklo_epi64
#define _mm512_unpackhi_epi64 npu_ops::emulated::unpackhi_epi64
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 npu_ops::emulated::shuffle_i64x2
#define _mm512_permutex2var_epi8 npu_ops::emulated::permutex2var_epi8
#define _mm512_cvtepi32_epi8 npu_ops::emulated::cvtepi32_epi8
#define _mm512_dpwssd_epi32 npu_ops::emulated::dpwssd_epi32
#define _mm512_dpbusd_epi32 npu_ops::emulated::dpbusd_epi32
#define _mm512_permutexvar_epi32 npu_ops::emulated::permutexvar_epi32
#define _mm512_permutexvar_epi16 npu_ops::emulated::permutexvar_epi16
#define _mm512_subs_epu16 npu_ops::emulated::subs_epu16
#define _mm512_testn_epi8_mask npu_ops::emulated::testn_epi8_mask
#define _mm512_shuffle_epi8 npu_ops::emulated::shuffle_epi8
#undef _mm512_mask_blend_epi16
#define _mm512_mask_blend_epi16 npu_ops::emulated::mask_blend_epi16
#define _mm512_test_epi32_mask npu_ops::emulated::test_epi32_mask
#define _mm512_cvtneps_pbh npu_ops::emulated::cvtneps_pbh
#define _mm512_cvtne2ps_pbh npu_ops::emulated::cvtne2ps_pbh
#define _mm512_dpbf16_ps npu_ops::emulated::dpbf16_ps
