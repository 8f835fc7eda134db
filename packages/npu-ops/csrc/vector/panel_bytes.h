// Units of panels (vector/panels.h) with the four bytes of a column together, as instructions for products of bytes want them.
#pragma once

#include "vector/panels.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512)

constexpr int kUnitRows = kColumns / 16;  // a unit's registers: [16 columns][4 of k]

typedef int8_t Bytes64 __attribute__((vector_size(64)));
typedef uint16_t Words32 __attribute__((vector_size(64)));

// Where the 16-bit words of a unit in a panel go. Of 4 bits: the words of the lower bytes twice, and those of the upper.
struct WordOrder {
  uint16_t four[2][32], eight[32], shift[32];
};
constexpr WordOrder word_order() {
  WordOrder order{};
  for (int i = 0; i < 32; ++i) {
    const int column = i % 16 / 2, pair = i % 2;
    for (int j = 0; j < 2; ++j) order.four[j][i] = static_cast<uint16_t>(2 * (pair * 8 + column) + j);
    order.eight[i] = static_cast<uint16_t>(i / 16 * 16 + pair * 8 + column);
    order.shift[i] = static_cast<uint16_t>(i / 16 * 4);
  }
  return order;
}
alignas(64) constexpr WordOrder kWordOrder = word_order();
alignas(16) constexpr uint8_t kBytesOfPairs[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};

NPU_INLINE __m512i in_each_lane(const uint8_t (&bytes)[16]) { return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes))); }

// A unit's registers. 4-bit codes come without a sign.
NPU_INLINE void unit_rows(__m512i (&rows)[kUnitRows], Nibbles, const uint8_t* unit) {
  // of each pair of k the lower bytes beside one another, and the upper bytes: they hold the columns' vectors 0 and 1, and 2 and 3
  const __m512i words = _mm512_shuffle_epi8(load_raw<__m512i>(unit), in_each_lane(kBytesOfPairs));
#pragma GCC unroll 2
  for (int j = 0; j < kUnitRows; ++j) {
    const __m512i both = _mm512_permutexvar_epi16(load_raw<__m512i>(kWordOrder.four[j]), words);
    rows[j] = (__m512i)((U)((Words32)both >> load_raw<Words32>(kWordOrder.shift)) & 0x0f0f0f0fu);
  }
}
NPU_INLINE void unit_rows(__m512i (&rows)[kUnitRows], Codes, const uint8_t* unit) {
  unit_rows(rows, Nibbles{}, unit);
  for (int j = 0; j < kUnitRows; ++j) rows[j] = _mm512_shuffle_epi8(in_each_lane(kCodes), rows[j]);
}
NPU_INLINE void unit_rows(__m512i (&rows)[kUnitRows], Bytes, const uint8_t* unit) {
  for (int j = 0; j < kUnitRows; ++j)
    rows[j] = _mm512_permutexvar_epi16(load_raw<__m512i>(kWordOrder.eight), load_raw<__m512i>(unit + j * 64));
}

// Where the nibbles of columns 0 to 15, or 16 to 31, are in the words of a pair of k, twice.
struct NibbleShifts {
  uint16_t of[kUnitRows][32];
};
constexpr NibbleShifts nibble_shifts() {
  NibbleShifts t{};
  for (int j = 0; j < kUnitRows; ++j)
    for (int i = 0; i < 32; ++i) t.of[j][i] = static_cast<uint16_t>(8 * j + i / 16 * 4);
  return t;
}
alignas(64) constexpr NibbleShifts kNibbleShifts = nibble_shifts();

// The scales of 32 columns' block of k, and what these make of its zero points.
struct ColumnScales {
  F scale[kUnitRows], offset[kUnitRows];
};

// From 16 numbers and then their 16 neighbours, in one register, to pairs.
struct PairOrder {
  uint16_t of[32];
};
constexpr PairOrder pair_order() {
  PairOrder order{};
  for (int i = 0; i < 32; ++i) order.of[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  return order;
}
alignas(64) constexpr PairOrder kPairsOfHalves = pair_order();

// The columns' zero points in the places of their weights.
NPU_INLINE void unit_zeros(Bytes64 (&out)[kUnitRows], const int8_t* zeros) {
  for (int j = 0; j < kUnitRows; ++j) {
    const U of = (U)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + j * 16)));
    out[j] = (Bytes64)((of & 0xffu) * 0x01010101u);
  }
}

#endif

}  // namespace
}  // namespace npu_ops
