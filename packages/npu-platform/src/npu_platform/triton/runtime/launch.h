// How a kernel reaches the device: the table of npu_launch.h, the grid in chunks, the memory of large arrays.
#pragma once

#include <new>

#include "arithmetic.h"
#include "types.h"

struct npu_launch_table {
  uint32_t abi;
  int (*launch)(int device, const char* name, void (*run)(void*), void* closure, void (*destroy)(void*));
  void (*parallel_for)(int64_t, int64_t, int64_t, void (*)(void*, int64_t, int64_t), void*);
  int (*num_threads)(void);
  const char* (*last_error)(void);
};

namespace npu_triton {

// Arrays that are too large for a thread's stack; one piece for all programs of a chunk.
class Arena {
 public:
  explicit Arena(uint64_t bytes) : data(bytes ? static_cast<char*>(::operator new(bytes, std::align_val_t(64))) : nullptr) {}
  Arena(const Arena&) = delete;
  ~Arena() {
    if (data) ::operator delete(data, std::align_val_t(64));
  }
  char* const data;
};

constexpr int64_t kWorthAThread = 20000;  // ns; one that sleeps takes longer to come

// Words: the kernel's arguments, each in 8 bytes. Grain: the fewest programs that are worth another thread, by their operations. How
// often loops turn, nobody knows before: from the second launch on, what a program of the last one took says it. Where all of these are
// not worth a thread by that, the launching one begins alone, and calls others when it was wrong.
template <int Words, int Grain, uint64_t ArenaBytes, void (*Run)(const Program&, const int64_t*, char*)>
struct Launch {
  const npu_launch_table* table;
  int32_t x, y, z;
  int64_t arguments[Words ? Words : 1];

  inline static int64_t last = 0;  // ns that a program took; 0: none ran

  static void chunk(void* self, int64_t begin, int64_t end) {
    const auto& launch = *static_cast<const Launch*>(self);
    const int64_t began = nanoseconds();
    Arena arena(ArenaBytes);
    for (int64_t i = begin; i < end; i++) {
      const int64_t plane = i / launch.x;
      Run({int32_t(i % launch.x), int32_t(plane % launch.y), int32_t(plane / launch.y), launch.x, launch.y, launch.z},
          launch.arguments, arena.data);
    }
    __atomic_store_n(&last, (nanoseconds() - began) / (end - begin) + 1, __ATOMIC_RELAXED);
  }
  static void run(void* self) {
    const auto& launch = *static_cast<const Launch*>(self);
    const int64_t programs = int64_t(launch.x) * launch.y * launch.z;
    const int64_t begun = programs <= grain() ? alone(self, programs) : 0;
    if (begun < programs) launch.table->parallel_for(begun, programs, grain(), chunk, self);
  }
  static int64_t grain() {
    const int64_t each = __atomic_load_n(&last, __ATOMIC_RELAXED);
    return each ? kWorthAThread / each + 1 : Grain;
  }
  // Runs the first programs, for as long as that is worth no other thread; returns how many.
  static int64_t alone(void* self, int64_t programs) {
    int64_t begun = 0;
    const int64_t until = nanoseconds() + kWorthAThread;
    for (int64_t some = 1; begun < programs && nanoseconds() < until; some *= 2) {
      const int64_t end = begun + some < programs ? begun + some : programs;
      chunk(self, begun, end);
      begun = end;
    }
    return begun;
  }
  static void destroy(void* self) { delete static_cast<Launch*>(self); }

  static const char* submit(const npu_launch_table* table, int device, const char* name, int x, int y, int z,
                            const void* arguments) {
    if (table->abi != 1) return "this Triton kernel was compiled for another version of npu-platform";
    auto* launch = new Launch{table, x, y, z, {}};
    __builtin_memcpy(launch->arguments, arguments, Words * sizeof(int64_t));
    return table->launch(device, name, run, launch, destroy) ? table->last_error() : nullptr;
  }
};

template <class T>
NPU_INLINE T argument(int64_t word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof(T));  // little-endian: the value comes first
  return value;
}

}  // namespace npu_triton
