// Integer weights in panels of 32 output columns, and their products with 16-bit rows: sums exact in 32 bits.
//
// A panel's unit is 32 columns by 4 elements of k, packed by npu_ops/panels.py:
//   8 bits: int8 [4 vectors][2 pairs of k][8 columns][2 of the pair]
//   4 bits: the same order, but the four vectors share 16-bit words, a nibble each: uint16 [2 pairs][8 columns][2 of the pair]
// so that kernels of 256 and of 512 bits read whole registers that feed the instruction for products of 16-bit pairs.
#pragma once

#include "vector/parts.h"

namespace npu_ops {
namespace {

constexpr int64_t kColumns = 32;      // of a panel
constexpr int kVectors = 4;           // of eight columns each
constexpr int kPairs = W / 8;         // pairs of k that a vector holds of its eight columns
constexpr int kStep = 2 * kPairs;     // elements of k a step
constexpr int kSums = kColumns / W;   // vectors of one number a column

constexpr int64_t kAheadUnits = 32;   // how far ahead weights are fetched

// Panels that more rows than a few meet one after the other.
constexpr int64_t kPanelsAtATime = 2;
NPU_INLINE int64_t panels_at_a_time(int64_t rows) { return rows > 16 ? kPanelsAtATime : 1; }

// Panels that take turns beside one row: each is a stream of memory, which is fetched so many bytes ahead.
#if defined(__AVX2__) && !defined(NPU_AVX512)
constexpr int kStreams = 2;
template <class Source>
constexpr int64_t kStreamAhead = 1024;
#else
constexpr int kStreams = 1;
template <class Source>
constexpr int64_t kStreamAhead = kAheadUnits * Source::kUnit;
#endif

// For each lane sum + a[0] * b[0] + a[1] * b[1] of its two 16-bit halves.
NPU_INLINE I add_pair_products(I sum, I a, I b) {
#if defined(NPU_AVX512)
  return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  I low = ((I)((U)a << 16) >> 16) * ((I)((U)b << 16) >> 16);
  return sum + low + (a >> 16) * (b >> 16);
#endif
}

// The pairs of x that the lanes of a step meet.
NPU_INLINE I pairs_of(const int16_t* x) {
#if defined(NPU_AVX512)
  int64_t two;
  memcpy(&two, x, sizeof two);
  return (I)_mm512_permutexvar_epi32(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), _mm512_set1_epi64(two));
#elif defined(__AVX2__)
  return (I)_mm256_broadcast_ss(reinterpret_cast<const float*>(x));  // from memory: it takes no port of the arithmetic
#else
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return pair - I{};
#endif
}

// Eight values for the lanes of the first pair, zero for the others.
NPU_INLINE I first_pair(const int8_t* p) {
#if defined(NPU_AVX512)
  return (I)_mm512_zextsi256_si512(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  I v;
  for (int i = 0; i < W; ++i) v[i] = p[i];
  return v;
#endif
}

// ---- between floats, integers of 32 bits and their low halves ----
NPU_INLINE F to_floats(I v) {
#if defined(NPU_AVX512)
  return (F)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, F);
#endif
}
NPU_INLINE I rounded(F x) {
#if defined(NPU_AVX512)
  return (I)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (I)_mm256_cvtps_epi32((__m256)x);
#else
  I v;
  for (int i = 0; i < W; ++i) v[i] = static_cast<int32_t>(__builtin_rintf(x[i]));
  return v;
#endif
}
// the low halves of the lanes
NPU_INLINE void store_low(int16_t* p, I v, Whole) {
  U16 h = narrow((U)v & 0xffffu);
  memcpy(p, &h, sizeof h);
}
NPU_INLINE void store_low(int16_t* p, I v, int64_t n) {
  U16 h = narrow((U)v & 0xffffu);
  memcpy(p, &h, 2 * n);
}
NPU_INLINE int32_t sum_of(I v) {
  int32_t s = 0;
  for (int i = 0; i < W; ++i) s += v[i];
  return s;
}
NPU_INLINE I limited(I v, int32_t low, int32_t high) {
  I lo = low - I{}, hi = high - I{};
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}

// From the sums of V vectors of eight columns those of the columns in their order: the pairs of k that a vector holds are added up.
template <int V>
NPU_INLINE void by_column(I (&out)[V / kPairs], const I (&sums)[V]) {
#if defined(NPU_AVX512)
#pragma GCC unroll 2
  for (int j = 0; j < V / kPairs; ++j) {
    const I a = sums[2 * j], b = sums[2 * j + 1];
    out[j] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#else
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) out[j] = sums[j];
#endif
}

// ---- where a step's vectors of weights come from: fetch gives V of the four, each 8 columns x kPairs pairs of 16 bits, and asks the memory
// for what lies `ahead` bytes further ----
struct Nibbles {
  const uint8_t* data;
  static constexpr int64_t kUnit = 64;  // bytes for 4 elements of k
  template <int V>
  NPU_INLINE void fetch(I (&v)[V], int64_t step, int first, int64_t ahead = kAheadUnits * kUnit) const {
    const uint8_t* p = data + step * (kUnit / 2 * kPairs);
    __builtin_prefetch(p + ahead);
    U u = load_raw<U>(p);
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) v[j] = (I)((u >> (4 * (first + j))) & 0x000f000fu);
  }
};

// e2m1 (MXFP4) in the order of its values: a code is a place in the table of twice the value + 12, so that zero stays zero.
alignas(16) constexpr uint8_t kCodes[16] = {0, 4, 6, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16, 18, 20, 24};
constexpr int8_t kCodesZero = 12;
struct Codes {
  const uint8_t* data;
  static constexpr int64_t kUnit = Nibbles::kUnit;
  template <int V>
  NPU_INLINE void fetch(I (&v)[V], int64_t step, int first, int64_t ahead = kAheadUnits * kUnit) const {
    Nibbles{data}.fetch(v, step, first, ahead);
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {  // the upper bytes are 0, and stay so
#if defined(NPU_AVX512)
      v[j] = (I)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kCodes))), (__m512i)v[j]);
#elif defined(__AVX2__)
      v[j] = (I)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kCodes))), (__m256i)v[j]);
#else
      for (int i = 0; i < W; ++i) v[j][i] = kCodes[v[j][i] & 15] | kCodes[v[j][i] >> 16] << 16;
#endif
    }
  }
};

struct Bytes {
  const uint8_t* data;
  static constexpr int64_t kUnit = 128;
  template <int V>
  NPU_INLINE void fetch(I (&v)[V], int64_t step, int first, int64_t ahead = kAheadUnits * kUnit) const {
    __builtin_prefetch(data + step * (kUnit / 2 * kPairs) + ahead);
    const uint8_t* p = data + (kPairs == 2 ? step * kUnit : step / 2 * kUnit + step % 2 * 16) + first * 32;
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
#if defined(NPU_AVX512)
      v[j] = (I)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + j * 32)));
#elif defined(__AVX2__)
      v[j] = (I)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + j * 32)));
#else
      U u = widen(load_raw<U16>(p + j * 32));
      v[j] = (I)(((I)(u << 24) >> 24 & 0xffff) | ((I)(u << 16) >> 24 << 16));
#endif
    }
  }
};

// Weights of a block, unpacked once for several tiles of rows: [steps][4 vectors].
struct Unpacked {
  const int16_t* data;
  template <int V>
  NPU_INLINE void fetch(I (&v)[V], int64_t step, int first) const {
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) v[j] = load_raw<I>(data + (step * kVectors + first + j) * (2 * W));
  }
};

template <class Source>
NPU_INLINE void unpack_block(int16_t* out, const Source& w, int64_t steps) {
  for (int64_t s = 0; s < steps; ++s) {
    I v[kVectors];
    w.fetch(v, s, 0);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) memcpy(out + (s * kVectors + j) * (2 * W), &v[j], sizeof(I));
  }
}

// From a row of 16-bit integers to the next, elements: an odd number of lines, or the rows of a block would share a few sets of the caches.
NPU_INLINE int64_t digits_length(int64_t k) { return (ceil_div(k, 32) | 1) * 32; }

// ---- a block of k: the sums of M rows by V vectors of eight columns, from policy.start, a row's handed to policy.add ----
// Not inlined: the loop needs all registers, and what its surroundings keep in them would drive a sum into memory.
template <int M, int V, class Source, class Policy>
__attribute__((noinline)) void block_sums(const Policy& policy, const Source& w, int first, const int16_t* x, int64_t ldx, int64_t row, int64_t steps) {
  I sums[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sums[m][j] = policy.start(row + m, first + j);
  x += row * ldx;
  for (int64_t s = 0; s < steps; ++s) {
    I v[V];
    w.fetch(v, s, first);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      I b = pairs_of(x + m * ldx + s * kStep);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sums[m][j] = add_pair_products(sums[m][j], v[j], b);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) policy.add(row + m, first, sums[m]);
}

// Registers hold the sums of kTileRows rows by kTileVectors vectors; of two rows by all vectors.
#if defined(NPU_AVX512)
constexpr int kTileRows = 6, kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 5, kTileVectors = 2;
#else
constexpr int kTileRows = 2, kTileVectors = 2;
#endif

template <int M, class Source, class Policy>
inline void tile(int64_t rows, const Policy& policy, const Source& w, const int16_t* x, int64_t ldx, int64_t row, int64_t steps) {
  if constexpr (M > 0) {
    if (rows < M) return tile<M - 1>(rows, policy, w, x, ldx, row, steps);
    constexpr int V = M <= 2 ? kVectors : kTileVectors;
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; j += V) block_sums<M, V>(policy, w, j, x, ldx, row, steps);
  }
}

// All rows of a block; tiles of equal height.
template <class Source, class Policy>
inline void block_rows(const Policy& policy, const Source& w, const int16_t* x, int64_t ldx, int64_t rows, int64_t steps) {
  const int64_t tiles = ceil_div(rows, kTileRows);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = t * rows / tiles;
    tile<kTileRows>((t + 1) * rows / tiles - row, policy, w, x, ldx, row, steps);
  }
}

// ---- one row beside several panels ----
// Adds to sums[i] the products of a row's `steps` with panel i, whose weights are w[i].
template <int N, class Source>
NPU_INLINE void add_row_products(I (&sums)[N][kVectors], const Source (&w)[N], const int16_t* x, int64_t steps) {
  for (int64_t s = 0; s < steps; ++s) {
    const I pairs = pairs_of(x + s * kStep);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      I v[kVectors];
      w[i].fetch(v, s, 0, kStreamAhead<Source>);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[i][j] = add_pair_products(sums[i][j], v[j], pairs);
    }
  }
}

// N panels that are read together.
template <int N>
struct Streams {
  int64_t first, apart;
  NPU_INLINE int64_t operator[](int i) const { return first + i * apart; }
};

// fn(Streams) until `count` panels from `first` on are read, kStreams at a time as long as there are so many.
template <class Fn>
NPU_INLINE void in_streams(int64_t first, int64_t count, const Fn& fn) {
  const int64_t each = count / kStreams;
  for (int64_t i = 0; i < each; ++i) fn(Streams<kStreams>{first + i, each});
  for (int64_t i = kStreams * each; i < count; ++i) fn(Streams<1>{first + i, 0});
}

// ---- results ----
// out = y (32 columns) + bias
template <class T>
NPU_INLINE void store_columns(T* out, const T* bias, const float* y, int64_t columns) {
  for_vectors(columns, [&](int64_t j, auto n) {
    F v = load(y + j);
    store_n(out + j, bias ? v + load_n(bias + j, n) : v, n);
  });
}

// Panels that a thread takes at a time: about eight pieces a thread, none below 32 KiB of weights.
template <class Parallel>
inline int64_t panels_a_piece(int64_t panels, int64_t panel_bytes, const Parallel& parallel) {
  return greater(panels / (parallel.num_threads() * 8), ceil_div(32768, greater(1, panel_bytes)));
}

}  // namespace
}  // namespace npu_ops
