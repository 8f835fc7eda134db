#include "kernels/weight_only_experts/weight_only_experts.inc"
