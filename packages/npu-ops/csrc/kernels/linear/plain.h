// What is written of a product alone: its sums and the bias.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

// An Epilogue of kernels/linear/body.h. Params have bias, out and ldo.
template <class T, class Params>
struct Plain {
  static constexpr int kSides = 1;
  static constexpr bool kInLanes = true;
  static constexpr bool kReadsOut = false;
  const Params& p;

  NPU_INLINE F in_lanes(int64_t column, F y) const {
    const T* bias = static_cast<const T*>(p.bias);
    return bias ? y + set1(to_float(bias[column])) : y;
  }

  template <class Left>
  NPU_INLINE F value(int64_t, int64_t column, F y, Left left) const {
    const T* bias = static_cast<const T*>(p.bias);
    return bias ? y + load_n(bias + column, left) : y;
  }

  template <class Left>
  NPU_INLINE void put(int64_t m, int64_t column, F y, Left left) const {
    store_n(static_cast<T*>(p.out) + m * p.ldo + column, value(m, column, y, left), left);
  }
};

}  // namespace
}  // namespace npu_ops
