// What graphs record and replay, without torch, for the sanitizers: launches of the simulator, from several threads.
#include <atomic>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/recording.h"
#include "simulator/driver.h"

namespace {

constexpr int kThreads = 4;
constexpr int kLaunches = 50;
constexpr int kRounds = 200;

const npu_driver& simulator = *npu::sim::driver();

template <class Body>
void from_several_threads(Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (auto& thread : threads) thread.join();
}

void submit(npu::Node& node) {
  auto run = [](void* closure) { static_cast<npu::Node*>(closure)->run(); };
  CHECK(simulator.launch(node.device(), 0, node.name().c_str(), run, &node) == NPU_OK);
}

int64_t* new_counter() {
  void* address = nullptr;
  CHECK(simulator.memory_map(0, NPU_MEMORY_GRANULE, &address) == NPU_OK);
  return static_cast<int64_t*>(address);
}

void give_back(int64_t* counter) { CHECK(simulator.memory_unmap(0, counter, NPU_MEMORY_GRANULE) == NPU_OK); }

// A kernel's own memory, of which the recording is the last owner.
std::atomic<int> closures{0};

struct Closure {
  Closure() { ++closures; }
  ~Closure() { --closures; }
};

template <class Kernel>
void record(npu::Recording& recording, const char* name, Kernel kernel) {
  recording.add(std::make_unique<npu::KernelNode<Kernel>>(0, name, std::move(kernel)));
}

// A launch whose cores add one to each of kLaunches values, from the device's threads.
void add_one_to_all(int64_t* values) {
  auto body = [](void* all, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++static_cast<int64_t*>(all)[i];
  };
  simulator.parallel_for(0, kLaunches, 1, body, values);
}

std::unique_ptr<npu::Recording> capture(int64_t* values) {
  auto recording = std::make_unique<npu::Recording>();
  auto owned = std::make_shared<Closure>();
  for (int i = 0; i < kLaunches; ++i) record(*recording, "add", [values, i, owned] { values[i] += 1; });
  record(*recording, "add_to_all", [values, owned] { add_one_to_all(values); });
  return recording;
}

void check_all(const int64_t* values, int64_t expected) {
  for (int i = 0; i < kLaunches; ++i) CHECK(values[i] == expected);
}

void each_thread_captures_and_replays_its_own() {
  from_several_threads([](int) {
    int64_t* values = new_counter();
    for (int round = 0; round < kRounds / 10; ++round) {
      const auto recording = capture(values);
      CHECK(recording->size() == kLaunches + 1);
      recording->replay(submit);
      recording->replay(submit);
    }
    check_all(values, kRounds / 10 * 4);
    give_back(values);
  });
  CHECK(closures == 0);
}

// The kernels write plain memory: replays of one recording must not overlap.
void several_threads_replay_one() {
  int64_t* values = new_counter();
  auto recording = capture(values);
  from_several_threads([&](int) {
    for (int round = 0; round < kRounds; ++round) recording->replay(submit);
  });
  check_all(values, kThreads * kRounds * 2);
  recording.reset();
  CHECK(closures == 0);
  give_back(values);
}

// One thread captures, another replays, a third lets go.
void a_recording_moves_between_threads() {
  int64_t* values = new_counter();
  for (int round = 0; round < 20; ++round) {
    std::unique_ptr<npu::Recording> recording;
    std::thread([&] { recording = capture(values); }).join();
    std::thread([&] { recording->replay(submit); }).join();
    std::thread([&] { recording.reset(); }).join();
  }
  check_all(values, 40);
  CHECK(closures == 0);
  give_back(values);
}

void an_error_ends_a_replay_and_leaves_the_recording_usable() {
  npu::Recording recording;
  int runs = 0;
  bool fails = true;
  record(recording, "first", [&] { ++runs; });
  record(recording, "second", [&] {
    if (fails) throw std::runtime_error("second");
  });
  record(recording, "third", [&] { ++runs; });
  auto run = [](npu::Node& node) { node.run(); };
  bool raised = false;
  try {
    recording.replay(run);
  } catch (const std::runtime_error&) {
    raised = true;
  }
  CHECK(raised && runs == 1);
  fails = false;
  recording.replay(run);
  CHECK(runs == 3);
}

void what_is_recorded_can_be_read() {
  npu::Recording recording;
  CHECK(recording.broken_by().empty());
  recording.break_by("item()");
  CHECK(recording.broken_by() == "item()");
  record(recording, "first", [] {});
  record(recording, "second", [] {});
  std::ostringstream dot;
  recording.write_dot(dot);
  CHECK(dot.str() == "digraph npu {\n  n0 [label=\"first\"];\n  n1 [label=\"second\"];\n  n0 -> n1;\n}\n");
}

}  // namespace

void test_recording() {
  each_thread_captures_and_replays_its_own();
  several_threads_replay_one();
  a_recording_moves_between_threads();
  an_error_ends_a_replay_and_leaves_the_recording_usable();
  what_is_recorded_can_be_read();
}
