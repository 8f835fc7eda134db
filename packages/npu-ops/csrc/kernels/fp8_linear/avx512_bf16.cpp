#include "kernels/fp8_linear/fp8_linear.inc"
