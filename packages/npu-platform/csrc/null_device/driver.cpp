// The time of the null device is the host's: a launch or a copy takes NPU_DEVICE=null:launch=<time> of its stream (5 us
// by default), beginning when the work before it ends or when it is submitted, whichever is later. Nothing else takes time.
#include "null_device/driver.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "config/config.h"
#include "null_device/memory.h"

namespace npu::null {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr uint64_t kStreams = 33;  // the default stream, and those that are handed out in turn
constexpr nanoseconds kLaunch{5000};
constexpr nanoseconds kLongest = std::chrono::seconds(10);

// When the work of a stream will be done, on the host's clock in nanoseconds.
struct Stream {
  std::atomic<int64_t> done{0};
};

struct Device {
  explicit Device(size_t memory_bytes) : memory(memory_bytes) {}
  Memory memory;
  std::array<Stream, kStreams> streams;
};

struct Event {
  std::atomic<int64_t> done{-1};  // when what was before its record is done; -1: never recorded
};

nanoseconds launch_time = kLaunch;
std::vector<std::unique_ptr<Device>>* devices = nullptr;  // never destroyed
thread_local std::string last_error;

Event* event_of(npu_event* event) { return reinterpret_cast<Event*>(event); }

npu_status fail(npu_status status, std::string text) {
  last_error = std::move(text);
  return status;
}

int64_t now() { return std::chrono::duration_cast<nanoseconds>(Clock::now().time_since_epoch()).count(); }

void wait_until(int64_t done) {
  constexpr int64_t kOversleep = 100'000;  // what a sleep takes too long, in nanoseconds
  for (int64_t left = done - now(); left > 0; left = done - now()) {
    if (left > kOversleep) std::this_thread::sleep_for(nanoseconds(left - kOversleep));
  }
}

void raise_to(std::atomic<int64_t>& time, int64_t least) {
  int64_t before = time.load(std::memory_order_relaxed);
  while (before < least && !time.compare_exchange_weak(before, least, std::memory_order_relaxed)) {
  }
}

void take_time(Stream& stream) {
  const int64_t start = now();
  int64_t before = stream.done.load(std::memory_order_relaxed);
  while (!stream.done.compare_exchange_weak(before, std::max(before, start) + launch_time.count(), std::memory_order_relaxed)) {
  }
}

// "launch=2.5us"
bool parse_options(const std::string& text) {
  constexpr std::string_view kName = "launch=";
  if (text.empty()) return true;
  if (!text.starts_with(kName)) return false;
  char* unit = nullptr;
  const double number = std::strtod(text.c_str() + kName.size(), &unit);
  const std::string_view name(unit);
  const double factor = name == "ns" ? 1 : name == "us" ? 1e3 : name == "ms" ? 1e6 : 0;
  if (unit == text.c_str() + kName.size() || factor == 0 || !(number >= 0) || number * factor > double(kLongest.count())) return false;
  launch_time = nanoseconds(std::llround(number * factor));
  return true;
}

void before_fork() {
  for (auto& device : *devices) device->memory.mutex().lock();
}
void after_fork() {
  for (auto& device : *devices) device->memory.mutex().unlock();
}

npu_status initialize(const char* options) {
  if (!parse_options(options)) {
    return fail(NPU_ERROR_CONFIG, "NPU_DEVICE='null:" + std::string(options) +
                                      "' cannot be used: the one option is the time that a kernel or a copy takes, from "
                                      "launch=0us to launch=10000ms");
  }
  try {
    auto made = std::make_unique<std::vector<std::unique_ptr<Device>>>();
    for (size_t i = 0; i < config().visible.size(); ++i) made->push_back(std::make_unique<Device>(config().memory_bytes));
    devices = made.release();
  } catch (const ConfigError& error) {
    return fail(NPU_ERROR_CONFIG, error.what());
  } catch (const std::bad_alloc&) {
    return fail(NPU_ERROR_OUT_OF_MEMORY, "the host has no address space for the memory of the null devices: lower NPU_SIMULATOR_MEMORY");
  }
  pthread_atfork(before_fork, after_fork, after_fork);
  return NPU_OK;
}

const char* error_of_this_thread() { return last_error.c_str(); }

npu_status check_device(int device) {
  if (device >= 0 && size_t(device) < devices->size()) return NPU_OK;
  return fail(NPU_ERROR_INVALID_DEVICE, "invalid npu device " + std::to_string(device) + ": " + std::to_string(devices->size()) +
                                            " visible; see NPU_SIMULATOR_DEVICES and NPU_VISIBLE_DEVICES");
}

Device& device_at(int device) { return *(*devices)[size_t(device)]; }

// Any id is a stream: Python can make one up.
Stream& stream_at(int device, int64_t stream) { return device_at(device).streams[size_t(uint64_t(stream) % kStreams)]; }

// ---- devices ----
npu_status device_count(int* count) {
  *count = int(devices->size());
  return NPU_OK;
}

npu_status device_synchronize(int device) {
  const npu_status status = check_device(device);
  if (status != NPU_OK) return status;
  for (Stream& stream : device_at(device).streams) wait_until(stream.done.load(std::memory_order_relaxed));
  return NPU_OK;
}

npu_status device_reset(int device) { return device_synchronize(device); }

// ---- memory ----
npu_status memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  const npu_status status = check_device(device);
  if (status != NPU_OK) return status;
  *free_bytes = device_at(device).memory.free();
  *total_bytes = device_at(device).memory.capacity();
  return NPU_OK;
}

npu_status memory_range(int device, void** base, size_t* span) {
  const npu_status status = check_device(device);
  if (status != NPU_OK) return status;
  *base = device_at(device).memory.base();
  *span = device_at(device).memory.span();
  return NPU_OK;
}

npu_status memory_map(int device, size_t bytes, void** address) {
  const npu_status status = check_device(device);
  if (status != NPU_OK) return status;
  if (bytes == 0 || bytes % NPU_MEMORY_GRANULE) return fail(NPU_ERROR_INVALID_VALUE, "map whole granules of 2 MiB");
  void* mapped = device_at(device).memory.map(bytes);
  if (!mapped) return fail(NPU_ERROR_OUT_OF_MEMORY, "the memory of the device is used up");
  *address = mapped;
  return NPU_OK;
}

npu_status memory_unmap(int device, void* address, size_t bytes) {
  const npu_status status = check_device(device);
  if (status == NPU_OK) device_at(device).memory.unmap(address, bytes);
  return status;
}

npu_status memory_discard(int device, void* address, size_t bytes) {
  const npu_status status = check_device(device);
  if (status == NPU_OK) device_at(device).memory.discard(address, bytes);
  return status;
}

npu_status memory_release(int device, void* address, size_t bytes) {
  const npu_status status = check_device(device);
  if (status == NPU_OK) device_at(device).memory.release(address, bytes);
  return status;
}

npu_status memory_restore(int device, void*, size_t bytes) {
  const npu_status status = check_device(device);
  if (status != NPU_OK || device_at(device).memory.restore(bytes)) return status;
  return fail(NPU_ERROR_OUT_OF_MEMORY, "the memory of the device is used up");
}

npu_status host_allocate(size_t bytes, void** address) {
  void* allocated = std::malloc(bytes);
  if (!allocated) return fail(NPU_ERROR_OUT_OF_MEMORY, "the host has no memory for a pinned buffer of " + std::to_string(bytes) + " bytes");
  *address = allocated;
  return NPU_OK;
}

void host_free(void* address) { std::free(address); }

// ---- streams and events ----
npu_status stream_create(int device, int, int64_t* stream) {
  static std::atomic<uint64_t> created{0};
  const npu_status status = check_device(device);
  if (status == NPU_OK) *stream = 1 + int64_t(created.fetch_add(1) % (kStreams - 1));
  return status;
}

npu_status stream_query(int device, int64_t stream, int* is_done) {
  *is_done = stream_at(device, stream).done.load(std::memory_order_relaxed) <= now();
  return NPU_OK;
}

npu_status stream_synchronize(int device, int64_t stream) {
  wait_until(stream_at(device, stream).done.load(std::memory_order_relaxed));
  return NPU_OK;
}

npu_status stream_wait_event(int device, int64_t stream, npu_event* event) {
  raise_to(stream_at(device, stream).done, event_of(event)->done.load(std::memory_order_relaxed));
  return NPU_OK;
}

npu_status event_create(npu_event** event) {
  auto* created = new (std::nothrow) Event;
  if (!created) return fail(NPU_ERROR_OUT_OF_MEMORY, "the host has no memory for an event");
  *event = reinterpret_cast<npu_event*>(created);
  return NPU_OK;
}

void event_destroy(npu_event* event) { delete event_of(event); }

npu_status event_record(npu_event* event, int device, int64_t stream) {
  event_of(event)->done.store(std::max(stream_at(device, stream).done.load(std::memory_order_relaxed), now()), std::memory_order_relaxed);
  return NPU_OK;
}

npu_status event_query(npu_event* event, int* is_done) {
  *is_done = event_of(event)->done.load(std::memory_order_relaxed) <= now();
  return NPU_OK;
}

npu_status event_synchronize(npu_event* event) {
  wait_until(event_of(event)->done.load(std::memory_order_relaxed));
  return NPU_OK;
}

npu_status event_elapsed(npu_event* start, npu_event* end, double* milliseconds) {
  const int64_t from = event_of(start)->done, to = event_of(end)->done;
  if (from < 0 || to < 0) return fail(NPU_ERROR_INVALID_VALUE, "record both events before asking for the time between them");
  *milliseconds = double(to - from) / 1e6;
  return NPU_OK;
}

// ---- work ----
npu_status launch(int device, int64_t stream, const char*, void (*)(void*), void*) {
  take_time(stream_at(device, stream));
  return NPU_OK;
}

npu_status copy(int device, int64_t stream, void* target, const void*, size_t bytes, npu_copy_kind kind) {
  take_time(stream_at(device, stream));
  if (kind == NPU_COPY_DEVICE_TO_HOST) std::memset(target, 0, bytes);
  return NPU_OK;
}

constexpr npu_driver kDriver{
    .abi = NPU_DRIVER_ABI,
    .size = sizeof(npu_driver),
    .name = "null",
    .device_name = "Null NPU (computes nothing)",
    .major = 1,
    .minor = 0,
    .capabilities = 0,
    .initialize = &initialize,
    .last_error = &error_of_this_thread,
    .device_count = &device_count,
    .device_synchronize = &device_synchronize,
    .device_reset = &device_reset,
    .memory_info = &memory_info,
    .memory_range = &memory_range,
    .memory_map = &memory_map,
    .memory_unmap = &memory_unmap,
    .memory_discard = &memory_discard,
    .host_allocate = &host_allocate,
    .host_free = &host_free,
    .stream_create = &stream_create,
    .stream_query = &stream_query,
    .stream_synchronize = &stream_synchronize,
    .stream_wait_event = &stream_wait_event,
    .event_create = &event_create,
    .event_destroy = &event_destroy,
    .event_record = &event_record,
    .event_query = &event_query,
    .event_synchronize = &event_synchronize,
    .event_elapsed = &event_elapsed,
    .launch = &launch,
    .copy = &copy,
    .num_threads = nullptr,
    .set_num_threads = nullptr,
    .parallel_for = nullptr,
    .memory_check = nullptr,
    .memory_release = &memory_release,
    .memory_restore = &memory_restore,
};

}  // namespace

const npu_driver* driver() { return &kDriver; }

}  // namespace npu::null
