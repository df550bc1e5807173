// The logits of an output head on Hopper, and what becomes of them while they are still fp32 accumulators.
//
// A cluster of two blocks works on 256 rows by 256 ids: each block its own 128 rows, both the same tile of the weight.
// Each block fetches half of that tile and multicasts it to both, so a third fewer bytes leave the L2 than without a
// cluster. In a block a producer warp streams tiles through a ring with TMA; two warpgroups of 64 rows run wgmma and
// may be apart by up to the depth of the ring, so that the epilogue of one overlaps the matmul of the other.
//
// MODE 0 STATS  per row and tile: largest logit y, sum of exponentials, and that weighted by the shifted logit; the
//               chosen id is left out of these and its logit stored by itself
//      1 SAVE   STATS, and fp16(y - tile max) to memory
//      2 GRAD   the gradient of the logits in bf16 to memory
//
//   y = acc + bias, capped: c tanh((acc + bias) scale / c)         z in base-2 units = y * s2[row]
//   dz = 2^(y s2 - lse2) (ca + cb y), times 1 - (y / c)^2 under a cap
//
// Compiled with -DMODE, -DBIAS, -DCAP, -DCOUNTED, -DSTAGES, -DGROUP, -DLAG.
#include "linear_logprob/ring.cuh"

#define FAR (-1e30f)  // a logit that takes no part: its exponential is exactly 0

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
head(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, unsigned short* out, const int* target,
     const float* bias, const float* row_scale, float* tops, float* sums, float* chosen, const float* coef,
     const int* count, int first_row, int N, int V, int stride, int pitch, float cap, float cap_in, int k_tiles) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[STAGES], empty_[STAGES];
  const u32 base = shared_address(ring), full = shared_address(full_), empty = shared_address(empty_);
  const u32 rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128;
  ring_begin<STAGES>(full, empty);

  int rows = N;
#if COUNTED
  rows = min(max(*count - first_row, 0), N);
#endif
  const int pairs = (rows + 2 * ROWS - 1) / (2 * ROWS), tiles = (V + COLS - 1) / COLS;
  int stage = 0;
  u32 phase = 0;

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
        int pair, tile;
        tile_at<GROUP>(i, pairs, tiles, pair, tile);
        const int row = (2 * pair + rank) * ROWS, id = tile * COLS + rank * (COLS / 2);
        for (int k = 0; k < k_tiles; k++) {
          barrier_wait(empty + 8 * stage, phase ^ 1);
          const u32 bar = full + 8 * stage, at = base + stage * STAGE_BYTES;
          barrier_expect(bar, STAGE_BYTES);
          fetch(at, &x_map, k * DEPTH, row, bar);
          fetch_for_both(at + A_BYTES + rank * (B_BYTES / 2), &w_map, k * DEPTH, id, bar);
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int me = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, q = lane % 4;
    const u32 a0 = base + me * (64 * DEPTH * 2), b0 = base + A_BYTES;
    for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
      int pair, tile;
      tile_at<GROUP>(i, pairs, tiles, pair, tile);
      float d[128];
      for (int k = 0; k < k_tiles; k++) {
        barrier_wait(full + 8 * stage, phase);
        const u64 a = described(a0 + stage * STAGE_BYTES), b = described(b0 + stage * STAGE_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply<0, 0>(d, a, b, k > 0);
#pragma unroll
        for (int j = 1; j < DEPTH / 16; j++) multiply<0, 0>(d, a + 2 * j, b + 2 * j, 1);
        free_step<STAGES, LAG>(empty, stage, k > 0, thread);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      free_last<STAGES, LAG>(empty, stage, true, thread, d);

      const int col0 = tile * COLS + q * 2;
      const int r0 = (2 * pair + rank) * ROWS + me * 64 + thread / 32 * 16 + lane / 4, r1 = r0 + 8;
      const bool live0 = r0 < N, live1 = r1 < N;
      const float s0 = live0 ? row_scale[r0] : 0.f, s1 = live1 ? row_scale[r1] : 0.f;
#if BIAS || CAP
#pragma unroll
      for (int j = 0; j < 32; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int col = col0 + j * 8 + e;
#if BIAS
          const float b = col < V ? bias[col] : 0.f;
#else
          const float b = 0.f;
#endif
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float y = d[j * 4 + r * 2 + e] + b;
#if CAP
            const float capped = cap * (1.f - __fdividef(2.f, 1.f + exp2_(y * cap_in)));
            y = y == -__int_as_float(0x7f800000) ? FAR : capped;
#else
            y = y == -__int_as_float(0x7f800000) ? FAR : y;
#endif
            d[j * 4 + r * 2 + e] = y;
          }
        }
#endif
#if MODE == 2
      const float l0 = live0 ? coef[r0] : 0.f, l1 = live1 ? coef[r1] : 0.f;
      const float a0_ = live0 ? coef[stride + r0] : 0.f, a1_ = live1 ? coef[stride + r1] : 0.f;
      const float c0 = live0 ? coef[2 * stride + r0] : 0.f, c1 = live1 ? coef[2 * stride + r1] : 0.f;
#pragma unroll
      for (int j = 0; j < 128; j++) {
        const bool second = j & 2;
        const float y = d[j];
        float g = exp2_(fmaf(y, second ? s1 : s0, second ? -l1 : -l0)) * fmaf(y, second ? c1 : c0, second ? a1_ : a0_);
#if CAP
        g *= y <= FAR ? 0.f : 1.f - y * y / (cap * cap);
#endif
        d[j] = g;
      }
#else
      const int t0 = (live0 ? target[r0] : -1) - col0, t1 = (live1 ? target[r1] : -1) - col0;
      if (__any_sync(0xffffffffu, (t0 >= -6 && t0 < COLS) || (t1 >= -6 && t1 < COLS))) {
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (t0 == j * 8 + e) chosen[r0] = d[j * 4 + e], d[j * 4 + e] = FAR;
            if (t1 == j * 8 + e) chosen[r1] = d[j * 4 + 2 + e], d[j * 4 + 2 + e] = FAR;
          }
      }
      if (tile * COLS + COLS > V) {
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (col0 + j * 8 + e >= V) d[j * 4 + e] = FAR, d[j * 4 + 2 + e] = FAR;
      }
      float m0 = d[0], m1 = d[2];
#pragma unroll
      for (int j = 0; j < 32; j++) {
        m0 = fmaxf(m0, fmaxf(d[j * 4], d[j * 4 + 1]));
        m1 = fmaxf(m1, fmaxf(d[j * 4 + 2], d[j * 4 + 3]));
      }
#pragma unroll
      for (int x = 1; x < 4; x *= 2) {
        m0 = fmaxf(m0, __shfl_xor_sync(0xffffffffu, m0, x));
        m1 = fmaxf(m1, __shfl_xor_sync(0xffffffffu, m1, x));
      }
      float e0 = 0.f, e1 = 0.f, w0 = 0.f, w1 = 0.f;
      // Subtract the top before scaling: if all ids hold one large number, y s - m s is a rounding error.
#pragma unroll
      for (int j = 0; j < 32; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          d[j * 4 + e] -= m0, d[j * 4 + 2 + e] -= m1;
          const float z0 = d[j * 4 + e] * s0, z1 = d[j * 4 + 2 + e] * s1;
          const float p0 = exp2_(z0), p1 = exp2_(z1);
          e0 += p0, e1 += p1;
          w0 = fmaf(p0, z0, w0), w1 = fmaf(p1, z1, w1);
        }
#pragma unroll
      for (int x = 1; x < 4; x *= 2) {
        e0 += __shfl_xor_sync(0xffffffffu, e0, x), e1 += __shfl_xor_sync(0xffffffffu, e1, x);
        w0 += __shfl_xor_sync(0xffffffffu, w0, x), w1 += __shfl_xor_sync(0xffffffffu, w1, x);
      }
      if (q == 0) {
        float* top = tops + (long long)tile * stride;
        float* sum = sums + (long long)tile * 2 * N;
        if (live0) top[r0] = m0, sum[r0] = e0, sum[N + r0] = w0;
        if (live1) top[r1] = m1, sum[r1] = e1, sum[N + r1] = w1;
      }
#endif
#if MODE != 0
#if MODE == 1
#define STORED packed_fp16
#else
#define STORED packed
#endif
      unsigned short* at0 = out + (long long)r0 * pitch;
      unsigned short* at1 = out + (long long)r1 * pitch;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        u32 v0[4], v1[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          v0[n] = STORED(d[(j + n) * 4], d[(j + n) * 4 + 1]);
          v1[n] = STORED(d[(j + n) * 4 + 2], d[(j + n) * 4 + 3]);
        }
        store_group(at0, tile * COLS + j * 8, V, live0, v0, q);
        store_group(at1, tile * COLS + j * 8, V, live1, v1, q);
      }
#endif
    }
  }
  cluster_sync();  // no block leaves while the other may still write to its ring
}
