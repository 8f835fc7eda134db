#include "kernels/attention/attention.inc"
