// Functions of the dialect `math` and of libdevice, on libm and, in loops, on its vectors (libmvec, glibc 2.35).
#pragma once

#include "types.h"

// Declared here and not by <math.h>: as C++ that header takes longer to compile than a kernel, and its functions are not
// declared as vectors.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
#define NPU_VECTOR __attribute__((simd("notinbranch"), const))
#endif
#endif
#ifndef NPU_VECTOR
#define NPU_VECTOR __attribute__((const))
#endif
#define NPU_SCALAR __attribute__((const))

extern "C" {
#define NPU_DECLARE_1(kind, name) \
  kind float name##f(float) noexcept; \
  kind double name(double) noexcept;
#define NPU_DECLARE_2(kind, name) \
  kind float name##f(float, float) noexcept; \
  kind double name(double, double) noexcept;
NPU_DECLARE_1(NPU_VECTOR, acos)
NPU_DECLARE_1(NPU_VECTOR, acosh)
NPU_DECLARE_1(NPU_VECTOR, asin)
NPU_DECLARE_1(NPU_VECTOR, asinh)
NPU_DECLARE_1(NPU_VECTOR, atan)
NPU_DECLARE_1(NPU_VECTOR, atanh)
NPU_DECLARE_1(NPU_VECTOR, cbrt)
NPU_DECLARE_1(NPU_VECTOR, cos)
NPU_DECLARE_1(NPU_VECTOR, cosh)
NPU_DECLARE_1(NPU_VECTOR, erf)
NPU_DECLARE_1(NPU_VECTOR, erfc)
NPU_DECLARE_1(NPU_VECTOR, exp)
NPU_DECLARE_1(NPU_VECTOR, exp10)
NPU_DECLARE_1(NPU_VECTOR, exp2)
NPU_DECLARE_1(NPU_VECTOR, expm1)
NPU_DECLARE_1(NPU_VECTOR, log)
NPU_DECLARE_1(NPU_VECTOR, log10)
NPU_DECLARE_1(NPU_VECTOR, log1p)
NPU_DECLARE_1(NPU_VECTOR, log2)
NPU_DECLARE_1(NPU_VECTOR, sin)
NPU_DECLARE_1(NPU_VECTOR, sinh)
NPU_DECLARE_1(NPU_VECTOR, tan)
NPU_DECLARE_1(NPU_VECTOR, tanh)
NPU_DECLARE_2(NPU_VECTOR, atan2)
NPU_DECLARE_2(NPU_VECTOR, hypot)
NPU_DECLARE_2(NPU_VECTOR, pow)
NPU_DECLARE_1(NPU_SCALAR, j0)
NPU_DECLARE_1(NPU_SCALAR, j1)
NPU_DECLARE_1(NPU_SCALAR, y0)
NPU_DECLARE_1(NPU_SCALAR, y1)
NPU_DECLARE_1(NPU_SCALAR, lgamma)
NPU_DECLARE_1(NPU_SCALAR, tgamma)
NPU_DECLARE_1(NPU_SCALAR, logb)
NPU_DECLARE_2(NPU_SCALAR, fmod)
NPU_DECLARE_2(NPU_SCALAR, nextafter)
NPU_DECLARE_2(NPU_SCALAR, remainder)
#undef NPU_DECLARE_1
#undef NPU_DECLARE_2
}

namespace npu_triton {

#define NPU_MATH_1(name, of_float, of_double)           \
  NPU_INLINE float name(float x) { return of_float; }   \
  NPU_INLINE double name(double x) { return of_double; } \
  NPU_INLINE bf16 name(bf16 x) { return bf16(name(float(x))); } \
  NPU_INLINE f16 name(f16 x) { return f16(name(float(x))); }
#define NPU_LIBM_1(name) NPU_MATH_1(m_##name, ::name##f(x), ::name(x))
#define NPU_BUILTIN_1(name) NPU_MATH_1(m_##name, __builtin_##name##f(x), __builtin_##name(x))
NPU_LIBM_1(acos)
NPU_LIBM_1(acosh)
NPU_LIBM_1(asin)
NPU_LIBM_1(asinh)
NPU_LIBM_1(atan)
NPU_LIBM_1(atanh)
NPU_LIBM_1(cbrt)
NPU_LIBM_1(cos)
NPU_LIBM_1(cosh)
NPU_LIBM_1(erf)
NPU_LIBM_1(erfc)
NPU_LIBM_1(exp)
NPU_LIBM_1(exp10)
NPU_LIBM_1(exp2)
NPU_LIBM_1(expm1)
NPU_LIBM_1(log)
NPU_LIBM_1(log10)
NPU_LIBM_1(log1p)
NPU_LIBM_1(log2)
NPU_LIBM_1(sin)
NPU_LIBM_1(sinh)
NPU_LIBM_1(tan)
NPU_LIBM_1(tanh)
NPU_LIBM_1(j0)
NPU_LIBM_1(j1)
NPU_LIBM_1(y0)
NPU_LIBM_1(y1)
NPU_LIBM_1(lgamma)
NPU_LIBM_1(tgamma)
NPU_LIBM_1(logb)
NPU_BUILTIN_1(fabs)
NPU_BUILTIN_1(floor)
NPU_BUILTIN_1(ceil)
NPU_BUILTIN_1(trunc)
NPU_BUILTIN_1(rint)
NPU_BUILTIN_1(round)
NPU_BUILTIN_1(sqrt)
NPU_MATH_1(m_rsqrt, 1.0f / __builtin_sqrtf(x), 1.0 / __builtin_sqrt(x))
NPU_MATH_1(m_rcbrt, 1.0f / ::cbrtf(x), 1.0 / ::cbrt(x))
NPU_MATH_1(m_reciprocal, 1.0f / x, 1.0 / x)
NPU_MATH_1(m_saturate, !(x > 0.0f) ? 0.0f : x < 1.0f ? x : 1.0f, !(x > 0.0) ? 0.0 : x < 1.0 ? x : 1.0)
NPU_MATH_1(m_sinpi, ::sinf(3.14159265358979f * x), ::sin(3.14159265358979323846 * x))
NPU_MATH_1(m_cospi, ::cosf(3.14159265358979f * x), ::cos(3.14159265358979323846 * x))
NPU_MATH_1(m_normcdf, 0.5f * ::erfcf(-0.70710678f * x), 0.5 * ::erfc(-0.70710678118654752 * x))
#undef NPU_LIBM_1
#undef NPU_BUILTIN_1
#undef NPU_MATH_1

#define NPU_MATH_2(name, of_float, of_double)                       \
  NPU_INLINE float name(float x, float y) { return of_float; }      \
  NPU_INLINE double name(double x, double y) { return of_double; }  \
  NPU_INLINE bf16 name(bf16 x, bf16 y) { return bf16(name(float(x), float(y))); } \
  NPU_INLINE f16 name(f16 x, f16 y) { return f16(name(float(x), float(y))); }
NPU_MATH_2(m_atan2, ::atan2f(x, y), ::atan2(x, y))
NPU_MATH_2(m_hypot, ::hypotf(x, y), ::hypot(x, y))
NPU_MATH_2(m_rhypot, 1.0f / ::hypotf(x, y), 1.0 / ::hypot(x, y))
NPU_MATH_2(m_pow, ::powf(x, y), ::pow(x, y))
NPU_MATH_2(m_fmod, ::fmodf(x, y), ::fmod(x, y))
NPU_MATH_2(m_nextafter, ::nextafterf(x, y), ::nextafter(x, y))
NPU_MATH_2(m_remainder, ::remainderf(x, y), ::remainder(x, y))
NPU_MATH_2(m_copysign, __builtin_copysignf(x, y), __builtin_copysign(x, y))
NPU_MATH_2(m_fdim, x > y ? x - y : 0.0f, x > y ? x - y : 0.0)
NPU_MATH_2(m_div, x / y, x / y)
NPU_MATH_2(m_mul, x* y, x* y)
NPU_MATH_2(m_add, x + y, x + y)
NPU_MATH_2(m_sub, x - y, x - y)
#undef NPU_MATH_2
NPU_INLINE float m_powi(float x, int32_t n) { return ::powf(x, float(n)); }
NPU_INLINE double m_powi(double x, int32_t n) { return ::pow(x, double(n)); }
NPU_INLINE float m_ldexp(float x, int32_t n) { return __builtin_ldexpf(x, n); }
NPU_INLINE double m_ldexp(double x, int32_t n) { return __builtin_ldexp(x, n); }

template <class T>
NPU_INLINE T m_fma(T a, T b, T c) {
  if constexpr (__is_same(T, double)) return __builtin_fma(a, b, c);
  return T(__builtin_fmaf(float(a), float(b), float(c)));
}
template <class T>
NPU_INLINE T m_absi(T value) {
  return value < 0 ? T(Unsigned<T>(0) - Unsigned<T>(value)) : value;
}
template <class T>
NPU_INLINE int32_t m_isnan(T value) {
  return __builtin_isnan(value);
}
template <class T>
NPU_INLINE int32_t m_isinf(T value) {
  return __builtin_isinf(value) != 0;
}
template <class T>
NPU_INLINE int32_t m_isfinite(T value) {
  return __builtin_isfinite(value);
}
template <class T>
NPU_INLINE int32_t m_signbit(T value) {
  return __builtin_signbit(value) != 0;
}
template <class T>
NPU_INLINE int32_t m_ilogb(T value) {
  return __builtin_ilogb(value);
}
template <class T>
NPU_INLINE int64_t m_llrint(T value) {
  return __builtin_llrint(value);
}
template <class T>
NPU_INLINE int64_t m_llround(T value) {
  return __builtin_llround(value);
}

template <class T>
NPU_INLINE int32_t m_clz(T value) {
  const uint64_t word = Unsigned<T>(value);
  return word == 0 ? int32_t(sizeof(T) * 8) : __builtin_clzll(word) - int32_t(64 - sizeof(T) * 8);
}
template <class T>
NPU_INLINE int32_t m_ctz(T value) {
  const uint64_t word = Unsigned<T>(value);
  return word == 0 ? int32_t(sizeof(T) * 8) : __builtin_ctzll(word);
}
template <class T>
NPU_INLINE int32_t m_ffs(T value) {
  return value == 0 ? 0 : m_ctz(value) + 1;
}
template <class T>
NPU_INLINE int32_t m_popc(T value) {
  return __builtin_popcountll(uint64_t(Unsigned<T>(value)));
}
template <class T>
NPU_INLINE T m_brev(T value) {
  Unsigned<T> word = Unsigned<T>(value), reversed = 0;
  for (unsigned bit = 0; bit < sizeof(T) * 8; bit++) {
    reversed = Unsigned<T>((reversed << 1) | (word & 1));
    word = Unsigned<T>(word >> 1);
  }
  return T(reversed);
}
NPU_INLINE int32_t m_byte_perm(int32_t x, int32_t y, int32_t selector) {
  const uint64_t bytes = uint64_t(uint32_t(x)) | uint64_t(uint32_t(y)) << 32;
  uint32_t result = 0;
  for (int place = 0; place < 4; place++)
    result |= uint32_t((bytes >> (((uint32_t(selector) >> (4 * place)) & 7) * 8)) & 0xff) << (8 * place);
  return int32_t(result);
}
NPU_INLINE int32_t m_mul24(int32_t a, int32_t b) {
  return int32_t(uint32_t((a << 8) >> 8) * uint32_t((b << 8) >> 8));
}

}  // namespace npu_triton
