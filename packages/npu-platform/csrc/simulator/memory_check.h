// NPU_DEBUG=memory: device memory is closed while no kernel runs, freed memory always; an access to what is closed is named.
#pragma once

#include <cstddef>

namespace npu::sim::memory_check {

// Installs the handler that names a bad access before the process dies of it.
void start();

// Memory below `end` is in use by a device whose addresses begin at `base`.
void extend(char* base, char* end);

// Opens the memory of all devices until close(). `name`, of the kernel or what else reads memory, must outlive the scope.
int open(const char* name);
void close(int scope);

// Pages that stay closed in kernels too; their contents are lost. False: the system cannot (Linux before 6.13).
bool close_pages(char* address, size_t bytes);
void reopen_pages(char* address, size_t bytes);

// What the handler knows: an allocation of `bytes` at `data` in the pages [begin, end), and that it was freed.
void remember(int device, char* begin, char* end, char* data, size_t bytes);
void forget(char* begin);

void before_fork();
void after_fork();

}  // namespace npu::sim::memory_check
