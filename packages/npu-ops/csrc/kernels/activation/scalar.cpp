#include "kernels/activation/activation.inc"
