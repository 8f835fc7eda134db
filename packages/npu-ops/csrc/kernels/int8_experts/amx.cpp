#include "kernels/int8_experts/int8_experts.inc"
