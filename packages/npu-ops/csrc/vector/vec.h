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

namespace npu_ops {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

namespace {

#if defined(__AVX512F__)
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

template <class V, class T>
NPU_INLINE V load_raw(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// ---- conversions to float; GCC 12 makes poor code of its own vector conversions ----
NPU_INLINE U widen(U16 h) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, U);
#endif
}
// values below 2^16
NPU_INLINE U16 narrow(U u) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(__AVX2__)
  return (U16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
#else
  return __builtin_convertvector(u, U16);
#endif
}

NPU_INLINE F widen_bf16(U16 h) { return from_bits(widen(h) << 16); }

NPU_INLINE F widen_fp16(U16 h) {
#if defined(__AVX512F__)
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
NPU_INLINE U16 narrow_bf16(F x) {
#if defined(__AVX512BF16__)
  return (U16)_mm512_cvtneps_pbh((__m512)x);
#else
  U u = bits_of(x);
  U rounded = u + 0x7fffu + ((u >> 16) & 1u);
  U nan = (U)(x != x);
  U r = ((nan & 0x7fc00000u) | (~nan & rounded)) >> 16;
  return narrow(r);
#endif
}

NPU_INLINE U16 narrow_fp16(F x) {
#if defined(__AVX512F__)
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

// Value of x after a round trip through T.
NPU_INLINE F rounded_to(F x, float*) { return x; }
NPU_INLINE F rounded_to(F x, bf16*) { return widen_bf16(narrow_bf16(x)); }
NPU_INLINE F rounded_to(F x, fp16*) { return widen_fp16(narrow_fp16(x)); }

// ---- scalars, through the same conversions ----
template <class T>
NPU_INLINE float to_float(T x) {
  return load_n(&x, 1)[0];
}
NPU_INLINE float to_float(float x) { return x; }

NPU_INLINE F vmax(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
NPU_INLINE F vmin(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

NPU_INLINE float sum(F x) {
#if defined(__AVX512F__)
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
  float m = x[0];
  for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// e^x, relative error below 3e-7; 0 below -87.3, infinity above 88.7, NaN stays.
// Cody-Waite reduction by ln 2 and a polynomial of degree 6 (Cephes expf coefficients).
NPU_INLINE F vexp(F x) {
  F clamped = vmin(vmax(x, set1(-87.5f)), set1(88.8f));
  F shift = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  F nf = fma(clamped, set1(1.44269504088896341f), shift);
  I n = (I)bits_of(nf) - (I)bits_of(shift);
  nf -= shift;
  F r = fma(nf, set1(-0.693359375f), clamped);
  r = fma(nf, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.f));
  I half = n >> 1;  // two factors: 2^n itself may overflow
  F y = p * (F)((half + 127) << 23) * (F)((n - half + 127) << 23);
  y = from_bits(bits_of(y) & (U)(x > set1(-87.33f) || x != x));
  return from_bits((bits_of(y) & (U)(x == x)) | (bits_of(x) & (U)(x != x)));
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
NPU_INLINE void exchange(F& a, F& b, Lanes<J...>) {
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
  exchange_rows<1>(r);
  exchange_rows<2>(r);
  exchange_rows<4>(r);
#if defined(__AVX512F__)
  exchange_rows<8>(r);
#endif
}

template <int... J>
NPU_INLINE void deinterleave_lanes(F& a, F& b, Lanes<J...>) {
  F even = __builtin_shufflevector(a, b, (2 * J)...);
  F odd = __builtin_shufflevector(a, b, (2 * J + 1)...);
  a = even;
  b = odd;
}
template <int... J>
NPU_INLINE void interleave_lanes(F& a, F& b, Lanes<J...>) {
  F lo = __builtin_shufflevector(a, b, ((J & 1) ? W + J / 2 : J / 2)...);
  F hi = __builtin_shufflevector(a, b, ((J & 1) ? W + W / 2 + J / 2 : W / 2 + J / 2)...);
  a = lo;
  b = hi;
}
// (x0 y0 x1 y1 ...) in a, b -> all x in a, all y in b; and back
NPU_INLINE void deinterleave(F& a, F& b) { deinterleave_lanes(a, b, AllLanes{}); }
NPU_INLINE void interleave(F& a, F& b) { interleave_lanes(a, b, AllLanes{}); }

NPU_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
NPU_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
NPU_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace npu_ops
