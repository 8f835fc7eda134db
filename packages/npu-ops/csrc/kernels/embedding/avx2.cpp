#include "kernels/embedding/embedding.inc"
