#include "distributed/process_group.h"

#include <memory>
#include <optional>

#include "distributed/operands.h"
#include "distributed/rendezvous.h"
#include "distributed/shared_group.h"
#include "distributed/work.h"
#include "runtime/launch.h"

namespace npu {
namespace {

using namespace c10d;  // NOLINT: the option and work types of every signature below
using WorkPtr = c10::intrusive_ptr<Work>;
using Milliseconds = std::chrono::milliseconds;
using Op = ReduceOp::RedOpType;

// What all_gather does for several inputs: outputs[i][r] takes input i of rank r.
auto gathering(const Tensors& inputs, const TensorLists& outputs) {
  std::vector<OneGather> all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    all.push_back({bytes_of(inputs[i]), all_bytes_of<Bytes>(outputs[i]), {}});
    for (const Tensor& output : outputs[i]) all.back().sizes.push_back(output.nbytes());
  }
  return [all = std::move(all)](const SharedCall& call) {
    for (const OneGather& one : all) shared_all_gather(call, one.input, one.outputs, one.sizes);
  };
}

class ProcessGroup final : public Backend {
 public:
  ProcessGroup(c10::intrusive_ptr<Backend> host, const c10::intrusive_ptr<Store>& store, Rendezvous met,
               const ByHosts::MakeBackend& make_backend)
      : Backend(host->getRank(), host->getSize()),
        host_(std::move(host)),
        timeout_(host_->getBackendOptions()->timeout),
        health_(std::make_shared<Health>(getRank(), getSize())) {
    if (met.segment) {
      group_ = std::make_shared<SharedGroup>(std::move(met.segment), health_);
    } else {
      by_hosts_ = ByHosts::make(store, getRank(), met.hosts, make_backend, health_);
    }
  }
  ~ProcessGroup() override {
    if (group_) group_->abort();
  }

  const std::string getBackendName() const override { return "npuccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }
  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    host_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void abort() override {
    if (group_) group_->abort();
    if (by_hosts_) by_hosts_->abort();
    host_->abort();
  }
  void shutdown() override {
    if (group_) group_->finish();
    if (by_hosts_) by_hosts_->finish();
    host_->shutdown();
  }

  // Collectives between the two run one by one, as others do: they are waited for together.
  void startCoalescing() override { coalesced_.emplace(); }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalesced_, "npuccl: endCoalescing() belongs after startCoalescing(), which was not called");
    auto work = c10::make_intrusive<JoinedWork>(std::move(*coalesced_));
    coalesced_.reset();
    return work;
  }

  // ---- through shared memory when the ranks share a host ----

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    static constexpr const char* name = "broadcast";
    const Tensor& tensor = only_one(name, tensors);
    check_contiguous(name, tensors);
    if (!group_) {
      return on_host(name, tensors, [a = owning_aliases(tensors), options](Backend& host) mutable {
        return host.broadcast(a, options);
      });
    }
    return shared(name, options, tensors, tensors,
                  [data = bytes_of(tensor), bytes = tensor.nbytes(), root = int(options.rootRank)](const SharedCall& call) {
                    shared_broadcast(call, data, bytes, root);
                  });
  }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    only_one("all_reduce", tensors);
    return all_reduce("all_reduce", tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return all_reduce("all_reduce_coalesced", tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    static constexpr const char* name = "reduce";
    const Tensor& tensor = only_one(name, tensors);
    check_contiguous(name, tensors);
    const Reduction what = reduction_of(name, tensor, options.reduceOp);
    if (!group_) {
      return reduced_on_host(name, tensors, what, [a = owning_aliases(tensors), options = options](Backend& host, Op op) mutable {
        options.reduceOp = op;
        return host.reduce(a, options);
      });
    }
    return shared(name, options, tensors, tensors,
                  [what, data = bytes_of(tensor), root = int(options.rootRank)](const SharedCall& call) {
                    shared_reduce(call, what, data, root);
                  });
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    static constexpr const char* name = "all_gather";
    const Tensor& input = only_one(name, inputs);
    const Tensors& parts = only_one(name, outputs);
    check_contiguous(name, joined(inputs, parts));
    check_parts(name, input, parts, getSize(), /*uneven=*/true);
    if (!group_) {
      return on_host(name, parts, [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
        return host.allgather(o, i, options);
      });
    }
    return shared(name, options, joined(inputs, parts), parts, gathering({input}, {parts}));
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    static constexpr const char* name = "all_gather_coalesced";
    TensorLists by_input(inputs.size());
    for (const Tensors& of_rank : outputs) {
      check_parts(name, inputs[0], of_rank, int(inputs.size()), /*uneven=*/true);
      for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
    }
    for (size_t i = 0; i < inputs.size(); ++i) check_parts(name, inputs[i], by_input[i], getSize());
    const Tensors all = flat(outputs);
    check_contiguous(name, joined(inputs, all));
    if (!group_) {
      return on_host(name, all, [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
        return host.allgather_coalesced(o, i, options);
      });
    }
    return shared(name, options, joined(inputs, all), all, gathering(inputs, by_input));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& options) override {
    static constexpr const char* name = "all_gather_into_tensor";
    check_contiguous(name, {output, input});
    check_whole(name, input, output, getSize());
    if (!group_) {
      return on_host(name, {output}, [o = owning_alias(output), i = owning_alias(input), options](Backend& host) mutable {
        return host._allgather_base(o, i, options);
      });
    }
    return gather_into(name, {output}, {input}, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    static constexpr const char* name = "all_gather_into_tensor_coalesced";
    check_contiguous(name, joined(inputs, outputs));
    TORCH_CHECK_VALUE(inputs.size() == outputs.size(), "npuccl: ", name, " needs an output for each input.");
    for (size_t i = 0; i < inputs.size(); ++i) check_whole(name, inputs[i], outputs[i], getSize());
    if (!group_) {
      return on_host(name, outputs, [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
        return host.allgather_into_tensor_coalesced(o, i, options);
      });
    }
    return gather_into(name, outputs, inputs, options);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const GatherOptions& options) override {
    static constexpr const char* name = "gather";
    const Tensor& input = only_one(name, inputs);
    const Tensors parts = getRank() == options.rootRank ? only_one(name, outputs) : Tensors();
    check_contiguous(name, joined(inputs, parts));
    if (getRank() == options.rootRank) check_parts(name, input, parts, getSize());
    if (!group_) {
      return on_host(name, parts, [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
        return host.gather(o, i, options);
      });
    }
    return shared(name, options, joined(inputs, parts), parts,
                  [in = bytes_of(input), out = all_bytes_of<Bytes>(parts), bytes = input.nbytes(),
                   root = int(options.rootRank)](const SharedCall& call) { shared_gather(call, in, out, bytes, root); });
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ScatterOptions& options) override {
    static constexpr const char* name = "scatter";
    const Tensor& output = only_one(name, outputs);
    const Tensors parts = getRank() == options.rootRank ? only_one(name, inputs) : Tensors();
    check_contiguous(name, joined(outputs, parts));
    if (getRank() == options.rootRank) check_parts(name, output, parts, getSize());
    if (!group_) {
      return on_host(name, outputs, [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
        return host.scatter(o, i, options);
      });
    }
    return shared(name, options, joined(outputs, parts), outputs,
                  [in = all_bytes_of<ConstBytes>(parts), out = bytes_of(output), bytes = output.nbytes(),
                   root = int(options.rootRank)](const SharedCall& call) { shared_scatter(call, in, out, bytes, root); });
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const ReduceScatterOptions& options) override {
    static constexpr const char* name = "reduce_scatter";
    const Tensor& output = only_one(name, outputs);
    const Tensors& parts = only_one(name, inputs);
    check_contiguous(name, joined(outputs, parts));
    check_parts(name, output, parts, getSize());
    const Reduction what = reduction_of(name, output, options.reduceOp);
    if (!group_) {
      return reduced_on_host(name, outputs, what,
                             [o = owning_aliases(outputs), i = owning_aliases(inputs), options = options](Backend& host, Op op) mutable {
                               options.reduceOp = op;
                               return host.reduce_scatter(o, i, options);
                             });
    }
    return shared(name, options, joined(outputs, parts), outputs,
                  [what, in = all_bytes_of<ConstBytes>(parts), out = bytes_of(output)](const SharedCall& call) {
                    shared_reduce_scatter(call, what, in, out);
                  });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return scatter_reduced("reduce_scatter_tensor", outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    return scatter_reduced("reduce_scatter_tensor_coalesced", outputs, inputs, options);
  }

  WorkPtr barrier(const BarrierOptions& options) override {
    static constexpr const char* name = "barrier";
    if (group_) return shared(name, options, {}, {}, [](const SharedCall& call) { shared_barrier(call); });
    BarrierOptions for_host = options;
    for_host.device_ids.clear();
    for_host.device.reset();
    return on_host(name, {}, [for_host](Backend& host) { return host.barrier(for_host); });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const AllToAllOptions& options) override {
    static constexpr const char* name = "all_to_all_single";
    check_contiguous(name, {output, input});
    if (!group_) {
      return on_host(name, {output},
                     [o = owning_alias(output), i = owning_alias(input), output_sizes, input_sizes, options](Backend& host) mutable {
                       return host.alltoall_base(o, i, output_sizes, input_sizes, options);
                     });
    }
    return all_to_all(name, options, {output, input}, {output}, rows_of(name, output, output_sizes, getSize()),
                      rows_of(name, input, input_sizes, getSize()));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    static constexpr const char* name = "all_to_all";
    check_contiguous(name, joined(outputs, inputs));
    for (const Tensors& parts : {outputs, inputs}) check_parts(name, inputs.at(0), parts, getSize(), /*uneven=*/true);
    if (!group_) {  // gloo has none of its own: made of sends and receives
      return on_host(name, outputs,
                     [o = owning_aliases(outputs), i = owning_aliases(inputs), rank = getRank(), health = health_](
                         Backend& host) mutable { return exchange(host, o, i, rank, health); });
    }
    return all_to_all(name, options, joined(outputs, inputs), outputs, parts_of_list(outputs), parts_of_list(inputs));
  }

  // ---- by the host's backend: rank by rank ----

  WorkPtr send(Tensors& tensors, int target, int tag) override {
    check_contiguous("send", tensors);
    return on_host("send", tensors, [a = owning_aliases(tensors), target, tag](Backend& host) mutable {
      return host.send(a, target, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    check_contiguous("recv", tensors);
    return on_host("recv", tensors, [a = owning_aliases(tensors), source, tag](Backend& host) mutable {
      return host.recv(a, source, tag);
    });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    check_contiguous("recv", tensors);
    return on_host("recv", tensors, [a = owning_aliases(tensors), tag](Backend& host) mutable {
      return host.recvAnysource(a, tag);
    });
  }

 private:
  static constexpr int kAllToAllTag = 0x4e50;

  template <class Options>
  WorkPtr all_reduce(const char* name, const Tensors& tensors, const Options& options) {
    check_contiguous(name, tensors);
    c10::SmallVector<std::pair<Reduction, Bytes>, 1> each;
    for (const Tensor& tensor : tensors) each.emplace_back(reduction_of(name, tensor, options.reduceOp), bytes_of(tensor));
    if (each.empty()) return SharedWork::done({});
    if (by_hosts_) return all_reduce_by_hosts(name, timeout_of(options), tensors, std::move(each));
    if (!group_) {
      return reduced_on_host(name, tensors, each[0].first, [a = owning_aliases(tensors), options = options](Backend& host, Op op) mutable {
        options.reduceOp = op;
        if constexpr (std::is_same_v<Options, AllreduceOptions>) {
          return host.allreduce(a, options);
        } else {
          return host.allreduce_coalesced(a, options);
        }
      });
    }
    return shared(name, options, tensors, tensors, [each = std::move(each)](const SharedCall& call) {
      for (const auto& [what, data] : each) shared_all_reduce(call, what, data);
    });
  }

  WorkPtr all_reduce_by_hosts(const char* name, Milliseconds timeout, const Tensors& tensors,
                              c10::SmallVector<std::pair<Reduction, Bytes>, 1> each) {
    return on_host(name, tensors, [name, timeout, each = std::move(each), by_hosts = by_hosts_, ranks = getSize(),
                                   a = owning_aliases(tensors)](Backend&) -> WorkPtr {
      for (size_t i = 0; i < a.size(); ++i) by_hosts->all_reduce(name, timeout, each[i].first, a[i], ranks);
      return SharedWork::done({});
    });
  }

  WorkPtr gather_into(const char* name, const Tensors& outputs, const Tensors& inputs, const AllgatherOptions& options) {
    std::vector<OneGather> all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      all.push_back({bytes_of(inputs[i]), parts_of<Bytes>(outputs[i], getSize()),
                     std::vector<size_t>(size_t(getSize()), inputs[i].nbytes())});
    }
    return shared(name, options, joined(inputs, outputs), outputs, [all = std::move(all)](const SharedCall& call) {
      for (const OneGather& one : all) shared_all_gather(call, one.input, one.outputs, one.sizes);
    });
  }

  WorkPtr scatter_reduced(const char* name, Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) {
    struct One {
      Reduction what;
      std::vector<ConstBytes> inputs;
      Bytes output;
    };
    check_contiguous(name, joined(inputs, outputs));
    TORCH_CHECK_VALUE(inputs.size() == outputs.size(), "npuccl: ", name, " needs an output for each input.");
    std::vector<One> all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_whole(name, outputs[i], inputs[i], getSize());
      all.push_back({reduction_of(name, outputs[i], options.reduceOp), parts_of<ConstBytes>(inputs[i], getSize()),
                     bytes_of(outputs[i])});
    }
    if (all.empty()) return SharedWork::done({});
    if (!group_) {
      return reduced_on_host(name, outputs, all[0].what,
                             [o = owning_aliases(outputs), i = owning_aliases(inputs), options = options](Backend& host, Op op) mutable {
                               options.reduceOp = op;
                               return host.reduce_scatter_tensor_coalesced(o, i, options);
                             });
    }
    return shared(name, options, joined(inputs, outputs), outputs, [all = std::move(all)](const SharedCall& call) {
      for (const One& one : all) shared_reduce_scatter(call, one.what, one.inputs, one.output);
    });
  }

  WorkPtr all_to_all(const char* name, const AllToAllOptions& options, const Tensors& tensors, const Tensors& outputs,
                     RankParts taken, RankParts given) {
    return shared(name, options, tensors, outputs, [taken = std::move(taken), given = std::move(given)](const SharedCall& call) {
      const std::vector<ConstBytes> inputs(given.parts.begin(), given.parts.end());
      shared_all_to_all(call, inputs, given.sizes, taken.parts, taken.sizes);
    });
  }

  // Runs body(SharedCall), which knows plain memory only: now, later (async), and at each replay of a graph under capture.
  // `tensors` own that memory.
  template <class Options, class Body>
  WorkPtr shared(const char* name, const Options& options, const Tensors& tensors, const Tensors& outputs, Body body) {
    const c10::DeviceIndex device = tensors.empty() ? thread_state.device : tensors[0].device().index();
    const Milliseconds timeout = timeout_of(options);
    if (C10_UNLIKELY(is_capturing())) {
      launch(device, name, [group = group_, name, timeout, body = std::move(body), memory = owning_aliases(tensors)]() mutable {
        group->run(name, timeout, body);
      });
      return SharedWork::done(outputs);
    }
    wait_for_stream(device);
    if (!options.asyncOp) {
      KernelScope inside(device, name);
      group_->run(name, timeout, body);
      return SharedWork::done(outputs);
    }
    auto work = c10::make_intrusive<SharedWork>(outputs);
    auto kernel = [device, name, body = std::move(body), memory = owning_aliases(tensors)](const SharedCall& call) mutable {
      KernelScope inside(device, name);
      body(call);
    };
    group_->run_later(
        name, timeout, std::move(kernel), [work](std::exception_ptr error) { work->finish_with(error); },
        [work] { work->complete_future(); });
    return started_now(work);
  }

  WorkPtr started_now(WorkPtr work) {
    if (coalesced_) coalesced_->push_back(work);
    return work;
  }

  template <class Options>
  Milliseconds timeout_of(const Options& options) const {
    return options.timeout > Milliseconds(0) ? options.timeout : timeout_.load();
  }

  // Starts a collective of the host's backend; in a graph under capture it is waited for, and repeated so at each replay.
  template <class Collective>
  WorkPtr on_host(const char* name, const Tensors& outputs, Collective collective) {
    health_->check(name);
    const c10::DeviceIndex device = outputs.empty() ? thread_state.device : outputs[0].device().index();
    auto start = [host = host_, health = health_, name, collective = std::move(collective)](Tensors results) mutable {
      health->check(name);
      return c10::make_intrusive<HostWork>(started(name, *health, [&] { return collective(*host); }), name, std::move(results),
                                           health);
    };
    if (C10_UNLIKELY(is_capturing())) {
      launch(device, name, [start = std::move(start)]() mutable { start({})->wait(kNoTimeout); });
      return SharedWork::done(outputs);
    }
    wait_for_stream(device);
    KernelScope inside(device, name);
    auto work = start(outputs);
    if (C10_UNLIKELY(is_watched(kWatchMemory))) work->keep_memory_open();
    return started_now(work);
  }

  // gloo refuses arguments by c10::Error, which is the caller's; anything else is a lost connection.
  template <class Start>
  static WorkPtr started(const char* name, Health& health, Start start) {
    try {
      return start();
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception& error) {
      health.fail(name, c10::str("the connection to another rank failed: ", error.what()));
    }
  }

  // The same for collective(Backend&, op). gloo knows no averages: they are sums, waited for and divided.
  template <class Collective>
  WorkPtr reduced_on_host(const char* name, const Tensors& outputs, const Reduction& what, Collective collective) {
    if (what.op != ReduceOp::AVG) {
      return on_host(name, outputs, [collective = std::move(collective), op = what.op](Backend& host) mutable {
        return collective(host, op);
      });
    }
    auto averaged = [collective = std::move(collective), sums = owning_aliases(outputs), name, health = health_,
                     size = getSize()](Backend& host) mutable -> WorkPtr {
      HostWork::wait_for(collective(host, ReduceOp::SUM), name, health);
      at::NoGradGuard no_grad;
      for (Tensor& sum : sums) sum.div_(size);
      return SharedWork::done({});
    };
    return on_host(name, outputs, std::move(averaged));
  }

  static WorkPtr exchange(Backend& host, Tensors& outputs, Tensors& inputs, int rank, const std::shared_ptr<Health>& health) {
    outputs[size_t(rank)].copy_(inputs[size_t(rank)]);
    std::vector<WorkPtr> pending;
    for (int peer = 0; peer < int(inputs.size()); ++peer) {
      if (peer == rank) continue;
      Tensors out{inputs[size_t(peer)]}, in{outputs[size_t(peer)]};
      pending.push_back(host.send(out, peer, kAllToAllTag));
      pending.push_back(host.recv(in, peer, kAllToAllTag));
    }
    for (auto& work : pending) HostWork::wait_for(work, "all_to_all", health);
    return SharedWork::done({});
  }

  c10::intrusive_ptr<Backend> host_;
  std::atomic<Milliseconds> timeout_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<SharedGroup> group_;  // null: the ranks do not share a host
  std::shared_ptr<ByHosts> by_hosts_;   // null: they do, or no two of them do
  std::optional<std::vector<WorkPtr>> coalesced_;  // started since startCoalescing()
};

}  // namespace

std::pair<c10::intrusive_ptr<c10d::Backend>, std::string> make_process_group(
    c10::intrusive_ptr<c10d::Backend> host, const c10::intrusive_ptr<c10d::Store>& store, const std::string& host_name,
    const ByHosts::MakeBackend& make_backend) {
  Rendezvous met = share_memory(*store, host->getRank(), host->getSize(), host_name);
  std::string refusal = met.refusal;
  return {c10::make_intrusive<ProcessGroup>(std::move(host), store, std::move(met), make_backend), std::move(refusal)};
}

void sum_over_ranks(const c10::intrusive_ptr<c10d::Backend>& backend, Tensor tensor) {
  AllreduceOptions options;
  options.asyncOp = false;
  Tensors tensors{std::move(tensor)};
  backend->allreduce(tensors, options)->wait();
}

void gather_from_ranks(const c10::intrusive_ptr<c10d::Backend>& backend, Tensor output, Tensor input) {
  AllgatherOptions options;
  options.asyncOp = false;
  backend->_allgather_base(output, input, options)->wait();
}

}  // namespace npu
