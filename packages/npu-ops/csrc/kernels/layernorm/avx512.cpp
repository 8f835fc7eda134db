#include "kernels/layernorm/layernorm.inc"
