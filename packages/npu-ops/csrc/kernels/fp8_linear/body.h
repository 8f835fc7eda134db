// Body of the linear kernels with 8-bit floating weights, compiled once a tier.
//
// A weight becomes a half by moving its bits, exactly but for a factor of 2^-8, subnormals included, and then a float. Few rows of x
// take products along the weight rows; more rows share a panel of weights in the cache. On AVX2 weights are moved to
// where a float has its bits, which is a factor of 2^-120 (many rows: lanes.inc); on AMX they become bf16 by bytes (vector/e4m3_rows.h), as those of tiles do.
// Rows of bf16 meet weights of bf16 where the processor multiplies those: panels.inc, of weights that are stored as rows few_vectors.inc and
// many_vectors.inc, tiles.inc.
#pragma once

#include "dispatch/batch_invariance.h"
#include "kernels/fp8_linear/fp8_linear.h"
#include "vector/e4m3_rows.h"
#include "vector/gemm.h"
#include "vector/panel_rows.h"
#include "vector/parts.h"

namespace npu_ops {
namespace {

struct e4m3 {
  uint8_t bits;
};

// W weights, times 2^-8
NPU_INLINE F load(const e4m3* p) {
#if defined(NPU_AVX512)
  U16 h = (U16)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  U16 h = (U16)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  U16 h;
  for (int i = 0; i < W; ++i) h[i] = static_cast<uint16_t>(static_cast<int8_t>(p[i].bits));
#endif
  return widen_fp16((h << 7) & 0xbfff);  // the sign is extended: it stays at the top
}

constexpr float kFactor = 256;

#if defined(__AVX2__) && !defined(NPU_AVX512)
// Four weights share a lane: x is in the order of their places in it.
template <>
struct RowDot<e4m3> {
  using Packed = float;
  using Vector = F;
  static constexpr int kStep = 4 * W, kParts = 4, kLanes = W;
  template <int Part>
  static NPU_INLINE Vector part(const e4m3* w) {
    const U u = load_raw<U>(w);
    return from_bits((U)((I)(Part < 3 ? u << (24 - 8 * Part) : u) >> 4) & 0x87f00000u);
  }
  static NPU_INLINE Vector packed(const Packed* x) { return load(x); }
  static NPU_INLINE F mac(F acc, Vector w, Vector x) { return fma(w, x, acc); }
};
constexpr float kLiftOfFew = 0x1p56f, kFactorOfFew = 0x1p64f;  // the lift keeps products away from where floats end

// kStep values of x, times their scales; scale_of(i): of the 32 around the i-th
template <class ScaleOf>
NPU_INLINE void order_step(float* out, const float* x, const ScaleOf& scale_of) {
  const F scale = scale_of(0);
  F a = load(x), b = load(x + W), c = load(x + 2 * W), d = load(x + 3 * W);
  deinterleave(a, b);
  deinterleave(c, d);
  deinterleave(a, c);
  deinterleave(b, d);
  store(out, a * scale);
  store(out + W, b * scale);
  store(out + 2 * W, c * scale);
  store(out + 3 * W, d * scale);
}
#elif defined(NPU_AMX)
// 64 weights become bf16 by bytes, and then the floats of their upper and lower halves: x is in the order of their places.
template <>
struct RowDot<e4m3> {
  static constexpr int kStep = kCodesAtATime, kParts = 4;
};
constexpr float kLiftOfFew = 1, kFactorOfFew = 1;
template <class ScaleOf>
NPU_INLINE void order_step(float* out, const float* x, const ScaleOf& scale_of) {
  F v[4];
  for (int i = 0; i < 4; ++i) {  // of each 16 the four of a part beside one another
    const F of = load(x + i * W) * scale_of(i * W);
    v[i] = __builtin_shufflevector(of, of, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  }
  for (int i = 0; i < 4; ++i)
    for (int part = 0; part < 4; ++part) memcpy(out + part * W + i * 4, reinterpret_cast<const char*>(&v[i]) + part * 16, 16);
}

// As row_dots.
template <int R, int M>
NPU_INLINE void code_dots(F (&acc)[R][M], const e4m3* const (&w)[R], const float* x, int64_t ldx, int64_t k, int64_t ahead) {
  for (int64_t j = 0; j < k; j += kCodesAtATime)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint8_t* codes = &w[r]->bits + j;
      if (ahead) __builtin_prefetch(codes + ahead, 0, 2);
      __m512i v[2];
      widen_e4m3(v, load_e4m3(codes, k - j));
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const U u = (U)v[part / 2];
        const F of = from_bits(part % 2 ? u & 0xffff0000u : u << 16);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[r][m] = fma(of, load(x + m * ldx + j + part * W), acc[r][m]);
      }
    }
}
#else
constexpr float kLiftOfFew = 1, kFactorOfFew = kFactor;
template <class ScaleOf>
NPU_INLINE void order_step(float* out, const float* x, const ScaleOf& scale_of) {
  store(out, load(x) * scale_of(0));
}
#endif
#if !defined(NPU_AMX)
template <int R, int M>
NPU_INLINE void code_dots(F (&acc)[R][M], const e4m3* const (&w)[R], const float* x, int64_t ldx, int64_t k, int64_t ahead) {
  row_dots<e4m3, R, M>(acc, w, x, ldx, k, ahead);
}
#endif

}  // namespace
}  // namespace npu_ops

namespace npu_ops::NPU_TIER {
namespace {

constexpr int kRowGroup = 16;  // weight rows a work item
#if defined(NPU_AVX512)
constexpr int kBatch = 6;  // rows of x at a time
#elif defined(__AVX2__)
constexpr int kBatch = 4;
#else
constexpr int kBatch = 3;
#endif
// Weight rows at a time beside m rows of x.
constexpr int beside(int m) { return m == 1 ? 8 : m == 4 && kBatch == 4 ? 2 : 4; }
#if defined(__AVX2__) && !defined(NPU_AVX512)
constexpr int64_t kFewRows = 19;  // up to here products along rows: lanes.inc takes more
#else
constexpr int64_t kFewRows = 12;
#endif
constexpr int64_t kRowDepth = 1024;  // elements of x's rows that a pass keeps in L1

// How k falls into blocks of one scale each, of the weights and of x.
NPU_INLINE int64_t scale_block(const Fp8LinearParams& p) {
  const int64_t x = p.x_group ? lesser(p.x_group, p.k) : p.k;
  return lesser(lesser(p.block_k, p.k), x);
}
NPU_INLINE const float* scales_of(const Fp8LinearParams& p, int64_t n) { return p.scale + n / p.block_n * ceil_div(p.k, p.block_k); }

template <class T>
NPU_INLINE void store_row(const Fp8LinearParams& p, const float* sums, int64_t m, int64_t n, int64_t count, float factor) {
  const T* bias = static_cast<const T*>(p.bias);
  T* out = static_cast<T*>(p.out) + m * p.ldo + n - p.first;
  float scale[kRowGroup * 4];
  for (int64_t i = 0; i < count; ++i) scale[i] = factor * (p.block_k < p.k ? 1.f : *scales_of(p, n + i));
  for_vectors(count, [&](int64_t i, auto left) {
    F y = load_n(sums + i, left) * load_n(scale + i, left);
    store_n(out + i, bias ? y + load_n(bias + n + i, left) : y, left);
  });
}

// M rows of x, weight rows [n, end). `ahead`: rows further on that are fetched meanwhile; 0: none.
template <class T, int M>
__attribute__((noinline)) void batch_rows(const Fp8LinearParams& p, const float* x, int64_t ldx, int64_t m, int64_t n, int64_t end, int64_t ahead) {
  constexpr int R = beside(M);
  const int64_t depth = M == 1 && !batch_invariant() ? greater(1, p.k) : kRowDepth;
  float sums[M][kRowGroup] = {};
  for (int64_t k = 0; k < p.k; k += depth) {
    const int64_t left = lesser(depth, p.k - k);
    int64_t r = n;
    const auto some = [&](auto rows) {
      constexpr int N = sizeof(rows);
      const e4m3* w[N];
      for (int i = 0; i < N; ++i) w[i] = reinterpret_cast<const e4m3*>(p.w) + (r + i) * p.ldw + k;
      F acc[N][M] = {};
      code_dots<N, M>(acc, w, x + m * ldx + k, ldx, left, ahead * p.ldw);
      for (int i = 0; i < N; ++i)
        for (int j = 0; j < M; ++j) sums[j][r - n + i] += sum(acc[i][j]);
    };
    struct Many {
      char rows[R];
    };
    for (; r + R <= end; r += R) some(Many{});
    for (; r < end; ++r) some(char{});
  }
  for (int j = 0; j < M; ++j) store_row<T>(p, sums[j], m + j, n, end - n, kFactorOfFew);
}

template <class T, int M>
inline void batch_of(int64_t size, const Fp8LinearParams& p, const float* x, int64_t ldx, int64_t m, int64_t n, int64_t end, int64_t ahead) {
  if constexpr (M > 0) {
    if (size == M) return batch_rows<T, M>(p, x, ldx, m, n, end, ahead);
    batch_of<T, M - 1>(size, p, x, ldx, m, n, end, ahead);
  }
}

// x in the order of the products' steps, times the scales of its blocks beside the weight rows from n on
NPU_INLINE void order_rows(const Fp8LinearParams& p, float* to, const float* x, int64_t ldx, int64_t n) {
  const bool blocks = p.block_k < p.k;
  const float* scale = scales_of(p, n);
  for (int64_t m = 0; m < p.m; ++m)
    for (int64_t k = 0; k < p.k; k += RowDot<e4m3>::kStep)
      order_step(to + m * ldx + k, x + m * ldx + k,
                 [&](int64_t i) { return set1(kLiftOfFew * (blocks && k + i < p.k ? scale[(k + i) / p.block_k] : 1.f)); });
}

// |x| up to 448 to the nearest e4m3 value, NaN to NaN
NPU_INLINE F nearest_e4m3(F x) {
  const U u = bits_of(x), magnitude = u & 0x7fffffffu;
  const U normal = (u + 0x7ffffu + ((u >> 20) & 1u)) & 0xfff00000u;
  const F shift = from_bits((bits_of(set1(0x1.8p14f)) & 0x7fffffffu) | (u & 0x80000000u));  // adding it rounds to a multiple of 2^-9
  const U small = (U)(magnitude < 0x3c800000u);                                             // below 2^-6
  const F nearest = from_bits((small & bits_of((x + shift) - shift)) | (~small & normal));
  return x == x ? nearest : x;
}

// The scale by which a group of x is rounded to e4m3: the given one, or by its range.
template <class T>
NPU_INLINE float scale_of_group(const T* x, int64_t n, const float* given) {
  if (given) return *given;
  I top{};
  for_vectors(n, [&](int64_t i, auto left) { top = larger_magnitude(top, load_n(x + i, left)); });
  constexpr float least = 1.f / (448.f * 512.f);
  const float scale = largest_magnitude(top) / 448.f;
  return scale < least ? least : scale;  // in this order NaN stays
}

// A group of x rounded to e4m3 by its scale, which is returned; multiplied by it again if `scale_back`.
template <class Out, class T>
NPU_INLINE float round_group(Out* out, const T* x, int64_t n, const float* given, bool scale_back) {
  const float scale = scale_of_group(x, n, given), inverse = 1.f / scale, back = scale_back ? scale : 1.f;
  for_vectors(n, [&](int64_t i, auto left) {
    const F v = clamped(load_n(x + i, left) * set1(inverse), -448.f, 448.f);
    store_n(out + i, nearest_e4m3(v) * set1(back), left);
  });
  return scale;
}

// A row of x as floats, rounded where that is asked for, and zero behind its end.
template <class T>
inline void floats_of_row(float* out, int64_t ldx, const T* x, int64_t size, int64_t group, const float* scale) {
  if (group)
    for (int64_t k = 0; k < size; k += group) round_group(out + k, x + k, lesser(group, size - k), scale, true);
  else
    for_vectors(size, [&](int64_t i, auto left) { store_n(out + i, load_n(x + i, left), left); });
  for (int64_t k = size; k < ldx; ++k) out[k] = 0;
}

template <class T>
inline float* floats_of(const Fp8LinearParams& p, int64_t ldx, const Parallel& parallel) {
  float* x = static_cast<float*>(thread_scratch(kCallerSlots, sizeof(float) * (p.m * ldx + 1)));
  parallel(p.m, greater(1, 16384 / greater(1, p.k)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) floats_of_row<T>(x + i * ldx, ldx, static_cast<const T*>(p.x) + i * p.ldx, p.k, p.x_group, p.x_scale);
  });
  return x;
}

// Columns of the groups [begin, end) of kRowGroup
template <class T>
inline void few_columns(const Fp8LinearParams& p, const float* x, int64_t ldx, int64_t begin, int64_t end) {
  const int64_t batches = ceil_div(p.m, kBatch);
  float* ordered = static_cast<float*>(thread_scratch(0, sizeof(float) * (p.m * ldx + 1)));
  int64_t ordered_for = -1;
  for (int64_t g = begin; g < end; ++g) {
    const int64_t n = g * kRowGroup, scales = p.block_k < p.k ? n / p.block_n : 0;
    if (scales != ordered_for) order_rows(p, ordered, x, ldx, n);
    ordered_for = scales;
    for (int64_t b = 0; b < batches; ++b) {
      // the last pass over a group leaves the memory idle: it fetches what comes next
      const int64_t from = b * p.m / batches, next = p.m == 1 ? beside(1) : kRowGroup;
      const int64_t ahead = b == batches - 1 && n + 2 * kRowGroup <= p.n ? next : 0;
      batch_of<T, kBatch>((b + 1) * p.m / batches - from, p, ordered, ldx, from, n, lesser(p.n, n + kRowGroup), ahead);
    }
  }
}

template <class T>
inline void few_rows(const Fp8LinearParams& p, const Parallel& parallel) {
  const int64_t ldx = packed_length<e4m3>(p.k);
  const float* x = floats_of<T>(p, ldx, parallel);
  const int64_t groups = ceil_div(p.n, kRowGroup);
  const int64_t grain = greater(groups / (parallel.num_threads() * 8), ceil_div(32768, kRowGroup * greater(1, p.k)));
  parallel(groups, grain, [&](int64_t begin, int64_t end) { few_columns<T>(p, x, ldx, begin, end); });
}

#if !defined(__AVX2__) || defined(NPU_AVX512)
constexpr int64_t kDepth = 256;       // of a packed panel
constexpr int64_t kRowsInCache = 96;  // of x, as floats, beside the panels in L2
constexpr int64_t kPanels = 64 / kPanel < 2 ? 2 : 64 / kPanel;
constexpr int64_t kColumns = kPanels * kPanel;

// X: the element of x here, p.x's own or float
template <class T, class X>
inline void many_columns(const Fp8LinearParams& p, const X* x, int64_t ldx, int64_t n0, int64_t columns) {
  float* b = static_cast<float*>(thread_scratch(0, sizeof(float) * kDepth * kColumns));
  float* a = static_cast<float*>(thread_scratch(1, sizeof(float) * kRowsInCache * kDepth));
  float* c = static_cast<float*>(thread_scratch(2, sizeof(float) * p.m * kColumns));
  const e4m3* w = reinterpret_cast<const e4m3*>(p.w) + n0 * p.ldw;
  if (p.k == 0) memset(c, 0, sizeof(float) * p.m * kColumns);
  for (int64_t k = 0; k < p.k; k += kDepth) {
    const int64_t depth = lesser(kDepth, p.k - k);
    for (int64_t j = 0; j < columns; j += kPanel) {
      float* panel = b + j * kDepth;
      pack_panel_transposed<e4m3>(panel, [&](int64_t i) { return w + (j + i) * p.ldw + k; }, columns - j, depth);
      if (p.block_k < p.k)
        for (int64_t i = 0; i < depth; ++i) {
          const F scale = set1(scales_of(p, n0 + j)[(k + i) / p.block_k]);
          store(panel + i * kPanel, load(panel + i * kPanel) * scale);
          store(panel + i * kPanel + W, load(panel + i * kPanel + W) * scale);
        }
    }
    for (int64_t m = 0; m < p.m; m += kRowsInCache) {
      const int64_t rows = lesser(kRowsInCache, p.m - m);
      for (int64_t i = 0; i < rows; ++i)
        for_vectors(depth, [&](int64_t j, auto left) { store(a + i * kDepth + j, load_n(x + (m + i) * ldx + k + j, left)); });
      for (int64_t j = 0; j < columns; j += kPanel)
        panel_product(rows, c + m * kColumns + j, kColumns, a, kDepth, b + j * kDepth, depth, k > 0);
    }
  }
  for (int64_t m = 0; m < p.m; ++m) store_row<T>(p, c + m * kColumns, m, n0, columns, kFactor);
}

template <class T, class X>
inline void by_panels(const Fp8LinearParams& p, const X* x, int64_t ldx, const Parallel& parallel) {
  parallel(ceil_div(p.n, kColumns), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) many_columns<T>(p, x, ldx, i * kColumns, lesser(kColumns, p.n - i * kColumns));
  });
}
#endif

// The same product of `count` rows of x from `first` on.
template <class T>
NPU_INLINE Fp8LinearParams some_rows(const Fp8LinearParams& p, int64_t first, int64_t count) {
  Fp8LinearParams part = p;
  part.x = static_cast<const T*>(p.x) + first * p.ldx;
  part.out = static_cast<T*>(p.out) + first * p.ldo;
  part.m = count;
  return part;
}

}  // namespace
}  // namespace npu_ops::NPU_TIER

#if defined(__AVX2__) && !defined(NPU_AVX512)
#include "kernels/fp8_linear/lanes.inc"
#elif defined(NPU_AMX)
#include "kernels/fp8_linear/tiles.inc"
#elif defined(NPU_AVX512_BF16)
#include "kernels/fp8_linear/many_vectors.inc"
#include "kernels/fp8_linear/panels.inc"
#endif

namespace npu_ops::NPU_TIER {
namespace {

// The same weights as rows, in the caller's scratch slot: for what has no way of its own from panels.
inline Fp8LinearParams with_rows(Fp8LinearParams p, int slot, const Parallel& parallel) {
  uint8_t* rows = static_cast<uint8_t*>(thread_scratch(slot, p.n * p.k + 1));
  parallel(p.n, greater(1, 16384 / greater(1, p.k)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) row_of_panels(rows + n * p.k, p.w, n, p.k);
  });
  p.w = rows, p.ldw = p.k, p.in_panels = false;
  return p;
}

template <class T>
inline void fp8_linear_of(const Fp8LinearParams& p, const Parallel& parallel) {
  if (p.in_panels) {
#if defined(NPU_AVX512_BF16) && !defined(NPU_AMX)
    if constexpr (__is_same(T, bf16)) return fp8_linear_by_panels(p, parallel);
#endif
    return fp8_linear_of<T>(with_rows(p, kCallerSlots + 5, parallel), parallel);
  }
#if defined(NPU_AMX)
  if (tiles_take<T>(p) && (p.m > kTooFewForTiles || batch_invariant())) return fp8_linear_tiles<T>(p, parallel);
#endif
#if defined(NPU_AVX512_BF16) && !defined(NPU_AMX)
  if constexpr (__is_same(T, bf16))
    if (vectors_take(p)) return fp8_linear_by_vectors(p, parallel);
#endif
  if (p.m <= kFewRows) return few_rows<T>(p, parallel);
  in_parts(p.m, [&](int64_t first, int64_t count) {
    const Fp8LinearParams part = some_rows<T>(p, first, count);
    if (batch_invariant()) return few_rows<T>(part, parallel);
    if (!p.x_group) return by_panels<T>(part, static_cast<const T*>(part.x), p.ldx, parallel);
    const float* x = floats_of<T>(part, p.k, parallel);
    by_panels<T>(part, x, p.k, parallel);
  });
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
