#include "kernels/pages/pages.h"

#include <algorithm>

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

constexpr size_t kShape = 8;  // numbers of a stack

bool is_bytes(const Tensor& t) { return t.scalar_type() == ScalarType::Char && t.dim() == 1 && t.is_contiguous(); }

int64_t plus(int64_t a, int64_t b) {
  int64_t sum = 0;
  NPU_CHECK(!__builtin_add_overflow(a, b, &sum), "copy_pages: ", a, " + ", b, " of the stacks' rows or bytes is beyond 2^63.");
  return sum;
}
int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  NPU_CHECK(!__builtin_mul_overflow(a, b, &product), "copy_pages: ", a, " * ", b, " of a stack's rows or bytes is beyond 2^63.");
  return product;
}

// Takes its pairs from `offsets` on.
PageStack stack_of(const Tensor& device, const int64_t* shape, const int64_t* offsets) {
  return {static_cast<char*>(device.data_ptr()), {shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, shape[6], offsets,
          times(times(shape[7], shape[0]), shape[3])};
}

// Bytes from the first of a pair to the end, by the distances of layers and of fragments.
int64_t reach_of(const PageStack& s, int64_t layer, int64_t fragment) {
  return plus(plus(times(s.layers.number - 1, layer), times(s.fragments.number - 1, fragment)), s.bytes);
}

void check_stack(const PageStack& s, int64_t pairs, int64_t device_bytes, int64_t host_bytes) {
  const int64_t least = std::min({s.layers.device, s.layers.host, s.fragments.device, s.fragments.host});
  NPU_CHECK(s.layers.number > 0 && s.fragments.number > 0 && s.bytes > 0 && pairs >= 0 && least >= 0,
            "copy_pages: layers, fragments and bytes of a stack must be positive, distances and pairs not negative.");
  const int64_t on_device = reach_of(s, s.layers.device, s.fragments.device), on_host = reach_of(s, s.layers.host, s.fragments.host);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t d = s.offsets[2 * i], h = s.offsets[2 * i + 1];
    NPU_CHECK(d >= 0 && d <= device_bytes - on_device && h >= 0 && h <= host_bytes - on_host, "copy_pages: a pair at ", d, " and ", h,
              " reaches out of ", device_bytes, " bytes of the device or ", host_bytes, " of the host.");
  }
}

void copy_pages(std::vector<Tensor> device, Tensor host, std::vector<int64_t> shapes, Tensor pairs, Tensor progress, bool to_host,
                double seconds) {
  NPU_CHECK(shapes.size() == kShape * device.size(), "copy_pages: ", kShape, " numbers say what a stack is, got ", shapes.size(), " for ",
            device.size(), " stacks.");
  NPU_CHECK(is_bytes(host) && host.is_cpu(), "copy_pages: host must be int8 in a row, on the CPU.");
  for (const Tensor* t : {&pairs, &progress}) {
    NPU_CHECK(is_int64(*t) && t->is_contiguous() && t->is_cpu(), "copy_pages: pairs and progress must be contiguous int64 on the CPU.");
  }
  NPU_CHECK(pairs.dim() == 2 && pairs.size(1) == 2 && progress.numel() == 1, "copy_pages: pairs must be [number, 2], progress one number.");
  std::vector<PageStack> stacks;
  const int64_t* offsets = static_cast<const int64_t*>(pairs.data_ptr());
  const int64_t* const end = offsets + pairs.numel();
  int64_t rows = 0;
  for (size_t i = 0; i < device.size(); ++i) {
    const int64_t* shape = shapes.data() + kShape * i;
    NPU_CHECK(is_bytes(device[i]), "copy_pages: memories of the device must be int8 in a row.");
    check_same_device(device[0], device[i], "each memory");
    NPU_CHECK(shape[7] >= 0 && shape[7] <= (end - offsets) / 2, "copy_pages: stacks have more pairs than there are.");
    stacks.push_back(stack_of(device[i], shape, offsets));
    check_stack(stacks.back(), shape[7], device[i].numel(), host.numel());
    offsets += 2 * shape[7];
    rows = plus(rows, stacks.back().rows);
  }
  NPU_CHECK(offsets == end, "copy_pages: there are more pairs than stacks have.");
  int64_t* const done = static_cast<int64_t*>(progress.data_ptr());
  NPU_CHECK(*done >= 0 && *done <= rows, "copy_pages: progress is ", *done, ", but there are ", rows, " rows.");
  int64_t first = 0;
  for (size_t i = 0; i < stacks.size() && *done < rows; i += kPageStacks) {
    PagesParams params{{}, 0, static_cast<char*>(host.data_ptr()), done, first, to_host, seconds};
    for (size_t j = i; j < std::min(stacks.size(), i + kPageStacks); ++j) {
      params.stacks[params.num_stacks++] = stacks[j];
      first += stacks[j].rows;
    }
    if (*done >= first) continue;
    const int64_t before = *done;
    launch<copy_pages_tiers>(device[i], "npu_ops::copy_pages", params);
    if (*done == before) *done = first;  // a device that does not compute
    if (*done < first) return;
  }
}

}  // namespace

NPU_OPS(m) {
  m.impl("copy_pages", TORCH_BOX(&copy_pages));
}

}  // namespace npu_ops
