// Collectives for npu tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <utility>

#include "distributed/by_hosts.h"

namespace npu {

// The backend "npuccl". Ranks on one host exchange through memory that they share; what that does not cover, and ranks on
// several hosts, use the collectives of `host` (gloo) on aliases of the npu tensors; where several of these are on one host,
// all_reduce goes by hosts, with a backend of `make_backend` between them. All ranks of the group make theirs together.
// `host_name` identifies the host ("": nothing does). Also returns why memory is not shared ("": it is).
std::pair<c10::intrusive_ptr<c10d::Backend>, std::string> make_process_group(
    c10::intrusive_ptr<c10d::Backend> host, const c10::intrusive_ptr<c10d::Store>& store, const std::string& host_name,
    const ByHosts::MakeBackend& make_backend);

// For a caller that waits and is in a hurry: no handle is made for Python, which takes as long as a small sum.
void sum_over_ranks(const c10::intrusive_ptr<c10d::Backend>& backend, at::Tensor tensor);                       // in place
void gather_from_ranks(const c10::intrusive_ptr<c10d::Backend>& backend, at::Tensor output, at::Tensor input);  // in rank order

}  // namespace npu
