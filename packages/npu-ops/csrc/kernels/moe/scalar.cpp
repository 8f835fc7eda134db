#include "kernels/moe/fused_experts.inc"
#include "kernels/moe/select_experts.inc"
