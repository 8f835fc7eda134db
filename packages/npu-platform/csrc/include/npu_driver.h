/* The driver of an npu: a table of C functions, which a vendor fills in to run under the PyTorch device in csrc/runtime.

   A driver is a shared library that exports npu_driver_entry(); NPU_DEVICE=/path/to/library.so[:options] loads it. The
   simulator and the null device, which are built in, are the same table without the library. docs/developer_guide/driver.md
   tells how to write one.

   Rules for all functions:
   - Errors. Whatever returns npu_status returns NPU_OK, or a status and a sentence: last_error() of the same thread then
     says what is wrong, with the value and the remedy. No exception and no longjmp leaves a function. Results are written
     only with NPU_OK.
   - Late errors. Work that fails after the call that submitted it has returned is reported once, by the next call for that
     stream which waits for it or submits more; last_error() then names the kernel that failed. Nothing waits for ever on it.
   - Threads. Any function may be called from any thread at any time after initialize(); calls for one stream come from
     several threads too. last_error() is of the calling thread.
   - Ownership. Strings and tables that the driver returns live as long as the process; pointers that it is given are the
     caller's, and are not kept beyond the call, but for memory that a copy under way reads or writes.
   - Order. Work of one stream is done in the order of submission; work of two streams only where stream_wait_event() says
     so. Functions that submit (launch, copy, event_record, stream_wait_event) need not wait for the work.
   - fork(). The child goes on with a copy of the parent's devices; a driver that cannot do so fails there with
     NPU_ERROR_DEVICE_LOST. It may use pthread_atfork().
   - Devices are ordinals 0 .. count - 1. Bytes are bytes, times are named with their unit. */
#ifndef NPU_DRIVER_H
#define NPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NPU_DRIVER_ABI 1 /* a change that breaks drivers raises it; functions added at the end do not */
#define NPU_MAX_DEVICES 16
#define NPU_MEMORY_GRANULE ((size_t)2 << 20) /* bytes */

typedef enum npu_status {
  NPU_OK = 0,
  NPU_ERROR_CONFIG = 1,         /* an environment variable or an option has a bad value */
  NPU_ERROR_INVALID_DEVICE = 2, /* no such ordinal */
  NPU_ERROR_INVALID_VALUE = 3,
  NPU_ERROR_OUT_OF_MEMORY = 4,
  NPU_ERROR_LAUNCH_FAILED = 5, /* a kernel failed; the device goes on */
  NPU_ERROR_DEVICE_LOST = 6    /* everything on the device fails until device_reset() */
} npu_status;

/* Bits of npu_driver.capabilities. */
#define NPU_DRIVER_COMPUTES ((uint64_t)1) /* launch() runs kernels; without it the runtime keeps shapes and sizes alone */

typedef struct npu_event npu_event; /* the driver's own */

typedef enum npu_copy_kind { NPU_COPY_HOST_TO_DEVICE = 0, NPU_COPY_DEVICE_TO_HOST = 1, NPU_COPY_DEVICE_TO_DEVICE = 2 } npu_copy_kind;

/* Optional: what NPU_DEBUG=memory needs of a driver. Device memory is closed to the host while no scope is open. */
typedef struct npu_memory_check {
  int (*open)(const char* name); /* opens the memory of all devices; `name` is of what reads it and outlives the scope */
  void (*close)(int scope);      /* of open() */
  int (*close_pages)(void* address, size_t bytes); /* closed in scopes too, contents lost; nonzero: done */
  void (*reopen_pages)(void* address, size_t bytes);
  /* For reports: an allocation of `bytes` at `data`, in the pages [begin, end); and that it was freed. */
  void (*remember)(int device, void* begin, void* end, void* data, size_t bytes);
  void (*forget)(void* begin);
} npu_memory_check;

typedef struct npu_driver {
  uint32_t abi;          /* NPU_DRIVER_ABI */
  uint32_t size;         /* sizeof(npu_driver), as the driver was compiled */
  const char* name;        /* of the driver, e.g. "simulator" */
  const char* device_name; /* of a device, for people, e.g. "Software NPU" */
  int32_t major, minor;    /* version of the hardware */
  uint64_t capabilities; /* NPU_DRIVER_* bits */

  /* Called once, before all others, at the first use of a device: `options` is what follows the driver's name in
     NPU_DEVICE, "" when nothing does. After an error it may be called again. */
  npu_status (*initialize)(const char* options);
  const char* (*last_error)(void);

  /* ---- devices ---- */
  npu_status (*device_count)(int* count); /* 0 to NPU_MAX_DEVICES; never changes. Those of NPU_VISIBLE_DEVICES, if set: the driver reads it */
  npu_status (*device_synchronize)(int device); /* returns when all submitted work is done */
  npu_status (*device_reset)(int device);       /* a lost device works again; what is mapped stays so and reads as zero */

  /* ---- memory of a device: one range of addresses, mapped and unmapped in granules. The host can read and write it at
     the same addresses (unified or mapped memory): kernels without a version for the device are host code. ---- */
  npu_status (*memory_info)(int device, size_t* free_bytes, size_t* total_bytes);
  npu_status (*memory_range)(int device, void** base, size_t* span);           /* never changes; base on a granule */
  npu_status (*memory_map)(int device, size_t bytes, void** address);          /* whole granules, contiguous; reads as zero */
  npu_status (*memory_unmap)(int device, void* address, size_t bytes); /* any granules that are mapped, after the work that may use them */
  npu_status (*memory_discard)(int device, void* address, size_t bytes);       /* granules that read as zero from now on */
  npu_status (*host_allocate)(size_t bytes, void** address);                   /* pinned: copies need not be staged */
  void (*host_free)(void* address);

  /* ---- streams, named by device and id: 0 is the default stream of each device, the others are the driver's to
     choose. They live as long as the process; a driver may hand out the same one twice. ---- */
  npu_status (*stream_create)(int device, int priority, int64_t* stream); /* priority: lower is more urgent, 0 usual */
  npu_status (*stream_query)(int device, int64_t stream, int* is_done);   /* 1: all submitted work is done */
  npu_status (*stream_synchronize)(int device, int64_t stream);
  npu_status (*stream_wait_event)(int device, int64_t stream, npu_event* event); /* later work waits for the last record */

  /* ---- events: a place in a stream, and its time ---- */
  npu_status (*event_create)(npu_event** event);
  void (*event_destroy)(npu_event* event); /* its record may be under way; NULL: nothing */
  npu_status (*event_record)(npu_event* event, int device, int64_t stream);
  npu_status (*event_query)(npu_event* event, int* is_done); /* 1: all work before the last record, or never recorded */
  npu_status (*event_synchronize)(npu_event* event);
  npu_status (*event_elapsed)(npu_event* start, npu_event* end, double* milliseconds); /* both recorded and done */

  /* ---- work ---- */
  /* A kernel, as host code. The driver waits for the work before it in the stream and calls run(closure) once, on the
     calling thread, before it returns: run() allocates, and what it returns decides shapes. A driver that does not compute
     never calls it. For a `name` ("namespace::op") whose closure only enqueues work on the stream by other means, the
     driver need not wait. run() lets no exception out; the closure is the caller's. This is the hot path. */
  npu_status (*launch)(int device, int64_t stream, const char* name, void (*run)(void* closure), void* closure);
  /* Bytes that do not overlap; device to device may be between two devices, then `device` is the target's. Host memory
     that is not of host_allocate() has been read, or written, when the call returns. */
  npu_status (*copy)(int device, int64_t stream, void* target, const void* source, size_t bytes, npu_copy_kind kind);

  /* ---- the cores that host code runs on; all three NULL: it runs on its caller alone ---- */
  int (*num_threads)(void);
  npu_status (*set_num_threads)(int threads); /* the caller's included; at least 1 */
  /* body(ctx, begin, end) over [begin, end) in chunks of at least `grain`, from several threads; returns when all are done.
     A call inside a body runs on its caller alone. A body lets no exception out. */
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx);

  const npu_memory_check* memory_check; /* NULL: NPU_DEBUG=memory is refused */

  /* ---- optional, what follows may be missing: both NULL, or a table that ends before them ---- */
  /* Mapped granules give their memory and its contents up, and count as free, while their addresses stay taken: sleep
     mode. They are restored before anything else is done with them; restored memory reads as zero. */
  npu_status (*memory_release)(int device, void* address, size_t bytes);
  npu_status (*memory_restore)(int device, void* address, size_t bytes); /* NPU_ERROR_OUT_OF_MEMORY: nothing is restored */
} npu_driver;

/* What a shared library exports. `abi` is the runtime's NPU_DRIVER_ABI; NULL: the driver does not know that one. */
const npu_driver* npu_driver_entry(uint32_t abi);

#ifdef __cplusplus
}
#endif

#endif /* NPU_DRIVER_H */
