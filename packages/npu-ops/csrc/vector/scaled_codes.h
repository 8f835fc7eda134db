// Codes in panels (vector/panels.h) times the scales of their groups as bf16, which holds such products exactly: in registers, by integer arithmetic. A scale
// of e8m0 (MXFP4, MXFP8) moves the exponent; one of e4m3 (NVFP4) has three bits behind its point and a code of e2m1 one, which adds half of the scale or nothing.
#pragma once

#include "vector/e4m3_panels.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)

// A code's value as bf16, times 2^(kLifted - 127): a scale of 2^(s - 127) then takes kLifted - s off the exponent, and saturation keeps zero.
constexpr int kLifted = 252;
struct LiftedCodes {
  uint16_t of[32];         // twice: the fifth bit of a place is another code's
  uint16_t powers[32];     // without what is behind the point
  uint16_t fractions[32];  // all bits where something is, else the sign's
};
constexpr LiftedCodes lifted_codes() {
  LiftedCodes t{};
  for (int i = 0; i < 32; ++i) {
    const int twice = kCodes[i % 16] - kCodesZero, size = twice < 0 ? -twice : twice;
    const int exponent = size < 2 ? -1 : size < 4 ? 0 : size < 8 ? 1 : 2;
    t.powers[i] = static_cast<uint16_t>(size ? (twice < 0) << 15 | (kLifted + exponent) << 7 : 0);
    t.of[i] = static_cast<uint16_t>(size ? t.powers[i] | (size << 7 >> (exponent + 1) & 0x7f) : 0);
    t.fractions[i] = static_cast<uint16_t>(size & (size - 1) ? 0xffff : 0x8000);
  }
  return t;
}
alignas(64) constexpr LiftedCodes kLiftedCodes = lifted_codes();

// The codes of 16 columns from 16 * j on of the pair-th pair of k, each in the lower four bits of a word.
NPU_INLINE __m512i e2m1_columns(const uint8_t* unit, int pair, int j) {
  const __m512i both = _mm512_broadcast_i64x4(load_raw<__m256i>(unit + pair * 32));
  return (__m512i)((Words32)both >> load_raw<Words32>(kNibbleShifts.of[j]));
}

// Where the bytes of 16 columns from 16 * j on go: into the upper bytes of a column's two words, above bytes that are zero.
struct UpperBytes {
  uint8_t of[kSums][64];
};
constexpr UpperBytes upper_bytes() {
  UpperBytes t{};
  for (int j = 0; j < kSums; ++j)
    for (int i = 0; i < 64; ++i) t.of[j][i] = static_cast<uint8_t>(i % 2 ? 16 * j + i / 4 : 32);
  return t;
}
alignas(64) constexpr UpperBytes kUpperBytes = upper_bytes();

// What a panel's scales take off the exponents of their pairs, where codes are `lifted`. Scales are kept from `lowest` on, and where no number would leave bf16.
NPU_INLINE void taken_off(__m512i (&off)[kSums], const uint8_t* scales, uint8_t lowest, uint8_t lifted) {
  typedef uint8_t Bytes32 __attribute__((vector_size(32)));
  const Bytes32 of = load_raw<Bytes32>(scales), low = Bytes32{} + lowest, high = Bytes32{} + lifted;
  const Bytes32 least = of < low ? low : of, kept = least > high ? high : least;
  const __m512i bytes = _mm512_zextsi256_si512((__m256i)(high - kept));
#pragma GCC unroll 2
  for (int j = 0; j < kSums; ++j) off[j] = (__m512i)((Words32)_mm512_permutex2var_epi8(bytes, load_raw<__m512i>(kUpperBytes.of[j]), bytes) >> 1);
}

// Scales of a panel's group of kUnits units, as what the bf16 of codes need of them: of 16 columns a register, in both halves of a column's lane.
struct Mxfp4Scales {
  using Source = Codes;
  static constexpr int64_t kUnits = 8;
  __m512i off[kSums];

  NPU_INLINE static Mxfp4Scales of(const uint8_t* scales) {
    Mxfp4Scales group;
    taken_off(group.off, scales, 2, kLifted);
    return group;
  }
  // The pair-th pair of k of a unit's columns from 16 * j on, times the scales.
  NPU_INLINE __m512bh columns(const uint8_t* unit, int pair, int j) const {
    return (__m512bh)_mm512_subs_epu16(_mm512_permutexvar_epi16(e2m1_columns(unit, pair, j), load_raw<__m512i>(kLiftedCodes.of)), off[j]);
  }
};

// The same of e4m3, whose exponents reach further. Zero has no sign, or something would be left of it (npu_ops/panels.py sees to that).
constexpr int kLiftedE4m3 = 246;
constexpr E4m3Values lifted_e4m3() {
  E4m3Values t{};
  for (int i = 0; i < 128; ++i) {  // zero too: gcc 12 takes a vector of which an element has no initialiser for all zero
    const int bits = i ? (kE4m3Values.upper[i] << 8 | kE4m3Values.lower[i]) + ((kLiftedE4m3 - 127) << 7) : 0;
    t.upper[i] = static_cast<uint8_t>(bits >> 8), t.lower[i] = static_cast<uint8_t>(bits & 0xff);
  }
  return t;
}
alignas(64) constexpr E4m3Values kLiftedE4m3Values = lifted_e4m3();

struct Mxfp8Scales {
  using Source = E4m3Codes;
  static constexpr int64_t kUnits = 8;
  __m512i off[kSums];

  NPU_INLINE static Mxfp8Scales of(const uint8_t* scales) {
    Mxfp8Scales group;
    taken_off(group.off, scales, 10, kLiftedE4m3);
    return group;
  }
  NPU_INLINE __m512bh columns(const uint8_t* unit, int pair, int j) const {
    __m512bh both[2];  // for either pair the compiler looks them up but once
    e4m3_columns(both, unit, j, kLiftedE4m3Values);
    return (__m512bh)_mm512_subs_epu16((__m512i)both[pair], off[j]);
  }
};

// Of each e4m3 but its sign: what it takes off the exponent of a lifted code, all for zero, in bytes; and what half of it adds to its bf16, which is a byte.
struct E4m3Scales {
  uint8_t lower[128], upper[128], half[128];
};
constexpr E4m3Scales e4m3_scales() {
  E4m3Scales t{};
  for (int i = 0; i < 128; ++i) {
    const int bits = kE4m3Values.upper[i] << 8 | kE4m3Values.lower[i], off = i ? (kLifted << 7) - bits : 0xffff;
    const float scale = __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
    t.lower[i] = static_cast<uint8_t>(off & 0xff), t.upper[i] = static_cast<uint8_t>(off >> 8);
    t.half[i] = static_cast<uint8_t>(static_cast<int>(__builtin_bit_cast(uint32_t, 1.5f * scale) >> 16) - bits);
  }
  return t;
}
alignas(64) constexpr E4m3Scales kE4m3Scales = e4m3_scales();

// Where the bytes of 32 columns go, twice each, so that unpacking words by themselves leaves the first 16 columns, and the last.
struct ByteOrder {
  uint8_t of[64];
};
constexpr ByteOrder bytes_twice() {
  ByteOrder order{};
  for (int i = 0; i < 64; ++i) order.of[i] = static_cast<uint8_t>(i / 16 * 4 + i / 2 % 4 + i % 16 / 8 * 16);
  return order;
}
alignas(64) constexpr ByteOrder kBytesTwice = bytes_twice();

struct Nvfp4Scales {
  using Source = Codes;
  static constexpr int64_t kUnits = 4;
  __m512i off[kSums], half[kSums];  // half: with the scale's sign

  NPU_INLINE static Nvfp4Scales of(const uint8_t* scales) {
    Nvfp4Scales group;
    const __m512i all = _mm512_broadcast_i64x4(load_raw<__m256i>(scales)), codes = _mm512_permutex2var_epi8(all, load_raw<__m512i>(kBytesTwice.of), all);
    const auto looked_up = [&](const uint8_t (&table)[128]) {
      return (U)_mm512_permutex2var_epi8(load_raw<__m512i>(table), codes, load_raw<__m512i>(table + 64));
    };
    const U lower = looked_up(kE4m3Scales.lower) & 0x00ff00ffu, upper = looked_up(kE4m3Scales.upper) & 0xff00ff00u;
    in_both_halves(group.off, lower | upper);
    in_both_halves(group.half, (looked_up(kE4m3Scales.half) & 0x00ff00ffu) | ((U)codes & 0x80008000u));
    return group;
  }
  NPU_INLINE __m512bh columns(const uint8_t* unit, int pair, int j) const {
    const __m512i codes = e2m1_columns(unit, pair, j), power = _mm512_subs_epu16(_mm512_permutexvar_epi16(codes, load_raw<__m512i>(kLiftedCodes.powers)), off[j]);
    const U more = (U)_mm512_permutexvar_epi16(codes, load_raw<__m512i>(kLiftedCodes.fractions)) & (U)half[j];
    return (__m512bh)((Words32)power + (Words32)more);
  }

  NPU_INLINE static void in_both_halves(__m512i (&to)[kSums], U words) {
    to[0] = _mm512_unpacklo_epi16((__m512i)words, (__m512i)words), to[1] = _mm512_unpackhi_epi16((__m512i)words, (__m512i)words);
  }
};

#endif

}  // namespace
}  // namespace npu_ops
