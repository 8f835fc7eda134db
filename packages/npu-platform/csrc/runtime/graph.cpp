#include "runtime/graph.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/AutogradState.h>

#include <fstream>

#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace npu {

void refuse_during_capture(std::string_view operation) {
  if (C10_LIKELY(!is_capturing())) return;
  thread_state.capture->break_by(operation);
  TORCH_CHECK(false, "npu: ", operation, " is not permitted while a graph is captured: a replay could not repeat it. ",
              "Move it out of the captured region.");
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
    if (capturing_) stop_capturing();
    drop();
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(!is_capturing(), "npu: this thread already captures a graph; end that capture first");
    TORCH_CHECK(!capture_, "npu: this graph already holds a capture; call reset() first");
    check_device(thread_state.device);
    pool_ = pool.second ? pool.second : pool.first ? pool.first : new_pool_id();
    retain_pool(pool_);
    capture_ = std::make_unique<Recording>();
    pool_before_ = std::exchange(thread_state.pool, pool_);
    // Autograd's own threads capture nothing: until the end the backward runs on this one.
    auto& autograd = c10::AutogradState::get_tls_state();
    threads_before_ = autograd.get_multithreading_enabled();
    autograd.set_multithreading_enabled(false);
    thread_state.capture = capture_.get();
    capturing_ = true;
  }

  void capture_end() override {
    TORCH_CHECK(capturing_, "npu: capture_end() without capture_begin()");
    TORCH_CHECK(thread_state.capture == capture_.get(), "npu: end the capture on the thread that began it");
    stop_capturing();
  }

  void instantiate() override {}

  void replay() override {
    TORCH_CHECK(capture_ && !capturing_, "npu: replay() needs a captured graph");
    TORCH_CHECK(capture_->broken_by().empty(), "npu: this graph cannot be replayed: its capture met ",
                capture_->broken_by(), "; call reset() and capture again");
    TORCH_CHECK(!is_capturing(), "npu: replay() is not permitted while a graph is captured");
    capture_->replay([](Node& node) {
      const auto device = c10::DeviceIndex(node.device());
      KernelScope inside(device, node.name().c_str());
      auto kernel = [&node] { node.run(); };
      submit(device, node.name().c_str(), kernel);
    });
  }

  void reset() override {
    TORCH_CHECK(!capturing_, "npu: reset() during the capture; call capture_end() first");
    drop();
  }

  c10::MempoolId_t pool() const override { return {0, pool_}; }
  void enable_debug_mode() override {}

  void debug_dump(const std::string& path) override {
    std::ofstream file(path);
    TORCH_CHECK(file, "npu: cannot write the graph to ", path);
    const Recording none;
    (capture_ ? *capture_ : none).write_dot(file);
  }

 private:
  void stop_capturing() {
    thread_state.capture = nullptr;
    thread_state.pool = pool_before_;
    c10::AutogradState::get_tls_state().set_multithreading_enabled(threads_before_);
    capturing_ = false;
  }

  void drop() {
    if (!capture_) return;
    capture_.reset();  // its nodes let go of what they kept
    release_pool(pool_);
  }

  std::unique_ptr<Recording> capture_;
  PoolId pool_ = kDefaultPool;
  PoolId pool_before_ = kDefaultPool;
  bool threads_before_ = true;
  bool capturing_ = false;
};

}  // namespace
}  // namespace npu

// The key is the device's name in upper case, as it is after the rename.
namespace at {
C10_REGISTER_CLASS(GraphImplRegistry, NPU, npu::Graph)
}  // namespace at
