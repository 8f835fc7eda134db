#include "kernels/fp8_experts/fp8_experts.inc"
