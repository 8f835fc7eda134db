// Gives the kernels to torch's dispatcher: for the CPU at load, for npu when Python hands over the device's launch table.
#include <string>

#include "bindings/families.h"
#include "bindings/launch.h"

namespace npu_ops {

void set_device_table(int64_t address);

namespace {

using torch::stable::detail::StableLibrary;

void add_kernels(StableLibrary& m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("gemma_rms_norm", TORCH_BOX(&gemma_rms_norm));
  m.impl("fused_add_gemma_rms_norm", TORCH_BOX(&fused_add_gemma_rms_norm));
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  m.impl("multimodal_rotary_embedding", TORCH_BOX(&multimodal_rotary_embedding));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu", TORCH_BOX(&gelu));
  m.impl("quick_gelu", TORCH_BOX(&quick_gelu));
  m.impl("relu2", TORCH_BOX(&relu2));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("top_k_top_p", TORCH_BOX(&top_k_top_p));
}

bool set_isa(std::string name) { return set_tier(name.c_str()); }
std::string isa() { return tier_name(current_tier()); }
std::string highest_isa() { return tier_name(highest_tier()); }

void bind_device(int64_t launch_table) {
  set_device_table(launch_table);
  // kept for ever: torch forgets the kernels when the object goes
  static StableLibrary* library = nullptr;
  if (library) return;
  library = new StableLibrary(StableLibrary::Kind::IMPL, "npu_ops", "PrivateUse1", __FILE__, __LINE__);
  add_kernels(*library);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) { add_kernels(m); }

STABLE_TORCH_LIBRARY_FRAGMENT(npu_ops, m) {
  m.def("_set_isa(str name) -> bool");
  m.def("_isa() -> str");
  m.def("_highest_isa() -> str");
  m.def("_bind_device(int launch_table) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(npu_ops, CompositeExplicitAutograd, m) {
  m.impl("_set_isa", TORCH_BOX(&set_isa));
  m.impl("_isa", TORCH_BOX(&isa));
  m.impl("_highest_isa", TORCH_BOX(&highest_isa));
  m.impl("_bind_device", TORCH_BOX(&bind_device));
}

}  // namespace npu_ops
