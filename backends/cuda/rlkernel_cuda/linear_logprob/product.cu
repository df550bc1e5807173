// C = A B (+ C), fp32 accumulators over the whole depth: the matmuls of the backward pass, in clusters of two.
//
//   transposed 0   A [M, K] with K contiguous: dX = dz W
//              1   A [K, M] with M contiguous: dW = dz' X
//   B [K, N] with N contiguous, N a multiple of 8.
//   add            the accumulators start from what C holds, so a depth that is cut into pieces of 64 gives the bits of
//                  one that is not
//   round          C is written as bf16, else as fp32
//   counted        a count on the device bounds M (transposed 0) or K (transposed 1)
//
// A tile of B lies in shared memory as four boxes of 64 of depth by 64 columns; a transposed A as
// two of 64 of depth by 64 rows, one a warpgroup.
#include "linear_logprob/ring.cuh"

// What a build is compiled for: the macros of the compile line, which nothing else reads.
struct Build {
  static constexpr bool transposed = TRANSPOSED, add = ADD, round = ROUND, counted = COUNTED;
  static constexpr int stages = STAGES;  // of the ring
  static constexpr int group = GROUP;    // pairs of row tiles that share a tile of B
  static constexpr bool lag = LAG;       // a step's tiles are freed while the next step's matmuls run
};
constexpr int BOX = 64 * 64 * 2;  // bytes

// A box or more with rows contiguous, swizzled by 128 bytes: 8192 bytes from one 64 of rows to the next.
__device__ __forceinline__ u64 described_across(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(BOX >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

// The rows of A of a step: one box, or, transposed, one for each warpgroup.
__device__ __forceinline__ void fetch_a(u32 to, const Map* map, int row, int k, u32 bar) {
  if constexpr (Build::transposed) {
    fetch(to, map, row, k, bar);
    fetch(to + BOX, map, row + 64, k, bar);
  } else {
    fetch(to, map, k, row, bar);
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
product(const __grid_constant__ Map a_map, const __grid_constant__ Map b_map, const float* from, void* to,
        const int* count, int first, int M, int N, int K, int from_pitch, int to_pitch) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[Build::stages], empty_[Build::stages];
  const u32 base = shared_address(ring), full = shared_address(full_), empty = shared_address(empty_);
  const u32 rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128;
  ring_begin<Build::stages>(full, empty);

  int rows = M, depth = K;
  if constexpr (Build::counted) {
    const int live = max(*count - first, 0);
    (Build::transposed ? depth : rows) = min(live, Build::transposed ? K : M);
  }
  const int pairs = (rows + 2 * ROWS - 1) / (2 * ROWS), tiles = (N + COLS - 1) / COLS;
  const int k_tiles = (depth + DEPTH - 1) / DEPTH;
  int stage = 0;
  u32 phase = 0;

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
        int pair, tile;
        tile_at<Build::group>(i, pairs, tiles, pair, tile);
        const int row = (2 * pair + rank) * ROWS, col = tile * COLS + rank * (COLS / 2);
        for (int k = 0; k < k_tiles; k++) {
          barrier_wait(empty + 8 * stage, phase ^ 1);
          const u32 bar = full + 8 * stage, at = base + stage * STAGE_BYTES;
          const u32 half = at + A_BYTES + rank * (B_BYTES / 2);
          barrier_expect(bar, STAGE_BYTES);
          fetch_a(at, &a_map, row, k * DEPTH, bar);
          fetch_for_both(half, &b_map, col, k * DEPTH, bar);
          fetch_for_both(half + BOX, &b_map, col + 64, k * DEPTH, bar);
          if (++stage == Build::stages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int me = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, q = lane % 4;
    const u32 a0 = base + me * (64 * DEPTH * 2), b0 = base + A_BYTES;
    for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
      int pair, tile;
      tile_at<Build::group>(i, pairs, tiles, pair, tile);
      const int r0 = (2 * pair + rank) * ROWS + me * 64 + thread / 32 * 16 + lane / 4, r1 = r0 + 8;
      const bool live0 = r0 < M, live1 = r1 < M;
      const int col0 = tile * COLS + q * 2;
      float d[128];
      if constexpr (Build::add) {
        const float* from0 = from + (long long)r0 * from_pitch;
        const float* from1 = from + (long long)r1 * from_pitch;
#pragma unroll
        for (int j = 0; j < 32; j++) {
          const int col = col0 + j * 8;
          const float2 zero = make_float2(0.f, 0.f);
          const float2 u = live0 && col < N ? *(const float2*)(from0 + col) : zero;
          const float2 v = live1 && col < N ? *(const float2*)(from1 + col) : zero;
          d[j * 4] = u.x, d[j * 4 + 1] = u.y, d[j * 4 + 2] = v.x, d[j * 4 + 3] = v.y;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 128; j++) d[j] = 0.f;
      }
      for (int k = 0; k < k_tiles; k++) {
        barrier_wait(full + 8 * stage, phase);
        const u32 at = stage * STAGE_BYTES;
        const u64 b = described_across(b0 + at);
        const u64 a = Build::transposed ? described_across(a0 + at) : described(a0 + at);
        constexpr int step = Build::transposed ? 128 : 2;  // to 16 rows of 128 bytes on, or to 16 of depth
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < DEPTH / 16; j++) multiply<Build::transposed, 1>(d, a + step * j, b + 128 * j, 1);
        free_step<Build::stages, Build::lag>(empty, stage, k > 0, thread);
        if (++stage == Build::stages) stage = 0, phase ^= 1;
      }
      free_last<Build::stages, Build::lag>(empty, stage, k_tiles > 0, thread, d);
      if constexpr (Build::round) {
        store_rounded<false>(d, (unsigned short*)to, to_pitch, r0, live0, live1, 0.f, 0.f, tile * COLS, N, q);
      } else {
        float* to0 = (float*)to + (long long)r0 * to_pitch;
        float* to1 = (float*)to + (long long)r1 * to_pitch;
#pragma unroll
        for (int j = 0; j < 32; j++) {
          const int col = col0 + j * 8;
          if (live0 && col < N) *(float2*)(to0 + col) = make_float2(d[j * 4], d[j * 4 + 1]);
          if (live1 && col < N) *(float2*)(to1 + col) = make_float2(d[j * 4 + 2], d[j * 4 + 3]);
        }
      }
    }
  }
  cluster_sync();  // no block leaves while the other may still write to its ring
}
