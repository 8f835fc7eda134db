// Products of bf16 on AMX tiles that have been made beforehand: weights out of some narrower format, and rows of x.
#pragma once

#include "vector/tiles.h"

namespace npu_ops {
namespace {

constexpr int64_t kDepthOfTile = 32;  // elements of k in a tile of bf16

// Tiles along k, of 16 rows of 32 elements for A, of 16 pairs of k by 16 columns for B.
struct TileRun {
  const void* data;
  int64_t row;   // bytes from a row to the next
  int64_t step;  // and from a tile to the next
};

template <int T>
NPU_INLINE void load_run(const TileRun& run, int64_t s) {
  tile_load<T>(static_cast<const char*>(run.data) + s * run.step, run.row);
}

// A step of N runs of A by M of B, of which the fewer stay in their registers: A's are 0 and 1, B's 2 and 3; of four the others are 1 to 3.
template <int N, int M, int i = 0>
NPU_INLINE void run_step(const TileRun* a, const TileRun* b, int64_t s) {
  if constexpr (N == 4 && i < 4) {
    if constexpr (i == 0) load_run<0>(b[0], s);
    load_run<1 + i % 3>(a[i], s);
    tile_dp_bf16<4 + i, 1 + i % 3, 0>();
    run_step<N, M, i + 1>(a, b, s);
  } else if constexpr (M == 4 && i < 4) {
    if constexpr (i == 0) load_run<0>(a[0], s);
    load_run<1 + i % 3>(b[i], s);
    tile_dp_bf16<4 + i, 0, 1 + i % 3>();
    run_step<N, M, i + 1>(a, b, s);
  } else if constexpr (N == 2) {
    load_run<0>(a[0], s);
    load_run<2>(b[0], s);
    tile_dp_bf16<4, 0, 2>();
    load_run<3>(b[1], s);
    tile_dp_bf16<5, 0, 3>();
    load_run<1>(a[1], s);
    tile_dp_bf16<6, 1, 2>();
    tile_dp_bf16<7, 1, 3>();
  }
}

// sums[N][M][16][16]: four tiles hold them, so that as many products are under way as it takes to hide how long one takes. A sum runs
// along k in one order whatever N and M.
template <int N, int M>
NPU_INLINE void run_products(float* sums, const TileRun* a, const TileRun* b, int64_t steps) {
  static_assert(N * M == 4);
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t s = 0; s < steps; ++s) run_step<N, M>(a, b, s);
  tile_store<4>(sums, 64), tile_store<5>(sums + 256, 64), tile_store<6>(sums + 512, 64), tile_store<7>(sums + 768, 64);
}

}  // namespace
}  // namespace npu_ops
