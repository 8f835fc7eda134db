// Method: a child profiler of Kineto, as torch/csrc/profiler/standalone/privateuse1_profiler.h provides for.
#include "runtime/profiler.h"

#include <c10/util/ApproximateClock.h>
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/forks.h"
#include "runtime/thread_state.h"

namespace npu::profiler {

std::atomic<bool> detail::recording{false};

namespace {

using libkineto::ActivityType;

struct KernelRecord {
  std::string name;
  c10::DeviceIndex device;
  int64_t stream, began, ended;
  uint64_t op;  // correlation id of the op that launched it, 0 for none
  int32_t thread;
};

// The records of the session that records; Kineto has one at a time.
std::mutex mutex;
std::vector<KernelRecord> records;
[[maybe_unused]] const bool is_held_in_forks = (hold_in_forks(mutex), true);

// The ops that this thread is in, as their correlation ids.
thread_local std::vector<uint64_t> ops;

ActivityType type_of(std::string_view kernel) {
  const bool copies = kernel == "aten::_copy_from" || kernel == "aten::_local_scalar_dense";
  return copies ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL;
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  explicit Session(std::set<ActivityType> types) : types_(std::move(types)) {}

  void start() override {
    std::lock_guard lock(mutex);
    records.clear();
    detail::recording = true;
    status_ = libkineto::TraceStatus::RECORDING;
  }

  void stop() override {
    detail::recording = false;
    std::lock_guard lock(mutex);
    taken_ = std::exchange(records, {});
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override { return {}; }
  void processTrace(libkineto::ActivityLogger& logger) override { processTrace(logger, {}, 0, INT64_MAX); }

  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked_activity, int64_t start,
                    int64_t end) override {
    trace_->span = libkineto::TraceSpan(start, end, "npu");
    std::set<std::pair<c10::DeviceIndex, int64_t>> rows;
    for (const KernelRecord& kernel : taken_) {
      if (kernel.began < start || kernel.began > end || !types_.contains(type_of(kernel.name))) continue;
      rows.emplace(kernel.device, kernel.stream);
      log(logger, kernel, linked_activity ? linked_activity(int32_t(kernel.op)) : nullptr);
    }
    describe(logger, rows, start);
    trace_->gpuOpCount = int(trace_->activities.size());
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }  // described with the trace
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(trace_); }

  void pushCorrelationId(uint64_t id) override { ops.push_back(id); }
  void popCorrelationId() override {
    if (!ops.empty()) ops.pop_back();  // empty: the session began inside the op
  }

 private:
  void log(libkineto::ActivityLogger& logger, const KernelRecord& kernel, const libkineto::ITraceActivity* op) {
    trace_->emplace_activity(trace_->span, type_of(kernel.name), kernel.name);
    libkineto::GenericTraceActivity& activity = *trace_->activities.back();
    activity.startTime = kernel.began;
    activity.endTime = kernel.ended;
    activity.id = int32_t(kernel.op);
    activity.device = kernel.device;
    activity.resource = int32_t(kernel.stream);
    activity.threadId = kernel.thread;
    activity.linked = op;
    activity.addMetadata("device", int(kernel.device));
    activity.addMetadata("stream", kernel.stream);
    activity.addMetadata("correlation", kernel.op);
    activity.log(logger);
  }

  static void describe(libkineto::ActivityLogger& logger, const std::set<std::pair<c10::DeviceIndex, int64_t>>& rows,
                       int64_t start) {
    int described = -1;
    for (const auto& [device, stream] : rows) {
      const std::string label = "npu:" + std::to_string(device);
      if (device != described) logger.handleDeviceInfo({device, libkineto::kExceedMaxPid + device, "npu", label}, start);
      described = device;
      logger.handleResourceInfo({stream, stream, device, "stream " + std::to_string(stream)}, start);
    }
  }

  std::set<ActivityType> types_;
  std::vector<KernelRecord> taken_;
  // On the heap: activities point to its span.
  std::unique_ptr<libkineto::CpuTraceBuffer> trace_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return available_; }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<ActivityType>& types,
                                                                 const libkineto::Config&) override {
    std::set<ActivityType> wanted;
    for (const ActivityType type : types) {
      if (available_.contains(type)) wanted.insert(type);
    }
    if (wanted.empty()) return nullptr;  // a profile of the CPU alone
    return std::make_unique<Session>(std::move(wanted));
  }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(int64_t, int64_t, const std::set<ActivityType>& types,
                                                                 const libkineto::Config& config) override {
    return configure(types, config);
  }

 private:
  const std::string name_ = "npu";
  const std::set<ActivityType> available_{ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY};
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

}  // namespace

int64_t now() { return c10::getTime(); }

void record_kernel(c10::DeviceIndex device, const char* name, int64_t began) {
  const int64_t ended = now();
  const uint64_t op = ops.empty() ? 0 : ops.back();
  std::lock_guard lock(mutex);
  if (!is_recording()) return;  // stopped meanwhile
  records.push_back({name, device, thread_state.stream[size_t(device)], began, ended, op, libkineto::systemThreadId()});
}

}  // namespace npu::profiler
