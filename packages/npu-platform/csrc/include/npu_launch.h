/* How a library of kernels reaches the npu device without linking to it: `torch.ops.npu.launch_table()` returns the address of
   one npu_launch_table. Kept identical in npu-platform and npu-ops. */
#ifndef NPU_LAUNCH_H
#define NPU_LAUNCH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NPU_LAUNCH_ABI 1

typedef struct npu_launch_table {
  uint32_t abi; /* NPU_LAUNCH_ABI */
  /* Run `run(closure)` as a kernel of `device`: now, and again at each replay when the calling thread captures a graph
     (then the graph owns the closure and calls destroy when it dies; otherwise destroy is called before return).
     Returns 0, or a nonzero code; message in last_error(). An exception that leaves run() is such an error. */
  int (*launch)(int device, const char* name, void (*run)(void* closure), void* closure, void (*destroy)(void* closure));
  /* body(ctx, begin, end) over [begin, end) in dynamic chunks of at least grain, on the device's thread pool. The first
     exception that leaves a body is raised again on the caller, when all bodies have ended; chunks that had not begun by then
     are left out. */
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx);
  int (*num_threads)(void);
  const char* (*last_error)(void); /* of this thread */
} npu_launch_table;

#ifdef __cplusplus
}
#endif

#endif /* NPU_LAUNCH_H */
