#include "distributed/process_group.h"

#include "aten/alias.h"
#include "runtime/graph.h"
#include "runtime/launch.h"

namespace npu {
namespace {

using at::Tensor;
using namespace c10d;  // NOLINT: the option and work types of every signature below
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

// Work is asynchronous, so the aliases own their memory.
Tensors owning_aliases(const Tensors& tensors) {
  Tensors aliases;
  for (const Tensor& tensor : tensors) aliases.push_back(owning_alias(tensor));
  return aliases;
}
TensorLists owning_aliases(const TensorLists& lists) {
  TensorLists aliases;
  for (const Tensors& tensors : lists) aliases.push_back(owning_aliases(tensors));
  return aliases;
}

class DoneWork final : public Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
};

class ProcessGroup final : public Backend {
 public:
  explicit ProcessGroup(c10::intrusive_ptr<Backend> host) : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "npuccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { host_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void abort() override { host_->abort(); }
  void shutdown() override { host_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run("broadcast", [a = owning_aliases(tensors), options](Backend& host) mutable { return host.broadcast(a, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return run("all_reduce", [a = owning_aliases(tensors), options](Backend& host) mutable { return host.allreduce(a, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return run("all_reduce_coalesced",
               [a = owning_aliases(tensors), options](Backend& host) mutable { return host.allreduce_coalesced(a, options); });
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    return run("reduce", [a = owning_aliases(tensors), options](Backend& host) mutable { return host.reduce(a, options); });
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    return run("all_gather", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.allgather(o, i, options);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& options) override {
    return run("all_gather_into_tensor", [o = owning_alias(output), i = owning_alias(input), options](Backend& host) mutable {
      return host._allgather_base(o, i, options);
    });
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    return run("all_gather_coalesced", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.allgather_coalesced(o, i, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    return run("all_gather_into_tensor_coalesced", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.allgather_into_tensor_coalesced(o, i, options);
    });
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const GatherOptions& options) override {
    return run("gather", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.gather(o, i, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ScatterOptions& options) override {
    return run("scatter", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.scatter(o, i, options);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const ReduceScatterOptions& options) override {
    return run("reduce_scatter", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.reduce_scatter(o, i, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& options) override {
    return run("reduce_scatter_tensor", [o = owning_alias(output), i = owning_alias(input), options](Backend& host) mutable {
      return host._reduce_scatter_base(o, i, options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    return run("reduce_scatter_tensor_coalesced", [o = owning_aliases(outputs), i = owning_aliases(inputs), options](Backend& host) mutable {
      return host.reduce_scatter_tensor_coalesced(o, i, options);
    });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const AllToAllOptions& options) override {
    return run("all_to_all_single", [o = owning_alias(output), i = owning_alias(input), output_sizes, input_sizes, options](
                                        Backend& host) mutable {
      return host.alltoall_base(o, i, output_sizes, input_sizes, options);
    });
  }
  // gloo has none of its own: made of sends and receives.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions&) override {
    return run("all_to_all", [o = owning_aliases(outputs), i = owning_aliases(inputs), rank = getRank(), tag = kAllToAllTag](Backend& host) mutable {
      return exchange(host, o, i, rank, tag);
    });
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    return run("send", [a = owning_aliases(tensors), target, tag](Backend& host) mutable { return host.send(a, target, tag); });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return run("recv", [a = owning_aliases(tensors), source, tag](Backend& host) mutable { return host.recv(a, source, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return run("recv_anysource", [a = owning_aliases(tensors), tag](Backend& host) mutable { return host.recvAnysource(a, tag); });
  }
  WorkPtr barrier(const BarrierOptions& options) override {
    BarrierOptions on_host = options;
    on_host.device_ids.clear();
    on_host.device.reset();
    return run("barrier", [on_host](Backend& host) { return host.barrier(on_host); });
  }

 private:
  static constexpr int kAllToAllTag = 0x4e50;

  // Starts the collective; in a graph under capture it is waited for, and repeated so at each replay.
  template <class Collective>
  WorkPtr run(const char* name, Collective collective) {
    const c10::DeviceIndex device = thread_state.device;
    if (C10_LIKELY(!is_capturing())) {
      KernelScope inside(device, name);
      return collective(*host_);
    }
    launch(device, name, [host = host_, collective]() mutable { collective(*host)->wait(); });
    return c10::make_intrusive<DoneWork>();
  }

  static WorkPtr exchange(Backend& host, Tensors& outputs, Tensors& inputs, int rank, int tag) {
    outputs[size_t(rank)].copy_(inputs[size_t(rank)]);
    std::vector<WorkPtr> pending;
    for (int peer = 0; peer < int(inputs.size()); ++peer) {
      if (peer == rank) continue;
      Tensors out{inputs[size_t(peer)]}, in{outputs[size_t(peer)]};
      pending.push_back(host.send(out, peer, tag));
      pending.push_back(host.recv(in, peer, tag));
    }
    for (auto& work : pending) work->wait();
    return c10::make_intrusive<DoneWork>();
  }

  c10::intrusive_ptr<Backend> host_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(c10::intrusive_ptr<c10d::Backend> host) {
  return c10::make_intrusive<ProcessGroup>(std::move(host));
}

}  // namespace npu
