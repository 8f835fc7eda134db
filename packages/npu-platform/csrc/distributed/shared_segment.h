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

  uint64_t digest() const;  // of all that is above
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

// The ranks go through numbered exchanges together. In exchange s a rank writes its contribution into its slot, then
// counts its `arrived` up to s; the others wait for that and read. A rank that has arrived at s - 1 has read all it
// needs of s - 2: only the slots of s - 1 and s must not overlap, and one counter a rank is all there is to agree on.
// Slots follow each other around a ring, so that a line is written again only when it has left all caches.
//
// One thread of a process at a time. What goes wrong is a std::runtime_error that names the ranks.
class SharedSegment {
 public:
  static constexpr size_t kSlotBytes = size_t(1) << 20;

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

  // Begins the next exchange: returns where to write so many bytes, kSlotBytes at most and as many on all ranks, once
  // nobody reads there any more.
  std::byte* begin(size_t bytes, const Deadline& deadline);
  void arrive(const ExchangeLabel& label);
  // The contribution of a rank to this exchange, once it has arrived; raises when its label is another.
  const std::byte* await(int peer, const Deadline& deadline);

  void leave(bool failed);  // the others are told, and wait for this rank no more
  void abort() { aborted_.store(true); }  // from any thread: the wait under way ends within a tick

 private:
  struct RankState;

  // Three of the largest slots: one that does not fit behind the last begins at the front, which that one has left free.
  static constexpr size_t kRingBytes = 3 * kSlotBytes;

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
  size_t slot_ = 0, behind_ = 0;  // where in the rings this exchange's slots begin and end
  uint64_t own_digest_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace npu
