// The tiers of 64-bit ARM; see tiers_x86_64.h for what a line says. The plainest bodies, compiled for NEON.
#define NPU_TIERS(X, ...) X(neon, every, "simd", "", __VA_ARGS__)
