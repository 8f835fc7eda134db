// npu_platform._C: what the module torch.npu needs beyond the dispatcher and torch.accelerator.
#include <ATen/ops/empty_strided.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "aten/alias.h"
#include "aten/fallback.h"
#include "aten/weak_ref.h"
#include "distributed/process_group.h"
#include "runtime/allocator.h"
#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "faults/faults.h"
#include "runtime/driver.h"
#include "runtime/faults.h"
#include "runtime/generator.h"
#include "runtime/graph.h"
#include "runtime/host_allocator.h"
#include "runtime/launch.h"
#include "triton_launcher.h"

namespace py = pybind11;

namespace {

py::list snapshot(c10::DeviceIndex device) {
  py::list segments;
  for (const auto& info : npu::CachingAllocator::of(device).snapshot()) {
    py::dict segment;
    segment["device"] = int(info.device);
    segment["address"] = info.address;
    segment["total_size"] = info.total_size;
    segment["allocated_size"] = info.allocated_size;
    segment["requested_size"] = info.requested_size;
    segment["segment_type"] = info.is_large ? "large" : "small";
    segment["segment_pool_id"] = py::make_tuple(info.owner_private_pool_id.first, info.owner_private_pool_id.second);
    segments.append(segment);
  }
  return segments;
}

// What a device's tensors hold: address, bytes that were asked for, bytes counted.
std::vector<std::tuple<size_t, size_t, size_t>> live_memory(c10::DeviceIndex device) {
  auto& allocator = npu::CachingAllocator::of(device);
  std::vector<std::tuple<size_t, size_t, size_t>> blocks;
  for (const auto& [address, requested] : allocator.live()) {
    blocks.emplace_back(reinterpret_cast<size_t>(address), requested, allocator.size_of(address));
  }
  return blocks;
}

py::dict host_memory_stats() {
  const at::HostStats stats = npu::host_allocator()->get_stats();
  py::dict all;
  auto put = [&all](const char* name, const c10::CachingAllocator::Stat& stat) {
    py::dict values;
    values["current"] = stat.current;
    values["peak"] = stat.peak;
    values["allocated"] = stat.allocated;
    values["freed"] = stat.freed;
    all[name] = values;
  };
  put("allocations", stats.allocations);
  put("allocated_bytes", stats.allocated_bytes);
  put("active_requests", stats.active_requests);
  put("active_bytes", stats.active_bytes);
  all["num_host_alloc"] = stats.num_host_alloc;
  all["num_host_free"] = stats.num_host_free;
  return all;
}

// The memory of a process in a pool of its own, for torch.npu.use_mem_pool().
class PoolScope {
 public:
  explicit PoolScope(npu::PoolId pool) : use_(std::in_place, pool), previous_(std::exchange(npu::thread_state.pool, pool)) {}
  void leave() {
    npu::thread_state.pool = previous_;
    use_.reset();
  }

 private:
  std::optional<npu::PoolUse> use_;
  npu::PoolId previous_;
};

// The kernels that this thread launches without running them, for torch.npu.skip_kernels().
class SkipScope {
 public:
  using Names = std::set<std::string, std::less<>>;
  explicit SkipScope(Names names) : names_(std::move(names)), previous_(std::exchange(npu::thread_state.skipped, &names_)) {}
  void leave() { npu::thread_state.skipped = previous_; }

 private:
  Names names_;
  const Names* previous_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  npu::install_cpu_allocator();
  npu::prefer_fallback_to_composites();

  m.def("device_count", &npu::device_count);
  m.def("driver_name", [] { return npu::chosen_driver().name; });
  m.def("device_name", [] { return npu::chosen_driver().device_name; });
  m.def("device_version", [] { return py::make_tuple(npu::chosen_driver().major, npu::chosen_driver().minor); });
  m.def("computes", [] { return (npu::chosen_driver().capabilities & NPU_DRIVER_COMPUTES) != 0; });
  m.def("check_device", &npu::check_device);
  m.def("current_device", [] { return int(npu::thread_state.device); });
  m.def("set_device", [](c10::DeviceIndex device) {
    npu::check_device(device);
    npu::thread_state.device = device;
  });
  m.def("is_initialized", &npu::is_initialized);
  m.def("num_threads", &npu::num_threads);
  m.def("set_num_threads", &npu::set_num_threads);
  // The pool alone, for tests: how often each index of [0, n) was visited.
  m.def("_visit_in_parallel", [](int64_t n, int64_t grain) {
    std::vector<int> visits(size_t(n), 0);
    py::gil_scoped_release without_gil;
    npu::parallel_for(0, n, grain, [](void* context, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++(*static_cast<std::vector<int>*>(context))[size_t(i)];
    }, &visits);
    py::gil_scoped_acquire with_gil;
    return py::make_tuple(*std::min_element(visits.begin(), visits.end()), *std::max_element(visits.begin(), visits.end()));
  });

  m.def("size_of", [](int64_t address) {
    auto* pointer = reinterpret_cast<void*>(address);
    const c10::DeviceIndex device = npu::device_of(pointer);
    return device < 0 ? size_t(0) : npu::CachingAllocator::of(device).size_of(pointer);
  });
  m.def("set_memory_limit", [](c10::DeviceIndex device, size_t bytes) { npu::CachingAllocator::of(device).set_limit(bytes); });
  m.def("memory_limit", [](c10::DeviceIndex device) { return npu::CachingAllocator::of(device).limit(); });
  m.def("memory_snapshot", &snapshot);
  m.def("live_memory", &live_memory);
  m.def("allocate", [](c10::DeviceIndex device, size_t bytes) {
    return reinterpret_cast<size_t>(npu::CachingAllocator::of(device).allocate(bytes, npu::thread_state.pool));
  });
  m.def("release", [](size_t address) {
    auto* pointer = reinterpret_cast<void*>(address);
    TORCH_CHECK_VALUE(!pointer || npu::device_of(pointer) >= 0, "npu: ", pointer, " is not an address of device memory");
    npu::free_device_memory(pointer);
  });
  m.def("can_suspend", [] { return npu::chosen_driver().memory_release != nullptr; });
  m.def("suspend_pool", [](c10::DeviceIndex device, npu::PoolId pool) { return npu::CachingAllocator::of(device).suspend(pool); });
  m.def("resume_pool", [](c10::DeviceIndex device, npu::PoolId pool) { return npu::CachingAllocator::of(device).resume(pool); });
  m.def("pool_sleeps", [](c10::DeviceIndex device, npu::PoolId pool) { return npu::CachingAllocator::of(device).sleeps(pool); });
  m.def("live_memory_of_pool", [](c10::DeviceIndex device, npu::PoolId pool) {
    std::vector<std::pair<size_t, size_t>> blocks;
    for (const auto& [address, bytes] : npu::CachingAllocator::of(device).live(pool)) {
      blocks.emplace_back(reinterpret_cast<size_t>(address), bytes);
    }
    return blocks;
  });
  // Bytes between the host and a device, or two devices.
  m.def("copy_memory", [](size_t target, size_t source, size_t bytes) {
    npu::MemoryScope open("a copy of memory");
    npu::submit_copy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
  }, py::call_guard<py::gil_scoped_release>());
  m.def("host_memory_stats", &host_memory_stats);
  m.def("reset_peak_host_memory_stats", [] { npu::host_allocator()->reset_peak_stats(); });
  m.def("reset_accumulated_host_memory_stats", [] { npu::host_allocator()->reset_accumulated_stats(); });
  m.def("new_pool_id", &npu::new_pool_id);
  m.def("retain_pool", [](npu::PoolId pool) { npu::retain_pool(pool); });
  m.def("release_pool", [](npu::PoolId pool) { npu::release_pool(pool); });
  m.def("empty_cache_of_pool", [](npu::PoolId pool) { c10::getDeviceAllocator(npu::kNpu)->emptyCache({0, pool}); });
  m.def("pool_users", &npu::count_pool_users);
  py::class_<PoolScope>(m, "PoolScope").def(py::init<npu::PoolId>()).def("leave", &PoolScope::leave);

  // What torch.empty_strided does, without its parsing: compiled code allocates each buffer so.
  m.def("empty_strided", [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType dtype,
                            c10::DeviceIndex device) {
    return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(npu::kNpu, device));
  });

  m.def("default_generator", [](c10::DeviceIndex device) { return npu::default_generator(device); });
  m.def("seed_all", &npu::seed_all);

  py::class_<npu::ArmedFault, npu::Faults::Handle>(m, "ArmedFault")
      .def_property_readonly("text", [](const npu::ArmedFault& armed) { return armed.fault.text(); })
      .def_property_readonly("struck", [](const npu::ArmedFault& armed) { return npu::Faults::instance().struck(armed); })
      .def_property_readonly("history",
                             [](const npu::ArmedFault& armed) { return npu::Faults::instance().history(armed); });
  m.def("arm_fault", [](const std::string& text) {
    npu::device_count();  // the environment's faults come first
    auto fault = npu::parse_fault(text);
    if (!fault) throw py::value_error("npu: '" + text + "' is not a fault; see torch.npu.faults");
    return npu::Faults::instance().arm(std::move(*fault));
  });
  m.def("disarm_fault", [](const npu::Faults::Handle& fault) { npu::Faults::instance().disarm(fault); });
  m.def("clear_faults", [] { npu::Faults::instance().clear(); });
  m.def("lose_device", [](c10::DeviceIndex device) {
    npu::check_device(device);
    npu::Faults::instance().lose(device, "by torch.npu.faults.lose_device");
  });
  m.def("reset_device", &npu::reset_device);

  m.def("is_capturing", [] { return npu::is_capturing(npu::current_stream(npu::thread_state.device)); });
  m.def("launch_counts", [] {
    const auto counts = npu::launch_counts();
    return py::make_tuple(counts.kernels, counts.fallbacks);
  });
  py::class_<SkipScope>(m, "SkipScope").def(py::init<SkipScope::Names>()).def("leave", &SkipScope::leave);
  m.def("cpu_alias", &npu::owning_alias);
  m.def("define_weak_ref_tensor", &npu::define_weak_ref_tensor);
  npu::define_triton_launcher(m);
  m.def("make_process_group", &npu::make_process_group, py::call_guard<py::gil_scoped_release>());
  m.def("sum_over_ranks", &npu::sum_over_ranks, py::call_guard<py::gil_scoped_release>());
  m.def("gather_from_ranks", &npu::gather_from_ranks, py::call_guard<py::gil_scoped_release>());
}
