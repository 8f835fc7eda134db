// The handles of collectives that callers did not wait for.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>
#include <vector>

#include "distributed/health.h"
#include "runtime/launch.h"

namespace npu {

// A collective of ours: done at once, or later by finish_with(), and then complete_future().
class SharedWork : public c10d::Work {
 public:
  explicit SharedWork(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}

  // Of an operation that is done.
  static c10::intrusive_ptr<SharedWork> done(std::vector<at::Tensor> outputs);

  void finish_with(std::exception_ptr error) { finish(std::move(error)); }
  void complete_future();  // and run what waits for it, on this thread, outside of the group's turn: it may ask for collectives
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  // A future of the list of outputs, which its caller completes.
  c10::intrusive_ptr<c10::ivalue::Future> make_future() const;
  // One that is completed when `other` is.
  c10::intrusive_ptr<c10::ivalue::Future> future_after(c10::ivalue::Future& other) const;

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for
  std::atomic<bool> delivered_{false};
};

// A collective of the host's backend on aliases of `outputs`. Its failure ends the group.
class HostWork final : public SharedWork {
 public:
  HostWork(c10::intrusive_ptr<c10d::Work> host, const char* name, std::vector<at::Tensor> outputs,
           std::shared_ptr<Health> health)
      : SharedWork(std::move(outputs)), host_(std::move(host)), name_(name), health_(std::move(health)) {}

  // Waits for work whose failure ends the group.
  static void wait_for(c10::intrusive_ptr<c10d::Work> host, const char* name, std::shared_ptr<Health> health) {
    c10::make_intrusive<HostWork>(std::move(host), name, std::vector<at::Tensor>(), std::move(health))->wait(kNoTimeout);
  }

  bool isCompleted() override { return host_->isCompleted(); }
  bool isSuccess() const override { return host_->isSuccess(); }
  std::exception_ptr exception() const override { return host_->exception(); }
  int sourceRank() const override { return host_->sourceRank(); }
  void synchronize() override { host_->synchronize(); }
  void abort() override { host_->abort(); }
  uint64_t getSequencenumber() const override { return host_->getSequencenumber(); }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // NPU_DEBUG=memory: the host's threads use the tensors when the kernel that started this has ended, so memory stays
  // open until they are done; in a send or a receive, which have no future, until somebody has waited or let go.
  void keep_memory_open();

 private:
  c10::intrusive_ptr<c10d::Work> host_;
  std::shared_ptr<MemoryScope> open_;
  const char* name_;
  std::shared_ptr<Health> health_;
};

// Several collectives of one caller: done when each is.
class JoinedWork final : public SharedWork {
 public:
  explicit JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;  // for each at most
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace npu
