// The pool of threads and the processors that it runs on, without torch, for the sanitizers: returns 0, or prints the first check that
// failed and returns 1.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "config/processors.h"
#include "simulator/thread_pool.h"

using npu::sim::ThreadPool;

namespace {

using Each = std::function<void(int64_t)>;

ThreadPool& pool_of(int threads, std::vector<std::vector<int>> nodes = {}) {
  static auto& all = *new std::vector<ThreadPool*>;  // whose threads never end
  return *all.emplace_back(new ThreadPool(threads, std::move(nodes)));
}

void each(ThreadPool& pool, int64_t n, int64_t grain, Each body) {
  pool.parallel_for(0, n, grain, [](void* body, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) (*static_cast<Each*>(body))(i);
  }, &body);
}

void visit_each_once(ThreadPool& pool, int64_t n, int64_t grain) {
  std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
  each(pool, n, grain, [&](int64_t i) { visits[size_t(i)].fetch_add(1, std::memory_order_relaxed); });
  CHECK(std::all_of(visits.begin(), visits.end(), [](const auto& count) { return count == 1; }));
}

void any_number_of_threads_visits_each_index_once() {
  for (const int threads : {1, 2, 3, 7, 64}) {
    ThreadPool& pool = pool_of(threads);
    for (const int64_t n : {1, 2, 7, 64, 65, 1000}) {
      for (const int64_t grain : {1, 3, 16, 999, 1000}) visit_each_once(pool, n, grain);
    }
  }
}

void pieces_are_of_whole_grains() {
  ThreadPool& pool = pool_of(3);
  pool.parallel_for(5, 5 + 103, 4, [](void*, int64_t begin, int64_t end) {
    CHECK((begin - 5) % 4 == 0 && ((end - 5) % 4 == 0 || end == 5 + 103) && begin < end);
  }, nullptr);
}

// Threads that are late for a loop must not take part in the next one with what they know of the last.
void loops_follow_one_another_at_once() {
  ThreadPool& pool = pool_of(8);
  for (int round = 0; round < 20000; ++round) {
    std::atomic<int64_t> sum{0};
    const int64_t n = 2 + round % 23;
    each(pool, n, 1 + round % 3, [&](int64_t i) { sum.fetch_add(i + 1, std::memory_order_relaxed); });
    CHECK(sum == n * (n + 1) / 2);
    if (round % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // they fall asleep
    if (round % 100 == 0) pool.set_threads(1 + round / 100 % 12);
  }
}

// The threads of the indices of a loop in which nobody is done before all have begun.
std::vector<std::thread::id> threads_of(ThreadPool& pool, int64_t n) {
  std::vector<std::thread::id> ids(size_t(n), std::thread::id{});
  std::atomic<int64_t> begun{0};
  each(pool, n, 1, [&](int64_t i) {
    ids[size_t(i)] = std::this_thread::get_id();
    ++begun;
    while (begun < n) std::this_thread::yield();
  });
  return ids;
}

void a_share_is_of_the_same_thread_each_time() {
  ThreadPool& pool = pool_of(4);
  const auto first = threads_of(pool, 4);
  CHECK(first[0] == std::this_thread::get_id());
  CHECK(std::set(first.begin(), first.end()).size() == 4);
  for (int round = 0; round < 50; ++round) CHECK(threads_of(pool, 4) == first);
  const auto two = threads_of(pool, 2);
  CHECK(two[0] == first[0] && two[1] == first[2]);
}

void a_loop_calls_no_more_threads_than_it_has_work_for() {
  ThreadPool& pool = pool_of(16);
  std::vector<std::thread::id> ids(2);
  std::set<std::thread::id> all;
  for (int round = 0; round < 500; ++round) {
    each(pool, 2, 1, [&](int64_t i) { ids[size_t(i)] = std::this_thread::get_id(); });
    all.insert(ids.begin(), ids.end());
  }
  CHECK(all.size() <= 2);
}

// The caller goes on alone when the others do not come, here because a core is all that there is for them.
void what_others_leave_is_done_by_who_has_time() {
  ThreadPool& pool = pool_of(4);
  std::atomic<bool> over{false};
  std::atomic<int64_t> visits{0};
  const auto caller = std::this_thread::get_id();
  each(pool, 32, 1, [&](int64_t) {
    ++visits;
    if (std::this_thread::get_id() == caller) over = visits > 20;
    else while (!over) std::this_thread::yield();  // a helper holds its first piece until most of the loop is done
  });
  CHECK(visits == 32);
}

std::vector<int> here() {
  CHECK(!npu::processors_allowed().empty());
  return npu::processors_allowed();
}

void helpers_stay_beside_their_memory() {
  const auto processors = here();
  if (processors.size() < 2) return;
  ThreadPool& pool = pool_of(4, {{processors[0]}, {processors[1]}});
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<int>> allowed(4);
    std::atomic<int> begun{0};
    each(pool, 4, 1, [&](int64_t i) {
      allowed[size_t(i)] = npu::processors_allowed();
      ++begun;
      while (begun < 4) std::this_thread::yield();
    });
    CHECK(allowed[0] == processors && "the caller is free");
    CHECK(allowed[1] == std::vector{processors[0]});
    CHECK(allowed[2] == std::vector{processors[1]} && allowed[3] == std::vector{processors[1]});
  }
}

void processors_are_read_as_linux_writes_them() {
  CHECK((npu::processors_in("0-3,8,10-11") == std::vector{0, 1, 2, 3, 8, 10, 11}));
  CHECK(npu::processors_in("7") == std::vector{7});
  CHECK(npu::processors_in("").empty());
}

void nodes_are_those_with_processors_of_ours() {
  const auto root = std::filesystem::temp_directory_path() / ("npu-nodes-" + std::to_string(getpid()));
  auto add = [&](const std::string& name, const std::string& list) {
    std::filesystem::create_directories(root / name);
    std::ofstream(root / name / "cpulist") << list << "\n";
  };
  for (const auto& [name, list] : {std::pair{"node0", "0-3,8-11"}, {"node1", "4-7,12-15"}, {"node2", ""}, {"node10", "16"}}) add(name, list);
  add("power", "0");  // not a node
  using Lists = std::vector<std::vector<int>>;
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  CHECK((npu::processors_by_node(all, root) == Lists{{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}, {16}}));
  CHECK((npu::processors_by_node({3, 4, 5}, root) == Lists{{3}, {4, 5}}));
  CHECK((npu::processors_by_node({4, 5}, root) == Lists{{4, 5}}));
  CHECK((npu::processors_by_node({77}, root) == Lists{{77}}) && "a tree that does not tell");
  std::filesystem::remove_all(root);
  CHECK((npu::processors_by_node({0, 1}, root) == Lists{{0, 1}}) && "no tree");
}

void a_mask_can_be_narrowed() {
  std::thread([] {
    const int last = here().back();
    CHECK(npu::stay_on({last}));
    CHECK(npu::processors_allowed() == std::vector{last});
    CHECK(sched_getcpu() == last);
    CHECK(!npu::stay_on({100000}));
  }).join();
}

}  // namespace

int main() {
  any_number_of_threads_visits_each_index_once();
  pieces_are_of_whole_grains();
  loops_follow_one_another_at_once();
  a_share_is_of_the_same_thread_each_time();
  a_loop_calls_no_more_threads_than_it_has_work_for();
  what_others_leave_is_done_by_who_has_time();
  processors_are_read_as_linux_writes_them();
  nodes_are_those_with_processors_of_ours();
  a_mask_can_be_narrowed();
  helpers_stay_beside_their_memory();
  std::puts("all well");
  return 0;
}
