// Logits of a student and of a teacher on Hopper, compared while they are still fp32 accumulators.
//
// A cluster of two blocks works on 256 rows by 256 ids, as head.cu does: the teacher's product first, which its threads
// put down in memory of their own, then the student's, beside which they read it again. What the blocks put down, 128 KB
// each, stays in the L2. Per row and tile of 256 ids, with a and b the student's and the teacher's law within the tile:
//
//   sums[tile][0..4]   the student's largest logit and sum of exponentials, the teacher's, and the KL of a and b
//   out_a              SAVE: fp16(2^14 a)
//   out_b              SAVE: REVERSE fp16(log(a / b)), else fp16(2^14 (a - b))
//
// A KL sums p log(p / q) - p + q, no term of which is negative. Values are rounded in the same order with SAVE and
// without: every operation that they are made of is written out.
//
// Compiled with -DREVERSE, -DSAVE, -DSTAGES, -DGROUP, -DLAG.
#include "common/cluster_pair.cuh"

// What a build is compiled for: the macros of the compile line, which nothing else reads.
struct Build {
  static constexpr bool reverse = REVERSE;  // p is the student, q the teacher
  static constexpr bool save = SAVE;
  static constexpr int stages = STAGES;  // of the ring
  static constexpr int group = GROUP;    // pairs of row tiles that share a tile of the weight
  static constexpr bool lag = LAG;       // a step's tiles are freed while the next step's matmuls run
};
constexpr float LN2 = 0.693147182f, SHIFT = 16384.f, MOST = 65000.f;  // fp16 ends at 65504
constexpr float CLOSE = 0.0625f;  // where p (d - 1 + e^-d) is a series, as the rest would cancel; to 4e-6 of it

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Where a thread is in the ring.
struct Place {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Build::stages) stage = 0, phase ^= 1;
  }
};

// Fetches all steps of one product.
__device__ __forceinline__ void fetch_all(const Map* x, const Map* w, int row, int id, u32 rank, int steps, u32 base,
                                          u32 full, u32 empty, Place& at) {
  for (int k = 0; k < steps; k++, at.next()) {
    barrier_wait(empty + 8 * at.stage, at.phase ^ 1);
    const u32 bar = full + 8 * at.stage, to = base + at.stage * STAGE_BYTES;
    barrier_expect(bar, STAGE_BYTES);
    fetch(to, x, k * DEPTH, row, bar);
    fetch_for_both(to + A_BYTES + rank * (B_BYTES / 2), w, k * DEPTH, id, bar);
  }
}

// All steps of one product into d.
__device__ __forceinline__ void multiply_all(float (&d)[128], int steps, u32 a0, u32 b0, u32 full, u32 empty, int thread,
                                             Place& at) {
  for (int k = 0; k < steps; k++, at.next()) {
    barrier_wait(full + 8 * at.stage, at.phase);
    const u64 a = described(a0 + at.stage * STAGE_BYTES), b = described(b0 + at.stage * STAGE_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply<0, 0>(d, a, b, k > 0);
#pragma unroll
    for (int j = 1; j < DEPTH / 16; j++) multiply<0, 0>(d, a + 2 * j, b + 2 * j, 1);
    free_step<Build::stages, Build::lag>(empty, at.stage, k > 0, thread);
  }
  free_last<Build::stages, Build::lag>(empty, at.stage, true, thread, d);
}

// One side's softmax within the tile, of a row: every lane of the four that share the row has it.
struct Side {
  float scale;  // to base-2 units
  float top;    // largest logit, -inf where no id takes part
  float total;  // sum of exponentials
  float log;    // of the total
};

// Two rows' softmaxes; their logits become base-2 units below the largest. Ids beyond the vocabulary take no part.
__device__ __forceinline__ void softmax(float (&d)[128], int col0, int V, bool last, Side (&of)[2]) {
  const float none = -infinity();
  if (last) {
#pragma unroll
    for (int j = 0; j < 128; j++)
      if (col0 + j / 4 * 8 + j % 2 >= V) d[j] = none;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = none;
#pragma unroll
    for (int j = 0; j < 32; j++) top = fmaxf(top, fmaxf(d[j * 4 + 2 * r], d[j * 4 + 2 * r + 1]));
    for (int x = 1; x < 4; x *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
    const float from = top == none ? 0.f : top;
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < 32; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& y = d[j * 4 + 2 * r + e];
        y = __fmul_rn(__fsub_rn(y, from), of[r].scale);
        total = __fadd_rn(total, exp2_(y));
      }
    for (int x = 1; x < 4; x *= 2) total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, x));
    of[r].top = top, of[r].total = total, of[r].log = total == 0.f ? 0.f : log2_(total);
  }
}

// p log(p / q) - p + q from p and q and their logarithms of base 2, of which -inf is none.
__device__ __forceinline__ float kl_term(float p, float log_p, float q, float log_q) {
  const float d = __fmul_rn(__fsub_rn(log_p, log_q), LN2);
  const float series = __fmaf_rn(d, __fmaf_rn(d, 1.f / 24, -1.f / 6), 0.5f);
  const float far = __fmaf_rn(p, __fsub_rn(d, 1.f), q);
  float term = fabsf(d) < CLOSE ? __fmul_rn(p, __fmul_rn(__fmul_rn(d, d), series)) : far;
  term = d == infinity() ? d : term;  // also where p itself is below the least number
  return log_p == -infinity() ? q : term;
}

// Sixteen numbers that a thread has put down. Volatile: where it stands, or all of them would take registers at once.
__device__ __forceinline__ void take(float (&z)[16], const float4* from) {
#pragma unroll
  for (int n = 0; n < 4; n++)
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(z[4 * n]), "=f"(z[4 * n + 1]), "=f"(z[4 * n + 2]), "=f"(z[4 * n + 3])
                 : "l"(from + n * 128) : "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
compare(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const __grid_constant__ Map t_map,
        const __grid_constant__ Map v_map, float4* put_down, const float* scale, const float* t_scale, float* sums,
        unsigned short* out_a, unsigned short* out_b, int N, int V, int pitch, int steps, int t_steps) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[Build::stages], empty_[Build::stages];
  const u32 base = shared_address(ring), full = shared_address(full_), empty = shared_address(empty_);
  const u32 rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Build::stages; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);  // two warpgroups of two blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

  const int pairs = (N + 2 * ROWS - 1) / (2 * ROWS), tiles = (V + COLS - 1) / COLS;
  Place at;

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
        int pair, tile;
        tile_at<Build::group>(i, pairs, tiles, pair, tile);
        const int row = (2 * pair + rank) * ROWS, id = tile * COLS + rank * (COLS / 2);
        fetch_all(&t_map, &v_map, row, id, rank, t_steps, base, full, empty, at);
        fetch_all(&x_map, &w_map, row, id, rank, steps, base, full, empty, at);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int me = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, q = lane % 4;
    const u32 a0 = base + me * (64 * DEPTH * 2), b0 = base + A_BYTES;
    float4* mine = put_down + (blockIdx.x * 2 + me) * (32 * 128) + thread;
    for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
      int pair, tile;
      tile_at<Build::group>(i, pairs, tiles, pair, tile);
      const int col0 = tile * COLS + q * 2;
      const int r0 = (2 * pair + rank) * ROWS + me * 64 + thread / 32 * 16 + lane / 4, r1 = r0 + 8;
      const bool live0 = r0 < N, live1 = r1 < N, last = tile * COLS + COLS > V;
      Side s[2], t[2];
      s[0].scale = live0 ? scale[r0] : 0.f, s[1].scale = live1 ? scale[r1] : 0.f;
      t[0].scale = live0 ? t_scale[r0] : 0.f, t[1].scale = live1 ? t_scale[r1] : 0.f;
      float d[128];
      multiply_all(d, t_steps, a0, b0, full, empty, thread, at);
      softmax(d, col0, V, last, t);
#pragma unroll
      for (int j = 0; j < 32; j++)
        __stcg(mine + j * 128, make_float4(d[j * 4], d[j * 4 + 1], d[j * 4 + 2], d[j * 4 + 3]));
      multiply_all(d, steps, a0, b0, full, empty, thread, at);
      softmax(d, col0, V, last, s);
      float kl[2] = {0.f, 0.f}, there[2][16];  // the teacher's, of these 16 sums and of the next
      take(there[0], mine);
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        if (j < 28) take(there[j / 4 % 2 ^ 1], mine + (j + 4) * 128);
        u32 a_row[2][4], b_row[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float* z = there[j / 4 % 2] + 4 * n;
          float a[4], b[4], log_ratio[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int r = e / 2;
            const float log_a = __fsub_rn(d[(j + n) * 4 + e], s[r].log), log_b = __fsub_rn(z[e], t[r].log);
            a[e] = exp2_(log_a), b[e] = exp2_(log_b);
            kl[r] = __fadd_rn(kl[r], Build::reverse ? kl_term(a[e], log_a, b[e], log_b)
                                                    : kl_term(b[e], log_b, a[e], log_a));
            log_ratio[e] = (log_a - log_b) * LN2;
          }
          if constexpr (Build::save) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
              const float u = a[2 * r], v = a[2 * r + 1];
              a_row[r][n] = packed_fp16(u * SHIFT, v * SHIFT);
              if constexpr (Build::reverse) {
                const float x = fminf(fmaxf(log_ratio[2 * r], -MOST), MOST);
                const float z = fminf(fmaxf(log_ratio[2 * r + 1], -MOST), MOST);
                b_row[r][n] = packed_fp16(x, z);
              } else {
                b_row[r][n] = packed_fp16((u - b[2 * r]) * SHIFT, (v - b[2 * r + 1]) * SHIFT);
              }
            }
          }
        }
        if constexpr (Build::save) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const long long row = (long long)(r ? r1 : r0) * pitch;
            store_group(out_a + row, tile * COLS + j * 8, V, r ? live1 : live0, a_row[r], q);
            store_group(out_b + row, tile * COLS + j * 8, V, r ? live1 : live0, b_row[r], q);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++)
        for (int x = 1; x < 4; x *= 2) kl[r] = __fadd_rn(kl[r], __shfl_xor_sync(0xffffffffu, kl[r], x));
      if (q == 0) {
        float* to = sums + (long long)tile * 5 * N;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = r ? r1 : r0;
          if (r ? live1 : live0) {
            to[row] = s[r].top, to[N + row] = s[r].total, to[2 * N + row] = t[r].top, to[3 * N + row] = t[r].total;
            to[4 * N + row] = kl[r];
          }
        }
      }
    }
  }
  cluster_sync();  // no block leaves while the other may still write to its ring
}
