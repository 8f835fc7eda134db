// The driver of the simulated devices. Work is done when it is submitted, on the submitting thread.
#include "simulator/driver.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "simulator/devices.h"
#include "simulator/memory_check.h"

namespace npu::sim {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  bool recorded = false;
  Clock::time_point time;
};

Event* event_of(npu_event* event) { return reinterpret_cast<Event*>(event); }

thread_local std::string last_error;

npu_status fail(npu_status status, std::string text) {
  last_error = std::move(text);
  return status;
}

// The devices, or nullptr and a status: no exception leaves the C API.
Devices* devices(npu_status* status) {
  try {
    *status = NPU_OK;
    return &Devices::instance();
  } catch (const ConfigError& error) {
    *status = fail(NPU_ERROR_CONFIG, error.what());
  } catch (const std::bad_alloc&) {
    *status = fail(NPU_ERROR_OUT_OF_MEMORY,
                   "the host has no address space for the memory of the npu devices: lower NPU_SIMULATOR_MEMORY or "
                   "NPU_SIMULATOR_DEVICES");
  }
  return nullptr;
}

DeviceMemory* memory_of(int device, npu_status* status) {
  Devices* all = devices(status);
  if (!all) return nullptr;
  if (device < 0 || device >= all->count()) {
    *status = fail(NPU_ERROR_INVALID_DEVICE, "invalid npu device " + std::to_string(device) + ": " +
                                                 std::to_string(all->count()) +
                                                 " visible; see NPU_SIMULATOR_DEVICES and NPU_VISIBLE_DEVICES");
    return nullptr;
  }
  return &all->memory(device);
}

npu_status initialize(const char* options) {
  if (*options) return fail(NPU_ERROR_CONFIG, "NPU_DEVICE='simulator:" + std::string(options) + "' cannot be used: the simulator has no options");
  npu_status status;
  devices(&status);
  return status;
}

const char* error_of_this_thread() { return last_error.c_str(); }

// ---- devices ----
npu_status device_count(int* count) {
  npu_status status;
  if (Devices* all = devices(&status)) *count = all->count();
  return status;
}

npu_status device_synchronize(int) { return NPU_OK; }

npu_status device_reset(int device) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) memory->discard(memory->base(), memory->span());
  return status;
}

// ---- memory ----
npu_status memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) {
    *total_bytes = memory->capacity();
    *free_bytes = memory->free();
  }
  return status;
}

npu_status memory_range(int device, void** base, size_t* span) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) {
    *base = memory->base();
    *span = memory->span();
  }
  return status;
}

npu_status memory_map(int device, size_t bytes, void** address) {
  npu_status status;
  auto* memory = memory_of(device, &status);
  if (!memory) return status;
  if (bytes == 0 || bytes % NPU_MEMORY_GRANULE) return fail(NPU_ERROR_INVALID_VALUE, "map whole granules of 2 MiB");
  void* mapped = memory->map(bytes);
  if (!mapped) return fail(NPU_ERROR_OUT_OF_MEMORY, "the memory of the device is used up");
  *address = mapped;
  return NPU_OK;
}

npu_status memory_unmap(int device, void* address, size_t bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) memory->unmap(address, bytes);
  return status;
}

npu_status memory_discard(int device, void* address, size_t bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) memory->discard(address, bytes);
  return status;
}

npu_status memory_release(int device, void* address, size_t bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) memory->release(address, bytes);
  return status;
}

npu_status memory_restore(int device, void* address, size_t bytes) {
  npu_status status;
  auto* memory = memory_of(device, &status);
  if (memory && !memory->restore(address, bytes)) return fail(NPU_ERROR_OUT_OF_MEMORY, "the memory of the device is used up");
  return status;
}

npu_status host_allocate(size_t bytes, void** address) {  // all host memory is the same to a simulated device
  constexpr size_t kPage = 4096;
  void* allocated = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (!allocated) return fail(NPU_ERROR_OUT_OF_MEMORY, "the host has no memory for a pinned buffer of " + std::to_string(bytes) + " bytes");
  *address = allocated;
  return NPU_OK;
}

void host_free(void* address) { std::free(address); }

// ---- streams and events ----
npu_status stream_create(int device, int, int64_t* stream) {
  static std::atomic<int64_t> created{0};
  constexpr int64_t kStreams = 32;  // handed out in turn, as by other accelerators
  npu_status status;
  if (memory_of(device, &status)) *stream = 1 + created.fetch_add(1) % kStreams;
  return status;
}

npu_status stream_query(int, int64_t, int* is_done) {
  *is_done = 1;
  return NPU_OK;
}

npu_status stream_synchronize(int, int64_t) { return NPU_OK; }
npu_status stream_wait_event(int, int64_t, npu_event*) { return NPU_OK; }

npu_status event_create(npu_event** event) {
  auto* created = new (std::nothrow) Event;
  if (!created) return fail(NPU_ERROR_OUT_OF_MEMORY, "the host has no memory for an event");
  *event = reinterpret_cast<npu_event*>(created);
  return NPU_OK;
}

void event_destroy(npu_event* event) { delete event_of(event); }

npu_status event_record(npu_event* event, int, int64_t) {
  event_of(event)->recorded = true;
  event_of(event)->time = Clock::now();
  return NPU_OK;
}

npu_status event_query(npu_event*, int* is_done) {
  *is_done = 1;
  return NPU_OK;
}

npu_status event_synchronize(npu_event*) { return NPU_OK; }

npu_status event_elapsed(npu_event* start, npu_event* end, double* milliseconds) {
  if (!event_of(start)->recorded || !event_of(end)->recorded) {
    return fail(NPU_ERROR_INVALID_VALUE, "record both events before asking for the time between them");
  }
  *milliseconds = std::chrono::duration<double, std::milli>(event_of(end)->time - event_of(start)->time).count();
  return NPU_OK;
}

// ---- work ----
npu_status launch(int, int64_t, const char*, void (*run)(void* closure), void* closure) {
  run(closure);
  return NPU_OK;
}

npu_status copy(int, int64_t, void* target, const void* source, size_t bytes, npu_copy_kind) {
  // Shared out as a kernel shares out the rows of a weight: who copies a part touches it first, and its memory is beside that thread.
  constexpr size_t kGrain = size_t(1) << 16, kLeast = size_t(4) << 20;
  if (bytes < kLeast) {
    std::memcpy(target, source, bytes);
    return NPU_OK;
  }
  struct Range {
    char* target;
    const char* source;
    size_t bytes;
  } range{static_cast<char*>(target), static_cast<const char*>(source), bytes};
  auto body = [](void* context, int64_t begin, int64_t end) {
    const auto& all = *static_cast<Range*>(context);
    const size_t from = size_t(begin) * kGrain, to = std::min(size_t(end) * kGrain, all.bytes);
    std::memcpy(all.target + from, all.source + from, to - from);
  };
  Devices::instance().pool().parallel_for(0, int64_t((bytes + kGrain - 1) / kGrain), 1, body, &range);
  return NPU_OK;
}

// ---- cores ----
int num_threads() { return Devices::instance().pool().threads(); }

npu_status set_num_threads(int threads) {
  if (threads < 1) return fail(NPU_ERROR_INVALID_VALUE, "the device needs at least one thread, not " + std::to_string(threads));
  Devices::instance().pool().set_threads(threads);
  return NPU_OK;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx) {
  Devices::instance().pool().parallel_for(begin, end, grain, body, ctx);
}

// ---- memory checks ----
int close_pages(void* address, size_t bytes) { return memory_check::close_pages(static_cast<char*>(address), bytes); }
void reopen_pages(void* address, size_t bytes) { memory_check::reopen_pages(static_cast<char*>(address), bytes); }
void remember(int device, void* begin, void* end, void* data, size_t bytes) {
  memory_check::remember(device, static_cast<char*>(begin), static_cast<char*>(end), static_cast<char*>(data), bytes);
}
void forget(void* begin) { memory_check::forget(static_cast<char*>(begin)); }

constexpr npu_memory_check kMemoryCheck{&memory_check::open, &memory_check::close, &close_pages, &reopen_pages, &remember, &forget};

constexpr npu_driver kDriver{
    .abi = NPU_DRIVER_ABI,
    .size = sizeof(npu_driver),
    .name = "simulator",
    .device_name = "Software NPU",
    .major = 1,
    .minor = 0,
    .capabilities = NPU_DRIVER_COMPUTES,
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
    .num_threads = &num_threads,
    .set_num_threads = &set_num_threads,
    .parallel_for = &parallel_for,
    .memory_check = &kMemoryCheck,
    .memory_release = &memory_release,
    .memory_restore = &memory_restore,
};

}  // namespace

const npu_driver* driver() { return &kDriver; }

}  // namespace npu::sim
