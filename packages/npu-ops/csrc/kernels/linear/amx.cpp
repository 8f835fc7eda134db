#include "kernels/linear/linear.inc"
