#include "simulator/memory_check.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "simulator/devices.h"

namespace npu::sim::memory_check {
namespace {

// Guard pages: closed whatever the protection of their mapping, so that one mprotect() can open all the rest. From the
// headers of Linux 6.13, which are newer than those of supported systems.
constexpr int kGuardInstall = 102;
constexpr int kGuardRemove = 103;

struct Range {
  char* base;
  char* end;
};

struct Gate {
  std::mutex mutex;
  int open = 0;
  std::vector<Range> ranges;  // by device
};

Gate& gate() {
  static auto* the = new Gate;
  return *the;
}

// The handler may read this at any moment: slots are claimed and left without a lock.
std::array<std::atomic<const char*>, 64> names{};

struct Allocation {
  char* end;
  char* data;
  size_t bytes;
  int device;
  bool is_freed;
};

// By the first page. The lock is one that the handler may take: no code that holds it touches device memory, so the thread
// that met a fault never holds it.
std::map<char*, Allocation>& allocations() {
  static auto* all = new std::map<char*, Allocation>;
  return *all;
}
std::atomic_flag allocations_locked;

struct AllocationsLock {
  AllocationsLock() {
    while (allocations_locked.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~AllocationsLock() { allocations_locked.clear(std::memory_order_release); }
};

void protect(int protection) {
  for (const Range& range : gate().ranges) mprotect(range.base, size_t(range.end - range.base), protection);
}

struct sigaction previous;

// Where the address lies, in words; the length of the text.
int place(char* text, size_t size, char* address) {
  AllocationsLock lock;
  auto next = allocations().upper_bound(address);
  if (next == allocations().begin() || address >= std::prev(next)->second.end) {
    return std::snprintf(text, size, "where no tensor is");
  }
  const Allocation& found = std::prev(next)->second;
  const char* what = found.is_freed ? "freed tensor memory" : "the tensor memory";
  if (address < found.data) {
    return std::snprintf(text, size, "%td bytes before %s of %zu bytes at %p", found.data - address, what, found.bytes, static_cast<void*>(found.data));
  }
  const size_t offset = size_t(address - found.data);
  if (offset >= found.bytes) {
    return std::snprintf(text, size, "%zu bytes past the end of %s of %zu bytes at %p", offset - found.bytes, what, found.bytes, static_cast<void*>(found.data));
  }
  return std::snprintf(text, size, "at byte %zu of %s of %zu bytes at %p%s", offset, what, found.bytes, static_cast<void*>(found.data),
                       found.is_freed ? " (use after free)" : "");
}

const char* direction([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  constexpr greg_t kWrite = 2;  // of the page fault's error code
  return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWrite ? "write" : "read";
#else
  return "access";
#endif
}

void report(char* address, int device, void* context) {
  char text[1024];
  int used = std::snprintf(text, sizeof text, "npu memory check: bad %s at %p on npu:%d, ", direction(context), static_cast<void*>(address), device);
  used += place(text + used, sizeof text - size_t(used), address);
  const char* joint = ", in kernel ";
  for (const auto& name : names) {
    const char* running = name.load();
    if (!running || used >= int(sizeof text) - 300) continue;
    used += std::snprintf(text + used, sizeof text - size_t(used), "%s%.100s", joint, running);
    joint = " or ";
  }
  const bool is_outside = joint[1] == ' ' && joint[0] == ',';
  used += std::snprintf(text + used, sizeof text - size_t(used), "%s\n",
                        is_outside ? ", outside any kernel: host code used a device pointer; copy the tensor with .cpu() first" : "");
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, size_t(used));
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  char* address = static_cast<char*>(info->si_addr);
  Devices* devices = Devices::if_created();
  const int device = info->si_code > 0 && devices ? devices->owner_of(address) : -1;
  if (device >= 0) report(address, device, context);
  // The access is tried again under the handler that was there before: it dies as it would have without us.
  sigaction(signal, &previous, nullptr);
  if (info->si_code <= 0) raise(signal);
  errno = saved;
}

}  // namespace

void start() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous);
}

void extend(char* base, char* end) {
  std::lock_guard lock(gate().mutex);
  Range* found = nullptr;
  for (Range& range : gate().ranges) {
    if (range.base == base) found = &range;
  }
  if (!found) found = &gate().ranges.emplace_back(Range{base, base});
  if (end <= found->end) return;
  if (gate().open) mprotect(found->end, size_t(end - found->end), PROT_READ | PROT_WRITE);
  found->end = end;
}

int open(const char* name) {
  {
    std::lock_guard lock(gate().mutex);
    if (gate().open++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const char* none = nullptr;
    if (names[i].compare_exchange_strong(none, name)) return int(i);
  }
  return -1;
}

void close(int scope) {
  if (scope >= 0) names[size_t(scope)].store(nullptr);
  std::lock_guard lock(gate().mutex);
  if (--gate().open == 0) protect(PROT_NONE);
}

bool close_pages(char* address, size_t bytes) { return bytes == 0 || madvise(address, bytes, kGuardInstall) == 0; }

void reopen_pages(char* address, size_t bytes) {
  if (bytes) madvise(address, bytes, kGuardRemove);
}

void remember(int device, char* begin, char* end, char* data, size_t bytes) {
  AllocationsLock lock;
  auto& all = allocations();
  auto at = all.lower_bound(begin);
  if (at != all.begin() && std::prev(at)->second.end > begin) --at;
  while (at != all.end() && at->first < end) at = all.erase(at);
  all[begin] = {end, data, bytes, device, false};
}

void forget(char* begin) {
  AllocationsLock lock;
  auto found = allocations().find(begin);
  if (found != allocations().end()) found->second.is_freed = true;
}

void before_fork() { gate().mutex.lock(); }
void after_fork() { gate().mutex.unlock(); }

}  // namespace npu::sim::memory_check
