// Panels of weights in the cache, and blocks of results on registers: C[m, 2W] = (or +=) A[m, k] * panel, A row-major.
//
// A panel holds 2W weight rows, transposed: what one element of A meets lies side by side. Panels of bf16 keep their 16 bits, so that
// packing writes half as much: [k / 2][2W] pairs of neighbours along k, which AVX512_BF16 multiplies by pairs of A in bf16; elsewhere a
// shift gives the first and a blend the second as floats. Panels of other types are floats: [k][2W]. Left: the element of A.
#pragma once

#include "vector/gemm.h"
#include "vector/panel_pairs.h"
#include "vector/past_caches.h"

namespace npu_ops {
namespace {

template <class T>
struct WeightPanel {
  using Left = float;
  static NPU_INLINE int64_t size(int64_t k) { return k * kPanel; }  // floats

  template <class Row>
  static NPU_INLINE void pack(float* panel, const Row& row, int64_t n, int64_t k) {
    pack_panel_transposed<T>(panel, row, n, k);
  }
  template <int M>
  static NPU_INLINE void product(float* c, int64_t ldc, const float* a, int64_t lda, const float* panel, int64_t k, bool add) {
    panel_rows<M>(c, ldc, a, lda, panel, k, add);
  }
};

template <>
struct WeightPanel<bf16> {
#if defined(NPU_AVX512_BF16)
  using Left = bf16;
#else
  using Left = float;
#endif
  static NPU_INLINE int64_t size(int64_t k) { return (k + 1) / 2 * kPanel; }

  // Up to 2W rows of k elements; rows past n and what is past k read as zero. `row(i)` gives a row's address. To: where most lines go.
  template <class To = IntoCache, class Row>
  static NPU_INLINE void pack(float* panel, const Row& row, int64_t n, int64_t k) {
    for (int64_t first = 0; first < kPanel; first += W) {
      const bf16* p[W];
      for (int64_t i = 0; i < W; ++i) p[i] = first + i < n ? row(first + i) : nullptr;
      int64_t j = 0;
      if (first + W <= n)
        for (; j + 2 * W <= k; j += 2 * W) {
          F r[W];
#pragma GCC unroll 16
          for (int i = 0; i < W; ++i) r[i] = load_raw<F>(p[i] + j);
          transpose(r);
#pragma GCC unroll 16
          for (int i = 0; i < W; ++i) {
#if defined(NPU_AVX512)
            To::put(panel + (j / 2 + i) * kPanel + first, (__m512i)r[i]);
#else
            store(panel + (j / 2 + i) * kPanel + first, r[i]);
#endif
          }
        }
      for (; j < k; j += 2 * W) {
        bf16 rest[W][2 * W] = {};
        F r[W];
        for (int64_t i = 0; i < W; ++i) {
          for (int64_t e = 0; p[i] && e < 2 * W && j + e < k; ++e) rest[i][e] = p[i][j + e];
          r[i] = load_raw<F>(rest[i]);
        }
        transpose(r);
        for (int64_t i = 0; i < W && j + 2 * i < k; ++i) store(panel + (j / 2 + i) * kPanel + first, r[i]);
      }
    }
  }

#if defined(NPU_AVX512_BF16)
  // Where k is odd, a zero lies behind each row of A.
  template <int M>
  static NPU_INLINE void product(float* c, int64_t ldc, const bf16* a, int64_t lda, const float* panel, int64_t k, bool add) {
    F acc[M][2];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      acc[i][0] = add ? load(c + i * ldc) : F{};
      acc[i][1] = add ? load(c + i * ldc + W) : F{};
    }
    for (int64_t j = 0; j < k; j += 2, panel += kPanel) {
      const __m512bh b0 = load_raw<__m512bh>(panel), b1 = load_raw<__m512bh>(panel + W);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        int32_t pair;
        memcpy(&pair, a + i * lda + j, sizeof pair);
        const __m512bh x = (__m512bh)(pair - I{});
        acc[i][0] = (F)_mm512_dpbf16_ps((__m512)acc[i][0], b0, x);
        acc[i][1] = (F)_mm512_dpbf16_ps((__m512)acc[i][1], b1, x);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      store(c + i * ldc, acc[i][0]);
      store(c + i * ldc + W, acc[i][1]);
    }
  }
#else
  static NPU_INLINE F first_of(const float* pairs) { return from_bits(load_raw<U>(pairs) << 16); }
  // After the first ones: their lower halves are zeros, so that no register has to hold a mask.
  static NPU_INLINE F second_of(const float* pairs, [[maybe_unused]] F first) {
#if defined(__AVX2__) && !defined(NPU_AVX512)
    return (F)_mm256_blend_epi16((__m256i)first, load_raw<__m256i>(pairs), 0xaa);
#else
    return from_bits(load_raw<U>(pairs) & 0xffff0000u);
#endif
  }

#if defined(__AVX2__) && !defined(NPU_AVX512)
  // As product, where the elements of A lie in lanes: a[k][kRows]. M: 5 or 6.
  template <int M>
  static NPU_INLINE void lane_product(float* c, int64_t ldc, const float* a, const float* panel, int64_t k, bool add) {
    if (k >= 2) multiply_lanes<M>(c, ldc, a, panel, k / 2, add);
    if (k % 2) {
      const F b0 = first_of(panel + k / 2 * kPanel), b1 = first_of(panel + k / 2 * kPanel + W);
      add = add || k > 1;
      for (int i = 0; i < M; ++i) {
        const F x = set1(a[(k - 1) * kRows + i]);
        store(c + i * ldc, fma(x, b0, add ? load(c + i * ldc) : F{}));
        store(c + i * ldc + W, fma(x, b1, add ? load(c + i * ldc + W) : F{}));
      }
    }
  }
#endif

  template <int M>
  static NPU_INLINE void product(float* c, int64_t ldc, const float* a, int64_t lda, const float* panel, int64_t k, bool add) {
#if defined(__AVX2__) && !defined(NPU_AVX512)
    if constexpr (M >= 5)
      if (k >= 2) {
        multiply_pairs<M>(c, ldc, a, lda, panel, k / 2, add);
        if (k % 2 == 0) return;
        a += k - 1;
        panel += k / 2 * kPanel;
        k = 1;
        add = true;
      }
#endif
    F acc[M][2];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      acc[i][0] = add ? load(c + i * ldc) : F{};
      acc[i][1] = add ? load(c + i * ldc + W) : F{};
    }
    const auto step = [&](int64_t j, F b0, F b1) {
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        F x = set1(a[i * lda + j]);
        acc[i][0] = fma(x, b0, acc[i][0]);
        acc[i][1] = fma(x, b1, acc[i][1]);
      }
    };
    int64_t j = 0;
    for (; j + 2 <= k; j += 2) {
      const float* b = panel + j / 2 * kPanel;
      const F b0 = first_of(b), b1 = first_of(b + W);
      step(j, b0, b1);
      step(j + 1, second_of(b, b0), second_of(b + W, b1));
    }
    if (j < k) step(j, first_of(panel + j / 2 * kPanel), first_of(panel + j / 2 * kPanel + W));
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      store(c + i * ldc, acc[i][0]);
      store(c + i * ldc + W, acc[i][1]);
    }
  }
#endif
};

template <class T, int M>
NPU_INLINE void some_panel_rows(int64_t m, float* c, int64_t ldc, const typename WeightPanel<T>::Left* a, int64_t lda, const float* panel,
                                int64_t k, bool add) {
  if constexpr (M > 0) {
    if (m == M) return WeightPanel<T>::template product<M>(c, ldc, a, lda, panel, k, add);
    some_panel_rows<T, M - 1>(m, c, ldc, a, lda, panel, k, add);
  }
}

// `between` is called after each group of rows; the groups are of about equal size, for a small one is as slow as a large one.
template <class T, class Between = Nothing>
inline void weight_panel_product(int64_t m, float* c, int64_t ldc, const typename WeightPanel<T>::Left* a, int64_t lda, const float* panel,
                                 int64_t k, bool add, const Between& between = {}) {
  const int64_t groups = ceil_div(m, kRows);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t i = g * m / groups;
    some_panel_rows<T, kRows>((g + 1) * m / groups - i, c + i * ldc, ldc, a + i * lda, lda, panel, k, add);
    between();
  }
}

// ---- many rows by a block of panels ----
constexpr int64_t kBlockPanels = 64 / kPanel < 2 ? 2 : 64 / kPanel;
constexpr int64_t kBlockColumns = kBlockPanels * kPanel;
constexpr int64_t kBlockRows = 48;   // of x at a time, as floats, beside the panels in L2
constexpr int64_t kBlockStep = 256;  // along k, between which the memory is given something to do
template <class T>
constexpr int64_t kBlockDepth = sizeof(T) == 2 && __is_same(T, bf16) ? 1024 : 512;  // of a panel

// Fetches `lines` cache lines of each weight row, `offset` elements further, into L2: `step` of them whenever it is called.
template <class Row>
struct FetchRows {
  const Row& row;
  int64_t offset, lines, step;
  mutable int64_t at = 0, line = 0;

  void operator()() const {
    for (int64_t i = 0; i < step && at < kBlockColumns; ++i) {
      __builtin_prefetch(reinterpret_cast<const char*>(row(at) + offset) + line * 64, 0, 2);
      if (++line == lines) ++at, line = 0;
    }
  }
};

// Rows of x that are floats already: whoever multiplies them by many blocks converts them once.
struct FloatRows {
  const float* data;
  int64_t ld;
};

// The same in lanes: the rows come in groups of kRows at most, of about equal size, whose elements lie side by side, [k][kRows]. One stream
// of memory in place of six rows of it, each with a page of its own.
struct LaneRows {
  const float* data;
  int64_t ld;  // floats from a group to the next
};

// Lanes beside weights whose scales are of blocks: scale_of(column, at) is that of the elements from `at` on of a panel's columns from `column`
// on, up to the next multiple of `block`, which is even.
template <class ScaleOf>
struct ScaledLaneRows {
  const float* data;
  int64_t ld, block;
  ScaleOf scale_of;
};
template <class ScaleOf>
ScaledLaneRows(const float*, int64_t, int64_t, ScaleOf) -> ScaledLaneRows<ScaleOf>;

template <class X>
constexpr bool kAreLanes = __is_same(X, LaneRows);
template <class ScaleOf>
constexpr bool kAreLanes<ScaledLaneRows<ScaleOf>> = true;

// How far from `at` on a product goes, of `left` elements.
template <class X>
NPU_INLINE int64_t step_of(const X&, int64_t, int64_t left) {
  return lesser(kBlockStep, left);
}
template <class ScaleOf>
NPU_INLINE int64_t step_of(const ScaledLaneRows<ScaleOf>& x, int64_t at, int64_t left) {
  return lesser(lesser(kBlockStep, left), x.block - at % x.block);
}

// Whether rows of T meet weights in lanes.
template <class T>
#if defined(__AVX2__) && !defined(NPU_AVX512)
constexpr bool kInLanes = __is_same(T, bf16);
#else
constexpr bool kInLanes = false;
#endif
constexpr int64_t kLeastInLanes = 20;  // rows: their groups have five at least

// Floats of a group: what is past its end is overwritten.
NPU_INLINE int64_t lane_length(int64_t k) { return k * kRows + W; }

// Up to kRows rows of k elements into the lanes of a group, times `lift`; `row(i)` gives a row's address.
template <class T, class Row>
NPU_INLINE void pack_lanes(float* lanes, const Row& row, int64_t rows, int64_t k, float lift = 1) {
  static_assert(kRows <= W);
  for_vectors(k, [&](int64_t j, auto n) {
    F r[W];
    for (int64_t i = 0; i < W; ++i) r[i] = i < rows ? load_n(row(i) + j, n) * set1(lift) : F{};
    transpose(r);
    for (int64_t i = 0; i < lesser(W, k - j); ++i) store(lanes + (j + i) * kRows, r[i]);
  });
}

// The rows [first, first + count) of x as floats from element `from` on, `lda` apart, in `a`.
template <class T, class X>
NPU_INLINE void rows_as_floats(float* a, int64_t lda, const X& x, int64_t first, int64_t count, int64_t last, int64_t from, int64_t depth) {
  for (int64_t i = 0; i < count; ++i) {
    const T *line = x(first + i) + from, *later = x(lesser(first + i + 2, last)) + from;
    for_vectors(depth, [&](int64_t j, auto n) {
      __builtin_prefetch(later + j);
      store(a + i * lda + j, load_n(line + j, n));
    });
  }
}

// A part of the rows after the other meets the panels, which steps(product) lists.
template <class T, class X, class Steps, class Fetch>
NPU_INLINE void rows_by_panels(float* c, int64_t count, const X& x, int64_t from, int64_t depth, const Steps& steps, const Fetch& fetch) {
  constexpr bool kReady = __is_same(X, FloatRows);
  int64_t lda = kBlockDepth<T> + W;
  [[maybe_unused]] float* copy = nullptr;
  if constexpr (kReady)
    lda = x.ld;
  else
    copy = static_cast<float*>(thread_scratch(1, sizeof(float) * kBlockRows * lda));
  const int64_t parts = ceil_div(count, kBlockRows);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t m = part * count / parts, some = (part + 1) * count / parts - m;
    const float* a = copy;  // at element `from`
    if constexpr (kReady)
      a = x.data + m * lda + from;
    else
      rows_as_floats<T>(copy, lda, x, m, some, count - 1, from, depth);
    steps([&](const float* panel, int64_t column, int64_t at, int64_t length) {
      weight_panel_product<T>(some, c + m * kBlockColumns + column, kBlockColumns, a + at - from, lda, panel, length, at > 0, fetch);
    });
  }
}

// M rows in lanes by a panel, `at` elements into it: out = (or += where it is not the first, or has scales) their product.
template <class T, int M, class X>
NPU_INLINE void lanes_by_panel(float* out, const X& x, const float* a, const float* panel, [[maybe_unused]] int64_t column, int64_t at, int64_t length) {
  if constexpr (__is_same(X, LaneRows)) {
    WeightPanel<T>::template lane_product<M>(out, kBlockColumns, a, panel, length, at > 0);
  } else {
    alignas(64) float y[kRows * kPanel];
    WeightPanel<T>::template lane_product<M>(y, kPanel, a, panel, length, false);
    const F scale = set1(x.scale_of(column, at));
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < kPanel; j += W) {
        float* to = out + i * kBlockColumns + j;
        store(to, fma(load(y + i * kPanel + j), scale, load(to)));
      }
  }
}

template <class T, class X, class Steps, class Fetch>
NPU_INLINE void lanes_by_panels(float* c, int64_t count, const X& x, const Steps& steps, const Fetch& fetch) {
  const int64_t groups = ceil_div(count, kRows), parts = ceil_div(count, kBlockRows);
  for (int64_t part = 0; part < parts; ++part)
    steps([&](const float* panel, int64_t column, int64_t at, int64_t length) {
      for (int64_t g = part * groups / parts; g < (part + 1) * groups / parts; ++g) {
        const int64_t m = g * count / groups;
        float* out = c + m * kBlockColumns + column;
        const float* a = x.data + g * x.ld + at * kRows;
        if ((g + 1) * count / groups - m == kRows) lanes_by_panel<T, kRows>(out, x, a, panel, column, at, length);
        else lanes_by_panel<T, kRows - 1>(out, x, a, panel, column, at, length);
        fetch();
      }
    });
}

// c[count][kBlockColumns] = rows of x by panels of weight rows, which meet floats; `x(i)` and `row(j)` are addresses, or x is FloatRows,
// LaneRows or ScaledLaneRows; `rows(panel)`: how many of the panel's kPanel rows there are. `ahead`: elements to the rows of the next block, 0: there is none.
// Takes the thread's scratch slots 0, 1.
template <class T, class X, class Row, class Rows>
inline void block_product(float* c, int64_t count, const X& x, const Row& row, const Rows& rows, int64_t k, int64_t ahead) {
  constexpr int64_t kDepth = kBlockDepth<T>;
  const int64_t size = WeightPanel<T>::size(kDepth);
  float* b = static_cast<float*>(thread_scratch(0, sizeof(float) * kBlockPanels * size));
  if (k == 0 || (kAreLanes<X> && !__is_same(X, LaneRows))) memset(c, 0, sizeof(float) * count * kBlockColumns);
  for (int64_t from = 0; from < k; from += kDepth) {
    const int64_t depth = lesser(kDepth, k - from);
    for (int64_t j = 0; j < kBlockPanels; ++j)
      if (rows(j) > 0) WeightPanel<T>::pack(b + j * size, [&](int64_t i) { return row(j * kPanel + i) + from; }, rows(j), depth);
    // meanwhile the memory is idle
    const bool deeper = from + depth < k;
    const int64_t lines = (deeper || ahead) ? lesser(kDepth, deeper ? k - from - depth : k) * static_cast<int64_t>(sizeof(T)) / 64 : 0;
    const int64_t calls = ceil_div(count, kRows) * kBlockPanels * ceil_div(depth, kBlockStep);
    const FetchRows<Row> fetch{row, deeper ? from + depth : ahead, greater(1, lines), ceil_div(lines * kBlockColumns, greater(1, calls))};
    const auto steps = [&](const auto& product) {  // product(panel, columns of c, from where on along k, how far)
      for (int64_t j = 0; j < kBlockPanels; ++j)
        for (int64_t step = 0, length; rows(j) > 0 && step < depth; step += length)
          product(b + j * size + WeightPanel<T>::size(step), j * kPanel, from + step, length = step_of(x, from + step, depth - step));
    };
    if constexpr (kAreLanes<X>) lanes_by_panels<T>(c, count, x, steps, fetch);
    else rows_by_panels<T>(c, count, x, from, depth, steps, fetch);
  }
}

}  // namespace
}  // namespace npu_ops
