#include "kernels/sampling/draw.inc"
#include "kernels/sampling/penalties.inc"
#include "kernels/sampling/sampling.inc"
#include "kernels/sampling/top_logprobs.inc"
