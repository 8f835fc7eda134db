#include "kernels/cache/cache.inc"
