// The families that there are, and the ops about the library itself.
#include "bindings/register.h"

#include <string>
#include <vector>

#include "bindings/launch.h"
#include "dispatch/batch_invariance.h"

namespace npu_ops {

void set_device_table(int64_t address);

namespace {

// The libraries are kept for ever: torch forgets the kernels when the object goes.
void add_for(const char* key, AddKernels add, const char* file, uint32_t line) {
  add(*new StableLibrary(StableLibrary::Kind::IMPL, "npu_ops", key, file, line));
}

std::vector<AddKernels>& families() {
  static std::vector<AddKernels> all;
  return all;
}

bool set_isa(std::string name) { return set_tier(name.c_str()); }
bool is_batch_invariant() { return batch_invariant(); }
void choose_batch_invariant(bool on) { set_batch_invariant(on); }
std::string isa() { return facts_of(current_tier()).name; }
std::string isas() {
  std::string names = facts_of(Tier{}).name;
  for (int i = 1; i < kTiers; ++i) names += std::string(" ") + facts_of(static_cast<Tier>(i)).name;
  return names;
}
const TierFacts& facts(const std::string& name) {
  const Tier tier = tier_of(name.c_str());
  NPU_CHECK(tier != Tier::count, "'", name, "' is no instruction set of this build: see torch.ops.npu_ops._isas().");
  return facts_of(tier);
}
std::string instructions_of_isa(std::string name) { return facts(name).instructions; }
std::string isa_timed_on(std::string name) { return facts(name).timed_on; }
bool can_run_isa(std::string name) {
  const Tier tier = tier_of(name.c_str());
  return tier != Tier::count && can_run(tier);
}
void count_tokens(std::optional<Tensor> tokens, int64_t rows) {
  if (!tokens) return set_padding(nullptr, 0);
  NPU_CHECK(tokens->numel() == 1 && is_int32(*tokens) && !tokens->is_cpu(),
            "_count_tokens: tokens must be one int32 on npu.");
  NPU_CHECK(rows > 0, "_count_tokens: rows must be positive, not ", rows, ".");
  set_padding(static_cast<const int32_t*>(tokens->data_ptr()), rows);
}
bool is_emulated() { return !has_instructions_of(current_tier()); }
std::string product_isa() { return facts_of(product_tier()).name; }
std::string highest_isa() { return facts_of(highest_tier()).name; }

void bind_device(int64_t launch_table) {
  set_device_table(launch_table);
  static bool bound = false;
  if (bound) return;
  bound = true;
  for (AddKernels add : families()) add_for("PrivateUse1", add, __FILE__, __LINE__);
}

}  // namespace

Family::Family(AddKernels add, const char* file, uint32_t line) {
  add_for("CPU", add, file, line);
  families().push_back(add);
}

STABLE_TORCH_LIBRARY_FRAGMENT(npu_ops, m) {
  m.def("_set_isa(str name) -> bool");
  m.def("_isa() -> str");
  m.def("_isas() -> str");
  m.def("_instructions_of_isa(str name) -> str");
  m.def("_isa_timed_on(str name) -> str");
  m.def("_highest_isa() -> str");
  m.def("_product_isa() -> str");
  m.def("_can_run_isa(str name) -> bool");
  m.def("_isa_is_emulated() -> bool");
  m.def("_batch_invariant() -> bool");
  m.def("_set_batch_invariant(bool on) -> ()");
  m.def("_bind_device(int launch_table) -> ()");
  m.def("_count_tokens(Tensor? tokens, int rows) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(npu_ops, CompositeExplicitAutograd, m) {
  m.impl("_set_isa", TORCH_BOX(&set_isa));
  m.impl("_isa", TORCH_BOX(&isa));
  m.impl("_isas", TORCH_BOX(&isas));
  m.impl("_instructions_of_isa", TORCH_BOX(&instructions_of_isa));
  m.impl("_isa_timed_on", TORCH_BOX(&isa_timed_on));
  m.impl("_highest_isa", TORCH_BOX(&highest_isa));
  m.impl("_product_isa", TORCH_BOX(&product_isa));
  m.impl("_can_run_isa", TORCH_BOX(&can_run_isa));
  m.impl("_isa_is_emulated", TORCH_BOX(&is_emulated));
  m.impl("_batch_invariant", TORCH_BOX(&is_batch_invariant));
  m.impl("_set_batch_invariant", TORCH_BOX(&choose_batch_invariant));
  m.impl("_bind_device", TORCH_BOX(&bind_device));
  m.impl("_count_tokens", TORCH_BOX(&count_tokens));
}

}  // namespace npu_ops
