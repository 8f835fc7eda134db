#include "distributed/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace npu {

using c10::ivalue::Future;

c10::intrusive_ptr<SharedWork> SharedWork::done(std::vector<at::Tensor> outputs) {
  auto work = c10::make_intrusive<SharedWork>(std::move(outputs));
  work->finish_with(nullptr);
  return work;
}

c10::intrusive_ptr<Future> SharedWork::getFuture() {
  {
    std::lock_guard lock(mutex_);
    if (!future_) future_ = make_future();
  }
  complete_future();
  return future_;
}

c10::intrusive_ptr<Future> SharedWork::make_future() const {
  std::vector<c10::Device> devices;
  for (const at::Tensor& output : outputs_) {
    if (std::find(devices.begin(), devices.end(), output.device()) == devices.end()) devices.push_back(output.device());
  }
  return c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::move(devices));
}

c10::intrusive_ptr<Future> SharedWork::future_after(Future& other) const {
  auto future = make_future();
  other.addCallback([future, outputs = outputs_](Future& other) {
    if (other.hasError()) {
      future->setError(other.exception_ptr());
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  });
  return future;
}

// Called whenever the work is done or the future is made: the later one completes it.
void SharedWork::complete_future() {
  {
    std::lock_guard lock(mutex_);
    if (!completed_ || !future_) return;
  }
  if (delivered_.exchange(true)) return;
  c10::OptionalDeviceGuard on_theirs;  // a new thread's device is the first, and what waits may make tensors on "npu"
  if (!outputs_.empty()) on_theirs.reset_device(outputs_[0].device());
  if (exception_) {
    future_->setError(exception_);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  try {
    const bool is_done = host_->wait(timeout);
    std::lock_guard lock(mutex_);
    open_.reset();
    return is_done;
  } catch (const std::exception& error) {
    if (!host_->isCompleted()) throw;  // only this wait was too short
    health_->fail(name_, c10::str("the connection to another rank failed: ", error.what()));
  }
}

void HostWork::keep_memory_open() {
  auto open = std::make_shared<MemoryScope>("a collective");
  try {
    host_->getFuture()->addCallback([open](Future&) {});
  } catch (const c10::Error&) {
    open_ = std::move(open);
  }
}

c10::intrusive_ptr<Future> HostWork::getFuture() { return future_after(*host_->getFuture()); }

namespace {

std::vector<at::Tensor> outputs_of(const std::vector<c10::intrusive_ptr<c10d::Work>>& parts) {
  std::vector<at::Tensor> all;
  for (const auto& part : parts) {
    for (at::Tensor& output : part->result()) all.push_back(std::move(output));
  }
  return all;
}

}  // namespace

JoinedWork::JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> parts) : SharedWork(outputs_of(parts)), parts_(std::move(parts)) {}

bool JoinedWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
}

bool JoinedWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& part : parts_) {
    if (part->isCompleted() && part->isSuccess()) continue;  // gloo would wait for a second message
    if (!part->wait(timeout)) return false;
  }
  return true;
}

c10::intrusive_ptr<Future> JoinedWork::getFuture() {
  c10::List<c10::intrusive_ptr<Future>> futures(c10::FutureType::create(c10::ListType::ofTensors()));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  return future_after(*c10::collectAll(futures));
}

}  // namespace npu
