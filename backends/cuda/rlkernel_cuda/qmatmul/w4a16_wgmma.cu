// y = x W' for many tokens: a 4-bit weight times its scales is rounded in registers, as `dequantize` does, and is the
// operand of wgmma that comes from registers; x comes from shared memory. One block a multiprocessor, warpgroups of 64 rows of
// the weight each, one thread that fetches: few large boxes, since it takes some 120 cycles to ask for one.
//
//   BM      tokens of a tile, of STEPS x 64 of depth a stage
//   WARPGROUPS   warpgroups that multiply, of 64 rows of the weight each: 2, or 4 where BM is at most 64
//   SPLIT   blocks take equal shares of all tiles' depth: a tile that several blocks share is added up, in the order of its
//           depth, by the last of them to arrive. Else a block takes whole tiles
//   GROUP_  columns of a scale: 32, 64, 128, 256; 0: one a row
//   ZEROS   zero-points, uint8; else 8
//
// N is a multiple of 64 WARPGROUPS, K of 128.
#include "qmatmul/fragments.cuh"

#define ROWS_ (64 * WARPGROUPS)
#define WORKERS (128 * WARPGROUPS)
#define X_BYTES (BM * 128)
#define WORD_BYTES (2048 * WARPGROUPS)
#define STAGE (STEPS * (X_BYTES + WORD_BYTES))
#define LINES (GROUP_ && GROUP_ < 64 * STEPS ? 64 * STEPS / (GROUP_ ? GROUP_ : 1) : 1)  // groups of a stage
#define LINE_BYTES ((2 + ZEROS) * ROWS_)  // scales, then zero-points
#define SCALE_BYTES (LINES * LINE_BYTES)
#define PITCH 144  // of a token's 64 results of a warpgroup, in bytes: no two rows of a matrix in one bank
#define CHUNK (BM < 64 ? BM : 64)
#define COUNT (BM / 2)  // accumulators of a thread

extern "C" __global__ void __launch_bounds__(WORKERS + 128, 1)
w4a16_wgmma(const __grid_constant__ Map x_map, const __grid_constant__ Map word_map, const char* scale, const char* zero,
     const unsigned short* bias, unsigned short* y, float4* partial, int* counters, int group_shift, int M, int N, int K) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(128) char scales_[STAGES * SCALE_BYTES];
  __shared__ __align__(8) u64 full_[STAGES], empty_[STAGES];
  __shared__ int seen_;
  const u32 base = shared_address(ring), scales = shared_address(scales_);
  const u32 full = shared_address(full_), empty = shared_address(empty_);
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4 * WARPGROUPS);  // warps that multiply
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  let_next_start();
  __syncthreads();
  wait_for_last();

  const int m_tiles = (M + BM - 1) / BM, tiles = N / ROWS_ * m_tiles, units = K / 128;
  const long long all = (long long)tiles * units;
#if SPLIT
  const int begin = (int)(blockIdx.x * all / gridDim.x), end = (int)((blockIdx.x + 1) * all / gridDim.x);
#else
  const int begin = blockIdx.x * units, end = (int)all;
#endif
  int stage = 0;
  u32 phase = 0;

  if (warpgroup == 0) {
#if WARPGROUPS == 4
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (threadIdx.x == 0) {
      for (int u = begin; u < end;) {
        const int tile = u / units, k0 = u % units, k1 = min(units, k0 + end - u);
        const int row = tile / m_tiles * ROWS_, token = tile % m_tiles * BM;
#pragma unroll 1
        for (int k = 2 * k0; k < 2 * k1; k += STEPS) {  // 64 of depth each
          const u32 bar = full + 8 * stage, at = base + stage * STAGE, beside = scales + stage * SCALE_BYTES;
          barrier_wait(empty + 8 * stage, phase ^ 1);
          barrier_expect(bar, STEPS * (X_BYTES + WORD_BYTES) + SCALE_BYTES);
          fetch(at + STEPS * X_BYTES, &word_map, k * 128, row / 16, bar);
          fetch_tokens(at, &x_map, token, k, bar);
#pragma unroll
          for (int l = 0; l < LINES; l++) {
            const long long from = (long long)(((k * 64) >> group_shift) + l) * N + row;
            fetch_line(beside + l * LINE_BYTES, scale + 2 * from, 2 * ROWS_, bar);
            if (ZEROS) fetch_line(beside + l * LINE_BYTES + 2 * ROWS_, zero + from, ROWS_, bar);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        u += SPLIT ? k1 - k0 : gridDim.x * units;
      }
    }
    __syncwarp();
  } else {
#if WARPGROUPS == 4
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    const int me = threadIdx.x - 128, warp = me / 32, group = warpgroup - 1, r8 = lane / 4;
    const u32 my_words = base + STEPS * X_BYTES + warp * (STEPS * 512) + lane * 16;
    const u32 my_scales = scales + 2 * (warp * 16 + r8), my_zeros = scales + 2 * ROWS_ + warp * 16 + r8;
    const u32 staging = base + STAGES * STAGE + group * (CHUNK * PITCH);
    for (int u = begin; u < end;) {
      const int tile = u / units, k0 = u % units, k1 = min(units, k0 + end - u);
      u += SPLIT ? k1 - k0 : gridDim.x * units;
      float d[COUNT];
#pragma unroll
      for (int j = 0; j < COUNT; j++) d[j] = 0.f;
      // A quarter of a step's operands: 16 of depth.
      u32 a[2][16];
      uint4 v = make_uint4(0, 0, 0, 0);
      auto decode = [&](u32* to, int j, int of_stage, int step) {
        const u32 word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
        const u32 at = of_stage * SCALE_BYTES + (LINES > 1 ? (64 * step + 16 * j) / (GROUP_ ? GROUP_ : 1) : 0) * LINE_BYTES;
        const u32 s0 = twice(shared_half(my_scales + at)), s1 = twice(shared_half(my_scales + at + 16));
        const u32 z0 = offset_of(ZEROS ? shared_byte(my_zeros + at) : 8);
        const u32 z1 = offset_of(ZEROS ? shared_byte(my_zeros + at + 8) : 8);
        decoded(word, z0, z1, to);
        to[0] = multiplied(to[0], s0), to[1] = multiplied(to[1], s1);
        to[2] = multiplied(to[2], s0), to[3] = multiplied(to[3], s1);
      };
      int before = 0;  // the stage of the step before
      for (int k = k0; k < k1; k++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int step = half % STEPS;
          if (step == 0) barrier_wait(full + 8 * stage, phase);
          v = shared_quad(my_words + stage * STAGE + step * 512);
#pragma unroll
          for (int j = 0; j < 4; j++) decode(a[half] + 4 * j, j, stage, step);
          const u64 b = described(base + stage * STAGE + step * X_BYTES);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int j = 0; j < 4; j++) multiply<HALF>(d, a[half] + 4 * j, b + 2 * j);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (step == 0 && k + half > k0 && lane == 0) arrive(empty + 8 * before);  // the step before is done
          if (step == STEPS - 1) {
            before = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
          }
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (lane == 0) arrive(empty + 8 * before);
#pragma unroll
      for (int j = 0; j < COUNT; j++) asm volatile("" : "+f"(d[j])::"memory");

#if SPLIT
      const int first = (int)((((long long)tile * units + 1) * gridDim.x - 1) / all);
      const int parts = (int)(((long long)(tile + 1) * units * gridDim.x - 1) / all) - first + 1;
      const int part = blockIdx.x - first;
      if (parts > 1) {
        if (me == 0) {
          int now;
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counters + tile) : "memory");
          seen_ = now;
        }
        named_barrier(1, WORKERS);
        int arrived = seen_;
        named_barrier(1, WORKERS);
        float4* mine = partial + (long long)(2 * blockIdx.x + (part == 0)) * (COUNT / 4 * WORKERS) + me;
        if (arrived != parts - 1 || part > 1) {
#pragma unroll
          for (int j = 0; j < COUNT / 4; j++)
            __stcg(mine + j * WORKERS, make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]));
        }
        if (arrived != parts - 1) {
          __threadfence();
          named_barrier(1, WORKERS);
          if (me == 0) seen_ = atomicAdd(counters + tile, 1);
          named_barrier(1, WORKERS);
          arrived = seen_;
          named_barrier(1, WORKERS);
        }
        if (arrived != parts - 1) continue;
        __threadfence();
        // Added up in the order of the depth. Of two terms the order is the same; from the third on, they are read back.
#pragma unroll 1
        for (int p = part > 1 ? 0 : part == 0; p < parts; p++) {
          if (p == part && part < 2) continue;
          const float4* from = partial + (2ll * (first + p) + (p == 0)) * (COUNT / 4 * WORKERS) + me;
          const bool fresh = p == 0 && part > 1;
#pragma unroll
          for (int j = 0; j < COUNT / 4; j++) {
            const float4 t = __ldcg(from + j * WORKERS);
            d[4 * j] = fresh ? t.x : d[4 * j] + t.x, d[4 * j + 1] = fresh ? t.y : d[4 * j + 1] + t.y;
            d[4 * j + 2] = fresh ? t.z : d[4 * j + 2] + t.z, d[4 * j + 3] = fresh ? t.w : d[4 * j + 3] + t.w;
          }
        }
        if (me == 0) counters[tile] = 0;
      }
#endif
      const int row = tile / m_tiles * ROWS_ + group * 64, token = tile % m_tiles * BM;
      float b0 = 0.f, b1 = 0.f;
      if (bias) b0 = wide_of(bias[row + warp % 4 * 16 + r8]), b1 = wide_of(bias[row + warp % 4 * 16 + r8 + 8]);
      const u32 to = staging + (lane / 16 * 8 + lane % 8) * PITCH + warp % 4 * 32 + lane / 8 % 2 * 16;
#pragma unroll
      for (int c = 0; c < BM / CHUNK; c++) {
        if (token + c * CHUNK < M) {
#pragma unroll
          for (int j = 0; j < CHUNK / 16; j++) {  // two blocks of 8 tokens
            const float* v = d + (c * CHUNK / 16 + j) * 8;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(to + j * 16 * PITCH), "r"(rounded_pair(v[0] + b0, v[1] + b0)),
                           "r"(rounded_pair(v[2] + b1, v[3] + b1)), "r"(rounded_pair(v[4] + b0, v[5] + b0)),
                           "r"(rounded_pair(v[6] + b1, v[7] + b1)) : "memory");
          }
          named_barrier(2 + group, 128);
#pragma unroll
          for (int i = 0; i < CHUNK / 16; i++) {
            const int at = i * 128 + me % 128, m = token + c * CHUNK + at / 8;
            const uint4 v = shared_quad(staging + at / 8 * PITCH + at % 8 * 16);
            if (m < M) *(uint4*)(y + (long long)m * N + row + at % 8 * 8) = v;
          }
          named_barrier(2 + group, 128);
        }
      }
    }
  }
}
