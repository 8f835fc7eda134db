// What a collective is called with: the tensors' bytes, their shares of the ranks, and what is asked of their shapes.
#pragma once

#include <ATen/ATen.h>

#include <numeric>
#include <vector>

#include "aten/alias.h"
#include "distributed/reduce.h"
#include "distributed/shared_collectives.h"

namespace npu {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

// Work is asynchronous, so the aliases own their memory.
inline Tensors owning_aliases(const Tensors& tensors) {
  Tensors aliases;
  for (const Tensor& tensor : tensors) aliases.push_back(owning_alias(tensor));
  return aliases;
}
inline TensorLists owning_aliases(const TensorLists& lists) {
  TensorLists aliases;
  for (const Tensors& tensors : lists) aliases.push_back(owning_aliases(tensors));
  return aliases;
}

inline Tensors joined(const Tensors& one, const Tensors& other) {
  Tensors all = one;
  all.insert(all.end(), other.begin(), other.end());
  return all;
}

inline Tensors flat(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

inline Bytes bytes_of(const Tensor& tensor) { return static_cast<Bytes>(tensor.mutable_data_ptr()); }

template <class Pointer>
std::vector<Pointer> all_bytes_of(const Tensors& tensors) {
  std::vector<Pointer> pointers;
  for (const Tensor& tensor : tensors) pointers.push_back(bytes_of(tensor));
  return pointers;
}

// The parts of a tensor that belong to the ranks, one after the other.
template <class Pointer>
std::vector<Pointer> parts_of(const Tensor& tensor, int ranks) {
  std::vector<Pointer> parts;
  for (int rank = 0; rank < ranks; ++rank) parts.push_back(bytes_of(tensor) + tensor.nbytes() / size_t(ranks) * size_t(rank));
  return parts;
}

inline const Tensor& only_one(const char* name, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "npuccl: ", name, " takes one tensor a rank, not ", tensors.size(), ".");
  return tensors[0];
}
inline const Tensors& only_one(const char* name, const TensorLists& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "npuccl: ", name, " takes one list of tensors a rank, not ", lists.size(), ".");
  return lists[0];
}

inline void check_contiguous(const char* name, const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "npuccl: ", name, " needs contiguous tensors, not one of shape ",
                      tensor.sizes(), " with strides ", tensor.strides(), ": call contiguous() first.");
  }
}

// `parts` are the shares of `ranks` ranks of the same dtype; the same length as `one` each, unless `uneven`.
inline void check_parts(const char* name, const Tensor& one, const Tensors& parts, int ranks, bool uneven = false) {
  TORCH_CHECK_VALUE(int(parts.size()) == ranks, "npuccl: ", name, " needs ", ranks, " tensors, one a rank, not ",
                    parts.size(), ".");
  for (const Tensor& part : parts) {
    TORCH_CHECK_VALUE(part.scalar_type() == one.scalar_type() && (uneven || part.numel() == one.numel()), "npuccl: ", name,
                      " needs tensors of one dtype and size, not ", one.scalar_type(), " of ", one.numel(),
                      " elements beside ", part.scalar_type(), " of ", part.numel(), ".");
  }
}

inline void check_whole(const char* name, const Tensor& part, const Tensor& whole, int ranks) {
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * ranks, "npuccl: ", name,
                    " over ", ranks, " ranks needs one tensor ", ranks, " times the other, of one dtype, not ",
                    part.scalar_type(), " of ", part.numel(), " elements and ", whole.scalar_type(), " of ", whole.numel(),
                    ".");
}

inline Reduction reduction_of(const char* name, const Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  check_reduction(name, tensor.scalar_type(), op);
  return {tensor.scalar_type(), op_of(tensor.scalar_type(), op), tensor.numel()};
}

// One gather of several: outputs[r] takes the sizes[r] bytes of rank r.
struct OneGather {
  ConstBytes input;
  std::vector<Bytes> outputs;
  std::vector<size_t> sizes;
};

// What is for each rank, or from it: where, and how many bytes.
struct RankParts {
  std::vector<Bytes> parts;
  std::vector<size_t> sizes;
};

inline RankParts parts_of_list(const Tensors& tensors) {
  RankParts of;
  for (const Tensor& tensor : tensors) {
    of.parts.push_back(bytes_of(tensor));
    of.sizes.push_back(tensor.nbytes());
  }
  return of;
}

// The ranks' rows of a tensor, one after the other: `counts` of them, or as many for each where that is empty.
inline RankParts rows_of(const char* name, const Tensor& tensor, const std::vector<int64_t>& counts, int ranks) {
  const int64_t rows = tensor.dim() ? tensor.size(0) : 0;
  const std::vector<int64_t> each = counts.empty() ? std::vector<int64_t>(size_t(ranks), rows / ranks) : counts;
  TORCH_CHECK_VALUE(int(each.size()) == ranks && std::accumulate(each.begin(), each.end(), int64_t(0)) == rows, "npuccl: ", name,
                    " needs a number of rows for each of ", ranks, " ranks, ", rows, " in all, not ", c10::IntArrayRef(each), ".");
  RankParts of;
  Bytes at = bytes_of(tensor);
  for (int64_t count : each) {
    of.parts.push_back(at);
    of.sizes.push_back(rows ? tensor.nbytes() / size_t(rows) * size_t(count) : 0);
    at += of.sizes.back();
  }
  return of;
}

}  // namespace npu
