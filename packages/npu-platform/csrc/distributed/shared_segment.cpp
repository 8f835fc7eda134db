#include "distributed/shared_segment.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "config/processors.h"

namespace npu {
namespace {

constexpr size_t kPage = 4096, kLine = 64;
constexpr int kPolls = 4000;      // about 60 us of pause instructions: two ranks of a decode step are rarely further apart
constexpr int kPollsCrowded = 50; // more ranks than cores: whoever is waited for needs the core
constexpr long kTickNanoseconds = 100'000'000;  // sleepers look this often whether the others still live

enum Membership : uint32_t { kMember = 0, kLeft = 1, kFailed = 2 };

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while the word is `seen`, for a tick at most. The word is shared between processes: no FUTEX_PRIVATE.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec tick{0, kTickNanoseconds};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &tick, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::string in_words(const ExchangeLabel& label) {
  std::ostringstream words;
  words << label.collective << " of " << label.bytes << " bytes (dtype " << label.dtype << ", op " << label.op << ", root "
        << label.root << ")";
  return words.str();
}

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

uint64_t ExchangeLabel::digest() const {
  uint64_t words[sizeof collective / sizeof(uint64_t) + 3]{};
  std::strncpy(reinterpret_cast<char*>(words), collective, sizeof collective);
  auto* behind = words + sizeof collective / sizeof(uint64_t);
  behind[0] = uint64_t(uint32_t(dtype)) << 32 | uint32_t(op);
  behind[1] = uint32_t(root);
  behind[2] = bytes;
  uint64_t digest = 0;
  for (uint64_t word : words) digest = (std::rotl(digest, 29) ^ word) * 0x9e3779b97f4a7c15u;
  return digest;
}

// The first pages of the segment: one of these for each rank; then the rings.
struct alignas(64) SharedSegment::RankState {
  std::atomic<uint32_t> arrived{0};   // at this exchange; a futex
  std::atomic<uint32_t> sleepers{0};  // ranks that sleep on `arrived`
  std::atomic<int> processor{-1};     // that it arrived on
  std::atomic<uint32_t> membership{kMember};
  uint64_t digests[2]{};  // of the labels: what the others look at comes with `arrived`, in one line of the cache
  alignas(64) ExchangeLabel labels[2]{};

  static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
};

size_t SharedSegment::bytes_for(int size) {
  return pages(size_t(size) * sizeof(RankState)) + size_t(size) * kRingBytes;
}

void SharedSegment::initialize(void* memory, int size) {
  for (int rank = 0; rank < size; ++rank) new (static_cast<std::byte*>(memory) + size_t(rank) * sizeof(RankState)) RankState;
}

SharedSegment::SharedSegment(std::shared_ptr<void> memory, int rank, std::vector<Peer> peers)
    : memory_(std::move(memory)),
      states_(std::launder(static_cast<RankState*>(memory_.get()))),
      rank_(rank),
      peers_(std::move(peers)),
      polls_(processors_allowed().size() >= peers_.size() ? kPolls : kPollsCrowded) {}

SharedSegment::~SharedSegment() { leave(false); }

std::byte* SharedSegment::begin(size_t bytes, const Deadline& deadline) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) wait_until_arrived(peer, sequence_, deadline);
  }
  ++sequence_;
  const size_t lines = (bytes + kLine - 1) / kLine * kLine;
  slot_ = behind_ + lines <= kRingBytes ? behind_ : 0;
  behind_ = slot_ + lines;
  return slot(rank_);
}

void SharedSegment::arrive(const ExchangeLabel& contributed) {
  RankState& own = states_[rank_];
  own_digest_ = contributed.digest();
  label(rank_) = contributed;
  own.digests[sequence_ % 2] = own_digest_;
  own.processor.store(sched_getcpu(), std::memory_order_relaxed);
  // Either this rank sees the sleeper, or the sleeper sees the new count: both orders are sequentially consistent.
  own.arrived.store(sequence_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst)) futex_wake_all(own.arrived);
}

const std::byte* SharedSegment::await(int peer, const Deadline& deadline) {
  if (peer == rank_) return slot(peer);
  wait_until_arrived(peer, sequence_, deadline);
  if (states_[peer].membership.load(std::memory_order_relaxed) == kFailed) throw_given_up(peer);
  if (states_[peer].digests[sequence_ % 2] != own_digest_) {
    throw std::runtime_error("rank " + std::to_string(peer) + " runs " + in_words(label(peer)) + " while rank " +
                             std::to_string(rank_) + " runs " + in_words(label(rank_)) +
                             ": all ranks must call the same collectives in the same order");
  }
  return slot(peer);
}

void SharedSegment::leave(bool failed) {
  if (getpid() != peers_[size_t(rank_)].pid) return;  // a forked child is not the rank
  uint32_t member = kMember;
  states_[rank_].membership.compare_exchange_strong(member, failed ? kFailed : kLeft);
  futex_wake_all(states_[rank_].arrived);
}

ExchangeLabel& SharedSegment::label(int rank) const { return states_[rank].labels[sequence_ % 2]; }

std::byte* SharedSegment::slot(int rank) const {
  const size_t states = pages(peers_.size() * sizeof(RankState));
  return static_cast<std::byte*>(memory_.get()) + states + size_t(rank) * kRingBytes + slot_;
}

bool SharedSegment::has_arrived(int peer, uint32_t target) const {
  return int32_t(states_[peer].arrived.load(std::memory_order_acquire) - target) >= 0;  // the count may wrap around
}

// Whether a rank was last seen on this processor: it cannot arrive before this one leaves it. Two ranks that a third process
// has pushed onto one processor would stay there, and each poll in vain before every exchange.
bool SharedSegment::is_beside(int peer) const {
  return states_[peer].processor.load(std::memory_order_relaxed) == sched_getcpu();
}

void SharedSegment::wait_until_arrived(int peer, uint32_t target, const Deadline& deadline) {
  // A rank that has much to write or to sum is waited for longer: to fall asleep and wake takes as long as a large slot.
  const size_t polls = polls_ == kPolls ? size_t(kPolls) + (behind_ - slot_) / kLine : size_t(polls_);
  for (size_t i = 0; i < polls; ++i) {
    if (has_arrived(peer, target)) return;
    if (is_beside(peer)) break;
    pause();
  }
  sleep_until_arrived(peer, target, deadline);
}

void SharedSegment::sleep_until_arrived(int peer, uint32_t target, const Deadline& deadline) {
  RankState& state = states_[peer];
  for (;;) {
    state.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = state.arrived.load(std::memory_order_seq_cst);
    if (int32_t(seen - target) < 0) futex_wait(state.arrived, seen);
    state.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (has_arrived(peer, target)) return;
    check_ranks(target, deadline);
  }
}

// Raises when one of the ranks that are still missing will never come.
void SharedSegment::check_ranks(uint32_t target, const Deadline& deadline) const {
  if (aborted_.load()) throw std::runtime_error("the group was aborted or destroyed on this rank meanwhile");
  std::string missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    const uint32_t membership = states_[peer].membership.load();
    if (membership == kFailed) throw_given_up(peer);
    const bool dead = is_dead(peer);
    if (has_arrived(peer, target)) continue;  // if only as the last thing it did
    if (dead) throw std::runtime_error(name_of(peer) + " is dead; look for its last words in its log");
    if (membership == kLeft) throw std::runtime_error(name_of(peer) + " has destroyed its group");
    missing += (missing.empty() ? "" : ", ") + name_of(peer);
  }
  if (std::chrono::steady_clock::now() < deadline.at) return;
  throw std::runtime_error("timed out after " + std::to_string(deadline.timeout.count()) + " ms: no sign of " + missing +
                           ". All ranks must call the same collectives in the same order; if they do and need longer, give "
                           "the group a longer timeout");
}

std::string SharedSegment::name_of(int peer) const {
  return "rank " + std::to_string(peer) + " (process " + std::to_string(peers_[size_t(peer)].pid) + ")";
}

void SharedSegment::throw_given_up(int peer) const {
  throw std::runtime_error(name_of(peer) + " has met an error and given up this group; see its log");
}

bool SharedSegment::is_dead(int peer) const {
  pollfd process{peers_[size_t(peer)].process.get(), POLLIN, 0};
  return poll(&process, 1, 0) == 1;
}

}  // namespace npu
