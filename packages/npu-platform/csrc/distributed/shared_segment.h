// The memory that the ranks of one host share, and how they wait for each other in it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distributed/descriptor.h"

namespace npu {

// What a rank contributes to; ranks that contribute to different collectives have lost each other.
struct ExchangeLabel {
  char collective[40];
  int32_t dtype, op, root;
  uint64_t bytes;
};

// When a rank stops waiting for the others.
struct Deadline {
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point at;
};

struct Peer {
  pid_t pid;
  Descriptor process;  // a pidfd: readable once the process is dead, whoever has its pid by then
};

// The ranks go through numbered exchanges together. In exchange s a rank writes its contribution into its slot s % 2,
// then counts its `arrived` up to s; the others wait for that and read. A rank that has arrived at s - 1 has read all
// it needs of s - 2, so its slots may be written again: one counter a rank is all there is to agree on.
//
// One thread of a process at a time. What goes wrong is a std::runtime_error that names the ranks.
class SharedSegment {
 public:
  static constexpr size_t kSlotBytes = size_t(256) << 10;

  // The size of the memory for so many ranks, and its first state: only one rank initializes it, before the others map.
  static size_t bytes_for(int size);
  static void initialize(void* memory, int size);

  // `memory` is a mapping of bytes_for(peers.size()) bytes, `peers` are all ranks, this one included.
  SharedSegment(std::shared_ptr<void> memory, int rank, std::vector<Peer> peers);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  int rank() const { return rank_; }
  int size() const { return int(peers_.size()); }

  // Begins the next exchange: returns where to write up to kSlotBytes, once nobody reads there any more.
  std::byte* begin(const Deadline& deadline);
  void arrive(const ExchangeLabel& label);
  // The contribution of a rank to this exchange, once it has arrived; raises when its label is another.
  const std::byte* await(int peer, const Deadline& deadline);

  void leave(bool failed);  // the others are told, and wait for this rank no more
  void abort() { aborted_.store(true); }  // from any thread: the wait under way ends within a tick

 private:
  struct RankState;

  ExchangeLabel& label(int rank) const;
  std::byte* slot(int rank) const;
  void wait_until_arrived(int peer, uint32_t target, const Deadline& deadline);
  void sleep_until_arrived(int peer, uint32_t target, const Deadline& deadline);
  void check_ranks(uint32_t target, const Deadline& deadline) const;
  bool is_beside(int peer) const;
  bool has_arrived(int peer, uint32_t target) const;
  bool is_dead(int peer) const;
  std::string name_of(int peer) const;
  [[noreturn]] void throw_given_up(int peer) const;

  std::shared_ptr<void> memory_;
  RankState* states_;
  int rank_;
  std::vector<Peer> peers_;
  int polls_;
  uint32_t sequence_ = 0;
  ExchangeLabel own_label_{};
  std::atomic<bool> aborted_{false};
};

}  // namespace npu
