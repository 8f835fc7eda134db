#include "runtime/fences.h"

#include <algorithm>
#include <cstring>

#include "runtime/driver.h"

namespace npu {

OpenMemory::OpenMemory(const char* name) : scope_(driver().memory_check->open(name)) {}
OpenMemory::~OpenMemory() { driver().memory_check->close(scope_); }

}  // namespace npu

namespace npu::fences {
namespace {

constexpr size_t kZone = 256;
constexpr size_t kAlignment = 64;  // of a cache line, which vector kernels may rely on
constexpr unsigned char kPattern = 0xFD;
constexpr int kPoison = 0xDB;
constexpr size_t kPoisonUpTo = size_t(64) << 20;  // beyond, a cache that is never used would take up host memory

constexpr size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

char* find_change(char* begin, char* end) {
  return std::find_if(begin, end, [](char byte) { return static_cast<unsigned char>(byte) != kPattern; });
}

}  // namespace

size_t block_size(size_t bytes) { return round_up(kZone + round_up(bytes, kAlignment), kPage) + kPage; }

char* data_in(char* block, size_t size, size_t bytes) { return block + size - kPage - round_up(bytes, kAlignment); }

void build(char* data, size_t bytes) {
  renew(data, bytes);
  poison(data, bytes);
}

void renew(char* data, size_t bytes) {
  std::memset(data - kZone, kPattern, kZone);
  std::memset(data + bytes, kPattern, round_up(bytes, kAlignment) - bytes);
}

void poison(char* address, size_t bytes) {
  if (bytes <= kPoisonUpTo) std::memset(address, kPoison, bytes);
}

std::optional<std::string> broken(char* data, size_t bytes) {
  char* end = data + bytes;
  char* zone_end = data + round_up(bytes, kAlignment);
  std::optional<std::string> where;
  if (char* at = find_change(data - kZone, data); at != data) {
    where = std::to_string(data - at) + " bytes before the start";
  } else if (at = find_change(end, zone_end); at != zone_end) {
    where = std::to_string(at - end) + " bytes past the end";
  }
  if (where) renew(data, bytes);
  return where;
}

}  // namespace npu::fences
