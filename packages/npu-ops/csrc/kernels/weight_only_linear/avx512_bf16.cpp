#include "kernels/weight_only_linear/weight_only_linear.inc"
