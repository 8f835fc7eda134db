/* A driver written against npu_driver.h alone: one device of 64 MiB, with everything done when it is submitted. Compiled
   with -DWRONG_ABI or -DWITHOUT_COPY it is one that must be refused; with -DSLOW it takes a second to initialize and to pin much
   memory; with -DEXCLUSIVE it has a second device, which another process holds; with -DFORGETFUL it loses a launch;
   with -DSILENT its errors have no sentence; with -DODD_RANGE, -DODD_MAP or -DNOTHING it answers what it must not. */
#include <npu_driver.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULES 32
#ifdef EXCLUSIVE
#define DEVICES 2
#endif
#ifndef DEVICES
#define DEVICES 1
#endif

static char* base[DEVICES];
static char mapped[DEVICES][GRANULES];
static long launches;
static const char* problem = "";

static npu_status fail(npu_status status, const char* text) {
  problem = text;
  return status;
}
static const char* last_error(void) {
#ifdef SILENT
  return NULL;
#endif
  return problem;
}

static void take_time(void) {
#ifdef SLOW
  sleep(1);
#endif
}

static npu_status initialize(const char* options) {
  take_time();
  if (strcmp(options, "") && strcmp(options, "fast")) return fail(NPU_ERROR_CONFIG, "smallest: the one option is 'fast'");
  for (int i = 0; i < DEVICES; ++i) {
    char* range = mmap(NULL, (GRANULES + 1) * NPU_MEMORY_GRANULE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range == MAP_FAILED) return fail(NPU_ERROR_OUT_OF_MEMORY, "smallest: no memory");
    base[i] = range + (NPU_MEMORY_GRANULE - (uintptr_t)range % NPU_MEMORY_GRANULE);
  }
  return NPU_OK;
}

static npu_status device_count(int* count) { return *count = DEVICES, NPU_OK; }
static npu_status open_device(int device) {
#ifdef EXCLUSIVE
  if (device) return fail(NPU_ERROR_DEVICE_LOST, "smallest: another process holds it");
#endif
  return (void)device, NPU_OK;
}
static npu_status device_synchronize(int device) { return (void)device, NPU_OK; }
static npu_status device_reset(int device) {
  memset(base[device], 0, GRANULES * NPU_MEMORY_GRANULE);
  return NPU_OK;
}

static npu_status memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  if (open_device(device)) return NPU_ERROR_DEVICE_LOST;
  *total_bytes = *free_bytes = GRANULES * NPU_MEMORY_GRANULE;
  for (int i = 0; i < GRANULES; ++i) *free_bytes -= mapped[device][i] ? NPU_MEMORY_GRANULE : 0;
  return NPU_OK;
}
static npu_status memory_range(int device, void** address, size_t* span) {
  if (open_device(device)) return NPU_ERROR_DEVICE_LOST;
  *address = base[device];
#ifdef ODD_RANGE
  *address = base[device] + 4096;
#endif
  *span = GRANULES * NPU_MEMORY_GRANULE;
  return NPU_OK;
}
static npu_status memory_map(int device, size_t bytes, void** address) {
  const size_t wanted = bytes / NPU_MEMORY_GRANULE;
  for (size_t first = 0, free = 0; first + free < GRANULES;) {
    if (mapped[device][first + free]) {
      first += free + 1;
      free = 0;
    } else if (++free == wanted) {
      memset(mapped[device] + first, 1, wanted);
      *address = base[device] + first * NPU_MEMORY_GRANULE;
#ifdef ODD_MAP
      *address = base[device] + GRANULES * NPU_MEMORY_GRANULE;
#endif
      return NPU_OK;
    }
  }
  return fail(NPU_ERROR_OUT_OF_MEMORY, "smallest: used up");
}
static npu_status memory_discard(int device, void* address, size_t bytes) {
  (void)device;
  memset(address, 0, bytes);
  return NPU_OK;
}
static npu_status memory_unmap(int device, void* address, size_t bytes) {
  memset(mapped[device] + ((char*)address - base[device]) / NPU_MEMORY_GRANULE, 0, bytes / NPU_MEMORY_GRANULE);
  return memory_discard(device, address, bytes);
}
static npu_status host_allocate(size_t bytes, void** address) {
  if (bytes > NPU_MEMORY_GRANULE) take_time();
#ifdef NOTHING
  return *address = NULL, NPU_OK;
#endif
  void* allocated = malloc(bytes);
  if (!allocated) return fail(NPU_ERROR_OUT_OF_MEMORY, "smallest: no host memory");
  *address = allocated;
  return NPU_OK;
}

static npu_status stream_create(int device, int priority, int64_t* stream) { return (void)device, (void)priority, *stream = 7, NPU_OK; }
static npu_status stream_query(int device, int64_t stream, int* is_done) { return (void)device, (void)stream, *is_done = 1, NPU_OK; }
static npu_status stream_synchronize(int device, int64_t stream) { return (void)device, (void)stream, NPU_OK; }
static npu_status stream_wait_event(int device, int64_t stream, npu_event* event) { return (void)device, (void)stream, (void)event, NPU_OK; }

/* An event's time is the number of launches before it: a clock that a test can foretell. */
struct npu_event {
  long launches;
};
static npu_status event_create(npu_event** event) {
#ifdef NOTHING
  return *event = NULL, NPU_OK;
#endif
  return (*event = calloc(1, sizeof **event)) ? NPU_OK : NPU_ERROR_OUT_OF_MEMORY;
}
static void event_destroy(npu_event* event) { free(event); }
static npu_status event_record(npu_event* event, int device, int64_t stream) { return (void)device, (void)stream, event->launches = launches, NPU_OK; }
static npu_status event_query(npu_event* event, int* is_done) { return (void)event, *is_done = 1, NPU_OK; }
static npu_status event_synchronize(npu_event* event) { return (void)event, NPU_OK; }
static npu_status event_elapsed(npu_event* start, npu_event* end, double* milliseconds) {
  *milliseconds = (double)(end->launches - start->launches);
  return NPU_OK;
}

static npu_status launch(int device, int64_t stream, const char* name, void (*run)(void* closure), void* closure) {
  (void)device, (void)stream;
  if (!strcmp(name, "aten::tan")) return fail(NPU_ERROR_LAUNCH_FAILED, "smallest: this hardware has no tangent");
#ifdef FORGETFUL
  if (!strncmp(name, "aten::sinh", 10)) return NPU_OK;
#endif
  ++launches;
  run(closure);
  return NPU_OK;
}
#ifndef WITHOUT_COPY
static npu_status copy(int device, int64_t stream, void* target, const void* source, size_t bytes, npu_copy_kind kind) {
  (void)device, (void)stream, (void)kind;
  memcpy(target, source, bytes);
  return NPU_OK;
}
#endif

static const npu_driver driver = {
#ifdef WRONG_ABI
    .abi = NPU_DRIVER_ABI + 1,
#else
    .abi = NPU_DRIVER_ABI,
#endif
#ifdef OLD_TABLE
    .size = offsetof(npu_driver, memory_release),
#else
    .size = sizeof(npu_driver),
#endif
    .name = "smallest",
    .device_name = "Smallest NPU",
    .major = 3,
    .minor = 1,
    .capabilities = NPU_DRIVER_COMPUTES,
    .initialize = initialize,
    .last_error = last_error,
    .device_count = device_count,
    .device_synchronize = device_synchronize,
    .device_reset = device_reset,
    .memory_info = memory_info,
    .memory_range = memory_range,
    .memory_map = memory_map,
    .memory_unmap = memory_unmap,
    .memory_discard = memory_discard,
    .host_allocate = host_allocate,
    .host_free = free,
    .stream_create = stream_create,
    .stream_query = stream_query,
    .stream_synchronize = stream_synchronize,
    .stream_wait_event = stream_wait_event,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .event_elapsed = event_elapsed,
    .launch = launch,
#ifndef WITHOUT_COPY
    .copy = copy,
#endif
};

const npu_driver* npu_driver_entry(uint32_t abi) { return abi == NPU_DRIVER_ABI ? &driver : NULL; }
