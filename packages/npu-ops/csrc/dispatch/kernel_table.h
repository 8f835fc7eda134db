// One table of kernels a tier; the processor chooses the tier, set_tier a lower one.
#pragma once

#include <cstdint>

#include "dispatch/parallel.h"

namespace npu_ops {

enum class Dtype : int { bf16, fp16, fp32 };
enum class Tier : int { scalar, avx2, avx512, count };

struct NormParams;
struct RotaryParams;
struct ActivationParams;
struct LinearParams;
struct AttentionParams;
struct CacheParams;
struct EmbeddingParams;
struct ArgmaxParams;
struct TopKTopPParams;

template <class Params>
using Kernel = void (*)(const Params&, const Parallel&);

struct KernelTable {
  Kernel<NormParams> norm;
  Kernel<RotaryParams> rotary;
  Kernel<ActivationParams> activation;
  Kernel<LinearParams> linear;
  // whether torch's own linear is the faster one for this shape
  bool (*linear_prefers_torch)(const LinearParams&);
  Kernel<AttentionParams> attention;
  Kernel<CacheParams> cache;
  Kernel<EmbeddingParams> embedding;
  Kernel<ArgmaxParams> argmax;
  Kernel<TopKTopPParams> top_k_top_p;
};

// The table of the chosen tier.
const KernelTable& kernels();

Tier current_tier();
const char* tier_name(Tier tier);
// Highest tier that this build holds and this machine runs.
Tier highest_tier();
// Chooses a tier by name; false when the name is unknown or the machine cannot run it.
bool set_tier(const char* name);

}  // namespace npu_ops
