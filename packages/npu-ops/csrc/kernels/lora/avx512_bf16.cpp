#include "kernels/lora/lora.inc"
