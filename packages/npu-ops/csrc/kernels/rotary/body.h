// Body of the rotary kernels, compiled once a tier.
#pragma once

#include "kernels/rotary/rotary.h"
#include "vector/vec.h"

namespace npu_ops::NPU_TIER {
namespace {

// Which of the three positions channel i of a multimodal rotation follows.
NPU_INLINE int section_of(const RotaryParams& p, int64_t i) {
  if (p.sections_interleaved) {
    if (i % 3 == 1 && i < p.sections[1] * 3) return 1;
    if (i % 3 == 2 && i < p.sections[2] * 3) return 2;
    return 0;
  }
  return i < p.sections[0] ? 0 : i < p.sections[0] + p.sections[1] ? 1 : 2;
}

// The row of a position, cosines and then sines; null where the table has none.
template <class C>
NPU_INLINE const C* row_of(const RotaryParams& p, int64_t position) {
  return position >= 0 && position < p.cos_sin_rows ? static_cast<const C*>(p.cos_sin) + position * p.cos_sin_stride : nullptr;
}

// Cosines and sines of one token as floats, [half] each, zero padded to a vector.
template <class C>
inline void gather_cos_sin(const RotaryParams& p, int64_t token, float* cos, float* sin) {
  const int64_t half = p.rotary_dim / 2;
  const bool plain = p.sections[0] + p.sections[1] + p.sections[2] == 0;
  const C* rows[3];
  for (int i = 0; i < (plain ? 1 : 3); ++i) {
    rows[i] = row_of<C>(p, p.positions[i * p.positions_stride + token]);
    if (rows[i]) continue;
    // A replayed kernel cannot raise: a position outside of the table gives NaN, never somebody's memory.
    memset(cos, 0xff, sizeof(float) * half);
    memset(sin, 0xff, sizeof(float) * half);
    return;
  }
  if (plain) {
    const C* row = rows[0];
    for (int64_t i = 0; i < half; i += W) {
      store(cos + i, load_n(row + i, half - i));
      store(sin + i, load_n(row + half + i, half - i));
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const C* row = rows[section_of(p, i)];
    cos[i] = to_float(row[i]);
    sin[i] = to_float(row[half + i]);
  }
}

// Cosines or sines in the order of T's pairs.
template <class T>
NPU_INLINE void order_pairs(float* x, int64_t n) {
  for_pairs(n, [&](int64_t i) { store_pair(x + i, load_pair_like(x + i, static_cast<T*>(nullptr))); }, [](int64_t, int64_t) {});
}

template <class T>
NPU_INLINE void rotate_neox(T* x, const float* cos, const float* sin, int64_t half) {
  T* y = x + half;
  for_pairs(
      half,
      [&](int64_t i) {
        const Pair a = load_pair(x + i), b = load_pair(y + i), c = load_pair(cos + i), s = load_pair(sin + i);
        store_pair(x + i, {a.a * c.a - b.a * s.a, a.b * c.b - b.b * s.b});
        store_pair(y + i, {b.a * c.a + a.a * s.a, b.b * c.b + a.b * s.b});
      },
      [&](int64_t i, int64_t n) {
        const F a = load_n(x + i, n), b = load_n(y + i, n), c = load(cos + i), s = load(sin + i);
        store_n(x + i, a * c - b * s, n);
        store_n(y + i, b * c + a * s, n);
      });
}

template <class T>
NPU_INLINE void rotate_pairs(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = 2 * (half - i);
    F a = load_n(x + 2 * i, n), b = n > W ? load_n(x + 2 * i + W, n - W) : F{};
    deinterleave(a, b);
    F c = load(cos + i), s = load(sin + i);
    F y0 = a * c - b * s, y1 = b * c + a * s;
    interleave(y0, y1);
    store_n(x + 2 * i, y0, n);
    if (n > W) store_n(x + 2 * i + W, y1, n - W);
  }
}

template <class T>
inline void rotate_heads(const RotaryParams& p, T* x, int64_t heads, int64_t stride, const float* cos, const float* sin) {
  for (int64_t h = 0; h < heads; ++h) {
    if (p.neox)
      rotate_neox(x + h * stride, cos, sin, p.rotary_dim / 2);
    else
      rotate_pairs(x + h * stride, cos, sin, p.rotary_dim / 2);
  }
}

// Room for the cosines and sines of a token: two of `padded_half` floats.
inline int64_t padded_half(const RotaryParams& p) { return ceil_div(p.rotary_dim / 2, W) * W; }
inline float* angles_of(const RotaryParams& p, int slot) {
  const int64_t count = 2 * padded_half(p);
  float* cos = static_cast<float*>(thread_scratch(slot, sizeof(float) * count));
  for (int64_t i = 0; i < count; ++i) cos[i] = 0.f;
  return cos;
}

template <class T, class C>
inline void rotate_token(const RotaryParams& p, int64_t t, float* cos) {
  float* sin = cos + padded_half(p);
  gather_cos_sin<C>(p, t, cos, sin);
  if (p.neox) {
    order_pairs<T>(cos, p.rotary_dim / 2);
    order_pairs<T>(sin, p.rotary_dim / 2);
  }
  rotate_heads(p, static_cast<T*>(p.query) + t * p.query_stride, p.query_heads, p.query_head_stride, cos, sin);
  if (p.key) rotate_heads(p, static_cast<T*>(p.key) + t * p.key_stride, p.key_heads, p.key_head_stride, cos, sin);
}

template <class T, class C>
inline void rotate_tokens(const RotaryParams& p, const Parallel& parallel) {
  const int64_t grain = greater(1, 16384 / greater(1, (p.query_heads + p.key_heads) * p.rotary_dim));
  parallel(p.tokens, grain, [&](int64_t begin, int64_t end) {
    float* angles = angles_of(p, 0);
    for (int64_t t = begin; t < end; ++t) rotate_token<T, C>(p, t, angles);
  });
}

template <class T>
inline void rotate_any_cache(const RotaryParams& p, const Parallel& parallel) {
  switch (p.cache_dtype) {
    case Dtype::bf16:
      return rotate_tokens<T, bf16>(p, parallel);
    case Dtype::fp16:
      return rotate_tokens<T, fp16>(p, parallel);
    case Dtype::fp32:
      return rotate_tokens<T, float>(p, parallel);
  }
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
