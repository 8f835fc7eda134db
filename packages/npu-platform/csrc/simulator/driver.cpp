// The C API of npu_driver.h over the simulated devices.
#include "simulator/include/npu_driver.h"

#include <atomic>
#include <chrono>
#include <new>
#include <string>

#include "simulator/devices.h"

using npu::sim::Devices;
using Clock = std::chrono::steady_clock;

struct npu_event {
  bool recorded = false;
  Clock::time_point time;
};

namespace {

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
  } catch (const npu::sim::ConfigError& error) {
    *status = fail(NPU_ERROR_CONFIG, error.what());
  } catch (const std::bad_alloc&) {
    *status = fail(NPU_ERROR_OUT_OF_MEMORY,
                   "the host has no address space for the memory of the npu devices: lower NPU_SIMULATOR_MEMORY or "
                   "NPU_SIMULATOR_DEVICES");
  }
  return nullptr;
}

npu::sim::DeviceMemory* memory_of(int device, npu_status* status) {
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

}  // namespace

const char* npu_last_error(void) { return last_error.c_str(); }

npu_status npu_device_count(int* count) {
  npu_status status;
  Devices* all = devices(&status);
  *count = all ? all->count() : 0;
  return status;
}

int npu_is_initialized(void) { return Devices::if_created() != nullptr; }

const char* npu_device_name(void) { return "Software NPU"; }

npu_status npu_memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) {
    *total_bytes = memory->capacity();
    *free_bytes = memory->free();
  }
  return status;
}

npu_status npu_memory_range(int device, void** base, size_t* span) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) {
    *base = memory->base();
    *span = memory->span();
  }
  return status;
}

npu_status npu_memory_map(int device, size_t bytes, void** address) {
  npu_status status;
  auto* memory = memory_of(device, &status);
  if (!memory) return status;
  if (bytes == 0 || bytes % NPU_MEMORY_GRANULE) return fail(NPU_ERROR_INVALID_VALUE, "map whole granules of 2 MiB");
  *address = memory->map(bytes);
  return *address ? NPU_OK : fail(NPU_ERROR_OUT_OF_MEMORY, "the memory of the device is used up");
}

npu_status npu_memory_unmap(int device, void* address, size_t bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) memory->unmap(address, bytes);
  return status;
}

npu_status npu_memory_discard(int device, void* address, size_t bytes) {
  npu_status status;
  if (auto* memory = memory_of(device, &status)) memory->discard(address, bytes);
  return status;
}

int npu_memory_device(const void* address) {
  Devices* all = Devices::if_created();
  return all ? all->owner_of(address) : -1;
}

npu_status npu_stream_create(int device, int64_t* stream) {
  static std::atomic<int64_t> created{0};
  constexpr int64_t kStreams = 32;  // handed out in turn, as by other accelerators
  npu_status status;
  if (memory_of(device, &status)) *stream = 1 + created.fetch_add(1) % kStreams;
  return status;
}

npu_status npu_event_create(npu_event** event) {
  *event = new (std::nothrow) npu_event;
  return *event ? NPU_OK : fail(NPU_ERROR_OUT_OF_MEMORY, "the host has no memory for an event");
}

void npu_event_destroy(npu_event* event) { delete event; }

npu_status npu_event_record(npu_event* event, int64_t) {
  event->recorded = true;
  event->time = Clock::now();
  return NPU_OK;
}

int npu_event_query(const npu_event*) { return 1; }

npu_status npu_event_elapsed(const npu_event* start, const npu_event* end, double* milliseconds) {
  if (!start->recorded || !end->recorded) return fail(NPU_ERROR_INVALID_VALUE, "record both events before asking for the time between them");
  *milliseconds = std::chrono::duration<double, std::milli>(end->time - start->time).count();
  return NPU_OK;
}

int npu_num_threads(void) {
  npu_status status;
  Devices* all = devices(&status);
  return all ? all->pool().threads() : 1;
}

npu_status npu_set_num_threads(int threads) {
  npu_status status;
  Devices* all = devices(&status);
  if (!all) return status;
  if (threads < 1) return fail(NPU_ERROR_INVALID_VALUE, "the device needs at least one thread, not " + std::to_string(threads));
  all->pool().set_threads(threads);
  return NPU_OK;
}

void npu_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx) {
  npu_status status;
  if (Devices* all = devices(&status)) {
    all->pool().parallel_for(begin, end, grain, body, ctx);
  } else if (begin < end) {
    body(ctx, begin, end);
  }
}
