#include "kernels/causal_conv/causal_conv.inc"
