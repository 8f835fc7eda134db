#include "faults/faults.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace npu {
namespace {

using std::chrono::nanoseconds;

constexpr size_t kLongestHistory = 1000;

struct Name {
  std::string_view text;
  FaultKind kind;
};
constexpr Name kNames[] = {{"oom", FaultKind::out_of_memory}, {"kernel", FaultKind::kernel},
                           {"lost", FaultKind::lost},         {"bitflip", FaultKind::bit_flip},
                           {"slow", FaultKind::slow},         {"slow_link", FaultKind::slow_link}};

bool is_delay(FaultKind kind) { return kind == FaultKind::slow || kind == FaultKind::slow_link; }
bool is_of_launches(FaultKind kind) { return kind != FaultKind::out_of_memory && kind != FaultKind::slow_link; }

std::optional<int64_t> to_number(std::string_view text, int64_t least) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) return std::nullopt;
  return value;
}

std::optional<nanoseconds> to_delay(const std::string& text) {
  char* unit = nullptr;
  const double number = std::strtod(text.c_str(), &unit);
  const std::string_view name(unit);
  const double factor = name == "us" ? 1e3 : name == "ms" ? 1e6 : name == "s" ? 1e9 : 0;
  if (unit == text.c_str() || !std::isfinite(number) || number <= 0 || factor == 0 || number * factor > 3.6e12) return std::nullopt;
  return nanoseconds(int64_t(number * factor));
}

std::string_view cut(std::string_view& text, size_t at) {
  std::string_view head = text.substr(0, at);
  text = at < text.size() ? text.substr(at + 1) : std::string_view();
  return head;
}

// The next lone colon: "::" belongs to the name of a kernel.
size_t find_colon(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != ':') continue;
    if (i + 1 < text.size() && text[i + 1] == ':') {
      ++i;
    } else {
      return i;
    }
  }
  return text.size();
}

bool set_option(Fault& fault, std::string_view name, std::string_view value) {
  std::optional<int64_t> number;
  if (name == "kernel" && is_of_launches(fault.kind)) {
    fault.kernel = value;
    return !value.empty();
  }
  if (name == "seed" && fault.kind == FaultKind::bit_flip) {
    if ((number = to_number(value, 0))) fault.seed = uint64_t(*number);
  } else if (name == "device") {
    if ((number = to_number(value, 0))) fault.device = *number < NPU_MAX_DEVICES ? int(*number) : -1;
    return number && fault.device >= 0;
  } else if (name == "times" && fault.kind != FaultKind::lost) {
    if ((number = to_number(value, 0))) fault.times = *number;
  }
  return number.has_value();
}

// What follows the "=" of the head: the kernel that fails, the delay.
bool set_value(Fault& fault, std::string_view value) {
  if (fault.kind == FaultKind::kernel) {
    fault.kernel = value;
    return !value.empty();
  }
  if (!is_delay(fault.kind)) return false;
  const auto delay = to_delay(std::string(value));
  fault.delay = delay.value_or(nanoseconds(0));
  return delay.has_value();
}

// "aten::add" means its overloads too, as "aten::add.Tensor".
bool is_kernel(const std::string& wanted, std::string_view name) {
  if (wanted.empty()) return true;
  return name.starts_with(wanted) && (name.size() == wanted.size() || name[wanted.size()] == '.');
}

// splitmix64: neighbouring seeds give unrelated bits.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
uint64_t mix(uint64_t value) {
  value += kGolden;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

bool is_on(const Fault& fault, int device) { return fault.device < 0 || fault.device == device; }

void remember(ArmedFault& fault, std::string what) {
  if (fault.history.size() < kLongestHistory) fault.history.push_back(std::move(what));
}

std::string on(int device) { return " on npu:" + std::to_string(device); }

}  // namespace

std::optional<Fault> parse_fault(std::string_view text) {
  std::string_view head = cut(text, find_colon(text));
  const bool is_counted = head.find('@') != std::string_view::npos;
  std::string_view event = head;
  const std::string_view what = cut(event, std::min(head.find('@'), head.size()));
  std::string_view value = what;
  const bool has_value = what.find('=') != std::string_view::npos;
  const std::string_view name = cut(value, std::min(what.find('='), what.size()));
  Fault fault;
  bool known = false;
  for (const Name& each : kNames) {
    if (each.text != name) continue;
    fault.kind = each.kind;
    known = true;
  }
  if (!known) return std::nullopt;
  if (has_value ? !set_value(fault, value) : is_delay(fault.kind)) return std::nullopt;
  if (is_delay(fault.kind)) fault.times = is_counted ? 1 : 0;
  if (is_counted) {
    const auto at = to_number(event, 1);
    if (!at) return std::nullopt;
    fault.at = *at;
  }
  while (!text.empty()) {
    std::string_view option = cut(text, find_colon(text));
    const std::string_view key = cut(option, std::min(option.find('='), option.size()));
    if (!set_option(fault, key, option)) return std::nullopt;
  }
  return fault;
}

std::string Fault::text() const {
  std::string text;
  for (const Name& each : kNames) {
    if (each.kind == kind) text = each.text;
  }
  // append(), not +: GCC 12 warns of an overlap in "text" + std::string (its bug 105651).
  auto add = [&text](const char* name, const std::string& value) { text.append(name).append(value); };
  if (is_delay(kind)) add("=", std::to_string(delay.count() / 1000) + "us");
  if (kind == FaultKind::kernel && !kernel.empty()) add("=", kernel);
  const bool is_counted = !is_delay(kind) || at != 1 || times != 0;
  if (is_counted) add("@", std::to_string(at));
  if (kind != FaultKind::kernel && !kernel.empty()) add(":kernel=", kernel);
  if (kind == FaultKind::bit_flip) add(":seed=", std::to_string(seed));
  if (device >= 0) add(":device=", std::to_string(device));
  if (is_counted && times != 1) add(":times=", std::to_string(times));
  return text;
}

bool ArmedFault::strikes() {
  ++seen;
  if (seen < fault.at || is_spent()) return false;
  ++struck;
  return true;
}

Faults& Faults::instance() {
  static auto* faults = new Faults;  // leaked: tensors in static storage are freed after static destructors have run
  return *faults;
}

Faults::Handle Faults::arm(Fault fault) {
  std::lock_guard lock(mutex_);
  armed_.push_back(std::make_shared<ArmedFault>(std::move(fault)));
  update_watch();
  return armed_.back();
}

void Faults::disarm(const Handle& fault) {
  std::lock_guard lock(mutex_);
  std::erase(armed_, fault);
  update_watch();
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  armed_.clear();
  update_watch();
}

int64_t Faults::struck(const ArmedFault& fault) {
  std::lock_guard lock(mutex_);
  return fault.struck;
}

std::vector<std::string> Faults::history(const ArmedFault& fault) {
  std::lock_guard lock(mutex_);
  return fault.history;
}

void Faults::note(ArmedFault& fault, std::string what) {
  std::lock_guard lock(mutex_);
  remember(fault, std::move(what));
}

std::optional<std::string> Faults::at_allocation(int device) {
  std::lock_guard lock(mutex_);
  std::optional<std::string> met;
  for (const Handle& armed : armed_) {
    const Fault& fault = armed->fault;
    if (fault.kind != FaultKind::out_of_memory || !is_on(fault, device) || !armed->strikes()) continue;
    met = fault.text();
    remember(*armed, "allocation " + std::to_string(armed->seen) + on(device));
  }
  update_watch();
  return met;
}

Faults::Verdict Faults::at_launch(int device, std::string_view kernel) {
  std::lock_guard lock(mutex_);
  Verdict verdict;
  for (const Handle& armed : armed_) {
    const Fault& fault = armed->fault;
    if (!is_of_launches(fault.kind) || !is_on(fault, device) || !is_kernel(fault.kernel, kernel) || !armed->strikes()) continue;
    if (fault.kind == FaultKind::slow) {
      verdict.delay += fault.delay;
    } else if (fault.kind == FaultKind::bit_flip) {  // its history is written when the bit is known
      verdict.flip = armed;
      verdict.random = mix(fault.seed + uint64_t(armed->struck) * kGolden);
    } else {
      remember(*armed, "launch " + std::to_string(armed->seen) + ", " + std::string(kernel) + on(device));
      if (fault.kind == FaultKind::kernel) verdict.failed = fault.text();
      if (fault.kind == FaultKind::lost) lost_[size_t(device)] = "at kernel " + std::string(kernel) + " by '" + fault.text() + "'";
    }
  }
  update_watch();
  return verdict;
}

std::chrono::nanoseconds Faults::at_transfer(int device) {
  std::lock_guard lock(mutex_);
  nanoseconds delay{0};
  for (const Handle& armed : armed_) {
    const Fault& fault = armed->fault;
    if (fault.kind == FaultKind::slow_link && is_on(fault, device) && armed->strikes()) delay += fault.delay;
  }
  update_watch();
  return delay;
}

void Faults::lose(int device, std::string why) {
  std::lock_guard lock(mutex_);
  lost_[size_t(device)] = std::move(why);
  update_watch();
}

void Faults::reset(int device) {
  std::lock_guard lock(mutex_);
  lost_[size_t(device)].reset();
  update_watch();
}

std::optional<std::string> Faults::why_lost(int device) {
  std::lock_guard lock(mutex_);
  return lost_[size_t(device)];
}

// A spent fault costs the hot path nothing.
void Faults::update_watch() {
  bool any = std::any_of(armed_.begin(), armed_.end(), [](const Handle& armed) { return !armed->is_spent(); });
  for (const auto& lost : lost_) any = any || lost.has_value();
  if (any) {
    watch_bits.fetch_or(kWatchFaults);
  } else {
    watch_bits.fetch_and(~uint32_t(kWatchFaults));
  }
}

}  // namespace npu
