// Vectors of W floats for the tier that a source file is compiled for; everything is local to that file.
//
// F is a vector type of the compiler (GCC, Clang), so + - * / and comparisons are the language's own. Only what the language
// lacks is written here: narrow types, reductions, exp. No standard library: an inline function of it, compiled here with
// wide instructions, could become the copy that the linker keeps for baseline code.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(NPU_EMULATED) && defined(NPU_AVX512)
#include "vector/emulated_avx512.h"
#elif defined(NPU_AVX512) && !defined(__AVX512F__)
#error "a tier of AVX-512 compiled without its instructions: pass -mavx512f, or configure with NPU_EMULATE_TIERS"
#endif

namespace npu_ops {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

namespace {

#if defined(NPU_AVX512)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));

#define NPU_INLINE inline __attribute__((always_inline))

NPU_INLINE F set1(float x) { return x - F{}; }
NPU_INLINE U bits_of(F x) { return (U)x; }
NPU_INLINE F from_bits(U x) { return (F)x; }
NPU_INLINE F fma(F a, F b, F c) { return a * b + c; }  // contracted where the tier has FMA

NPU_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
NPU_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
NPU_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class V, class T>
NPU_INLINE V load_raw(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// ---- conversions to float; GCC 12 makes poor code of its own vector conversions ----
NPU_INLINE U widen(U16 h) {
#if defined(NPU_AVX512)
  return (U)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, U);
#endif
}
// values below 2^16
NPU_INLINE U16 narrow(U u) {
#if defined(NPU_AVX512)
  return (U16)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(__AVX2__)
  return (U16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
#else
  return __builtin_convertvector(u, U16);
#endif
}

NPU_INLINE F widen_bf16(U16 h) { return from_bits(widen(h) << 16); }

NPU_INLINE F widen_fp16(U16 h) {
#if defined(NPU_AVX512)
  return (F)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)h);
#else
  U u = widen(h);
  U sign = (u & 0x8000u) << 16, rest = (u & 0x7fffu) << 13;
  F scaled = from_bits(rest) * set1(0x1p112f);  // exact, subnormals included
  U special = (U)(rest >= 0x0f800000u);         // infinity or NaN
  return from_bits(bits_of(scaled) | (special & 0x7f800000u) | sign);
#endif
}

NPU_INLINE F load(const float* p) { return load_raw<F>(p); }
NPU_INLINE F load(const bf16* p) { return widen_bf16(load_raw<U16>(p)); }
NPU_INLINE F load(const fp16* p) { return widen_fp16(load_raw<U16>(p)); }

// ---- conversions from float, to nearest even ----
// The upper half of each lane is x as bf16, the lower half is undefined. A NaN stays one, as a quiet NaN: the addition could carry
// out of one, or leave infinity of it. The instruction for bf16 takes subnormal numbers as zero, and so does its tier.
#if defined(NPU_AVX512_BF16)
NPU_INLINE U16 narrow_bf16(F x) { return (U16)_mm512_cvtneps_pbh((__m512)x); }
NPU_INLINE U rounded_bf16(F x) { return widen(narrow_bf16(x)) << 16; }
#else
NPU_INLINE U rounded_bf16(F x) {
  const U u = bits_of(x), r = u + 0x7fffu + ((u >> 16) & 1u);
  return x == x ? r : u | 0x00400000u;
}
NPU_INLINE U16 narrow_bf16(F x) { return narrow(rounded_bf16(x) >> 16); }
#endif

NPU_INLINE U16 narrow_fp16(F x) {
#if defined(NPU_AVX512)
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  U u = bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  U normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  U subnormal = bits_of(from_bits(a) + set1(0.5f)) - 0x3f000000u;  // the addition rounds at 2^-24
  U is_sub = (U)(a < 0x38800000u), is_big = (U)(a >= 0x477ff000u), is_nan = (U)(a > 0x7f800000u);
  U r = (is_sub & subnormal) | (~is_sub & normal);
  r = (is_big & 0x7c00u) | (~is_big & r);
  r = (is_nan & 0x7e00u) | (~is_nan & r);
  return narrow(r | sign);
#endif
}

NPU_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
NPU_INLINE void store(bf16* p, F x) {
  U16 v = narrow_bf16(x);
  memcpy(p, &v, sizeof v);
}
NPU_INLINE void store(fp16* p, F x) {
  U16 v = narrow_fp16(x);
  memcpy(p, &v, sizeof v);
}

// ---- the first n of W elements; the rest reads as zero, and is not written ----
template <class T>
NPU_INLINE F load_n(const T* p, int64_t n) {
  if (n >= W) return load(p);
  T tmp[W] = {};
  for (int64_t i = 0; i < n; ++i) tmp[i] = p[i];
  return load(tmp);
}
template <class T>
NPU_INLINE void store_n(T* p, F x, int64_t n) {
  if (n >= W) return store(p, x);
  T tmp[W];
  store(tmp, x);
  for (int64_t i = 0; i < n; ++i) p[i] = tmp[i];
}

// The same for a whole vector: what for_vectors passes until the last.
struct Whole {};
template <class T>
NPU_INLINE F load_n(const T* p, Whole) {
  return load(p);
}
template <class T>
NPU_INLINE void store_n(T* p, F x, Whole) {
  store(p, x);
}

// fn(i, count) for i = 0, W, 2W, ... below n; count is Whole, or how many are left. The rest is kept out of the loop because its
// calls of memcpy would cost the loop its registers.
template <class Fn>
NPU_INLINE void for_vectors(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + W <= n; i += W) fn(i, Whole{});
  if (i < n) fn(i, n - i);
}

// ---- 2 W elements in an order of the type's own: what is done to each element alone is cheaper so ----
struct Pair {
  F a, b;
};

template <class T>
NPU_INLINE Pair load_pair(const T* p) {
  return {load(p), load(p + W)};
}
// Two bf16 share a lane: the even ones, and the odd ones.
NPU_INLINE Pair load_pair(const bf16* p) {
  const U u = load_raw<U>(p);
  return {from_bits(u << 16), from_bits(u & 0xffff0000u)};
}

template <class T>
NPU_INLINE void store_pair(T* p, Pair x) {
  store(p, x.a);
  store(p + W, x.b);
}
NPU_INLINE void store_pair(bf16* p, Pair x) {
#if defined(NPU_AVX512)
  const U u = (U)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(rounded_bf16(x.a) >> 16), (__m512i)rounded_bf16(x.b));
#elif defined(__AVX2__) && !defined(NPU_AVX512)
  const U u = (U)_mm256_blend_epi16((__m256i)(rounded_bf16(x.a) >> 16), (__m256i)rounded_bf16(x.b), 0xaa);
#else
  const U u = (rounded_bf16(x.a) >> 16) | (rounded_bf16(x.b) & 0xffff0000u);
#endif
  memcpy(p, &u, sizeof u);
}

// pairs(i) for i = 0, 2 W, ... as long as 2 W elements are left below n, then rest(i, count) for the vectors of the rest.
template <class Pairs, class Rest>
NPU_INLINE void for_pairs(int64_t n, const Pairs& pairs, const Rest& rest) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) pairs(i);
  for (; i < n; i += W) rest(i, lesser(W, n - i));
}

// Value of x after a round trip through T.
NPU_INLINE F rounded_to(F x, float*) { return x; }
NPU_INLINE F rounded_to(F x, bf16*) { return from_bits(rounded_bf16(x) & 0xffff0000u); }
NPU_INLINE F rounded_to(F x, fp16*) { return widen_fp16(narrow_fp16(x)); }

// ---- scalars, through the same conversions ----
template <class T>
NPU_INLINE float to_float(T x) {
  return load_n(&x, 1)[0];
}
NPU_INLINE float to_float(float x) { return x; }

NPU_INLINE F vmax(F a, F b) {
#if defined(NPU_AVX512)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
NPU_INLINE F vmin(F a, F b) {
#if defined(NPU_AVX512)
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

NPU_INLINE float sum(F x) {
#if defined(NPU_AVX512)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  float s = 0;
  for (int i = 0; i < W; ++i) s += x[i];
  return s;
#endif
}
NPU_INLINE float highest(F x) {
#if defined(NPU_AVX512)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  float m = x[0];
  for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}

// The largest magnitude of each lane so far, as its bits: in their order a NaN is above infinity, and so is not lost as in vmax.
NPU_INLINE I larger_magnitude(I most, F x) {
  const I magnitude = (I)(bits_of(x) & 0x7fffffffu);
  return magnitude > most ? magnitude : most;
}
NPU_INLINE float largest_magnitude(I most) {
  int32_t m = most[0];
  for (int i = 1; i < W; ++i) m = most[i] > m ? most[i] : m;
  float x;
  memcpy(&x, &m, sizeof x);
  return x;
}

// 2^n as a float for the integer n = round(y), by adding to y what moves n + 127 into its lowest bits.
// It is 0 for n = -127 and infinity for n = 128: y must lie between them or be NaN.
NPU_INLINE F power_of_two(F y, F& n) {
  const F shift = set1(12582912.f + 127.f);  // 1.5 * 2^23 + 127
  const F moved = y + shift;
  n = moved - shift;
  return from_bits(bits_of(moved) << 23);
}

// Where a bound and NaN meet, vmax and vmin give their second argument.
NPU_INLINE F clamped(F x, float low, float high) { return vmin(set1(high), vmax(set1(low), x)); }

// e^x, relative error below 2e-7; 0 below -87.7, infinity above 88.4, NaN stays.
// Cody-Waite reduction by ln 2 and a minimax polynomial of degree 5 in the rest.
NPU_INLINE F vexp(F x) {
  x = clamped(x, -88.f, 88.72f);
  F n;
  const F power = power_of_two(x * set1(1.44269504088896341f), n);
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(8.312049321830273e-3f);
  p = fma(p, r, set1(4.189449921250343e-2f));
  p = fma(p, r, set1(1.6667133569717407e-1f));
  p = fma(p, r, set1(4.999920129776001e-1f));
  p = fma(p, r * r, r + set1(1.f));
  return p * power;
}

// 2^f for f in [-0.5, 0.5]
NPU_INLINE F exp2_of_fraction(F f) {
  F p = set1(1.3263358268886805e-3f);
  p = fma(p, f, set1(9.67258121818304e-3f));
  p = fma(p, f, set1(5.5507466197013855e-2f));
  p = fma(p, f, set1(2.402222603559494e-1f));
  p = fma(p, f, set1(6.931469440460205e-1f));
  return fma(p, f, set1(1.f));
}

// vexp2 for y <= 0
NPU_INLINE F vexp2_of_negative(F y) {
  y = vmax(set1(-127.f), y);
  F n;
  const F power = power_of_two(y, n);
  return exp2_of_fraction(y - n) * power;
}

// 2^y, relative error below 2e-7; 0 below -127, infinity above 127.5, NaN stays. Minimax polynomial of degree 5.
NPU_INLINE F vexp2(F y) {
  y = clamped(y, -127.f, 128.f);
  F n;
  const F power = power_of_two(y, n);
  return exp2_of_fraction(y - n) * power;
}

NPU_INLINE F vtanh(F x) { return set1(1.f) - set1(2.f) / (vexp(x + x) + set1(1.f)); }

// erf, absolute error below 2e-7 (Abramowitz and Stegun 7.1.26).
NPU_INLINE F verf(F x) {
  U sign = bits_of(x) & 0x80000000u;
  F a = from_bits(bits_of(x) & 0x7fffffffu);
  F t = set1(1.f) / fma(a, set1(0.3275911f), set1(1.f));
  F p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  F y = set1(1.f) - p * t * vexp(-a * a);
  return from_bits(bits_of(y) | sign);
}

// ---- shuffles ----
#if defined(NPU_EMULATED) && defined(NPU_AVX512)
#define NPU_SHUFFLE __attribute__((noinline))  // a lane at a time: inlined, they would be most of the library
#else
#define NPU_SHUFFLE NPU_INLINE
#endif
template <int... J>
struct Lanes {};
template <int N, int... J>
struct MakeLanes : MakeLanes<N - 1, N - 1, J...> {};
template <int... J>
struct MakeLanes<0, J...> {
  using type = Lanes<J...>;
};
using AllLanes = typename MakeLanes<W>::type;

template <int S, int... J>
NPU_SHUFFLE void exchange(F& a, F& b, Lanes<J...>) {
  F lo = __builtin_shufflevector(a, b, ((J & S) ? W + J - S : J)...);
  F hi = __builtin_shufflevector(a, b, ((J & S) ? W + J : J + S)...);
  a = lo;
  b = hi;
}
template <int S>
NPU_INLINE void exchange_rows(F (&r)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (!(i & S)) exchange<S>(r[i], r[i + S], AllLanes{});
}
// r[i][j] <-> r[j][i]
NPU_INLINE void transpose(F (&r)[W]) {
#if defined(__AVX2__) && !defined(NPU_AVX512)
  // unpacking is one instruction where an exchange of lanes takes two
  const auto low4 = [](F a, F b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); };
  const auto high4 = [](F a, F b) { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); };
  const auto low8 = [](F a, F b) { return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13); };
  const auto high8 = [](F a, F b) { return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15); };
  F t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 4) {
    const F a = low4(r[i], r[i + 1]), b = high4(r[i], r[i + 1]), c = low4(r[i + 2], r[i + 3]), d = high4(r[i + 2], r[i + 3]);
    t[i] = low8(a, c), t[i + 1] = high8(a, c), t[i + 2] = low8(b, d), t[i + 3] = high8(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  return;
#endif
  exchange_rows<1>(r);
  exchange_rows<2>(r);
  exchange_rows<4>(r);
#if defined(NPU_AVX512)
  exchange_rows<8>(r);
#endif
}

template <int... J>
NPU_SHUFFLE void deinterleave_lanes(F& a, F& b, Lanes<J...>) {
  F even = __builtin_shufflevector(a, b, (2 * J)...);
  F odd = __builtin_shufflevector(a, b, (2 * J + 1)...);
  a = even;
  b = odd;
}
template <int... J>
NPU_SHUFFLE void interleave_lanes(F& a, F& b, Lanes<J...>) {
  F lo = __builtin_shufflevector(a, b, ((J & 1) ? W + J / 2 : J / 2)...);
  F hi = __builtin_shufflevector(a, b, ((J & 1) ? W + W / 2 + J / 2 : W / 2 + J / 2)...);
  a = lo;
  b = hi;
}
// (x0 y0 x1 y1 ...) in a, b -> all x in a, all y in b; and back
NPU_INLINE void deinterleave(F& a, F& b) { deinterleave_lanes(a, b, AllLanes{}); }
NPU_INLINE void interleave(F& a, F& b) { interleave_lanes(a, b, AllLanes{}); }

// 2 W elements of another type in the order of T's pairs.
template <class C, class T>
NPU_INLINE Pair load_pair_like(const C* p, T*) {
  if constexpr (__is_same(C, T) || !(__is_same(C, bf16) || __is_same(T, bf16))) return load_pair(p);
  F a = load(p), b = load(p + W);
  if constexpr (__is_same(T, bf16)) deinterleave(a, b);
  return {a, b};
}


}  // namespace
}  // namespace npu_ops
