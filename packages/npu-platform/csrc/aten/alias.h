// Zero-copy aliases: npu tensors shown to CPU kernels as CPU tensors over the same memory, and results taken back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "faults/watch.h"
#include "runtime/faults.h"
#include "runtime/graph.h"
#include "runtime/launch.h"

namespace npu {

// The aliases of one op. The same tensor has one alias and the same storage one alias storage, so that in-place ops,
// `out=` and overlap checks see what they would see without us. The npu tensors themselves are never changed for the
// duration of an op: weights are shared between threads.
class Aliases {
 public:
  enum class Kind {
    memory,  // CPU tensors over the same memory; results lie on the device already
    shapes,  // meta tensors: where the driver does not compute, an op's shape function makes the results
    zeros,   // the same driver, an op without such a function: CPU tensors of zeros, and of results only the shapes count
  };

  explicit Aliases(Kind kind = Kind::memory) : kind_(kind) {}
  Aliases(const Aliases&) = delete;
  Aliases& operator=(const Aliases&) = delete;
  // An alias that somebody kept (a Python kernel, a node of a graph) owns a reference to the memory from here on.
  ~Aliases();

  // npu -> alias; any other tensor as it is. `is_written`: the op may write to it.
  at::Tensor of(const at::Tensor& tensor, bool is_written = false);
  // An argument's alias -> that argument; a view of one -> a view; a CPU argument or a view of it -> as it is; else adopted.
  at::Tensor to_npu(at::Tensor&& result);
  void write_back();                            // kernels may have resized what they write: sizes and memory move back

  // The index of the npu tensors seen so far; raises when they are of several devices.
  std::optional<c10::DeviceIndex> device() const { return device_ < 0 ? std::nullopt : std::optional(device_); }
  bool empty() const { return entries_.empty(); }
  bool lie_on(const void* address) const;  // whether an argument's memory begins there
  // Raises when tensors of the host lie beside those of the device. A single value of the host may.
  void check_one_device(const char* operation) const;

 private:
  struct Entry {
    c10::intrusive_ptr<c10::TensorImpl> original;
    c10::intrusive_ptr<c10::TensorImpl> alias;
  };

  using Side = c10::intrusive_ptr<c10::TensorImpl> Entry::*;
  struct Table {  // entries by their tensor on one side, and by its storage
    std::unordered_map<const void*, size_t> places;
    size_t size = 0;  // entries that are in it
  };
  struct Tables {
    Table originals, aliases;
  };

  const Entry* find(Side side, const c10::TensorImpl* impl, const c10::StorageImpl* storage);
  const Entry* look_up(Side side, const c10::TensorImpl* impl, const c10::StorageImpl* storage);
  bool is_of_host(const c10::StorageImpl* storage);
  at::Tensor view_of(const Entry& entry, const c10::TensorImpl& result);
  at::Tensor adopt(at::Tensor&& result);
  at::Tensor materialize(const at::Tensor& result);
  void write_back(Entry& entry);
  void recycle(Entry& entry);

  const Kind kind_;
  c10::SmallVector<Entry, 8> entries_;
  std::unique_ptr<Tables> tables_;  // where there are many
  c10::SmallVector<const c10::StorageImpl*, 4> host_;  // of the CPU arguments
  bool host_is_sorted_ = false;
  c10::DeviceIndex device_ = -1;
  bool host_beside_ = false;
};

// A CPU tensor over the memory of an npu tensor that owns a reference to it (unless a graph under capture owns it).
at::Tensor owning_alias(const at::Tensor& tensor);

// Where faults are armed: the memory in which a bit may flip when the kernel has ended.
inline void note_result_of_kernel(const at::Tensor& result) {
  if (!is_watched() || !result.defined() || !result.has_storage() || result.device().type() != kNpu) return;
  const bool whole = !result.is_contiguous();
  void* address = whole ? result.storage().mutable_data() : result.mutable_data_ptr();
  note_result(address, whole ? result.storage().nbytes() : result.nbytes());
}

// A node that runs a CPU kernel on aliases, lending it the allocations it made at capture.
class AliasNode : public Node {
 public:
  using Node::Node;
  AllocationLog log;
  void expect(const at::Tensor& result);  // results must come to the same addresses at each replay

 protected:
  void run() final;
  virtual void run_kernel(std::vector<at::Tensor>* results) = 0;

 private:
  std::vector<const void*> expected_;
};

enum class Devices { one, mixed };  // whether tensors of the host are part of an op's contract

using AliasedTensors = c10::SmallVector<at::Tensor, 3>;  // npu tensors, then their aliases

// Runs `kernel(aliases) -> Tensor or tuple of Tensors`, code for CPU tensors, as one kernel of the device.
template <class Kernel>
auto launch_on_aliases(const char* name, AliasedTensors arguments, Kernel kernel, Devices devices = Devices::one);

}  // namespace npu

#include "aten/alias_launch.h"
