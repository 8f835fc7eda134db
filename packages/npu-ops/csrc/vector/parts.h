// Large products in parts of their rows.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

constexpr int64_t kMostRows = 1024;

// fn(first, count) for rows in parts of equal size, of `most` rows at most, that bound the scratch memory.
template <class Fn>
inline void in_parts(int64_t rows, const Fn& fn, int64_t most = kMostRows) {
  const int64_t parts = ceil_div(rows, most);
  for (int64_t i = 0; i < parts; ++i) fn(i * rows / parts, (i + 1) * rows / parts - i * rows / parts);
}

}  // namespace
}  // namespace npu_ops
