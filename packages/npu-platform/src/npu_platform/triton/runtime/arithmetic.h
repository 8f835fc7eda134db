// The element-wise operations of the dialects `arith` and `tt`, by their names there. Integers wrap; a division by zero,
// which in a masked lane is no error, gives zero instead of a signal.
#pragma once

#include <time.h>

#include <type_traits>

#include "types.h"

namespace npu_triton {

#define NPU_BINARY(name, expression) \
  template <class T>                 \
  NPU_INLINE T name(T a, T b) {      \
    using U = Unsigned<T>;           \
    (void)sizeof(U);                 \
    return T(expression);            \
  }
NPU_BINARY(addi, (std::is_same_v<T, bool> ? U(a) != U(b) : U(a) + U(b)))  // a number of one bit wraps as well
NPU_BINARY(subi, (std::is_same_v<T, bool> ? U(a) != U(b) : U(a) - U(b)))
NPU_BINARY(muli, uint64_t(U(a)) * uint64_t(U(b)))
NPU_BINARY(andi, a & b)
NPU_BINARY(ori, a | b)
NPU_BINARY(xori, a ^ b)
NPU_BINARY(shli, uint64_t(U(b)) >= sizeof(T) * 8 ? U(0) : U(U(a) << (b & T(sizeof(T) * 8 - 1))))
NPU_BINARY(shrui, uint64_t(U(b)) >= sizeof(T) * 8 ? U(0) : U(U(a) >> (b & T(sizeof(T) * 8 - 1))))
NPU_BINARY(shrsi, a >> (uint64_t(U(b)) >= sizeof(T) * 8 ? T(sizeof(T) * 8 - 1) : b))
NPU_BINARY(divsi, b == T(0) ? T(0) : b == T(-1) ? T(U(0) - U(a)) : T(a / b))
NPU_BINARY(remsi, b == T(0) || b == T(-1) ? T(0) : T(a % b))
NPU_BINARY(divui, b == T(0) ? U(0) : U(U(a) / U(b)))
NPU_BINARY(remui, b == T(0) ? U(0) : U(U(a) % U(b)))
NPU_BINARY(maxsi, a > b ? a : b)
NPU_BINARY(minsi, a < b ? a : b)
NPU_BINARY(maxui, U(a) > U(b) ? a : b)
NPU_BINARY(minui, U(a) < U(b) ? a : b)
#undef NPU_BINARY

// The clock that a GPU calls %globaltimer.
NPU_INLINE int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

template <class T>
NPU_INLINE T ceildivsi(T a, T b) {
  const T quotient = divsi<T>(a, b);
  return quotient + T(b != 0 && quotient * b != a && (a < 0) == (b < 0));
}
template <class T>
NPU_INLINE T floordivsi(T a, T b) {
  const T quotient = divsi<T>(a, b);
  return quotient - T(b != 0 && quotient * b != a && (a < 0) != (b < 0));
}
NPU_INLINE int32_t mulhiui(int32_t a, int32_t b) {
  return int32_t((uint64_t(uint32_t(a)) * uint64_t(uint32_t(b))) >> 32);
}
NPU_INLINE int64_t mulhiui(int64_t a, int64_t b) {
  return int64_t((unsigned __int128)(uint64_t(a)) * uint64_t(b) >> 64);
}
NPU_INLINE int32_t mulhisi(int32_t a, int32_t b) { return int32_t((int64_t(a) * int64_t(b)) >> 32); }
NPU_INLINE int64_t mulhisi(int64_t a, int64_t b) { return int64_t(((__int128)a * b) >> 64); }

#define NPU_FLOAT_BINARY(name, expression) \
  template <class T>                       \
  NPU_INLINE T name(T first, T second) {   \
    const Wide<T> a(first), b(second);     \
    return T(expression);                  \
  }
NPU_FLOAT_BINARY(addf, a + b)
NPU_FLOAT_BINARY(subf, a - b)
NPU_FLOAT_BINARY(mulf, a* b)
NPU_FLOAT_BINARY(divf, a / b)
NPU_FLOAT_BINARY(maxnumf, a > b || b != b ? a : b)  // a NaN yields to a number
NPU_FLOAT_BINARY(minnumf, a < b || b != b ? a : b)
NPU_FLOAT_BINARY(maximumf, a > b || a != a ? a : b)  // a NaN wins
NPU_FLOAT_BINARY(minimumf, a < b || a != a ? a : b)
#undef NPU_FLOAT_BINARY

template <class T>
NPU_INLINE T negf(T value) {
  return T(-Wide<T>(value));
}
template <class T>
NPU_INLINE T clampf(T value, T low, T high) {
  return minnumf<T>(maxnumf<T>(value, low), high);
}
template <class T>
NPU_INLINE T clampf_nan(T value, T low, T high) {
  return minimumf<T>(maximumf<T>(value, low), high);
}

// Comparisons: signed ones are C++'s own, of integers and ordered floats; these are the others.
#define NPU_COMPARE(name, expression)   \
  template <class T>                    \
  NPU_INLINE bool name(T a, T b) {      \
    using U = Unsigned<T>;              \
    (void)sizeof(U);                    \
    return expression;                  \
  }
NPU_COMPARE(eq, a == b)
NPU_COMPARE(ne, a != b)
NPU_COMPARE(slt, a < b)
NPU_COMPARE(sle, a <= b)
NPU_COMPARE(sgt, a > b)
NPU_COMPARE(sge, a >= b)
NPU_COMPARE(ult, U(a) < U(b))
NPU_COMPARE(ule, U(a) <= U(b))
NPU_COMPARE(ugt, U(a) > U(b))
NPU_COMPARE(uge, U(a) >= U(b))
#undef NPU_COMPARE
#define NPU_COMPARE_FLOAT(name, expression) \
  template <class T>                        \
  NPU_INLINE bool name(T first, T second) { \
    const Wide<T> a(first), b(second);      \
    return expression;                      \
  }
NPU_COMPARE_FLOAT(f_oeq, a == b)
NPU_COMPARE_FLOAT(f_one, a < b || a > b)
NPU_COMPARE_FLOAT(f_olt, a < b)
NPU_COMPARE_FLOAT(f_ole, a <= b)
NPU_COMPARE_FLOAT(f_ogt, a > b)
NPU_COMPARE_FLOAT(f_oge, a >= b)
NPU_COMPARE_FLOAT(f_ord, a == a && b == b)
NPU_COMPARE_FLOAT(f_uno, a != a || b != b)
NPU_COMPARE_FLOAT(f_ueq, !(a < b || a > b))
NPU_COMPARE_FLOAT(f_une, a != b)
NPU_COMPARE_FLOAT(f_ult, !(a >= b))
NPU_COMPARE_FLOAT(f_ule, !(a > b))
NPU_COMPARE_FLOAT(f_ugt, !(a <= b))
NPU_COMPARE_FLOAT(f_uge, !(a < b))
#undef NPU_COMPARE_FLOAT

template <class To, class From>
NPU_INLINE To extsi(From value) {
  return To(value);
}
template <class To>
NPU_INLINE To extsi(bool value) {
  return To(-To(value));
}
template <class To, class From>
NPU_INLINE To extui(From value) {
  return To(Unsigned<From>(value));
}
template <class To, class From>
NPU_INLINE To trunci(From value) {
  if constexpr (__is_same(To, bool)) return (value & From(1)) != 0;
  return To(value);
}
#if defined(__x86_64__) && !defined(__AVX512DQ__)
// 64-bit integers, for which vectors of AVX2 have no conversion: both halves become parts of a double of their own, and
// only the sum rounds. `shift` is what was added to the number to have no sign, 0 or 2^63.
NPU_INLINE double double_of(uint64_t value, double shift) {
  const double high = bits<double>((value >> 32) | 0x4530000000000000ull) - (0x1.00000001p84 + shift);
  return high + bits<double>((value & 0xffffffffull) | 0x4330000000000000ull);
}
NPU_INLINE double double_of(uint64_t value) { return double_of(value, 0.0); }
NPU_INLINE double double_of(int64_t value) { return double_of(uint64_t(value) ^ (1ull << 63), 0x1p63); }
// What a double cannot hold tells a float only whether something is left: one bit does for eleven, nothing rounds twice.
template <class T>
NPU_INLINE float float_of(T value) {
  const T short_enough = T((((value & 2047) + 2047) | value) & T(-2048));
  const bool fits = value <= T(1ll << 53) && (T(-1) > 0 || value >= T(-(1ll << 53)));
  return float(double_of(fits ? value : short_enough));
}
NPU_INLINE void convert_wide(double& to, int64_t value) { to = double_of(value); }
NPU_INLINE void convert_wide(double& to, uint64_t value) { to = double_of(value); }
NPU_INLINE void convert_wide(float& to, int64_t value) { to = float_of(value); }
NPU_INLINE void convert_wide(float& to, uint64_t value) { to = float_of(value); }
#endif
template <class To, class From>
NPU_INLINE void convert_wide(To& to, From value) {
  to = To(value);
}
template <class To, class From>
NPU_INLINE To sitofp(From value) {
  if constexpr (__is_same(From, bool)) return To(-Wide<To>(value));
  Wide<To> wide;
  convert_wide(wide, value);
  return To(wide);
}
template <class To, class From>
NPU_INLINE To uitofp(From value) {
  Wide<To> wide;
  convert_wide(wide, Unsigned<From>(value));
  return To(wide);
}
template <class To, class From>
NPU_INLINE To fptosi(From value) {
  return To(Wide<From>(value));
}
template <class To, class From>
NPU_INLINE To fptoui(From value) {
  if constexpr (sizeof(To) < 8) return To(int64_t(Wide<From>(value)));
  return To(Unsigned<To>(Wide<From>(value)));
}
template <class To, class From>
NPU_INLINE To convertf(From value) {
  if constexpr (__is_same(From, double) || __is_same(To, double)) return To(Wide<To>(Wide<From>(value)));
  return To(float(value));
}
// Towards zero: what was rounded away from it goes back by one step.
NPU_INLINE uint16_t code_of(bf16 value) { return value.raw; }
NPU_INLINE uint16_t code_of(f16 value) { return bits<uint16_t>(value); }
template <int M, int B, bool I, bool U, uint8_t L>
NPU_INLINE uint8_t code_of(f8<M, B, I, U, L> value) {
  return value.raw;
}
NPU_INLINE uint32_t code_of(float value) { return bits<uint32_t>(value); }
template <class To, class From>
NPU_INLINE To convertf_rtz(From value) {
  const float exact = float(value);
  To result(exact);
  const float magnitude = __builtin_fabsf(float(result));
  using Code = decltype(code_of(result));
  if (magnitude > __builtin_fabsf(exact)) result = bits<To>(Code(code_of(result) - 1));
  return result;
}

template <class T>
NPU_INLINE T select(bool condition, T if_true, T if_false) {
  return condition ? if_true : if_false;
}

// Stochastic rounding to half precision: 13 random bits are added below the mantissa, then it is cut.
NPU_INLINE f16 round_stochastically(float value, int32_t random) {
  const uint32_t word = bits<uint32_t>(value), sign = word & 0x80000000u;
  const float magnitude = bits<float>(word ^ sign);
  if (!(magnitude < 65504.0f)) return f16(magnitude != magnitude ? value : __builtin_copysignf(65504.0f, value));
  const bool subnormal = magnitude < 6.103515625e-05f;
  const float shifted = subnormal ? magnitude + 0.5f : magnitude;  // its unit is that of the subnormal numbers
  const uint32_t cut = (bits<uint32_t>(shifted) + (uint32_t(random) & 0x1fffu)) & ~0x1fffu;
  const float rounded = bits<float>(cut) - (subnormal ? 0.5f : 0.0f);
  return f16(bits<float>(bits<uint32_t>(rounded) | sign));
}

// A float as E2M1, of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6; to nearest, ties to even, saturating.
NPU_INLINE int32_t to_e2m1(float value) {
  const float a = __builtin_fabsf(value);
  const int32_t code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return (value != value ? 7 : code) | (__builtin_signbit(value) ? 8 : 0);
}
NPU_INLINE int32_t pack_e2m1(float high, float low) { return (to_e2m1(high) << 4) | to_e2m1(low); }
NPU_INLINE float from_e2m1(int32_t code) {
  const int32_t exponent = (code >> 1) & 3, mantissa = code & 1;
  const float magnitude = exponent == 0 ? 0.5f * float(mantissa) : (1.0f + 0.5f * float(mantissa)) * float(1 << (exponent - 1));
  return (code & 8) ? -magnitude : magnitude;
}
// A scale of microscaling formats: a power of two by its exponent.
NPU_INLINE float from_e8m0(int8_t code) {
  const uint32_t exponent = uint8_t(code);
  return bits<float>(exponent == 255 ? 0x7fc00000u : exponent == 0 ? 0x00400000u : exponent << 23);
}

// The largest multiple of elements of a row of `Size` at whose last one `is_true` holds, which holds for none behind one
// for which it does not.
template <int Size, int Multiple, class IsTrue>
NPU_INLINE int true_until(IsTrue is_true) {
  int low = 0, high = Size / Multiple;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (is_true(middle * Multiple - 1)) low = middle;
    else high = middle - 1;
  }
  return low * Multiple;
}

}  // namespace npu_triton
