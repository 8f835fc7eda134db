#include "kernels/qk_norm_rotary/qk_norm_rotary.inc"
