// y = x W' for a few tokens and a weight of 8 bits as it is stored, rows of K bytes. A lane takes 16 bytes next to one
// another of two rows, so the neighbors along the depth of a matrix instruction are other columns than in memory,
// 16 c4 + 4 step + 2 half + p; x is read from shared memory in that order too, and the sum is the same.
//
//   FLOAT8  the codes are e4m3fn; else int8
//   GROUP_  columns of a scale: 128; 0: all
//   SCALE_SHIFT  rows of a scale, as a power of two; 31: all
//   BM, SETS, PARTS, STAGES as in w4a16_small_m.cu
//
// N is a multiple of 16, K of 256 * PARTS.
#include "qmatmul/fragments.cuh"

#define WARPS (SETS * PARTS)
#define BOX_BYTES (BM * 128)  // 64 of depth
#define STAGE (PARTS * 4 * BOX_BYTES)
#define AHEAD 4  // loads in flight of each row, each 64 of depth of a tile
#define BLOCKS (BM / 8)

// Two codes of a word, the lower two or the upper two, exactly.
template <int UPPER>
__device__ __forceinline__ u32 two_values(u32 word) {
  u32 t, r;
#if FLOAT8  // moved to where a 16-bit float has its exponent, times what the biases differ by: right for subnormals too
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(t) : "r"(word), "n"(UPPER ? 0x3424 : 0x1404));
  const u32 sign = t & NEGATIVE;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(HALF ? t >> 1 : t >> 4), "r"(HALF ? 0x3f803f80 : 0x07f007f0), "r"(sign));
  return multiplied(r, HALF ? 0x5c005c00u : 0x7b807b80u);
#else
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(t) : "r"(word), "n"(UPPER ? 0x4342 : 0x4140));
#if HALF  // 1024 + (code + 128)
  asm("lop3.b32 %0, %1, 0x00800080, %2, 0xbe;" : "=r"(r) : "r"(t), "r"(BIASED));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(r), "r"(ONES), "r"(0xe480e480u));
#else  // 128 + low seven bits, less 128, or 256 where the sign is set
  u32 less;
  asm("lop3.b32 %0, %1, 0x007f007f, %2, 0xea;" : "=r"(r) : "r"(t), "r"(BIASED));
  asm("lop3.b32 %0, %1, 0x00800080, %2, 0xea;" : "=r"(less) : "r"(t), "r"(BIASED ^ NEGATIVE));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(r), "r"(ONES), "r"(less));
#endif
  return r;
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
w8a16_small_m(const __grid_constant__ Map x_map, const char* codes, const float* scale, const unsigned short* bias,
        unsigned short* y, int scale_row, int M, int N, int K) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[STAGES], empty_[STAGES];
  const u32 base = shared_address(ring), full = shared_address(full_), empty = shared_address(empty_);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = K / (256 * PARTS);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  let_next_start();
  if (warp == WARPS) {
    __syncthreads();
    if (lane == 0) {
      wait_for_last();
      int stage = 0;
      u32 phase = 0;
      for (int piece = 0; piece < pieces; piece++) {
        const u32 bar = full + 8 * stage;
        barrier_wait(empty + 8 * stage, phase ^ 1);
        barrier_expect(bar, STAGE);
        fetch_tokens(base + stage * STAGE, &x_map, 0, piece * PARTS * 4, bar);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    return;
  }

  const int part = warp % PARTS, set = warp / PARTS, r8 = lane / 4, c4 = lane % 4;
  const int rows = N / 16, tile = blockIdx.x * SETS + set, row = min(tile, rows - 1) * 16 + r8;
  const char* low = codes + (long long)row * K + part * 256 + c4 * 16;
  const char* high = low + 8ll * K;
  const float* scale0 = scale + (long long)(row >> SCALE_SHIFT) * scale_row;
  const float* scale1 = scale + (long long)((row + 8) >> SCALE_SHIFT) * scale_row;
  const int group0 = part * 2;  // a part takes every PARTS-th piece
  wait_for_last();
  uint4 v[AHEAD][2];
  float s[AHEAD / 2][2];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    v[i][0] = streamed(low + i * 64), v[i][1] = streamed(high + i * 64);
    if (i % 2 == 0 && (GROUP_ || i == 0)) {
      s[i / 2][0] = scale0[GROUP_ ? group0 + i / 2 : 0], s[i / 2][1] = scale1[GROUP_ ? group0 + i / 2 : 0];
    }
  }
  __syncthreads();

  float acc[BLOCKS][4], sum[BLOCKS][4];
  u32 wrong0 = 0, wrong1 = 0;  // 0x80 in a byte: a code of the row was NaN
#pragma unroll
  for (int n = 0; n < BLOCKS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[n][i] = sum[n][i] = 0.f;

  const u32 x0 = r8 * 128 + ((2 * c4) ^ r8) * 16, x1 = x0 ^ 16;  // token r8, columns 16 c4 and 16 c4 + 8, swizzled
  int stage = 0;
  u32 phase = 0;
  for (int piece = 0; piece < pieces; piece++) {
    barrier_wait(full + 8 * stage, phase);
    const u32 at = base + stage * STAGE + part * 4 * BOX_BYTES;
    const bool more = piece + 1 < pieces;
#pragma unroll
    for (int q = 0; q < 4; q++) {
      u32 b[BLOCKS][8];
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        const uint4 f = shared_quad(at + q * BOX_BYTES + n * 1024 + x0), g = shared_quad(at + q * BOX_BYTES + n * 1024 + x1);
        b[n][0] = f.x, b[n][1] = f.y, b[n][2] = f.z, b[n][3] = f.w;
        b[n][4] = g.x, b[n][5] = g.y, b[n][6] = g.z, b[n][7] = g.w;
      }
      const u32 of_low[4] = {v[q][0].x, v[q][0].y, v[q][0].z, v[q][0].w};
      const u32 of_high[4] = {v[q][1].x, v[q][1].y, v[q][1].z, v[q][1].w};
      if (more) {
        v[q][0] = streamed(low + (piece + 1) * PARTS * 256 + q * 64);
        v[q][1] = streamed(high + (piece + 1) * PARTS * 256 + q * 64);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 a[4] = {two_values<0>(of_low[i]), two_values<0>(of_high[i]), two_values<1>(of_low[i]),
                          two_values<1>(of_high[i])};
#if FLOAT8
        wrong0 |= (of_low[i] & 0x7f7f7f7fu) + 0x01010101u;
        wrong1 |= (of_high[i] & 0x7f7f7f7fu) + 0x01010101u;
#endif
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) multiply(sum[n], a, b[n][2 * i], b[n][2 * i + 1]);
      }
      if (GROUP_ && q % 2 == 1) {
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) {
          acc[n][0] += sum[n][0] * s[q / 2][0], acc[n][1] += sum[n][1] * s[q / 2][0];
          acc[n][2] += sum[n][2] * s[q / 2][1], acc[n][3] += sum[n][3] * s[q / 2][1];
#pragma unroll
          for (int i = 0; i < 4; i++) sum[n][i] = 0.f;
        }
        if (more) {
          const int group = group0 + (piece + 1) * PARTS * 2 + q / 2;
          s[q / 2][0] = scale0[group], s[q / 2][1] = scale1[group];
        }
      }
    }
    if (lane == 0) arrive(empty + 8 * stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
#if FLOAT8  // any lane of a row
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    wrong0 |= __shfl_xor_sync(0xffffffffu, wrong0, mask);
    wrong1 |= __shfl_xor_sync(0xffffffffu, wrong1, mask);
  }
#endif
#pragma unroll
  for (int n = 0; n < BLOCKS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!GROUP_) acc[n][i] = sum[n][i] * s[0][i / 2];
      if ((i < 2 ? wrong0 : wrong1) & 0x80808080u) acc[n][i] = __uint_as_float(0x7fc00000u);
    }

#if PARTS > 1
  named_barrier(1, WARPS * 32);  // every piece has been read: the ring holds sums now
  float4* sums = (float4*)ring + set * BLOCKS * 32 + lane;
  const int stride = SETS * BLOCKS * 32;
  if (part > 0) {
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
      sums[(part - 1) * stride + n * 32] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
  }
  named_barrier(1, WARPS * 32);
  if (part > 0) return;
#pragma unroll
  for (int p = 0; p < PARTS - 1; p++)
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
      const float4 t = sums[p * stride + n * 32];
      acc[n][0] += t.x, acc[n][1] += t.y, acc[n][2] += t.z, acc[n][3] += t.w;
    }
#endif
  if (tile >= rows) return;
  const float b0 = bias ? wide_of(bias[row]) : 0.f, b1 = bias ? wide_of(bias[row + 8]) : 0.f;
#pragma unroll
  for (int n = 0; n < BLOCKS; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = n * 8 + 2 * c4 + i;
      if (m < M) {
        const u32 two = rounded_pair(acc[n][i] + b0, acc[n][2 + i] + b1);
        y[(long long)m * N + row] = (unsigned short)two;
        y[(long long)m * N + row + 8] = (unsigned short)(two >> 16);
      }
    }
}
