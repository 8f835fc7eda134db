#include "kernels/gated_norm/gated_norm.inc"
