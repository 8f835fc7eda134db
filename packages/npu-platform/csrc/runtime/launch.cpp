#include "runtime/launch.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <string>

#include "include/npu_launch.h"
#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/faults.h"
#include "runtime/launch_table.h"

namespace npu {
namespace {

std::atomic<int64_t> kernels{0};
std::atomic<int64_t> fallbacks{0};

}  // namespace

struct KernelScope::Watched {
  c10::DeviceIndex device;
  const char* name;
  PendingFlip flip;
  std::optional<OpenMemory> open;
};

void KernelScope::Delete::operator()(Watched* watched) const { delete watched; }

KernelScope::KernelScope(c10::DeviceIndex device, const char* name)
    : previous_(thread_state.device),
      name_(name),
      began_(profiler::is_recording() && thread_state.kernel_depth == 0 ? profiler::now() : 0) {
  if (C10_UNLIKELY(is_capturing()) && thread_state.kernel_depth == 0) check_stream_of_capture(device, name);
  if (is_watched()) {
    watched_.reset(new Watched{device, name, {}, {}});
    if (is_watched(kWatchFaults)) watched_->flip = meet_launch_faults(device, name);
    if (is_watched(kWatchMemory)) watched_->open.emplace(name);
  }
  kernels.fetch_add(1, std::memory_order_relaxed);
  thread_state.device = device;
  ++thread_state.kernel_depth;
}

void KernelScope::leave() {
  if (watched_->flip.fault) flip_bit(watched_->device, watched_->name, watched_->flip);
  if (!watched_->open) return;
  const std::string broken = CachingAllocator::of(watched_->device).broken_fences();
  const std::string name = watched_->name;
  watched_.reset();
  if (broken.empty()) return;
  const std::string text = "npu memory check: kernel " + name + " wrote out of bounds: " + broken;
  TORCH_CHECK(std::uncaught_exceptions() > 0, text);
  std::fprintf(stderr, "%s\n", text.c_str());  // another error is on its way
}

LaunchCounts launch_counts() { return {kernels.load(), fallbacks.load()}; }

void count_fallback() { fallbacks.fetch_add(1, std::memory_order_relaxed); }

// ---- the same door for libraries that do not link to us ----
namespace {

thread_local std::string table_error;

// Owns the caller's closure; moves into the node of a graph.
struct Closure {
  void (*run)(void*);
  void (*destroy)(void*);
  void* data;

  Closure(void (*run)(void*), void (*destroy)(void*), void* data) : run(run), destroy(destroy), data(data) {}
  Closure(Closure&& other) noexcept : run(other.run), destroy(std::exchange(other.destroy, nullptr)), data(other.data) {}
  Closure& operator=(Closure&&) = delete;
  ~Closure() {
    if (destroy) destroy(data);
  }
  void operator()() { run(data); }
};

int table_launch(int device, const char* name, void (*run)(void*), void* data, void (*destroy)(void*)) {
  Closure closure(run, destroy, data);
  try {
    check_device(device);
    launch(c10::DeviceIndex(device), name, std::move(closure));
    return 0;
  } catch (const c10::Error& error) {
    table_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    table_error = error.what();
  }
  return 1;
}

const char* table_last_error() { return table_error.c_str(); }

}  // namespace

const npu_launch_table* launch_table() {
  static const npu_launch_table table{NPU_LAUNCH_ABI, &table_launch, &parallel_for, &num_threads, &table_last_error};
  return &table;
}

}  // namespace npu
