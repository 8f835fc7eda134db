#include "kernels/norm_quant/norm_quant.inc"
