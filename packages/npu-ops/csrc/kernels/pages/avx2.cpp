#include "kernels/pages/pages.inc"
