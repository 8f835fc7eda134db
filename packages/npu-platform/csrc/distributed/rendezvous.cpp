#include "distributed/rendezvous.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <vector>

namespace npu {
namespace {

// What a rank tells the others about itself. The memory is rank 0's, reached through its /proc entry: it never has a
// name in a file system, so nothing is left behind however the ranks end.
struct Announcement {
  std::string host;
  pid_t pid = -1;
  int memory = -1;  // rank 0: the number of its descriptor
};

std::string errno_text(const char* call) { return std::string(call) + ": " + std::strerror(errno); }

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Gives this rank's text to the others, returns everybody's.
std::vector<std::string> exchange(c10d::Store& store, const std::string& topic, int rank, int size, const std::string& text) {
  const std::string prefix = "npuccl/" + topic + "/";
  store.set(prefix + std::to_string(rank), to_bytes(text));
  std::vector<std::string> all;
  for (int peer = 0; peer < size; ++peer) {
    const std::vector<uint8_t> bytes = store.get(prefix + std::to_string(peer));
    all.emplace_back(bytes.begin(), bytes.end());
  }
  return all;
}

std::string encode(const Announcement& own) {
  std::ostringstream text;
  text << own.pid << ' ' << own.memory << ' ' << own.host;
  return text.str();
}

Announcement decode(const std::string& text) {
  std::istringstream stream(text);
  Announcement other;
  stream >> other.pid >> other.memory;
  stream.get();
  std::getline(stream, other.host);
  return other;
}

std::string refusal_of(const std::vector<Announcement>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].host.empty()) return "nothing tells the host of rank " + std::to_string(rank) + " from others";
    if (all[rank].host != all[0].host) {
      return "rank " + std::to_string(rank) + " is on another host than rank 0 (" + all[rank].host + "; " + all[0].host + ")";
    }
  }
  if (all[0].memory < 0) return "rank 0 could not make the shared memory";
  return {};
}

Descriptor make_memory(int size) {
  Descriptor memory(int(syscall(SYS_memfd_create, "npuccl", /*MFD_CLOEXEC=*/1u)));
  if (!memory || ftruncate(memory.get(), off_t(SharedSegment::bytes_for(size))) != 0) return Descriptor();
  void* mapped = mmap(nullptr, SharedSegment::bytes_for(size), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return Descriptor();
  SharedSegment::initialize(mapped, size);
  munmap(mapped, SharedSegment::bytes_for(size));
  return memory;
}

std::unique_ptr<SharedSegment> attach(const std::vector<Announcement>& all, int rank, std::string* refusal) {
  std::vector<Peer> peers;
  for (const Announcement& other : all) {
    Descriptor process(int(syscall(SYS_pidfd_open, other.pid, 0)));
    if (!process) return *refusal = errno_text("pidfd_open"), nullptr;
    fcntl(process.get(), F_SETFD, FD_CLOEXEC);
    peers.push_back({other.pid, std::move(process)});
  }
  const std::string path = "/proc/" + std::to_string(all[0].pid) + "/fd/" + std::to_string(all[0].memory);
  const Descriptor memory(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!memory) return *refusal = errno_text(("open of " + path).c_str()), nullptr;
  const size_t bytes = SharedSegment::bytes_for(int(all.size()));
  struct stat status {};
  if (fstat(memory.get(), &status) != 0 || size_t(status.st_size) != bytes) {
    return *refusal = path + " is not the memory of rank 0", nullptr;
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return *refusal = errno_text("mmap"), nullptr;
  std::shared_ptr<void> owned(mapped, [bytes](void* address) { munmap(address, bytes); });
  return std::make_unique<SharedSegment>(std::move(owned), rank, std::move(peers));
}

}  // namespace

Rendezvous share_memory(c10d::Store& store, int rank, int size, const std::string& host) {
  const Descriptor memory = rank == 0 ? make_memory(size) : Descriptor();
  std::vector<Announcement> all;
  std::vector<std::string> hosts;
  for (const std::string& text : exchange(store, "host", rank, size, encode({host, getpid(), memory.get()}))) {
    all.push_back(decode(text));
    hosts.push_back(all.back().host);
  }
  if (std::string refusal = refusal_of(all); !refusal.empty()) return {nullptr, std::move(refusal), std::move(hosts)};

  std::string own_refusal = "attached";
  auto segment = attach(all, rank, &own_refusal);
  const auto outcomes = exchange(store, "attached", rank, size, own_refusal);
  for (int peer = 0; peer < size; ++peer) {
    if (outcomes[size_t(peer)] != "attached") {
      return {nullptr, "rank " + std::to_string(peer) + " cannot attach to the shared memory (" + outcomes[size_t(peer)] + ")",
              std::move(hosts)};
    }
  }
  return {std::move(segment), {}, std::move(hosts)};
}

bool agreed(c10d::Store& store, const std::string& topic, int rank, int size, bool own) {
  const auto said = exchange(store, topic, rank, size, own ? "yes" : "no");
  return std::count(said.begin(), said.end(), "yes") == size;
}

}  // namespace npu
