#include "runtime/graph.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/AutogradState.h>

#include <atomic>
#include <fstream>
#include <utility>

#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace npu {
namespace {

// What a graph holds, and, while it is captured, the thread that captures: a graph may die on another thread.
struct Capture {
  explicit Capture(PoolId pool) : pool(pool, PoolUser::graph) {}

  const PoolUse pool;  // outlives what the nodes keep
  Recording recording{current_stream(thread_state.device)};
  std::atomic<bool> is_abandoned{false};  // the graph is gone
};

// The capture of this thread.
struct Capturing {
  std::shared_ptr<Capture> capture;
  PoolId pool_before = kDefaultPool;
  bool threads_before = true;  // of autograd
};
thread_local Capturing capturing;

void begin_capturing(std::shared_ptr<Capture> capture) {
  // Autograd's own threads capture nothing: until the end the backward runs on this one.
  auto& autograd = c10::AutogradState::get_tls_state();
  capturing = {capture, thread_state.pool, autograd.get_multithreading_enabled()};
  autograd.set_multithreading_enabled(false);
  thread_state.pool = capture->pool.id();
  thread_state.capture = &capture->recording;
}

void end_capturing() {
  const Capturing ended = std::exchange(capturing, {});
  thread_state.capture = nullptr;
  thread_state.pool = ended.pool_before;
  c10::AutogradState::get_tls_state().set_multithreading_enabled(ended.threads_before);
}

}  // namespace

bool detail::has_graph() {
  if (C10_LIKELY(!capturing.capture->is_abandoned.load(std::memory_order_relaxed))) return true;
  end_capturing();
  return false;
}

void record_node(std::unique_ptr<Node> node) {
  if (!is_capturing()) return;
  thread_state.capture->streams().add_launch(current_stream(c10::DeviceIndex(node->device())));
  thread_state.capture->add(std::move(node));
}

void refuse_during_capture(std::string_view operation) {
  if (C10_LIKELY(!is_capturing())) return;
  thread_state.capture->break_by(operation);
  TORCH_CHECK(false, "npu: ", operation, " is not permitted while a graph is captured: a replay could not repeat it. ",
              "Move it out of the captured region.");
}

void check_stream_of_capture(c10::DeviceIndex device, const char* kernel) {
  if (is_capturing(current_stream(device))) return;
  refuse_during_capture(std::string(kernel) + " on a stream that is not part of the capture (it becomes one with "
                        "stream.wait_stream(), of the stream that captures)");
}

bool is_in_capture_pool(const void* address) {
  if (!address || !is_capturing()) return false;
  const c10::DeviceIndex device = device_of(address);
  return device >= 0 && CachingAllocator::of(device).pool_of(address) == thread_state.pool;
}

namespace {

// The graph behind torch.accelerator.Graph and torch.npu.NPUGraph.
class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs&) {}

  ~Graph() override {
    if (!capturing_) return;
    if (capturing.capture == capture_) {
      end_capturing();
    } else {
      capture_->is_abandoned = true;  // by another thread, which notices at its next launch
    }
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(!is_capturing(), "npu: this thread already captures a graph; end that capture first");
    TORCH_CHECK(!capture_, "npu: this graph already holds a capture; call reset() first");
    check_device(thread_state.device);
    pool_ = pool_of(pool);
    if (pool_ == kDefaultPool) pool_ = new_pool_id();
    capture_ = std::make_shared<Capture>(pool_);
    begin_capturing(capture_);
    capturing_ = true;
  }

  void capture_end() override {
    TORCH_CHECK(capturing_, "npu: capture_end() without capture_begin()");
    TORCH_CHECK(capturing.capture == capture_, "npu: end the capture on the thread that began it");
    const StreamName origin = capture_->recording.streams().origin();
    TORCH_CHECK(current_stream(c10::DeviceIndex(origin.device)) == origin, "npu: end the capture on the stream that it began on");
    end_capturing();
    capturing_ = false;
    check_joined();
  }

  void instantiate() override {}

  void replay() override {
    TORCH_CHECK(capture_ && !capturing_, "npu: replay() needs a captured graph");
    Recording& recording = capture_->recording;
    TORCH_CHECK(recording.broken_by().empty(), "npu: this graph cannot be replayed: its capture met ", recording.broken_by(),
                "; call reset() and capture again");
    TORCH_CHECK(!is_capturing(), "npu: replay() is not permitted while a graph is captured");
    recording.replay([](Node& node) {
      const auto device = c10::DeviceIndex(node.device());
      KernelScope inside(device, node.name().c_str());
      auto kernel = [&node] { node.run(); };
      submit(device, node.name().c_str(), kernel);
    });
  }

  void reset() override {
    TORCH_CHECK(!capturing_, "npu: reset() during the capture; call capture_end() first");
    capture_.reset();
  }

  c10::MempoolId_t pool() const override { return {0, pool_}; }
  void enable_debug_mode() override {}

  void debug_dump(const std::string& path) override {
    std::ofstream file(path);
    TORCH_CHECK(file, "npu: cannot write the graph to ", path);
    const Recording none;
    (capture_ ? capture_->recording : none).write_dot(file);
  }

 private:
  void check_joined() {
    Recording& recording = capture_->recording;
    const auto stream = recording.streams().find_unjoined();
    if (!stream || !recording.broken_by().empty()) return;
    recording.break_by("work on a stream that was not joined");
    TORCH_CHECK(false, "npu: the capture has work on stream ", stream->id, " of npu:", stream->device, " that is not joined to "
                "the stream where it began: let that one wait for it before the end, with wait_stream()");
  }

  std::shared_ptr<Capture> capture_;
  PoolId pool_ = kDefaultPool;
  bool capturing_ = false;
};

}  // namespace
}  // namespace npu

// The key is the device's name in upper case, as it is after the rename.
namespace at {
C10_REGISTER_CLASS(GraphImplRegistry, NPU, npu::Graph)
}  // namespace at
