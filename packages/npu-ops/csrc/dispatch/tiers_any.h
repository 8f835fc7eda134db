// The tiers of any other processor; see tiers_x86_64.h for what a line says.
#define NPU_TIERS(X, ...) X(scalar, every, "", "", __VA_ARGS__)
