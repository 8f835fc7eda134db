// A library of kernels that reaches the device by npu_launch.h alone: one whose loop may throw.
#include <npu_launch.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

namespace {

struct Loop {
  const npu_launch_table* table;
  int64_t n, throws_at;
  std::atomic<int64_t> visits{0};
  std::mutex mutex;
  std::set<std::thread::id> threads;

  void visit(int64_t i) {
    if (i == throws_at) throw std::runtime_error("index " + std::to_string(i));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    ++visits;
    std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  }
};

void run(void* closure) {
  auto& loop = *static_cast<Loop*>(closure);
  loop.table->parallel_for(0, loop.n, 1, [](void* ctx, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) static_cast<Loop*>(ctx)->visit(i);
  }, &loop);
}

}  // namespace

// Visits [0, n) in a kernel of the device, and throws at one of them unless that is negative. Returns what launch() returns.
extern "C" int visit_all(const npu_launch_table* table, int device, int64_t n, int64_t throws_at, int64_t* visits, int64_t* threads) {
  Loop loop{table, n, throws_at, {}, {}, {}};
  const int code = table->launch(device, "tests::visit_all", run, &loop, [](void*) {});
  *visits = loop.visits;
  *threads = int64_t(loop.threads.size());
  return code;
}

extern "C" const char* error_of(const npu_launch_table* table) { return table->last_error(); }
