// The tiers of x86-64, from the plainest to the one that is preferred: the one list of them, which CMake reads, too.
//
//   X(name, every or some, instructions, where its kernels were timed)
//
// every: each family has a body for it. some: those have that gain by it. Instructions are named as the compiler's options are, with _ for -;
// the processor must have them, the tier is compiled with them. A new tier is a line here, and a file <name>.cpp beside the kernels that
// gain; instructions that no tier had before are a line in features.h besides.
#define NPU_TIERS(X, ...)                                                                                                                    \
  X(scalar, every, "", "AMD Zen 3", __VA_ARGS__)                                                                                             \
  X(avx2, every, "avx2 fma f16c", "AMD Zen 3", __VA_ARGS__)                                                                                  \
  X(avx512, some, "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vnni",                                                             \
    "AMD Zen 4, Zen 5, Intel Xeon of the fifth generation with its tiles hidden", __VA_ARGS__)                                               \
  X(avx512_bf16, some, "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vnni avx512vbmi avx512bf16",                                  \
    "AMD Zen 4, Zen 5, Intel Xeon of the fifth generation with its tiles hidden", __VA_ARGS__)                                               \
  X(amx, some, "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vnni avx512vbmi avx512bf16 amx_tile amx_bf16 amx_int8",               \
    "Intel Xeon with AMX, since 2026-11-22", __VA_ARGS__)
