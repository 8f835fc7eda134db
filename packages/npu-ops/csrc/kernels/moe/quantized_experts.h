// Experts whose weights are in some quantised format: what is the same for all of them.
//
// The pairs (token, expert) are sorted by expert, their rows of x become what the format multiplies with, and two passes over the
// weights follow: gate and up with the activation, and down with the weighted sum. All that depends on the routing is decided in here,
// so that a recorded launch serves every step.
//
// A Format has
//   few<T>(): the most tokens of an expert that go another way than many; its rows are rows slice.packed and on of those, many's are
//     slice.from and on of all
// and, for pass 0 (gate and up) and 1 (down):
//   Rows rows<T>(pass, routing, row, parallel): the rows that the pass multiplies; row(i) is the address of the i-th sorted pair's
//   product<T>(y, ldy, rows, block, next): y[count of the block's slice][columns] = the slice's rows by the block's weight rows, in float, scaled,
//     without bias. `next`: the block that the thread takes after this one, or null. It may use the thread's scratch slots 0 to 2, and `rows`
//     the caller's first six.
#pragma once

#include "kernels/moe/gate.h"
#include "kernels/moe/routing.h"
#include "vector/parts.h"

namespace npu_ops::NPU_TIER {
namespace {

constexpr int64_t kItemColumns = 64;  // of a work item

// Weight rows [column, column + columns) of a slice's expert, of the up projection if `up`. `column` is a multiple of kItemColumns.
struct ExpertBlock {
  int pass;
  bool up;
  const ExpertSlice* slice;
  int64_t column, columns;
};

// fn(slice, i) for each sorted pair
template <class Fn>
inline void for_pairs_of(const Routing& r, int64_t grain, const Parallel& parallel, const Fn& fn) {
  parallel(r.pairs, grain, [&](int64_t begin, int64_t end) {
    const ExpertSlice* slice = r.slices;
    for (int64_t i = begin; i < end; ++i) {
      while (slice->from + slice->count <= i) ++slice;
      fn(*slice, i);
    }
  });
}

template <class T, ExpertActivation A, class Format>
inline void gates_and_ups(const ExpertsParams& p, const Routing& r, const Format& format, const typename Format::Rows& rows, T* activated,
                          const Parallel& parallel) {
  const int64_t blocks = ceil_div(p.width, kItemColumns), items = r.num_slices * blocks;
  const auto block_of = [&](int64_t item) {
    const int64_t column = item % blocks * kItemColumns;
    return ExpertBlock{0, false, r.slices + item / blocks, column, lesser(kItemColumns, p.width - column)};
  };
  parallel(items, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const ExpertBlock gate = block_of(item), next = block_of(lesser(item + 1, items - 1));
      const ExpertBlock up{0, true, gate.slice, gate.column, gate.columns}, *behind = parallel.goes_on(item, items) ? &next : nullptr;
      const ExpertSlice& slice = *gate.slice;
      const int64_t ldy = 2 * kItemColumns;
      float* y = static_cast<float*>(thread_scratch(3, sizeof(float) * slice.count * ldy));
      format.template product<T>(y, ldy, rows, gate, p.gated ? &up : behind);
      if (p.gated) format.template product<T>(y + kItemColumns, ldy, rows, up, behind);
      for (int64_t i = slice.from; i < slice.from + slice.count; ++i)
        activate_pair<T, A, kItemColumns>(p, slice.expert, r.order[i], gate.column, gate.columns, y + (i - slice.from) * ldy, kItemColumns,
                                          activated + i * p.width);
    }
  });
}

// total[tokens][kItemColumns] += weight * (the slice's results + bias)
template <class T>
inline void add_weighted(const ExpertsParams& p, const Routing& r, const ExpertSlice& slice, int64_t column, int64_t columns, const float* y,
                         float* total) {
  const T* bias = p.bias2 ? static_cast<const T*>(p.bias2) + slice.expert * p.hidden + column : nullptr;
  for (int64_t i = 0; i < slice.count; ++i) {
    const int64_t pair = r.order[slice.from + i];
    const F weight = set1(p.weigh_input ? 1.f : p.weights[pair]);
    float* to = total + pair / p.top_k * kItemColumns;
    for_vectors(columns, [&](int64_t j, auto n) {
      F v = load_n(y + i * kItemColumns + j, n);
      if (bias) v += load_n(bias + j, n);
      store_n(to + j, fma(weight, v, load_n(to + j, n)), n);
    });
  }
}

template <class T, class Format>
inline void downs(const ExpertsParams& p, const Routing& r, const Format& format, const typename Format::Rows& rows, const Parallel& parallel) {
  parallel(ceil_div(p.hidden, kItemColumns), 1, [&](int64_t begin, int64_t end) {
    float* total = static_cast<float*>(thread_scratch(4, sizeof(float) * p.tokens * kItemColumns));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item * kItemColumns, columns = lesser(kItemColumns, p.hidden - column);
      memset(total, 0, sizeof(float) * p.tokens * kItemColumns);
      for (int64_t s = 0; s < r.num_slices; ++s) {
        const ExpertSlice& slice = r.slices[s];
        float* y = static_cast<float*>(thread_scratch(3, sizeof(float) * slice.count * kItemColumns));
        const ExpertBlock block{1, false, &slice, column, columns}, next{1, false, &slice + 1, column, columns};
        format.template product<T>(y, kItemColumns, rows, block, s + 1 < r.num_slices ? &next : nullptr);
        add_weighted<T>(p, r, slice, column, columns, y, total);
      }
      T* out = static_cast<T*>(p.out) + column;
      for (int64_t t = 0; t < p.tokens; ++t)
        for_vectors(columns, [&](int64_t j, auto n) { store_n(out + t * p.hidden + j, load_n(total + t * kItemColumns + j, n), n); });
    }
  });
}

template <class T, class Format>
inline void some_tokens(const ExpertsParams& p, const Format& format, const Parallel& parallel) {
  const int64_t pairs = p.tokens * p.top_k;
  int32_t* lists = static_cast<int32_t*>(thread_scratch(kCallerSlots + 6, sizeof(int32_t) * (6 * p.experts + pairs)));
  const Routing r = sort_by_expert(p, lists, format.template few<T>());
  T* activated = static_cast<T*>(thread_scratch(kCallerSlots + 7, sizeof(T) * (r.pairs * p.width + 1)));
  const auto token = [&](int64_t i) { return static_cast<const T*>(p.x) + r.order[i] / p.top_k * p.stride_x; };
  const auto rows = format.template rows<T>(0, r, token, parallel);
  switch (p.activation) {
    case ExpertActivation::silu:
      gates_and_ups<T, ExpertActivation::silu>(p, r, format, rows, activated, parallel);
      break;
    case ExpertActivation::gelu_erf:
      gates_and_ups<T, ExpertActivation::gelu_erf>(p, r, format, rows, activated, parallel);
      break;
    case ExpertActivation::gelu_tanh:
      gates_and_ups<T, ExpertActivation::gelu_tanh>(p, r, format, rows, activated, parallel);
      break;
    case ExpertActivation::relu2:
      gates_and_ups<T, ExpertActivation::relu2>(p, r, format, rows, activated, parallel);
      break;
  }
  const auto inner = format.template rows<T>(1, r, [&](int64_t i) { return activated + i * p.width; }, parallel);
  downs<T>(p, r, format, inner, parallel);
}

template <class T, class Format>
inline void all_tokens(const ExpertsParams& p, const Format& format, const Parallel& parallel) {
  in_parts(p.tokens, [&](int64_t first, int64_t count) {
    ExpertsParams part = p;
    part.x = static_cast<const T*>(p.x) + first * p.stride_x;
    part.out = static_cast<T*>(p.out) + first * p.hidden;
    part.weights = p.weights + first * p.top_k;
    part.ids = static_cast<const char*>(p.ids) + first * p.top_k * (p.ids_are_int64 ? 8 : 4);
    part.tokens = count;
    some_tokens<T>(part, format, parallel);
  });
}

template <class Format>
inline void quantized_experts(const ExpertsParams& p, const Format& format, const Parallel& parallel) {
  switch (p.dtype) {
    case Dtype::bf16:
      return all_tokens<bf16>(p, format, parallel);
    case Dtype::fp16:
      return all_tokens<fp16>(p, format, parallel);
    case Dtype::fp32:
      return all_tokens<float>(p, format, parallel);
  }
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
