#include "simulator/devices.h"

#include <pthread.h>

#include <atomic>

#include "config/processors.h"
#include "simulator/memory_check.h"

namespace npu::sim {
namespace {

std::atomic<Devices*> created{nullptr};

void before_fork() {
  Devices* devices = created.load();
  devices->pool().before_fork();
  for (int i = 0; i < devices->count(); ++i) devices->memory(i).mutex().lock();
  memory_check::before_fork();
}

void unlock_memory(Devices* devices) {
  memory_check::after_fork();
  for (int i = devices->count(); i-- > 0;) devices->memory(i).mutex().unlock();
}

void after_fork_in_parent() {
  unlock_memory(created.load());
  created.load()->pool().after_fork_in_parent();
}

void after_fork_in_child() {
  unlock_memory(created.load());
  created.load()->pool().after_fork_in_child();
}

}  // namespace

Devices::Devices(const Config& config) : pool_(config.threads, processors_by_node(processors_allowed())) {
  for (size_t i = 0; i < config.visible.size(); ++i) {
    memory_.push_back(std::make_unique<DeviceMemory>(config.memory_bytes, config.huge_pages, config.check_memory));
  }
}

Devices& Devices::instance() {
  // Leaked on purpose: tensors in static storage are freed after static destructors have run.
  static Devices* devices = [] {
    created.store(new Devices(config()));
    if (config().check_memory) memory_check::start();
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return created.load();
  }();
  return *devices;
}

Devices* Devices::if_created() { return created.load(std::memory_order_acquire); }

int Devices::owner_of(const void* address) const {
  for (size_t i = 0; i < memory_.size(); ++i) {
    if (memory_[i]->contains(address)) return int(i);
  }
  return -1;
}

}  // namespace npu::sim
