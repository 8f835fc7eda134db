#include "kernels/gates/gates.inc"
