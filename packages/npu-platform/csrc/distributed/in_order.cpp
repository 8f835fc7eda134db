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

void InOrder::run_later(std::function<void()> task, std::function<void()> after) {
  if (on_worker()) {
    run(task);
    return after();
  }
  std::lock_guard lock(mutex_);
  queue_.push_back({tickets_++, std::move(task), std::move(after)});
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  queued_.notify_one();
}

void InOrder::work() {
  for (;;) {
    std::unique_lock lock(mutex_);
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    run_first(std::move(lock));
  }
}

bool InOrder::on_worker() {
  std::lock_guard lock(mutex_);
  return worker_.get_id() == std::this_thread::get_id();
}

InOrder::Ticket InOrder::take_ticket() {
  const bool runs_them = on_worker();
  for (;;) {
    std::unique_lock lock(mutex_);
    if (!runs_them || queue_.empty()) return tickets_++;
    run_first(std::move(lock));
  }
}

void InOrder::run_first(std::unique_lock<std::mutex> lock) {
  Queued first = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  {
    Turn turn(*this, first.ticket);
    first.task();
    first.task = nullptr;  // what it owns goes before the next one's turn
  }
  first.after();
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
