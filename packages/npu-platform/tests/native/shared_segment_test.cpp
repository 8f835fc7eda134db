// How ranks share memory, copy to and from it, and keep their order, with threads as ranks, for the sanitizers: returns 0, or prints the first
// check that failed and returns 1.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "distributed/copies.h"
#include "distributed/in_order.h"
#include "distributed/shared_segment.h"

namespace {

using npu::SharedSegment;
constexpr int kRanks = 3;
constexpr int kExchanges = 3000;

npu::Deadline within(std::chrono::milliseconds timeout) { return {timeout, std::chrono::steady_clock::now() + timeout}; }
npu::Deadline soon() { return within(std::chrono::minutes(1)); }

std::vector<npu::Peer> peers() {
  std::vector<npu::Peer> all;
  for (int rank = 0; rank < kRanks; ++rank) all.push_back({getpid(), npu::Descriptor(int(syscall(SYS_pidfd_open, getpid(), 0)))});
  return all;
}

std::shared_ptr<void> new_memory() {
  std::shared_ptr<void> memory(std::aligned_alloc(4096, SharedSegment::bytes_for(kRanks)), &std::free);
  SharedSegment::initialize(memory.get(), kRanks);
  return memory;
}

template <class Body>  // body(segment, rank)
void as_ranks(Body body) {
  const auto memory = new_memory();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      SharedSegment segment(memory, rank, peers());
      body(segment, rank);
    });
  }
  for (auto& rank : ranks) rank.join();
}

std::string failure(SharedSegment& segment, int peer, const npu::Deadline& deadline) {
  try {
    segment.await(peer, deadline);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

int value_of(int rank, int exchange) { return exchange * kRanks + rank; }

// Everybody reads everybody, or the root only; ranks run ahead of each other and fall asleep.
void exchanges_are_seen_whole() {
  as_ranks([](SharedSegment& segment, int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int exchange = 0; exchange < kExchanges; ++exchange) {
      const size_t count = exchange % 50 ? 1 + size_t(exchange) % 300 : SharedSegment::kSlotBytes / sizeof(int) - size_t(exchange) % 7;
      std::vector<int> mine(count, value_of(rank, exchange));
      std::memcpy(segment.begin(count * sizeof(int), soon()), mine.data(), count * sizeof(int));
      segment.arrive({"exchange", 0, 0, 0, uint64_t(exchange)});
      const bool only_root = exchange % 3 == 0;
      for (int peer = only_root ? exchange % kRanks : 0; peer < kRanks; peer = only_root ? kRanks : peer + 1) {
        std::vector<int> theirs(count);
        std::memcpy(theirs.data(), segment.await(peer, soon()), count * sizeof(int));
        CHECK(theirs == std::vector<int>(count, value_of(peer, exchange)));
      }
      if (random() % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

void a_rank_that_does_not_come_is_named() {
  as_ranks([](SharedSegment& segment, int rank) {
    if (rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(600));
    segment.begin(0, soon());
    segment.arrive({"late", 0, 0, 0, 0});
    CHECK(failure(segment, 1, within(std::chrono::milliseconds(50))).starts_with("timed out after 50 ms: no sign of rank 1"));
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    CHECK(failure(segment, 1, soon()).ends_with("has destroyed its group"));
  });
}

void different_labels_are_told() {
  as_ranks([](SharedSegment& segment, int rank) {
    segment.begin(0, soon());
    segment.arrive({"this", 0, 0, 0, uint64_t(rank)});
    CHECK(failure(segment, (rank + 1) % kRanks, soon()).find("the same order") != std::string::npos);
  });
}

void abort_ends_a_wait() {
  as_ranks([](SharedSegment& segment, int rank) {
    if (rank) return std::this_thread::sleep_for(std::chrono::milliseconds(400));
    segment.begin(0, soon());
    segment.arrive({"aborted", 0, 0, 0, 0});
    std::thread other([&] { segment.abort(); });
    CHECK(failure(segment, 1, soon()).find("aborted") != std::string::npos);
    other.join();
  });
}

// Of every length around those of the loops, from and to places that lie anyhow; beside them nothing is written.
void copies_are_whole() {
  constexpr size_t kMost = 1100, kAround = 64;
  std::vector<char> source(kMost + kAround), one(kMost + 2 * kAround), other(one.size());
  for (size_t i = 0; i < source.size(); ++i) source[i] = char(i * 37 + i / 256 + 1);
  for (size_t bytes = 0; bytes <= kMost; bytes += bytes < 600 ? 1 : 7) {
    const char* from = source.data() + bytes % kAround;
    const size_t at = bytes * 5 % kAround;
    auto expected = [&](const std::vector<char>& got) {
      std::vector<char> wanted(got.size(), 'x');
      std::copy(from, from + bytes, wanted.begin() + long(at));
      return got == wanted;
    };
    for (const auto once : {npu::copy_past_caches, npu::copy_into_slot}) {
      std::fill(one.begin(), one.end(), 'x');
      once(one.data() + at, from, bytes);
      CHECK(expected(one));
    }
    for (const auto twice : {npu::copy_past_caches_and_to, npu::copy_into_slot_and_to}) {
      std::fill(one.begin(), one.end(), 'x');
      std::fill(other.begin(), other.end(), 'x');
      twice(one.data() + at, other.data() + at, from, bytes);
      CHECK(expected(one) && expected(other));
    }
  }
}

void order_is_kept() {
  std::vector<int> done;
  npu::InOrder order;
  for (int i = 0; i < 1000; ++i) {
    if (i % 7 == 0) {
      order.run([&] { done.push_back(i); });
    } else {
      order.run_later([&, i] { done.push_back(i); }, [] {});
    }
  }
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) order.run([&] { done.push_back(1000); });
    });
  }
  for (auto& caller : callers) caller.join();
  order.run_later([&] { done.push_back(1001); }, [] {});
  order.stop();
  CHECK(done.size() == 1000 + 800 + 1);
  for (int i = 0; i < 1000; ++i) CHECK(done[size_t(i)] == i);
  CHECK(done.back() == 1001);
}

// Who is told on the order's thread asks for more, while another thread does, too.
void who_is_told_may_ask() {
  constexpr int kTasks = 500;
  std::vector<int> done;
  npu::InOrder order;
  for (int i = 0; i < kTasks; ++i) {
    order.run_later([&] { done.push_back(0); }, [&, i] {
      if (i % 2) order.run([&] { done.push_back(1); });
      else order.run_later([&] { done.push_back(2); }, [&] { order.run([&] { done.push_back(3); }); });
    });
    if (i % 5 == 0) order.run([&] { done.push_back(4); });
  }
  order.stop();
  const auto count = [&](int kind) { return std::count(done.begin(), done.end(), kind); };
  CHECK(count(0) == kTasks && count(1) == kTasks / 2 && count(2) == kTasks / 2 && count(3) == kTasks / 2 && count(4) == kTasks / 5);
}

}  // namespace

int main() {
  exchanges_are_seen_whole();
  a_rank_that_does_not_come_is_named();
  different_labels_are_told();
  abort_ends_a_wait();
  copies_are_whole();
  order_is_kept();
  who_is_told_may_ask();
  std::puts("all well");
  return 0;
}
