// What a capture records: the launches of a thread, to be run again as they are. Without torch, for the sanitizers.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/capture_streams.h"

namespace npu {

// One launch of a graph.
class Node {
 public:
  Node(int device, std::string name) : device_(device), name_(std::move(name)) {}
  virtual ~Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  virtual void run() = 0;  // the kernel, once it has been submitted
  int device() const { return device_; }
  const std::string& name() const { return name_; }

 private:
  const int device_;
  const std::string name_;
};

template <class Kernel>
class KernelNode final : public Node {
 public:
  KernelNode(int device, const char* name, Kernel kernel) : Node(device, name), kernel_(std::move(kernel)) {}
  void run() override { kernel_(); }

 private:
  Kernel kernel_;
};

// Recorded by one thread; replayed by any, and by several in turn: a replay writes to the memory of the one before, so
// they are put in an order, as on hardware.
class Recording {
 public:
  explicit Recording(StreamName origin = {}) : streams_(origin) {}

  void add(std::unique_ptr<Node> node) { nodes_.push_back(std::move(node)); }
  CaptureStreams& streams() { return streams_; }  // while it is captured
  size_t size() const { return nodes_.size(); }

  // The operation that the capture met and does not permit; empty: none.
  void break_by(std::string_view operation) { broken_by_ = operation; }
  const std::string& broken_by() const { return broken_by_; }

  // submit(Node&) for each launch. What it raises ends the replay.
  template <class Submit>
  void replay(Submit submit) {
    std::lock_guard lock(replaying_);
    for (const auto& node : nodes_) submit(*node);
  }

  void write_dot(std::ostream& out) const;  // for Graphviz

 private:
  CaptureStreams streams_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::string broken_by_;
  std::mutex replaying_;
};

}  // namespace npu
