#include "kernels/linear_epilogues/linear_epilogues.inc"
