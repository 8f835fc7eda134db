// Reading and writing where the type is only known at run time: small things beside the data that a kernel is compiled for.
#pragma once

#include "dispatch/tiers.h"
#include "vector/vec.h"

namespace npu_ops {
namespace {

// fn(p as pointer to the type)
template <class Fn>
NPU_INLINE void with_dtype(Dtype dtype, const Fn& fn) {
  switch (dtype) {
    case Dtype::bf16:
      return fn(bf16{});
    case Dtype::fp16:
      return fn(fp16{});
    case Dtype::fp32:
      return fn(float{});
  }
}

// element i of p
inline float read_any(const void* p, Dtype dtype, int64_t i) {
  float value = 0;
  with_dtype(dtype, [&](auto type) { value = to_float(static_cast<const decltype(type)*>(p)[i]); });
  return value;
}

}  // namespace
}  // namespace npu_ops
