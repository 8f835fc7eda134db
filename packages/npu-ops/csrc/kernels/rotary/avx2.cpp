#include "kernels/rotary/rotary.inc"
