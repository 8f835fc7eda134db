#include "distributed/by_hosts.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "distributed/rendezvous.h"

namespace npu {

std::shared_ptr<ByHosts> ByHosts::make(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<std::string>& hosts,
                                       const MakeBackend& make_backend, std::shared_ptr<Health> health) {
  std::vector<std::string> names;  // each host once, in the order of their first ranks
  for (const std::string& host : hosts) {
    if (host.empty()) return nullptr;
    if (std::find(names.begin(), names.end(), host) == names.end()) names.push_back(host);
  }
  if (names.size() == hosts.size() || names.size() < 2) return nullptr;
  const std::string& mine = hosts[size_t(rank)];
  const int place = int(std::find(names.begin(), names.end(), mine) - names.begin());
  const int beside = int(std::count(hosts.begin(), hosts.end(), mine)), own = int(std::count(hosts.begin(), hosts.begin() + rank, mine));
  c10d::PrefixStore of_host("npuccl/beside/" + std::to_string(place), store);
  auto [segment, refusal, _] = share_memory(of_host, own, beside, mine);
  if (!agreed(*store, "by_hosts", rank, int(hosts.size()), segment != nullptr)) return nullptr;
  c10::intrusive_ptr<c10d::Backend> leaders;
  if (own == 0) leaders = make_backend(c10::make_intrusive<c10d::PrefixStore>("npuccl/leaders", store), place, int(names.size()));
  return std::shared_ptr<ByHosts>(new ByHosts(std::move(segment), std::move(leaders), std::move(health)));
}

void ByHosts::all_reduce(const char* name, std::chrono::milliseconds timeout, const Reduction& what, const at::Tensor& data, int ranks) {
  const bool average = what.op == c10d::ReduceOp::AVG;
  const Reduction sums{what.dtype, average ? c10d::ReduceOp::SUM : what.op, what.count};
  const auto bytes = static_cast<Bytes>(data.mutable_data_ptr());
  auto within = [&](const SharedCall& call) { shared_reduce(call, sums, bytes, 0); };
  beside_.run(name, timeout, within);
  // The first rank's failure between the hosts is one of this exchange, so that the ranks beside it hear of it.
  auto between = [&](const SharedCall& call) {
    if (leaders_) {
      std::vector<at::Tensor> one{data};
      c10d::AllreduceOptions options;
      options.reduceOp = sums.op;
      options.timeout = timeout;
      leaders_->allreduce(one, options)->wait();
      at::NoGradGuard no_grad;
      if (average) at::Tensor(data).div_(ranks);
    }
    shared_broadcast(call, bytes, data.nbytes(), 0);
  };
  beside_.run(name, timeout, between);
}

void ByHosts::abort() {
  beside_.abort();
  if (leaders_) leaders_->abort();
}

void ByHosts::finish() {
  beside_.finish();
  if (leaders_) leaders_->shutdown();
}

}  // namespace npu
