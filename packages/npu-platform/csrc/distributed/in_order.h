// The order of a group's collectives: one after the other, as they were called, whether they are waited for or not.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace npu {

class InOrder {
 public:
  ~InOrder() { stop(); }

  // Runs the task on this thread when all earlier ones are done.
  template <class Task>
  void run(Task&& task) {
    Turn turn(*this, take_ticket());
    task();
  }

  // Runs the task on a thread of its own when all earlier ones are done, and then `after`, while later ones go on. Neither
  // may throw. Who calls this, or run(), in `after` is on that thread: what is queued is run first, since nobody else would
  // run what it waits for, and then its own task, on the spot.
  void run_later(std::function<void()> task, std::function<void()> after);

  // Waits for the tasks that are under way or queued (in a forked child there are none, and no thread).
  void stop();

 private:
  using Ticket = uint64_t;

  struct Queued {
    Ticket ticket;
    std::function<void()> task, after;
  };

  class Turn {
   public:
    Turn(InOrder& order, Ticket ticket) : order_(order) { order.wait_for(ticket); }
    ~Turn() { order_.next(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    InOrder& order_;
  };

  Ticket take_ticket();  // on the worker behind what is queued, which is run: nobody waits there with a ticket in hand
  void wait_for(Ticket ticket);
  void next();
  void work();
  bool on_worker();
  void run_first(std::unique_lock<std::mutex> lock);

  std::mutex mutex_;
  std::condition_variable turn_, queued_;  // two, so that a turn's end does not wake a worker that has nothing to do
  Ticket tickets_ = 0, serving_ = 0;
  std::deque<Queued> queue_;
  bool stopping_ = false;
  std::thread worker_;  // started by the first run_later()
  const pid_t process_ = getpid();
};

}  // namespace npu
