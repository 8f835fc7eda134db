#include "runtime/resize.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace npu {

void resize_storage(c10::StorageImpl& storage, size_t bytes, const char* name) {
  TORCH_CHECK(storage.resizable(), "npu: this storage cannot be resized: it does not own its memory. Copy the tensor first.");
  const c10::DeviceIndex device = storage.device().index();
  const DeviceScope on(device);
  const size_t kept = std::min(bytes, storage.nbytes());
  // A replay would copy what the old memory holds by then, over what the new memory was given since.
  if (kept && !is_in_capture_pool(storage.data())) refuse_during_capture("resize_() of a tensor from outside the graph that holds data");
  c10::DataPtr memory = device_allocator()->allocate(bytes);
  if (kept) launch(device, name, [to = memory.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); });
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace npu
