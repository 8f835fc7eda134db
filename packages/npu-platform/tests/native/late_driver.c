/* smallest_driver.c with two devices that do as little as they may: a copy of pinned memory lies in its stream's queue until
   somebody waits for it. */
#define DEVICES 2
#define npu_driver_entry smallest_entry
#include "smallest_driver.c"
#undef npu_driver_entry

#define STREAMS 8
#define PINNED 64

typedef struct {
  int device;
  int64_t stream;
  long tasks; /* of the stream, that were submitted before */
} place;

typedef struct task {
  void* target;
  const void* source; /* NULL: the task waits for `after` */
  size_t bytes;
  place after;
  struct task* next;
} task;

static struct {
  task *first, *last;
  long submitted, done;
} queues[DEVICES][STREAMS];

static void submit(int device, int64_t stream, task what) {
  task* made = malloc(sizeof *made);
  *made = what;
  made->next = NULL;
  if (queues[device][stream].first) queues[device][stream].last->next = made;
  else queues[device][stream].first = made;
  queues[device][stream].last = made;
  ++queues[device][stream].submitted;
}

static void work(place until) {
  while (queues[until.device][until.stream].done < until.tasks) {
    task* now = queues[until.device][until.stream].first;
    if (now->source) memcpy(now->target, now->source, now->bytes);
    else work(now->after);
    queues[until.device][until.stream].first = now->next;
    ++queues[until.device][until.stream].done;
    free(now);
  }
}

static place end_of(int device, int64_t stream) { return (place){device, stream, queues[device][stream].submitted}; }
static int is_behind(place at) { return queues[at.device][at.stream].done >= at.tasks; }

static npu_status late_synchronize(int device) {
  for (int stream = 0; stream < STREAMS; ++stream) work(end_of(device, stream));
  return NPU_OK;
}
static npu_status late_stream_create(int device, int priority, int64_t* stream) {
  static int64_t streams;
  return (void)device, (void)priority, *stream = 1 + streams++ % (STREAMS - 1), NPU_OK;
}
static npu_status late_stream_query(int device, int64_t stream, int* is_done) { return *is_done = is_behind(end_of(device, stream)), NPU_OK; }
static npu_status late_stream_synchronize(int device, int64_t stream) { return work(end_of(device, stream)), NPU_OK; }

static npu_status late_event_create(npu_event** event) { return *event = calloc(1, sizeof(place)), NPU_OK; }
static npu_status late_event_record(npu_event* event, int device, int64_t stream) { return *(place*)event = end_of(device, stream), NPU_OK; }
static npu_status late_event_query(npu_event* event, int* is_done) { return *is_done = is_behind(*(place*)event), NPU_OK; }
static npu_status late_event_synchronize(npu_event* event) { return work(*(place*)event), NPU_OK; }
static npu_status late_wait_event(int device, int64_t stream, npu_event* event) {
  return submit(device, stream, (task){.after = *(place*)event}), NPU_OK;
}

static npu_status late_launch(int device, int64_t stream, const char* name, void (*run)(void* closure), void* closure) {
  work(end_of(device, stream));
  return launch(device, stream, name, run, closure);
}

static struct {
  char* begin;
  size_t bytes;
} pinned[PINNED];

static npu_status late_host_allocate(size_t bytes, void** address) {
  static int count;
  if (count == PINNED) return fail(NPU_ERROR_OUT_OF_MEMORY, "late: no more pinned memory");
  const npu_status status = host_allocate(bytes, address);
  if (!status) pinned[count].begin = *address, pinned[count++].bytes = bytes;
  return status;
}
static void late_host_free(void* address) { (void)address; }

static int is_pinned(const void* address) {
  for (int i = 0; i < PINNED; ++i) {
    if ((const char*)address >= pinned[i].begin && (const char*)address < pinned[i].begin + pinned[i].bytes) return 1;
  }
  return 0;
}

static npu_status late_copy(int device, int64_t stream, void* target, const void* source, size_t bytes, npu_copy_kind kind) {
  submit(device, stream, (task){.target = target, .source = source, .bytes = bytes});
  const int of_host = kind != NPU_COPY_DEVICE_TO_DEVICE;
  if (of_host && !is_pinned(kind == NPU_COPY_HOST_TO_DEVICE ? source : target)) work(end_of(device, stream));
  return NPU_OK;
}

const npu_driver* npu_driver_entry(uint32_t abi) {
  static npu_driver late;
  late = driver;
  late.name = "late";
  late.device_synchronize = late_synchronize;
  late.stream_create = late_stream_create;
  late.stream_query = late_stream_query;
  late.stream_synchronize = late_stream_synchronize;
  late.stream_wait_event = late_wait_event;
  late.event_create = late_event_create;
  late.event_record = late_event_record;
  late.event_query = late_event_query;
  late.event_synchronize = late_event_synchronize;
  late.launch = late_launch;
  late.copy = late_copy;
  late.host_allocate = late_host_allocate;
  late.host_free = late_host_free;
  return abi == NPU_DRIVER_ABI ? &late : NULL;
}
