#include "runtime/driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>

#include "config/config.h"
#include "faults/faults.h"
#include "null_device/driver.h"
#include "runtime/host_allocator.h"
#include "simulator/driver.h"

namespace npu {
namespace detail {

std::atomic<const npu_driver*> driver{nullptr};
std::array<DeviceRange, NPU_MAX_DEVICES> ranges;
int device_count = 0;

namespace {

std::mutex opening;

// A child that was forked while a thread of its parent brought the driver up has half a driver.
std::atomic<int> threads_opening{0};
bool was_cut_by_fork = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { was_cut_by_fork |= threads_opening > 0; });

struct OpeningScope {
  OpeningScope() { ++threads_opening; }
  ~OpeningScope() { --threads_opening; }
};

std::string sentence(const npu_driver& driver, npu_status status) {
  const char* text = driver.last_error();
  if (text && *text) return text;
  return "the npu driver '" + std::string(driver.name) + "' returned status " + std::to_string(int(status)) +
         " without a sentence: last_error() must return one after an error; see npu_driver.h";
}

void check_open(npu_status status, const npu_driver& driver) {
  if (status != NPU_OK) TORCH_CHECK(false, sentence(driver, status));
}

const npu_driver* load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library, "NPU_DEVICE names a driver that cannot be loaded: ", dlerror());
  auto* entry = reinterpret_cast<decltype(&npu_driver_entry)>(dlsym(library, "npu_driver_entry"));
  TORCH_CHECK(entry, "NPU_DEVICE='", path, "' is no driver: it exports no npu_driver_entry (see npu_driver.h)");
  const npu_driver* driver = entry(NPU_DRIVER_ABI);
  TORCH_CHECK(driver && driver->abi == NPU_DRIVER_ABI, "NPU_DEVICE='", path, "' does not implement ABI ", NPU_DRIVER_ABI,
              " of npu_driver.h", driver ? " but " + std::to_string(driver->abi) : "", ": take a driver of this release");
  constexpr size_t kRequired = offsetof(npu_driver, memory_release);
  TORCH_CHECK(driver->size >= kRequired, "NPU_DEVICE='", path, "' was compiled with an npu_driver.h of ", driver->size,
              " bytes a table, not ", kRequired, ": compile it again");
  static const npu_driver whole = [driver] {
    npu_driver table{};  // what an older one does not have is NULL
    std::memcpy(&table, driver, std::min(size_t(driver->size), sizeof table));
    return table;
  }();
  return &whole;
}

// A missing function is named now, instead of a crash later.
void check_whole(const npu_driver& driver) {
#define NPU_CHECK_HAS(function) \
  TORCH_CHECK(driver.function, "the npu driver '", driver.name, "' has no function " #function "; see npu_driver.h")
  TORCH_CHECK(driver.name && driver.device_name, "the npu driver has no name; see npu_driver.h");
  NPU_CHECK_HAS(initialize);
  NPU_CHECK_HAS(last_error);
  NPU_CHECK_HAS(device_count);
  NPU_CHECK_HAS(device_synchronize);
  NPU_CHECK_HAS(device_reset);
  NPU_CHECK_HAS(memory_info);
  NPU_CHECK_HAS(memory_range);
  NPU_CHECK_HAS(memory_map);
  NPU_CHECK_HAS(memory_unmap);
  NPU_CHECK_HAS(memory_discard);
  NPU_CHECK_HAS(host_allocate);
  NPU_CHECK_HAS(host_free);
  NPU_CHECK_HAS(stream_create);
  NPU_CHECK_HAS(stream_query);
  NPU_CHECK_HAS(stream_synchronize);
  NPU_CHECK_HAS(stream_wait_event);
  NPU_CHECK_HAS(event_create);
  NPU_CHECK_HAS(event_destroy);
  NPU_CHECK_HAS(event_record);
  NPU_CHECK_HAS(event_query);
  NPU_CHECK_HAS(event_synchronize);
  NPU_CHECK_HAS(event_elapsed);
  NPU_CHECK_HAS(launch);
  NPU_CHECK_HAS(copy);
#undef NPU_CHECK_HAS
  TORCH_CHECK(bool(driver.memory_release) == bool(driver.memory_restore), "the npu driver '", driver.name,
              "' must have both of memory_release and memory_restore, or neither");
  const int cores = bool(driver.num_threads) + bool(driver.set_num_threads) + bool(driver.parallel_for);
  TORCH_CHECK(cores == 0 || cores == 3, "the npu driver '", driver.name,
              "' must have all of num_threads, set_num_threads and parallel_for, or none");
}

const npu_driver* choose(const DriverChoice& choice) {
  switch (choice.kind) {
    case DriverKind::simulator:
      return sim::driver();
    case DriverKind::null:
      return null::driver();
    case DriverKind::library:
      return load(choice.path);
  }
  return nullptr;
}

void count_devices(const npu_driver& driver) {
  int count = 0;
  check_open(driver.device_count(&count), driver);
  TORCH_CHECK(count >= 0 && count <= NPU_MAX_DEVICES, "the npu driver '", driver.name, "' has ", count,
              " devices; 0 to ", NPU_MAX_DEVICES, " can be used: its device_count() must leave out what this process may not use, "
              "as by NPU_VISIBLE_DEVICES");
  device_count = count;
}

std::string address(const void* of) {
  std::ostringstream text;
  text << of;
  return text.str();
}

void watch(const Config& config, const npu_driver& driver) {
  TORCH_CHECK(!config.check_memory || driver.memory_check, "NPU_DEBUG=memory cannot be used: the npu driver '", driver.name,
              "' has no memory checks; unset it, or debug on the simulator");
  if (config.check_memory) watch_bits.fetch_or(kWatchMemory);
  for (const Fault& fault : config.faults) Faults::instance().arm(fault);
  auto lock = [] { Faults::instance().mutex().lock(); };
  auto unlock = [] { Faults::instance().mutex().unlock(); };
  TORCH_CHECK(pthread_atfork(lock, unlock, unlock) == 0, "npu: pthread_atfork failed");
}

void check_range(int device, const void* base, size_t span) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  if (!base || begin % NPU_MEMORY_GRANULE || span < NPU_MEMORY_GRANULE) {
    refuse_answer("memory_range", "a base on a granule (2 MiB) and a span of at least one, not " + address(base) + " and " +
                                      std::to_string(span) + " bytes");
  }
  for (int other = 0; other < device_count; ++other) {
    const auto its = reinterpret_cast<uintptr_t>(ranges[size_t(other)].base.load());
    if (other == device || begin >= its + ranges[size_t(other)].span || its >= begin + span) continue;
    refuse_answer("memory_range", "addresses of one device alone: those of npu:" + std::to_string(device) + " at " + address(base) +
                                      " are npu:" + std::to_string(other) + "'s as well");
  }
}

// A bad environment is PyTorch's RuntimeError.
template <class Read>
decltype(auto) from_environment(Read read) {
  try {
    return read();
  } catch (const ConfigError& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace

const npu_driver& open_driver() {
  TORCH_CHECK(!was_cut_by_fork, "npu: this process was forked while another thread brought up the device, of which it has a part: "
              "use the device before the fork or after it, or start processes with 'spawn'");
  const OpeningScope scope;
  std::lock_guard lock(opening);
  if (const npu_driver* open = driver.load()) return *open;
  const Config& settings = from_environment([]() -> const Config& { return config(); });
  const npu_driver& chosen = chosen_driver();
  check_open(chosen.initialize(driver_choice().options.c_str()), chosen);
  count_devices(chosen);
  watch(settings, chosen);
  driver.store(&chosen, std::memory_order_release);
  return chosen;
}

std::pair<char*, size_t> open_range(int device) {
  void* base = nullptr;
  size_t span = 0;
  check(npu::driver().memory_range(device, &base, &span));
  check_range(device, base, span);
  DeviceRange& range = ranges[size_t(device)];
  range.base.store(static_cast<char*>(base), std::memory_order_relaxed);
  range.span.store(span, std::memory_order_release);
  return {static_cast<char*>(base), span};
}

void refuse_lost_launch(const char* kernel) {
  TORCH_CHECK(false, "the npu driver '", npu::driver().name, "' reports the launch of ", kernel,
              " as done and has not run it: launch() must call run(closure) before it returns NPU_OK; see npu_driver.h");
}

void refuse_answer(const char* function, const std::string& what) {
  TORCH_CHECK(false, "the npu driver '", npu::driver().name, "' must answer ", function, "() with ", what, "; see npu_driver.h");
}

}  // namespace detail

const npu_driver& chosen_driver() {
  if (const npu_driver* open = detail::driver.load(std::memory_order_acquire)) return *open;
  const npu_driver* chosen = detail::choose(detail::from_environment([] { return driver_choice(); }));
  detail::check_whole(*chosen);
  return *chosen;
}

void check(npu_status status) {
  if (C10_LIKELY(status == NPU_OK)) return;
  const std::string text = last_error(status);
  if (status == NPU_ERROR_LAUNCH_FAILED || status == NPU_ERROR_DEVICE_LOST) {
    throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, int32_t(status), text);
  }
  TORCH_CHECK(false, text);
}

std::string last_error(npu_status status) { return detail::sentence(driver(), status); }

npu_event* create_event() {
  npu_event* event = nullptr;
  check(driver().event_create(&event));
  if (C10_UNLIKELY(!event)) detail::refuse_answer("event_create", "an event, not NULL");
  return event;
}

bool may_run_behind() {
  const npu_driver* open = &driver();
  return open != sim::driver() && open != null::driver();
}

bool is_of_a_vendor() { return driver_choice().kind == DriverKind::library; }

void submit_copy(void* target, const void* source, size_t bytes, c10::DeviceIndex of_view) {
  if (bytes == 0) return;
  const c10::DeviceIndex from = device_of(source), to = device_of(target);
  const c10::DeviceIndex device = to >= 0 ? to : from >= 0 ? from : of_view;
  TORCH_INTERNAL_ASSERT(device >= 0, "npu: a copy between two places of the host");
  if (to < 0 && from < 0) {  // after the kernels that write it
    wait_for_stream(device);
    std::memcpy(target, source, bytes);
    return;
  }
  const auto kind = to < 0 ? NPU_COPY_DEVICE_TO_HOST : from < 0 ? NPU_COPY_HOST_TO_DEVICE : NPU_COPY_DEVICE_TO_DEVICE;
  const StreamName stream{device, thread_state.stream[size_t(device)]};
  check(driver().copy(device, stream.id, target, source, bytes, kind));
  if (kind != NPU_COPY_DEVICE_TO_DEVICE && may_run_behind()) note_pinned_use(to < 0 ? target : source, stream);
}

void wait_between_devices(c10::DeviceIndex waiting, c10::DeviceIndex before) {
  npu_event* event = create_event();
  npu_status status = driver().event_record(event, before, thread_state.stream[size_t(before)]);
  if (status == NPU_OK) status = driver().stream_wait_event(waiting, thread_state.stream[size_t(waiting)], event);
  driver().event_destroy(event);
  check(status);
}

void wait_for_stream(c10::DeviceIndex device) {
  check(driver().stream_synchronize(device, thread_state.stream[size_t(device)]));
}

namespace {

// A loop whose body may throw, which the driver, C code perhaps, must not see.
struct Loop {
  void (*body)(void* ctx, int64_t begin, int64_t end);
  void* ctx;
  std::atomic<bool> has_failed;
  std::exception_ptr error;  // the first: written by the thread that set has_failed

  void run(int64_t begin, int64_t end) noexcept {
    if (C10_UNLIKELY(has_failed.load(std::memory_order_relaxed))) return;
    try {
      body(ctx, begin, end);
    } catch (...) {
      if (!has_failed.exchange(true)) error = std::current_exception();
    }
  }
};

}  // namespace

int num_threads() {
  const auto& cores = driver();
  return cores.num_threads ? cores.num_threads() : 1;
}

void set_num_threads(int threads) {
  const auto& cores = driver();
  TORCH_CHECK(threads >= 1, "the device needs at least one thread, not ", threads);
  if (cores.set_num_threads) check(cores.set_num_threads(threads));
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx) {
  const auto& cores = driver();
  if (!cores.parallel_for) {
    if (begin < end) body(ctx, begin, end);
    return;
  }
  Loop loop{body, ctx, {}, {}};
  auto run = [](void* loop, int64_t from, int64_t to) { static_cast<Loop*>(loop)->run(from, to); };
  cores.parallel_for(begin, end, grain, run, &loop);
  if (C10_UNLIKELY(loop.error != nullptr)) std::rethrow_exception(std::move(loop.error));
}

}  // namespace npu
