// Logits of a student and of a teacher on Hopper, compared while they are still fp32 accumulators.
//
// A cluster of two blocks works on 256 rows by 256 ids, as head.cu does. The teacher's product comes first: threads store
// its logits in global memory, 128 KB a block, which stays in the L2. The student's product comes next, and each thread
// loads the teacher's logits of its own ids. With w = 2^(x - top) of the student and v of the teacher, tops those of a
// row's tile of 256 ids, and (p, q) = REVERSE ? (w, v) : (v, w), the kernel writes per row and tile:
//
//   sums[tile][0..5]   the student's top, sum w, the teacher's top, sum v, sum p log(p / q) - p + q, sum p log(p / q)
//   sums[tile][6]      SAVE and REVERSE: center, log2(w / v) of the student's top
//   first              SAVE: fp16(2^15 w)
//   second             SAVE: REVERSE fp16(log2(w / v) - center), else fp16(2^15 (w - v))
//
// No term of the fifth sum is negative. The gradient of a reverse KL is w (log(w / v) - mean of the row): without the
// center, rounding log(w / v) to fp16 would spoil the gradient of an id that holds most of the mass.
//
// A row has 256 numbers a tile in `first` and `second`, in the order in which threads hold them: of 32 ids, id
// 8 j + 2 q + e at 8 q + 2 j + e. SAVE changes no bit of the sums: every operation in them is written out, so that the
// compiler contracts none.
//
// Compiled with -DREVERSE, -DSAVE, -DSTAGES, -DGROUP, -DLAG.
#include "linear_logprob/ring.cuh"

// What a build is compiled for: the macros of the compile line, which nothing else reads.
struct Build {
  static constexpr bool reverse = REVERSE;  // p is the student, q the teacher
  static constexpr bool save = SAVE;
  static constexpr int stages = STAGES;  // of the ring
  static constexpr int group = GROUP;    // pairs of row tiles that share a tile of the weight
  static constexpr bool lag = LAG;       // a step's tiles are freed while the next step's matmuls run
};
constexpr float LN2 = 0.693147182f, SHIFT = 32768.f;  // fp16 ends at 65504
constexpr float CLOSE = 0.09f;       // log2(p / q) where p log(p / q) - p + q is a series, as the rest would cancel
constexpr float SERIES[3] = {0.240226507f, -0.0555041087f, 0.00961812911f};  // ln(2)^n / n! of 2^-x - 1 + x ln 2
constexpr float FAR = -1e6f;         // base-2 units of an id that takes no part: its exponential is 0
constexpr float LARGE = 65536.f;     // of |top * scale|: from here its rounding is larger than that of y - top

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounded to fp16; beyond its range, the largest finite number.
__device__ __forceinline__ u32 packed_finite(float lo, float hi) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
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

// Base-2 units from the top to a logit.
__device__ __forceinline__ float below(float y, float top, float scale) {
  const float less = __fmul_rn(-top, scale);
  return fabsf(less) < LARGE ? __fmaf_rn(y, scale, less) : __fmul_rn(__fsub_rn(y, top), scale);
}

// Finds the tops of two rows, the same in the four lanes of a row, and turns logits into base-2 units below the top.
// Returns whether a logit of this thread is -inf.
__device__ __forceinline__ bool below_top(float (&d)[128], const float (&scale)[2], int col0, int V, bool last,
                                          float (&top)[2]) {
  const float none = -infinity();
  float least = d[0];  // of ids beyond the vocabulary, too: their logits are 0 or NaN
#pragma unroll
  for (int j = 0; j < 128; j += 4) least = fminf(least, fminf(fminf(d[j], d[j + 1]), fminf(d[j + 2], d[j + 3])));
#pragma unroll
  for (int j = 0; j < 128; j++) asm volatile("" : "+f"(d[j]), "+f"(least));  // finish `least` here, or d is copied
  const bool odd = least == none;
  if (last) {
#pragma unroll
    for (int j = 0; j < 128; j++)
      if (col0 + j / 4 * 8 + j % 2 >= V) d[j] = none;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float best = none;
#pragma unroll
    for (int j = 0; j < 32; j++) best = fmaxf(best, fmaxf(d[j * 4 + 2 * r], d[j * 4 + 2 * r + 1]));
    for (int x = 1; x < 4; x *= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, x));
    top[r] = best;
    const float from = best == none ? 0.f : best, less = __fmul_rn(-from, scale[r]);
    if (fabsf(less) < LARGE) {
#pragma unroll
      for (int j = 0; j < 64; j++) {
        float& y = d[j / 2 * 4 + 2 * r + j % 2];
        y = __fmaf_rn(y, scale[r], less);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 64; j++) {
        float& y = d[j / 2 * 4 + 2 * r + j % 2];
        y = __fmul_rn(__fsub_rn(y, from), scale[r]);
      }
    }
  }
  if (last) {
#pragma unroll
    for (int j = 0; j < 128; j++)
      if (col0 + j / 4 * 8 + j % 2 >= V) d[j] = FAR;
  }
  return odd;
}

// The sums of a row's tile.
struct Sums {
  float w = 0.f, v = 0.f, term = 0.f, moment = 0.f;
};

// Loads numbers that this thread has stored. Volatile keeps the loads where they stand: moved together, they would need
// all registers at once.
template <int count>
__device__ __forceinline__ void take(float (&z)[count], const float4* from) {
#pragma unroll
  for (int n = 0; n < count / 4; n++)
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(z[4 * n]), "=f"(z[4 * n + 1]), "=f"(z[4 * n + 2]), "=f"(z[4 * n + 3])
                 : "l"(from + n * 128) : "memory");
}

// Replaces logits of -inf by FAR on both sides, and marks rows where q is 0 and p is not: their KL is infinite.
__device__ __forceinline__ void replace_none(float (&z)[128], float4* mine, bool (&infinite)[2]) {
  const float none = -infinity();
#pragma unroll
  for (int j = 0; j < 32; j++) {
    float there[4];
    take(there, mine + j * 128);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float &x = z[j * 4 + e], &y = there[e];
      if ((Build::reverse ? y : x) == none && (Build::reverse ? x : y) != none) infinite[e / 2] = true;
      x = x == none ? FAR : x, y = y == none ? FAR : y;
    }
    __stcg(mine + j * 128, make_float4(there[0], there[1], there[2], there[3]));
  }
}

// log2(w / v) of the student's top, the largest if several ids are at the top; the same in the four lanes of a row.
__device__ __forceinline__ float center_of(const float (&z)[128], int r, float top, float scale, const float4* mine) {
  const float best = below(top, top, scale);
  int place = -1;
#pragma unroll
  for (int j = 0; j < 64; j++) {
    const int at = j / 2 * 4 + 2 * r + j % 2;
    place = z[at] == best ? at : place;
  }
  float center = -infinity();
  if (place >= 0) center = best - __ldcg((const float*)(mine + place / 4 * 128) + place % 4);
  for (int x = 1; x < 4; x *= 2) center = fmaxf(center, __shfl_xor_sync(0xffffffffu, center, x));
  return center == -infinity() ? 0.f : center;
}

// Sums two rows, and with SAVE writes what the gradient reads. z: the student's logits; the teacher's are in memory.
__device__ __forceinline__ void compare_rows(const float (&z)[128], const float4* mine, unsigned short* first,
                                             unsigned short* second, long long at, long long down, const bool (&live)[2],
                                             const float (&center)[2], Sums (&sums)[2]) {
  float there[2][16];  // the teacher's logits: 16 that are in use, and the next 16
  take(there[0], mine);
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    if (j < 28) take(there[j / 4 % 2 ^ 1], mine + (j + 4) * 128);
    u32 a[2][4], b[2][4];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float w[2], other[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float x = z[(j + n) * 4 + 2 * r + e], y = there[j / 4 % 2][4 * n + 2 * r + e];
          const float v = exp2_(y), d = Build::reverse ? __fsub_rn(x, y) : __fsub_rn(y, x);
          w[e] = exp2_(x);
          const float p = Build::reverse ? w[e] : v, q = Build::reverse ? v : w[e];
          const float series = __fmaf_rn(d, __fmaf_rn(d, SERIES[2], SERIES[1]), SERIES[0]);
          const float far = __fmaf_rn(p, __fmaf_rn(d, LN2, -1.f), q), pd = __fmul_rn(p, d);
          const float term = fabsf(d) < CLOSE ? __fmul_rn(__fmul_rn(pd, d), series) : far;
          sums[r].w = __fadd_rn(sums[r].w, w[e]), sums[r].v = __fadd_rn(sums[r].v, v);
          sums[r].term = __fadd_rn(sums[r].term, term), sums[r].moment = __fadd_rn(sums[r].moment, pd);
          other[e] = Build::reverse ? d - center[r] : (w[e] - v) * SHIFT;
        }
        if constexpr (Build::save) a[r][n] = packed_fp16(w[0] * SHIFT, w[1] * SHIFT), b[r][n] = packed_finite(other[0], other[1]);
      }
#pragma unroll
    for (int r = 0; r < 2; r++)  // finish the sums here: their terms would take registers
      asm volatile("" : "+f"(sums[r].w), "+f"(sums[r].v), "+f"(sums[r].term), "+f"(sums[r].moment));
    if constexpr (Build::save) {
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (live[r]) {
          const long long to = at + r * down + j * 8;
          *(uint4*)(first + to) = make_uint4(a[r][0], a[r][1], a[r][2], a[r][3]);
          *(uint4*)(second + to) = make_uint4(b[r][0], b[r][1], b[r][2], b[r][3]);
        }
    }
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
compare(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const __grid_constant__ Map t_map,
        const __grid_constant__ Map v_map, float4* scratch, const float* scale, const float* t_scale, float* sums_out,
        unsigned short* first, unsigned short* second, int N, int V, int steps, int t_steps) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[Build::stages], empty_[Build::stages];
  const u32 base = shared_address(ring), full = shared_address(full_), empty = shared_address(empty_);
  const u32 rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128;
  ring_begin<Build::stages>(full, empty);

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
    float4* mine = scratch + (blockIdx.x * 2 + me) * (32 * 128) + thread;
    for (int i = blockIdx.x / 2; i < pairs * tiles; i += gridDim.x / 2) {
      int pair, tile;
      tile_at<Build::group>(i, pairs, tiles, pair, tile);
      const int col0 = tile * COLS + q * 2, r0 = (2 * pair + rank) * ROWS + me * 64 + thread / 32 * 16 + lane / 4;
      const bool live[2] = {r0 < N, r0 + 8 < N}, last = tile * COLS + COLS > V;
      float by[2] = {live[0] ? t_scale[r0] : 0.f, live[1] ? t_scale[r0 + 8] : 0.f}, d[128], top[2];
      float* out = sums_out + (long long)tile * 7 * N + r0;
      multiply_all(d, t_steps, a0, b0, full, empty, thread, at);
      const bool t_odd = below_top(d, by, col0, V, last, top);
      if (q == 0 && live[0]) out[2 * N] = top[0];
      if (q == 0 && live[1]) out[2 * N + 8] = top[1];
#pragma unroll
      for (int j = 0; j < 32; j++)
        __stcg(mine + j * 128, make_float4(d[j * 4], d[j * 4 + 1], d[j * 4 + 2], d[j * 4 + 3]));
      by[0] = live[0] ? scale[r0] : 0.f, by[1] = live[1] ? scale[r0 + 8] : 0.f;
      multiply_all(d, steps, a0, b0, full, empty, thread, at);
      const bool odd = below_top(d, by, col0, V, last, top) || t_odd;
      Sums sums[2];
      const long long to = ((long long)r0 * tiles + tile) * COLS + q * 8;
      bool infinite[2] = {false, false};
      if (odd) replace_none(d, mine, infinite);
      float center[2] = {0.f, 0.f};
      if constexpr (Build::save && Build::reverse) {
#pragma unroll
        for (int r = 0; r < 2; r++) center[r] = center_of(d, r, top[r], by[r], mine);
        if (q == 0 && live[0]) out[6 * N] = center[0];
        if (q == 0 && live[1]) out[6 * N + 8] = center[1];
      }
      compare_rows(d, mine, first, second, to, 8ll * tiles * COLS, live, center, sums);
#pragma unroll
      for (int r = 0; r < 2; r++) sums[r].term = infinite[r] ? infinity() : sums[r].term;
#pragma unroll
      for (int r = 0; r < 2; r++)
        for (int x = 1; x < 4; x *= 2) {
          sums[r].w = __fadd_rn(sums[r].w, __shfl_xor_sync(0xffffffffu, sums[r].w, x));
          sums[r].v = __fadd_rn(sums[r].v, __shfl_xor_sync(0xffffffffu, sums[r].v, x));
          sums[r].term = __fadd_rn(sums[r].term, __shfl_xor_sync(0xffffffffu, sums[r].term, x));
          sums[r].moment = __fadd_rn(sums[r].moment, __shfl_xor_sync(0xffffffffu, sums[r].moment, x));
        }
      if (q == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++, out += 8)
          if (live[r]) {
            out[0] = top[r], out[N] = sums[r].w, out[3 * N] = sums[r].v, out[4 * N] = sums[r].term;
            out[5 * N] = sums[r].moment * LN2;
          }
      }
    }
  }
  cluster_sync();  // no block leaves while the other may still write to its ring
}
