// Locks across fork(): a child would find one that a thread of its parent held locked for ever.
#pragma once

#include <mutex>

namespace npu {

// The lock is held while the process forks, from now on. For those under which no other is taken.
void hold_in_forks(std::mutex& mutex);

}  // namespace npu
