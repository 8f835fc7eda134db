#include "kernels/moe/fused_experts.inc"
