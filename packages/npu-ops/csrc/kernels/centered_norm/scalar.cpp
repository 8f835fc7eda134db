#include "kernels/centered_norm/centered_norm.inc"
