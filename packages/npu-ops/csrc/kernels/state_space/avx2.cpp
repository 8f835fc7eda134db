#include "kernels/state_space/gated_delta_rule.inc"
#include "kernels/state_space/selective_scan.inc"
