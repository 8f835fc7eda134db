// A group whose ranks share a host: its memory, the order of its collectives, and what becomes of it when one fails.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>

#include "distributed/health.h"
#include "distributed/in_order.h"
#include "distributed/shared_collectives.h"

namespace npu {

class SharedGroup {
 public:
  SharedGroup(std::unique_ptr<SharedSegment> segment, std::shared_ptr<Health> health)
      : segment_(std::move(segment)), health_(std::move(health)) {}

  // Runs body(SharedCall) in the group's order, on this thread. Its failure ends the group, for the other ranks too.
  template <class Body>
  void run(const char* name, std::chrono::milliseconds timeout, Body& body) {
    order_.run([&] { run_in_turn(name, timeout, body); });
  }

  // The same on the group's own thread, where done(error) ends its turn; then after().
  template <class Body, class Done, class After>
  void run_later(const char* name, std::chrono::milliseconds timeout, Body body, Done done, After after) {
    auto task = [this, name, timeout, body = std::move(body), done = std::move(done)]() mutable {
      std::exception_ptr error;
      try {
        run_in_turn(name, timeout, body);
      } catch (...) {
        error = std::current_exception();
      }
      done(error);
    };
    order_.run_later(std::move(task), std::move(after));
  }

  // Ends the group on this rank and tells the others: what is under way is aborted, or finished first.
  void abort() {
    health_->close("it was aborted or destroyed");
    segment_->abort();
    finish();
  }
  void finish() {
    stop();
    health_->close("it was shut down");
    segment_->leave(/*failed=*/false);
  }

 private:
  // The group's thread may be about to call a future's Python callback: it must get the interpreter's lock.
  void stop() {
    std::optional<pybind11::gil_scoped_release> without_gil;
    if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
    order_.stop();
  }

  template <class Body>
  void run_in_turn(const char* name, std::chrono::milliseconds timeout, Body& body) {
    health_->check(name);
    try {
      body(SharedCall{*segment_, name, {timeout, std::chrono::steady_clock::now() + timeout}});
    } catch (const std::exception& error) {
      segment_->leave(/*failed=*/true);
      health_->fail(name, error.what());
    }
  }

  std::unique_ptr<SharedSegment> segment_;
  std::shared_ptr<Health> health_;
  InOrder order_;
};

}  // namespace npu
