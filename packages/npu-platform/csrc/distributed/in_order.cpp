#include "distributed/in_order.h"

namespace npu {

void InOrder::wait_for(Ticket ticket) {
  std::unique_lock lock(mutex_);
  turn_.wait(lock, [&] { return serving_ == ticket; });
}

void InOrder::next() {
  std::lock_guard lock(mutex_);
  ++serving_;
  turn_.notify_all();
}

void InOrder::run_later(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  queue_.emplace_back(tickets_++, std::move(task));
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  queued_.notify_one();
}

void InOrder::work() {
  for (;;) {
    std::unique_lock lock(mutex_);
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto [ticket, task] = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Turn turn(*this, ticket);
    task();
    task = nullptr;  // what it owns goes before the next one's turn
  }
}

void InOrder::stop() {
  if (getpid() != process_) {
    if (worker_.joinable()) worker_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    queued_.notify_one();
  }
  if (worker_.joinable()) worker_.join();
}

}  // namespace npu
