#include "config/config.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "config/processors.h"
#include "include/npu_driver.h"

namespace npu {
namespace {

constexpr size_t kLeastMemory = size_t(16) << 20;

std::optional<std::string> read(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

[[noreturn]] void reject(const char* name, const std::string& value, const std::string& remedy) {
  throw ConfigError(std::string(name) + "='" + value + "' cannot be used: " + remedy);
}

std::optional<int> to_int(const std::string& text) {
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional<int>(value) : std::nullopt;
}

int int_between(const char* name, int least, int most, int otherwise) {
  auto text = read(name);
  if (!text || text->empty()) return otherwise;
  auto value = to_int(*text);
  if (!value || *value < least || *value > most) {
    reject(name, *text, "set a whole number from " + std::to_string(least) + " to " + std::to_string(most) + ", or unset it");
  }
  return *value;
}

bool flag(const char* name, bool otherwise) { return int_between(name, 0, 1, otherwise ? 1 : 0) == 1; }

// "8GiB", "512M", "1.5 GB", "1073741824"; a lone K, M, G or T counts in powers of 1024.
std::optional<size_t> to_bytes(std::string text) {
  text.erase(std::remove_if(text.begin(), text.end(), [](unsigned char c) { return std::isspace(c); }), text.end());
  char* rest = nullptr;
  const double number = std::strtod(text.c_str(), &rest);
  if (rest == text.c_str() || !std::isfinite(number) || number < 0) return std::nullopt;
  std::string unit(rest);
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  if (unit.empty() || unit == "B") return size_t(number);
  const size_t power = std::string("KMGT").find(unit[0]);
  if (power == std::string::npos) return std::nullopt;
  const std::string tail = unit.substr(1);
  if (tail != "" && tail != "B" && tail != "IB") return std::nullopt;
  const double bytes = number * std::pow(tail == "B" ? 1000.0 : 1024.0, double(power + 1));
  return bytes < 9e18 ? std::optional<size_t>(size_t(bytes)) : std::nullopt;
}

size_t host_memory() {
  size_t bytes = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  std::ifstream limit("/sys/fs/cgroup/memory.max");  // a container may have less than the machine
  size_t cgroup = 0;
  if (limit >> cgroup && cgroup > 0) bytes = std::min(bytes, cgroup);
  return bytes;
}

size_t memory_bytes(int devices) {
  auto text = read("NPU_SIMULATOR_MEMORY");
  size_t bytes = host_memory() / 10 * 8 / size_t(devices);
  if (text && !text->empty()) {
    auto value = to_bytes(*text);
    if (!value || *value < kLeastMemory) {
      reject("NPU_SIMULATOR_MEMORY", *text, "give the memory of one device in bytes or with a unit, at least 16MiB, e.g. 8GiB");
    }
    bytes = *value;
  }
  return bytes / NPU_MEMORY_GRANULE * NPU_MEMORY_GRANULE;
}

std::vector<int> visible_devices(int devices) {
  auto text = read("NPU_VISIBLE_DEVICES");
  std::vector<int> visible;
  if (!text) {
    for (int i = 0; i < devices; ++i) visible.push_back(i);
    return visible;
  }
  for (size_t begin = 0; begin < text->size();) {
    const size_t end = std::min(text->find(',', begin), text->size());
    auto ordinal = to_int(text->substr(begin, end - begin));
    if (!ordinal || *ordinal < 0 || *ordinal >= devices || std::count(visible.begin(), visible.end(), *ordinal)) {
      reject("NPU_VISIBLE_DEVICES", *text,
             "list different ordinals below NPU_SIMULATOR_DEVICES (" + std::to_string(devices) +
                 ") with commas, e.g. 0,1; empty hides all devices");
    }
    visible.push_back(*ordinal);
    begin = end + 1;
  }
  return visible;
}

FallbackReport fallback_report() {
  auto text = read("NPU_FALLBACK");
  if (!text || text->empty() || *text == "silent") return FallbackReport::silent;
  if (*text == "warn") return FallbackReport::warn;
  if (*text == "error") return FallbackReport::error;
  reject("NPU_FALLBACK", *text, "set silent, warn or error");
}

// "1", "memory,oom@37": memory checks and faults, with commas between them.
std::pair<bool, std::vector<Fault>> debug() {
  const std::string text = read("NPU_DEBUG").value_or("");
  bool memory = false;
  std::vector<Fault> faults;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    begin = end + 1;
    if (item == "1" || item == "memory") {
      memory = true;
    } else if (auto fault = parse_fault(item)) {
      faults.push_back(std::move(*fault));
    } else if (item != "0") {
      reject("NPU_DEBUG", text,
             "'" + item + "' is none of memory (or 1), oom@37, kernel=npu_ops::linear@5, lost@100, bitflip@12:seed=7, slow=2ms "
             "and slow_link=200us; each may add :device=0, and @n counts from 1");
    }
  }
  return {memory, std::move(faults)};
}

Config parse() {
  const int devices = int_between("NPU_SIMULATOR_DEVICES", 1, NPU_MAX_DEVICES, 1);
  auto [check_memory, faults] = debug();
  return Config{
      .visible = driver_choice().kind == DriverKind::library ? std::vector<int>{} : visible_devices(devices),
      .memory_bytes = memory_bytes(devices),
      .threads = int_between("NPU_NUM_THREADS", 1, 1024, int(processors_allowed().size())),
      .fallback = fallback_report(),
      .check_memory = check_memory,
      .faults = std::move(faults),
      .huge_pages = flag("NPU_HUGE_PAGES", true),
  };
}

}  // namespace

DriverChoice driver_choice() {
  const std::string text = read("NPU_DEVICE").value_or("");
  const size_t colon = std::min(text.find(':'), text.size());
  const std::string name = text.substr(0, colon);
  DriverChoice choice;
  choice.options = text.substr(std::min(colon + 1, text.size()));
  if (name.find('/') != std::string::npos) {
    choice.kind = DriverKind::library;
    choice.path = name;
    return choice;
  }
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (lower == "null") {
    choice.kind = DriverKind::null;
  } else if (lower != "" && lower != "auto" && lower != "simulator" && lower != "off") {
    reject("NPU_DEVICE", text, "set auto, simulator, null (with options: null:launch=5us), off, or the path of a driver's library");
  }
  return choice;
}

const Config& config() {
  static const Config parsed = parse();
  return parsed;
}

}  // namespace npu
