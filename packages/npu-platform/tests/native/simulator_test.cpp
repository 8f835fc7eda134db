// The simulator, and the null device beside it, without torch, through the table of npu_driver.h, for the sanitizers: `simulator_test` runs everything and returns 0, or prints
// the first check that failed and returns 1. Memory and cores are used from several threads at once.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "null_device/driver.h"
#include "simulator/driver.h"

void test_recording();  // recording_test.cpp

namespace {

constexpr int kCallers = 4;

const npu_driver& simulator = *npu::sim::driver();

int device_of(const void* address) {
  for (int device = 0; device < 2; ++device) {
    void* base = nullptr;
    size_t span = 0;
    CHECK(simulator.memory_range(device, &base, &span) == NPU_OK);
    if (size_t(static_cast<const char*>(address) - static_cast<char*>(base)) < span) return device;
  }
  return -1;
}

template <class Body>
void from_several_threads(Body body) {
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(body, i);
  for (auto& caller : callers) caller.join();
}

std::vector<int> visits(int64_t n, int64_t grain) {
  std::vector<int> counts(size_t(n), 0);
  simulator.parallel_for(0, n, grain, [](void* context, int64_t begin, int64_t end) {
    auto& each = *static_cast<std::vector<int>*>(context);
    for (int64_t i = begin; i < end; ++i) ++each[size_t(i)];
  }, &counts);
  return counts;
}

bool each_once(const std::vector<int>& counts) {
  return std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
}

void loops_visit_each_index_once() {
  for (const int threads : {1, 2, 3, 8, 2}) {
    CHECK(simulator.set_num_threads(threads) == NPU_OK);
    CHECK(simulator.num_threads() == threads);
    for (const int64_t n : {0, 1, 2, 7, 1000, 4099}) {
      for (const int64_t grain : {1, 3, 512, 100000}) CHECK(each_once(visits(n, grain)));
    }
  }
}

void loops_of_several_threads_at_once() {
  simulator.set_num_threads(4);
  from_several_threads([](int caller) {
    for (int round = 0; round < 300; ++round) {
      CHECK(each_once(visits(64 + 13 * caller + round, 4)));
      if (caller == 0) simulator.set_num_threads(1 + round % 5);
    }
  });
}

void a_loop_inside_a_loop_runs_on_its_caller() {
  std::atomic<int64_t> sum{0};
  simulator.parallel_for(0, 64, 1, [](void* context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      simulator.parallel_for(0, 10, 1, [](void* inner, int64_t from, int64_t to) {
        static_cast<std::atomic<int64_t>*>(inner)->fetch_add(to - from);
      }, context);
    }
  }, &sum);
  CHECK(sum == 640);
}

struct Range {
  char* address;
  size_t bytes;
};

// Maps and unmaps at random; each mapping must be this thread's alone, and read as zero at first.
void memory_by_one_thread(int device, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Range> mine;
  for (int step = 0; step < 200; ++step) {
    if (mine.empty() || random() % 2) {
      const size_t bytes = (1 + random() % 3) * NPU_MEMORY_GRANULE;
      void* address = nullptr;
      const npu_status status = simulator.memory_map(device, bytes, &address);
      CHECK(status == NPU_OK || status == NPU_ERROR_OUT_OF_MEMORY);
      if (status != NPU_OK) continue;
      auto* bytes_there = static_cast<char*>(address);
      CHECK(device_of(address) == device);
      CHECK(bytes_there[0] == 0 && bytes_there[bytes - 1] == 0);
      std::memset(address, int(seed) + 1, 4096);
      bytes_there[bytes - 1] = char(seed + 1);
      mine.push_back({bytes_there, bytes});
    } else {
      std::swap(mine[random() % mine.size()], mine.back());
      const Range range = mine.back();
      mine.pop_back();
      CHECK(range.address[0] == char(seed + 1) && range.address[range.bytes - 1] == char(seed + 1));
      CHECK(simulator.memory_unmap(device, range.address, range.bytes) == NPU_OK);
    }
  }
  for (const Range& range : mine) CHECK(simulator.memory_unmap(device, range.address, range.bytes) == NPU_OK);
}

size_t free_bytes(int device) {
  size_t free = 0, total = 0;
  CHECK(simulator.memory_info(device, &free, &total) == NPU_OK);
  CHECK(free <= total);
  return free;
}

void memory_of_several_threads_at_once() {
  const size_t before = free_bytes(1);
  from_several_threads([](int caller) { memory_by_one_thread(1, unsigned(caller)); });
  CHECK(free_bytes(1) == before);
}

void discarded_memory_reads_as_zero() {
  void* address = nullptr;
  CHECK(simulator.memory_map(0, NPU_MEMORY_GRANULE, &address) == NPU_OK);
  std::memset(address, 7, NPU_MEMORY_GRANULE);
  CHECK(simulator.memory_discard(0, address, NPU_MEMORY_GRANULE) == NPU_OK);
  CHECK(std::count(static_cast<char*>(address), static_cast<char*>(address) + NPU_MEMORY_GRANULE, 0) ==
        long(NPU_MEMORY_GRANULE));
  CHECK(simulator.memory_unmap(0, address, NPU_MEMORY_GRANULE) == NPU_OK);
}

void released_memory_counts_as_free_and_keeps_its_address() {
  const size_t before = free_bytes(0);
  void* address = nullptr;
  CHECK(simulator.memory_map(0, 3 * NPU_MEMORY_GRANULE, &address) == NPU_OK);
  std::memset(address, 7, 3 * NPU_MEMORY_GRANULE);
  char* middle = static_cast<char*>(address) + NPU_MEMORY_GRANULE;
  CHECK(simulator.memory_release(0, middle, NPU_MEMORY_GRANULE) == NPU_OK);
  CHECK(free_bytes(0) == before - 2 * NPU_MEMORY_GRANULE);
  void* other = nullptr;
  CHECK(simulator.memory_map(0, free_bytes(0), &other) == NPU_OK);
  CHECK(other != middle);
  CHECK(simulator.memory_restore(0, middle, NPU_MEMORY_GRANULE) == NPU_ERROR_OUT_OF_MEMORY);
  CHECK(simulator.memory_unmap(0, other, before - 2 * NPU_MEMORY_GRANULE) == NPU_OK);
  CHECK(simulator.memory_restore(0, middle, NPU_MEMORY_GRANULE) == NPU_OK);
  CHECK(std::count(middle, middle + NPU_MEMORY_GRANULE, 0) == long(NPU_MEMORY_GRANULE));
  CHECK(middle[-1] == 7 && middle[NPU_MEMORY_GRANULE] == 7);
  CHECK(simulator.memory_unmap(0, address, 3 * NPU_MEMORY_GRANULE) == NPU_OK);
  CHECK(free_bytes(0) == before);
}

void all_memory_can_be_had_and_no_more() {
  std::vector<void*> granules;
  void* address = nullptr;
  while (simulator.memory_map(0, NPU_MEMORY_GRANULE, &address) == NPU_OK) granules.push_back(address);
  CHECK(free_bytes(0) == 0);
  CHECK(std::string(simulator.last_error()).find("used up") != std::string::npos);
  CHECK(std::set<void*>(granules.begin(), granules.end()).size() == granules.size());
  for (void* granule : granules) CHECK(simulator.memory_unmap(0, granule, NPU_MEMORY_GRANULE) == NPU_OK);
  CHECK(simulator.memory_map(0, granules.size() * NPU_MEMORY_GRANULE, &address) == NPU_OK);
  CHECK(simulator.memory_unmap(0, address, granules.size() * NPU_MEMORY_GRANULE) == NPU_OK);
}

void wrong_calls_say_what_is_wrong() {
  void* address = nullptr;
  CHECK(simulator.memory_map(0, 5, &address) == NPU_ERROR_INVALID_VALUE);
  CHECK(std::string(simulator.last_error()).find("granules") != std::string::npos);
  CHECK(simulator.memory_map(2, NPU_MEMORY_GRANULE, &address) == NPU_ERROR_INVALID_DEVICE);
  CHECK(std::string(simulator.last_error()).find("NPU_SIMULATOR_DEVICES") != std::string::npos);
  int local = 0;
  CHECK(device_of(&local) == -1);
}

void streams_and_events() {
  from_several_threads([](int) {
    int64_t stream = 0, other = 0;
    CHECK(simulator.stream_create(0, 0, &stream) == NPU_OK && simulator.stream_create(0, 0, &other) == NPU_OK);
    CHECK(stream != 0 && stream != other);
    npu_event *start = nullptr, *end = nullptr;
    CHECK(simulator.event_create(&start) == NPU_OK && simulator.event_create(&end) == NPU_OK);
    CHECK(simulator.event_record(start, 0, stream) == NPU_OK);
    CHECK(simulator.event_record(end, 0, stream) == NPU_OK);
    double milliseconds = -1;
    CHECK(simulator.event_elapsed(start, end, &milliseconds) == NPU_OK && milliseconds >= 0);
    int is_done = 0;
    CHECK(simulator.event_query(end, &is_done) == NPU_OK && is_done);
    simulator.event_destroy(start);
    simulator.event_destroy(end);
  });
}

void a_forked_child_has_devices_of_its_own() {
  void* address = nullptr;
  CHECK(simulator.memory_map(0, NPU_MEMORY_GRANULE, &address) == NPU_OK);
  static_cast<char*>(address)[0] = 1;
  const pid_t child = fork();
  if (child == 0) {
    CHECK(static_cast<char*>(address)[0] == 1);
    static_cast<char*>(address)[0] = 2;
    CHECK(each_once(visits(10000, 1)));
    memory_by_one_thread(0, 9);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(static_cast<char*>(address)[0] == 1);
  CHECK(simulator.memory_unmap(0, address, NPU_MEMORY_GRANULE) == NPU_OK);
}

// The other driver, in the same process.
void the_null_device_keeps_memory_and_time() {
  const npu_driver& null = *npu::null::driver();
  CHECK(null.initialize("launch=3") == NPU_ERROR_CONFIG && null.initialize("launch=1us") == NPU_OK);
  from_several_threads([&null](int caller) {
    npu_event* start = nullptr;
    npu_event* end = nullptr;
    CHECK(null.event_create(&start) == NPU_OK && null.event_create(&end) == NPU_OK);
    CHECK(null.event_record(start, 1, 0) == NPU_OK);
    for (int round = 0; round < 200; ++round) {
      void* address = nullptr;
      CHECK(null.memory_map(1, (1 + size_t(caller)) * NPU_MEMORY_GRANULE, &address) == NPU_OK);
      CHECK(null.launch(1, 0, "nothing", [](void*) { std::abort(); }, nullptr) == NPU_OK);
      char value = 1;
      CHECK(null.copy(1, 0, &value, address, 1, NPU_COPY_DEVICE_TO_HOST) == NPU_OK && value == 0);
      CHECK(null.memory_unmap(1, address, (1 + size_t(caller)) * NPU_MEMORY_GRANULE) == NPU_OK);
    }
    CHECK(null.event_record(end, 1, 0) == NPU_OK && null.event_synchronize(end) == NPU_OK);
    double milliseconds = 0;
    CHECK(null.event_elapsed(start, end, &milliseconds) == NPU_OK && milliseconds >= 200 * 2 * 0.001);
    null.event_destroy(start);
    null.event_destroy(end);
  });
  size_t free = 0, total = 0;
  CHECK(null.memory_info(1, &free, &total) == NPU_OK && free == total);
}

}  // namespace

int main() {
  int count = 0;
  CHECK(simulator.initialize("speed=2") == NPU_ERROR_CONFIG);
  CHECK(simulator.initialize("") == NPU_OK);
  CHECK(simulator.device_count(&count) == NPU_OK && count == 2);
  loops_visit_each_index_once();
  loops_of_several_threads_at_once();
  a_loop_inside_a_loop_runs_on_its_caller();
  memory_of_several_threads_at_once();
  discarded_memory_reads_as_zero();
  released_memory_counts_as_free_and_keeps_its_address();
  all_memory_can_be_had_and_no_more();
  wrong_calls_say_what_is_wrong();
  streams_and_events();
  a_forked_child_has_devices_of_its_own();
  the_null_device_keeps_memory_and_time();
  test_recording();
  std::puts("all well");
  return 0;
}
