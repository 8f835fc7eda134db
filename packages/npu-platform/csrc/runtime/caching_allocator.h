// Device memory for tensors: small blocks from slabs, large ones by best fit, private pools for graphs, exact counts.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "runtime/driver.h"
#include "runtime/stream_uses.h"
#include "runtime/thread_state.h"

namespace npu {

// One device's allocator. Thread-safe. Counts what tensors hold to the slot: at most 12.5 % over the request up to
// 512 KiB, 512 bytes above, as CUDA does.
class CachingAllocator {
 public:
  static CachingAllocator& of(c10::DeviceIndex device);  // raises on a bad environment or device

  void* allocate(size_t bytes, PoolId pool);  // raises torch.OutOfMemoryError; 0 bytes: nullptr
  void free(void* address);

  // Memory at this address is not used again, when it is freed, before what the stream has been given until then is done.
  void note_use(void* address, StreamName stream);

  size_t size_of(const void* address);        // bytes counted for this block, 0 if it is none
  size_t requested_of(const void* address);   // bytes that were asked for, 0 when the address is not in use
  std::vector<std::pair<void*, size_t>> live();  // all that is in use: address, bytes that were asked for
  PoolId pool_of(const void* address);        // of the block or slab at this address
  // True once for a large block that still lies on untouched memory: zeroing it may leave it untouched.
  bool take_untouched(void* address);

  // NPU_DEBUG=memory: what was written outside the tensors of this device since the last call, in words; empty: nothing.
  std::string broken_fences();
  void renew_fences();                        // the contents of the memory are gone, those of the fences too

  void release_cached(PoolId pool);           // gives its free memory back to the driver, but of a pool that graphs replay in
  void merge_pool(PoolId pool);               // its blocks belong to the default pool from now on

  // A pool that sleeps has given its memory to the driver, and keeps its addresses: nothing is allocated from it, and what
  // is freed in it waits. Bytes that were given, and taken again. Contents are lost. Raises RuntimeError where the pool
  // sleeps already, is the default one, or the driver cannot; OutOfMemoryError.
  size_t suspend(PoolId pool);
  size_t resume(PoolId pool);
  bool sleeps(PoolId pool);
  std::vector<std::pair<void*, size_t>> live(PoolId pool);  // as live(), of one pool
  void set_limit(size_t bytes);
  size_t limit();

  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_peak_stats();
  void reset_accumulated_stats();
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> snapshot();
  std::mutex& mutex() { return mutex_; }

 private:
  struct Pool;
  struct Slab;
  struct Block;
  struct BySize {
    bool operator()(const Block* a, const Block* b) const;
  };

  explicit CachingAllocator(c10::DeviceIndex device);

  void* take(size_t bytes, PoolId pool);
  void* take_watched(size_t bytes, PoolId pool);
  void give_back(void* address);
  void settle_uses();
  void make_free(void* address);
  void report(void* address, int64_t bytes);
  void* allocate_small(size_t bytes, Pool& pool);
  void* allocate_large(size_t bytes, Pool& pool);
  Block* take_last_freed(Pool& pool, size_t size);
  void settle(Pool& pool);
  Block* take_free(Pool& pool, size_t size, size_t bytes);
  bool keeps_layout(const Pool& pool) const;
  void close(Block* block);
  void fence(Block* block);
  void unfence(Block* block);
  void check_fences(const Block* block);
  template <class Visit>
  void for_each_fenced(Visit visit);
  void count_reserved(size_t bytes, bool small, bool taken);
  Slab* new_slab(unsigned size_class, size_t slot, Pool& pool);
  Block* new_block(size_t bytes, Pool& pool);
  void split(Block* block, size_t bytes);
  Block* merge_with_neighbours(Block* block);
  void free_small(Slab* slab, void* address);
  void free_large(Block* block);
  void* map(size_t bytes);
  void check_mapped(const void* address, size_t bytes) const;
  void unmap(char* address, size_t bytes);
  void release(Pool& pool);
  void release_slabs(Pool& pool);
  void release_blocks(Pool& pool);
  std::vector<std::pair<char*, size_t>> mapped(Pool& pool);
  npu_status restore(const std::vector<std::pair<char*, size_t>>& ranges);
  void close_all(Pool& pool);
  void reopen_all(Pool& pool);
  Slab*& slab_at(const void* address);
  Block* block_at(const void* address);
  Pool& pool(PoolId id);
  void count(size_t bytes, size_t requested, bool small, bool allocated);
  bool is_within_limit(size_t bytes) const;
  [[noreturn]] void out_of_memory(size_t bytes, const std::string& fault = "");

  const c10::DeviceIndex device_;
  const bool fenced_;  // NPU_DEBUG=memory
  std::string broken_;
  std::mutex mutex_;
  char* base_ = nullptr;
  std::vector<Slab*> slabs_;                          // by granule of the device's address range
  std::unordered_map<const void*, Block*> blocks_;    // large blocks in use
  std::unordered_map<PoolId, std::unique_ptr<Pool>> pools_;
  Pool* default_pool_ = nullptr;
  size_t limit_ = 0;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  StreamUses uses_;
};

void release_cached_of_all(PoolId pool);  // devices

// Who allocates from a private pool holds it; with the last one it merges into the default pool.
enum class PoolUser { graph, other };
PoolId new_pool_id();
inline PoolId pool_of(c10::MempoolId_t id) { return id.second ? id.second : id.first; }  // PyTorch's name of one
void retain_pool(PoolId pool, PoolUser user = PoolUser::other);
void release_pool(PoolId pool, PoolUser user = PoolUser::other);
int count_pool_users(PoolId pool);
bool is_replayed(PoolId pool);  // a graph holds it

class PoolUse {
 public:
  explicit PoolUse(PoolId pool, PoolUser user = PoolUser::other) : id_(pool), user_(user) { retain_pool(pool, user); }
  ~PoolUse() { release_pool(id_, user_); }
  PoolUse(const PoolUse&) = delete;
  PoolUse& operator=(const PoolUse&) = delete;
  PoolId id() const { return id_; }

 private:
  const PoolId id_;
  const PoolUser user_;
};

void free_device_memory(void* address);  // of whatever device

}  // namespace npu
