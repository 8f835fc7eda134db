// All-reduce of a group over several hosts: within each host through the memory that its ranks share, and between the
// first ranks of the hosts by their own backend (gloo). So each host sends a tensor once, and not each rank.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distributed/shared_group.h"

namespace npu {

class ByHosts {
 public:
  // Makes the backend of some ranks that meet at a store: this one's number, and how many they are.
  using MakeBackend =
      std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store> store, int rank, int size)>;

  // All ranks of the group call this with the name of each one's host. Null, on all, where no two ranks share memory.
  static std::shared_ptr<ByHosts> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<std::string>& hosts,
                                       const MakeBackend& make_backend, std::shared_ptr<Health> health);

  ~ByHosts() { beside_.abort(); }

  // Reduces a tensor of the host over `ranks` ranks. Sums of float16 and bfloat16 are rounded once a host, and then again.
  void all_reduce(const char* name, std::chrono::milliseconds timeout, const Reduction& what, const at::Tensor& data, int ranks);

  void abort();
  void finish();

 private:
  ByHosts(std::unique_ptr<SharedSegment> segment, c10::intrusive_ptr<c10d::Backend> leaders, std::shared_ptr<Health> health)
      : beside_(std::move(segment), std::move(health)), leaders_(std::move(leaders)) {}

  SharedGroup beside_;
  c10::intrusive_ptr<c10d::Backend> leaders_;  // of the first rank of each host, null on the others
};

}  // namespace npu
