#include "kernels/sampling/sampling.inc"
