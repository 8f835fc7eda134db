// Large products in parts of their rows.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

// fn(first, count) for rows in parts of equal size that bound the scratch memory.
template <class Fn>
inline void in_parts(int64_t rows, const Fn& fn) {
  constexpr int64_t kMost = 1024;
  const int64_t parts = ceil_div(rows, kMost);
  for (int64_t i = 0; i < parts; ++i) fn(i * rows / parts, (i + 1) * rows / parts - i * rows / parts);
}

}  // namespace
}  // namespace npu_ops
