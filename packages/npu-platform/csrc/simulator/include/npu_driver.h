/* The driver of an npu, as a C API: what a vendor implements to run under the PyTorch glue in csrc/runtime.
   Every function that can fail returns an npu_status; the sentence for it is npu_last_error() of the same thread. */
#ifndef NPU_DRIVER_H
#define NPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum npu_status {
  NPU_OK = 0,
  NPU_ERROR_CONFIG = 1,         /* an environment variable has a bad value */
  NPU_ERROR_INVALID_DEVICE = 2, /* no such ordinal */
  NPU_ERROR_INVALID_VALUE = 3,
  NPU_ERROR_OUT_OF_MEMORY = 4,
  NPU_ERROR_LAUNCH_FAILED = 5, /* a kernel failed; the device goes on */
  NPU_ERROR_DEVICE_LOST = 6    /* everything on the device fails until it is reset */
} npu_status;

const char* npu_last_error(void);

/* ---- devices: ordinals 0 .. count-1 are those visible to this process ---- */
#define NPU_MAX_DEVICES 16
npu_status npu_device_count(int* count);
int npu_is_initialized(void); /* nonzero: the devices are up */
const char* npu_device_name(void);

/* ---- memory: mapped and unmapped in granules; the addresses of one device are one range ---- */
#define NPU_MEMORY_GRANULE ((size_t)2 << 20)
npu_status npu_memory_info(int device, size_t* free_bytes, size_t* total_bytes);
npu_status npu_memory_range(int device, void** base, size_t* span);
npu_status npu_memory_map(int device, size_t bytes, void** address);         /* bytes: a multiple of the granule; reads as zero */
npu_status npu_memory_unmap(int device, void* address, size_t bytes);        /* any granules that are mapped */
npu_status npu_memory_discard(int device, void* address, size_t bytes);      /* reads as zero from now on */
int npu_memory_device(const void* address);                                 /* the ordinal, or -1: not device memory */

/* ---- streams and events: work is done in the order of submission, on the submitting thread ---- */
typedef struct npu_event npu_event;
npu_status npu_stream_create(int device, int64_t* stream); /* 0 is the default stream of every device */
npu_status npu_event_create(npu_event** event);
void npu_event_destroy(npu_event* event);
npu_status npu_event_record(npu_event* event, int64_t stream);
int npu_event_query(const npu_event* event);               /* nonzero: all work before the record is done */
npu_status npu_event_elapsed(const npu_event* start, const npu_event* end, double* milliseconds);

/* ---- compute: the device's cores ---- */
int npu_num_threads(void);
npu_status npu_set_num_threads(int threads);
void npu_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx);

#ifdef __cplusplus
}
#endif

#endif /* NPU_DRIVER_H */
