// Graphs: what a thread launches between capture_begin() and capture_end(), on the stream where it begins and on those that
// events fork from it, to be run again as it is.
#pragma once

#include <c10/macros/Macros.h>

#include <memory>
#include <string_view>

#include "runtime/recording.h"
#include "runtime/thread_state.h"

namespace npu {

namespace detail {
bool has_graph();  // of the capture of this thread; without, the capture is over when this returns
}

// Whether this thread captures.
inline bool is_capturing() { return C10_UNLIKELY(thread_state.capture != nullptr) && detail::has_graph(); }

// Whether it captures what is launched on the stream.
inline bool is_capturing(StreamName stream) { return is_capturing() && thread_state.capture->streams().contains(stream); }

inline StreamName current_stream(c10::DeviceIndex device) { return {device, thread_state.stream[size_t(device)]}; }

// The next launch of the graph under capture. Nothing happens when the capture ended while the kernel ran.
void record_node(std::unique_ptr<Node> node);

// Raises RuntimeError naming the operation when this thread captures: the graph could not repeat it.
void refuse_during_capture(std::string_view operation);

// Raises it for a launch on a stream that is not part of the capture.
void check_stream_of_capture(c10::DeviceIndex device, const char* kernel);

// Whether the address belongs to the graph under capture, which then owns it: nodes must not keep such memory alive, or
// it could not be reused within the graph.
bool is_in_capture_pool(const void* address);

}  // namespace npu
