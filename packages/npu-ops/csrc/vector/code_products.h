// Products of codes in panels (vector/panels.h) by rows of bf16 on AVX512_BF16: codes become bf16 in registers, which holds their values exactly, and what a
// block's products add up to is scaled in float. Nothing is rounded before the result.
#pragma once

#include "vector/e4m3_panels.h"
#include "vector/past_caches.h"
#include "vector/strips.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)

constexpr int64_t kCodeDepth = 512;   // elements of k at a time, at most
constexpr int64_t kCodeBlocks = 8;    // scaled apart, at most
constexpr int kRowsBesideCodes = 12;  // of x: beside the weights of a panel their sums fill the registers
constexpr int kRowsOfTwoPanels = 4;   // so few meet two panels at a time: each product of one alone would wait for that before it

// What codes stand for without their zero points, as bf16: the lower five bits of a word are the place, of which four are its code.
struct CodeValues {
  uint16_t of[32];
};
constexpr CodeValues code_values() {
  CodeValues values{};
  for (int i = 0; i < 32; ++i) values.of[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, static_cast<float>(i % 16 - 8)) >> 16);
  return values;
}
alignas(64) constexpr CodeValues kCodeValues = code_values();

// The pair-th pair of k of a unit's columns from 16 * j on.
template <class Source>
NPU_INLINE __m512bh code_columns(const uint8_t* unit, int pair, int j) {
  const __m512i codes = _mm512_broadcast_i64x4(load_raw<__m256i>(unit + pair * 32));
  return (__m512bh)_mm512_permutexvar_epi16((__m512i)((Words32)codes >> load_raw<Words32>(kNibbleShifts.of[j])), load_raw<__m512i>(kCodeValues.of));
}
template <>
NPU_INLINE __m512bh code_columns<Bytes>(const uint8_t* unit, int pair, int j) {
  const auto eight = [&](int vector) {
    return (__m512)to_floats((I)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + vector * 32 + pair * 16))));
  };
  return _mm512_cvtne2ps_pbh(eight(2 * j + 1), eight(2 * j));
}

// What rows of x have for each block of k beside such codes, if anything: the sum of their elements, for zero points, or a scale.
enum class OfBlocks { sum, scale };
template <class Source>
constexpr OfBlocks kOfBlocks = OfBlocks::sum;
template <>
constexpr OfBlocks kOfBlocks<E4m3Codes> = OfBlocks::scale;

// Rows of x for them: whole units.
struct CodeRows {
  bf16* data;
  int64_t stride;
  float* of_blocks;  // [rows][blocks], or null
  int64_t block, blocks;

  NPU_INLINE PlainRows x() const { return {data, stride}; }
  // Rows from `from` on.
  NPU_INLINE CodeRows rows(int64_t from) const {
    return {data + from * stride, stride, of_blocks ? of_blocks + from * blocks : nullptr, block, blocks};
  }
};

// Elements of k that are added up before they are scaled, where each `group` has a scale: a divisor of 128, a multiple of 128, or at least k.
NPU_INLINE int64_t code_block(int64_t group, int64_t k) {
  if (group >= k || group % kCodeDepth == 0) return kCodeDepth;
  return group < kCodeDepth ? group : 128;
}

// Room for `count` rows of k elements in such blocks, in the caller's scratch slots `slot` and, if rows have something for each, `slot` + 1.
inline CodeRows room_for_codes(int slot, int64_t count, int64_t k, int64_t group, bool of_blocks) {
  const int64_t stride = plain_stride(k), block = code_block(group, k), blocks = ceil_div(k, block);
  bf16* rows = static_cast<bf16*>(thread_scratch(slot, sizeof(bf16) * (count * stride + 1)));
  return {rows, stride, of_blocks ? static_cast<float*>(thread_scratch(slot + 1, sizeof(float) * (count * blocks + 1))) : nullptr, block, blocks};
}

// Some blocks of k of P panels: their scales, [blocks][P], and their codes.
template <int P>
struct CodeGroups {
  ColumnScales scales[kCodeBlocks][P];
  const uint8_t* codes;
  int64_t apart;        // bytes from a panel's codes to the next one's
  int64_t units, size;  // in all, and of a block
};

// y[P][M][kColumns], `ldy` from a panel to the next, += blocks of P panels by M rows of x. of_blocks: what these rows have for them, `blocks` from
// a row to the next, or null. In one order for all M and P.
template <class Source, int M, int P, bool kHasBlocks>
__attribute__((noinline)) void code_tile(float* y, int64_t ldy, const CodeGroups<P>& w, const PlainRows& x, const float* of_blocks, int64_t blocks) {
  const bf16* rows[(M + 2) / 3];  // each third one: the others are once and twice the stride from it
#pragma GCC unroll 4
  for (int m = 0; m < (M + 2) / 3; ++m) rows[m] = x.data + 3 * m * x.stride;
  const uint8_t* codes = w.codes;
  for (int64_t g = 0, end = 0; end < w.units; ++g) {
    end = lesser(end + w.size, w.units);
    F acc[P][M][kSums] = {};
#pragma GCC unroll 1
    for (; codes < w.codes + end * Source::kUnit; codes += Source::kUnit) {
#pragma GCC unroll 4
      for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
        for (int64_t line = 0; line < Source::kUnit; line += 64) __builtin_prefetch(codes + i * w.apart + kAheadUnits * Source::kUnit + line);
      [[maybe_unused]] __m512bh both[P][kSums][2];
      if constexpr (__is_same(Source, E4m3Codes)) {
#pragma GCC unroll 4
        for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < kSums; ++j) e4m3_columns(both[i][j], codes + i * w.apart, j, kE4m3Values);
      }
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        __m512bh columns[P][kSums];
#pragma GCC unroll 4
        for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < kSums; ++j)
            if constexpr (__is_same(Source, E4m3Codes)) columns[i][j] = both[i][j][pair];
            else columns[i][j] = code_columns<Source>(codes + i * w.apart, pair, j);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          int32_t elements;
          memcpy(&elements, rows[m / 3] + m % 3 * x.stride + 2 * pair, sizeof elements);
          const __m512bh of_x = (__m512bh)(elements - I{});
#pragma GCC unroll 4
          for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < kSums; ++j) acc[i][m][j] = (F)_mm512_dpbf16_ps((__m512)acc[i][m][j], columns[i][j], of_x);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < (M + 2) / 3; ++m) rows[m] += 4;
    }
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < kSums; ++j) {
        const ColumnScales& scales = w.scales[g][i];
        const F scale = scales.scale[j];
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          float* to = y + i * ldy + m * kColumns + j * W;
          const bool scales_row = kHasBlocks && kOfBlocks<Source> == OfBlocks::scale, adds_sum = kHasBlocks && kOfBlocks<Source> == OfBlocks::sum;
          const F sum = fma(acc[i][m][j], scales_row ? scale * set1(of_blocks[m * blocks + g]) : scale, load(to));
          store(to, adds_sum ? fma(set1(of_blocks[m * blocks + g]), scales.offset[j], sum) : sum);
        }
      }
    __atomic_signal_fence(__ATOMIC_SEQ_CST);  // or the compiler would keep y in registers that it does not have
  }
}

template <class Source, int M, int P>
inline void code_tile_of(int64_t rows, float* y, int64_t ldy, const CodeGroups<P>& w, const PlainRows& x, const float* of_blocks, int64_t blocks) {
  if constexpr (M > 0) {
    if (rows == M && of_blocks) return code_tile<Source, M, P, true>(y, ldy, w, x, of_blocks, blocks);
    if (rows == M) return code_tile<Source, M, P, false>(y, ldy, w, x, nullptr, 0);
    code_tile_of<Source, M - 1, P>(rows, y, ldy, w, x, of_blocks, blocks);
  }
}

// y[P][m][kColumns] = P panels of `codes` by m rows of x of k elements, M of them at a time at most. scales_of(panel, block): ColumnScales.
template <class Source, int M, int P, class ScalesOf>
inline void code_tiles(float* y, const uint8_t* codes, int64_t k, int64_t m, const CodeRows& rows, const Streams<P>& panel, const ScalesOf& scales_of) {
  const int64_t units = ceil_div(k, 4), tiles = ceil_div(m, M), ldy = m * kColumns, together = lesser(rows.block < 32 ? kCodeBlocks : 4, kCodeDepth / rows.block);
  memset(y, 0, sizeof(float) * P * ldy);
  CodeGroups<P> w;
  w.apart = panel.apart * units * Source::kUnit, w.size = rows.block / 4;
  for (int64_t b = 0; b < rows.blocks; b += together) {
    const int64_t unit = b * w.size;
    w.codes = codes + (panel[0] * units + unit) * Source::kUnit, w.units = lesser(together * w.size, units - unit);
    for (int64_t g = 0; g < lesser(together, rows.blocks - b); ++g)
      for (int i = 0; i < P; ++i) w.scales[g][i] = scales_of(panel[i], b + g);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * m / tiles;
      const CodeRows x = rows.rows(row);
      const float* of_blocks = x.of_blocks ? x.of_blocks + b : nullptr;
      code_tile_of<Source, M, P>((t + 1) * m / tiles - row, y + row * kColumns, ldy, w, {x.data + 4 * unit, x.stride}, of_blocks, x.blocks);
    }
  }
}

// Panels [first, last) by m rows of x: tiles<M>(y[P][m][kColumns], panel) has P of them multiplied, put(y[m][kColumns], panel) is called with each one's.
// Takes the thread's scratch slot 1.
template <class Tiles, class Put>
inline void in_code_streams(int64_t m, int64_t first, int64_t last, const Tiles& tiles, const Put& put) {
  const auto streams = [&]<int P, int M>() {
    float* y = static_cast<float*>(thread_scratch(1, sizeof(float) * P * m * kColumns));
    const int64_t each = (last - first) / P;
    for (int64_t end = first + each; first < end; ++first) {
      const Streams<P> panel{first, each};
      tiles.template operator()<M>(y, panel);
      for (int i = 0; i < P; ++i) put(y + i * m * kColumns, panel[i]);
    }
    first += (P - 1) * each;
  };
  if (m <= kRowsOfTwoPanels) streams.template operator()<2, kRowsOfTwoPanels>();
  streams.template operator()<1, kRowsBesideCodes>();
}

// The same of `codes` and rows of k elements.
template <class Source, class ScalesOf, class Put>
inline void code_panels(const uint8_t* codes, int64_t k, int64_t m, const CodeRows& rows, int64_t first, int64_t last, const ScalesOf& scales_of,
                        const Put& put) {
  const auto tiles = [&]<int M, int P>(float* y, const Streams<P>& panel) { code_tiles<Source, M>(y, codes, k, m, rows, panel, scales_of); };
  in_code_streams(m, first, last, tiles, put);
}

#endif

}  // namespace
}  // namespace npu_ops
