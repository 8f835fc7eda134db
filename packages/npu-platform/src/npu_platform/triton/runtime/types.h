// The number types of Triton that C++ does not have, and what every other header needs.
#pragma once

#include <stdint.h>

#define NPU_INLINE static inline __attribute__((always_inline))

namespace npu_triton {

template <class To, class From>
NPU_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bitcast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Narrow numbers are copied by their field: g++ 12 has no vectors for a loop that copies a struct into an array.
struct bf16 {
  uint16_t raw;
  bf16() = default;
  bf16(const bf16& other) : raw(other.raw) {}
  bf16& operator=(const bf16& other) {
    raw = other.raw;
    return *this;
  }
  explicit bf16(float value) {
    const uint32_t word = bits<uint32_t>(value);
    const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;  // to nearest, ties to even
    raw = uint16_t(value != value ? 0x7fc0u : rounded);
  }
  operator float() const { return bits<float>(uint32_t(raw) << 16); }
};

// Not _Float16, which keeps g++ 12 from vectors, with AVX512-FP16 as well as without.
struct f16 {
  uint16_t raw;
  f16() = default;
  f16(const f16& other) : raw(other.raw) {}
  f16& operator=(const f16& other) {
    raw = other.raw;
    return *this;
  }
  explicit f16(float value) {
    const uint32_t word = bits<uint32_t>(value), magnitude = word & 0x7fffffffu;
    // Below the normal numbers a sum with a half rounds to the step of the subnormal ones; to nearest, ties to even.
    const uint32_t small = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - bits<uint32_t>(0.5f);
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (uint32_t(127 - 15) << 23);
    const uint32_t normal = magnitude < 0x47800000u ? rounded >> 13 : 0x7c00u;
    const uint32_t code = magnitude < 0x38800000u ? small : normal;
    raw = uint16_t((magnitude > 0x7f800000u ? 0x7e00u : code) | ((word >> 16) & 0x8000u));
  }
  operator float() const {
    const float positive = bits<float>(uint32_t(raw & 0x7fffu) << 13) * 0x1p112f;
    const uint32_t word = bits<uint32_t>(positive) | (uint32_t(raw & 0x8000u) << 16);
    return bits<float>((raw & 0x7c00u) == 0x7c00u ? word | 0x7f800000u : word);
  }
};

// A number of 8 bits: Mantissa and bias as named; Infinite: the top exponent holds infinities and NaNs (E5M2), else one
// code is NaN; Unsigned: no negative zero, its code is the NaN (FNUZ). Conversions saturate, as on NVIDIA's GPUs.
template <int Mantissa, int Bias, bool Infinite, bool Unsigned, uint8_t Largest>
struct f8 {
  uint8_t raw;
  f8() = default;
  f8(const f8& other) : raw(other.raw) {}
  f8& operator=(const f8& other) {
    raw = other.raw;
    return *this;
  }
  explicit f8(float value) {
    const uint32_t word = bits<uint32_t>(value), magnitude = word & 0x7fffffffu;
    const float positive = bits<float>(magnitude);
    constexpr int shift = 23 - Mantissa;
    // Below the normal numbers a sum with this power of two rounds to the step of the subnormal ones.
    const float magic = bits<float>(uint32_t(127 + 24 - Bias - Mantissa) << 23);
    const uint32_t small = bits<uint32_t>(positive + magic) - bits<uint32_t>(magic);
    const uint32_t rounded = magnitude + ((1u << (shift - 1)) - 1u) + ((magnitude >> shift) & 1u);
    const uint32_t large = (rounded - (uint32_t(127 - Bias) << 23)) >> shift;
    uint32_t code = magnitude < (uint32_t(128 - Bias) << 23) ? small : large;
    code = code > Largest ? Largest : code;
    const uint32_t sign = (word >> 24) & 0x80u;
    code |= Unsigned && code == 0 ? 0u : sign;
    raw = uint8_t(value != value ? (Unsigned ? 0x80u : 0x7fu) : code);
  }
  operator float() const {
    const uint32_t magnitude = raw & 0x7fu;
    const float positive = bits<float>(magnitude << (23 - Mantissa)) * bits<float>(uint32_t(254 - Bias) << 23);
    const uint32_t sign = uint32_t(raw & 0x80u) << 24;
    uint32_t word = bits<uint32_t>(positive) | sign;
    if (Infinite) word = magnitude > Largest ? (magnitude == Largest + 1u ? 0x7f800000u | sign : 0x7fc00000u) : word;
    if (!Infinite && !Unsigned) word = magnitude > Largest ? 0x7fc00000u : word;
    if (Unsigned) word = raw == 0x80u ? 0x7fc00000u : word;
    return bits<float>(word);
  }
};
using f8E4M3FN = f8<3, 7, false, false, 0x7e>;
using f8E5M2 = f8<2, 15, true, false, 0x7b>;
using f8E4M3FNUZ = f8<3, 8, false, true, 0x7f>;
using f8E5M2FNUZ = f8<2, 16, false, true, 0x7f>;

// In what a type computes: the narrow floating-point types in float, all others in themselves.
template <class T>
struct WideOf {
  using type = float;
};
#define NPU_COMPUTES_ITSELF(T) \
  template <>                  \
  struct WideOf<T> {           \
    using type = T;            \
  };
NPU_COMPUTES_ITSELF(double)
NPU_COMPUTES_ITSELF(bool)
NPU_COMPUTES_ITSELF(int8_t)
NPU_COMPUTES_ITSELF(int16_t)
NPU_COMPUTES_ITSELF(int32_t)
NPU_COMPUTES_ITSELF(int64_t)
#undef NPU_COMPUTES_ITSELF
template <class T>
using Wide = typename WideOf<T>::type;

// The unsigned integers in which a signed type wraps around.
template <class T>
struct UnsignedOf {
  using type = T;
};
template <>
struct UnsignedOf<int8_t> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<int16_t> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<int32_t> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<int64_t> {
  using type = uint64_t;
};
template <class T>
using Unsigned = typename UnsignedOf<T>::type;

// One program of the launched grid.
struct Program {
  int32_t x, y, z, size_x, size_y, size_z;
};

}  // namespace npu_triton
