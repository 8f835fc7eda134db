#include "bindings/launch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "npu_launch.h"

namespace npu_ops {
namespace {

const npu_launch_table* device_table = nullptr;

// A loop whose failure does not unwind into the threads that run it, which would end the process: the first is kept, what is left of the
// loop is skipped, and whoever called the loop gets it.
class Loop {
 public:
  Loop(Body body, void* context) : body_(body), context_(context) {}

  static void chunk(void* loop, int64_t begin, int64_t end) noexcept {
    Loop& self = *static_cast<Loop*>(loop);
    if (self.failed_.load(std::memory_order_relaxed)) return;
    try {
      self.body_(self.context_, begin, end);
    } catch (...) {
      if (!self.failed_.exchange(true)) self.error_ = std::current_exception();
    }
  }
  void rethrow() {
    if (error_) std::rethrow_exception(std::move(error_));
  }

 private:
  const Body body_;
  void* const context_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

// torch hands out fixed shares; a shared counter makes the chunks dynamic, so that a busy core does not hold up the rest.
void cpu_run(int64_t n, int64_t grain, Body body, void* context) {
  Loop loop(body, context);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(grain, std::memory_order_relaxed)) < n;) Loop::chunk(&loop, i, i + grain < n ? i + grain : n);
  });
  loop.rethrow();
}
int cpu_count() { return static_cast<int>(torch::stable::get_num_threads()); }

void device_run(int64_t n, int64_t grain, Body body, void* context) {
  Loop loop(body, context);
  device_table->parallel_for(0, n, grain, Loop::chunk, &loop);
  loop.rethrow();
}
int device_count() { return device_table->num_threads(); }
const Parallel device_threads{device_run, device_count};

// The batches that a call is for; no tokens: any.
struct Batch {
  const int32_t* tokens = nullptr;
  int64_t rows = 0;
};
thread_local Batch recorded;  // of what this thread launches

struct Closure {
  Run* run;
  Batch batch;
  alignas(16) unsigned char params[1];  // as many as the kernel's parameters need
};

void run_closure(void* closure) {
  Closure* c = static_cast<Closure*>(closure);
  if (!c->batch.tokens) return c->run(c->params, {}, device_threads);
  const int64_t rows = c->batch.rows, tokens = *c->batch.tokens;
  c->run(c->params, {rows, tokens < 1 || tokens > rows ? rows : tokens}, device_threads);
}

}  // namespace

void set_padding(const int32_t* tokens, int64_t rows) { recorded = {tokens, rows}; }

const Parallel& cpu_threads() {
  static const Parallel p{cpu_run, cpu_count};
  return p;
}

void launch_bytes(const Tensor& on, const char* name, Run* run, const void* params, size_t bytes) {
  if (on.is_cpu()) return run(params, {}, cpu_threads());
  NPU_CHECK(device_table, name, " was called on npu tensors, but the device has no launch table: import npu_ops after the device.");
  Closure* closure = static_cast<Closure*>(std::malloc(sizeof(Closure) + bytes));
  if (!closure) throw std::bad_alloc();
  closure->run = run;
  closure->batch = recorded;
  std::memcpy(closure->params, params, bytes);
  const int code = device_table->launch(on.get_device_index(), name, run_closure, closure, std::free);
  NPU_CHECK(code == 0, name, " failed on the device: ", device_table->last_error());
}

void set_device_table(int64_t address) {
  const npu_launch_table* table = reinterpret_cast<const npu_launch_table*>(address);
  NPU_CHECK(table && table->abi == NPU_LAUNCH_ABI, "the device's launch table has ABI ", table ? table->abi : 0, ", these kernels need ",
            NPU_LAUNCH_ABI, ": install npu-ops and npu-platform of one version.");
  device_table = table;
}

}  // namespace npu_ops
