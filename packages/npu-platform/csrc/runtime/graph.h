// Graphs: what a thread launches between capture_begin() and capture_end(), to be run again as it is.
#pragma once

#include <ATen/core/GraphImplInterface.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/thread_state.h"

namespace npu {

// One launch of a graph.
class Node {
 public:
  Node(c10::DeviceIndex device, std::string name) : device_(device), name_(std::move(name)) {}
  virtual ~Node() = default;
  void replay();
  const std::string& name() const { return name_; }

 protected:
  virtual void run() = 0;  // inside a KernelScope
  c10::DeviceIndex device_;

 private:
  std::string name_;
};

template <class Kernel>
class KernelNode final : public Node {
 public:
  KernelNode(c10::DeviceIndex device, const char* name, Kernel kernel) : Node(device, name), kernel_(std::move(kernel)) {}

 protected:
  void run() override { kernel_(); }

 private:
  Kernel kernel_;
};

// A graph under capture, or captured.
class Capture {
 public:
  std::vector<std::unique_ptr<Node>> nodes;
  std::string broken_by;  // an operation that capture does not permit
};

inline bool is_capturing() { return thread_state.capture != nullptr; }
void record_node(std::unique_ptr<Node> node);

// Raises RuntimeError naming the operation when this thread captures: the graph could not repeat it.
void refuse_during_capture(std::string_view operation);

// Whether the address belongs to the graph under capture, which then owns it: nodes must not keep such memory alive, or
// it could not be reused within the graph.
bool is_in_capture_pool(const void* address);

}  // namespace npu
