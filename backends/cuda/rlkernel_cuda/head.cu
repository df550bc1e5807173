// The logits of an output head on Hopper, and what becomes of them while they are still fp32 accumulators.
//
// A cluster of two blocks works on 256 rows by 256 ids: each block its own 128 rows, both the same tile of the weight.
// Each block fetches half of that tile and multicasts it to both, so a third fewer bytes leave the L2 than without a
// cluster. In a block a producer warp streams tiles through a ring with TMA; two warpgroups of 64 rows run wgmma and
// drift apart by up to the depth of the ring, so that the epilogue of one overlaps the matmul of the other.
//
// MODE 0 STATS  per row and tile: largest logit y, sum of exponentials, and that weighted by the shifted logit; the
//               chosen id is taken out of the sweep and its logit kept apart
//      1 SAVE   STATS, and bf16(y - tile max) to memory
//      2 GRAD   the gradient of the logits in bf16 to memory
//
//   y = acc + bias, capped: c tanh((acc + bias) scale / c)         z in base-2 units = y * s2[row]
//   dz = 2^(y s2 - lse2) (ca + cb y), times 1 - (y / c)^2 under a cap
//
// Compiled for sm_90a with -DMODE, -DBIAS, -DCAP, -DCOUNTED, -DSTAGES, -DGROUP (pairs of row tiles that walk together).
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { char bytes[128]; };

#define ROWS 128  // of a block
#define COLS 256
#define DEPTH 64
#define A_BYTES (ROWS * DEPTH * 2)
#define B_BYTES (COLS * DEPTH * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define FAR (-1e30f)  // a logit that takes no part: its exponential is exactly 0

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
      ::"r"(bar), "r"(phase) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar, u32 block) {  // in any block of the cluster
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(block) : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const Map* map, int k, int row, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
}

__device__ __forceinline__ void fetch_for_both(u32 to, const Map* map, int k, int row, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"((unsigned short)3) : "memory");
}

// A tile in shared memory, rows of 128 bytes, swizzled by 128 bytes, K contiguous.
__device__ __forceinline__ u64 described(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 packed(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ void swap_with(u32& a, u32& b, int mask, bool upper) {
  u32 x = __shfl_xor_sync(0xffffffffu, upper ? a : b, mask);
  if (upper) a = x; else b = x;
}

// A quad's 32 columns of one row: each lane has 2 columns of 4 groups of 8, and stores one group.
__device__ __forceinline__ void store_group(unsigned short* row, int col, int V, bool live, u32 (&v)[4], int q) {
  swap_with(v[0], v[1], 1, q & 1);
  swap_with(v[2], v[3], 1, q & 1);
  swap_with(v[0], v[2], 2, q & 2);
  swap_with(v[1], v[3], 2, q & 2);
  col += q * 8;
  if (live && col < V) *(uint4*)(row + col) = make_uint4(v[0], v[1], v[2], v[3]);
}

// Groups of GROUP pairs of row tiles walk the vocabulary together: the rows stay in L2, the weight streams by.
__device__ __forceinline__ void tile_at(int i, int pairs, int tiles, int& pair, int& tile) {
  int per_group = GROUP * tiles, first = i / per_group * GROUP, height = min(pairs - first, GROUP), r = i % per_group;
  pair = first + r % height;
  tile = r / height;
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
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);  // two warpgroups of two blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

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
        tile_at(i, pairs, tiles, pair, tile);
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
      tile_at(i, pairs, tiles, pair, tile);
      float d[128];
      for (int k = 0; k < k_tiles; k++) {
        barrier_wait(full + 8 * stage, phase);
        const u64 a = described(a0 + stage * STAGE_BYTES), b = described(b0 + stage * STAGE_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(d, a, b, k > 0);
#pragma unroll
        for (int j = 1; j < DEPTH / 16; j++) multiply(d, a + 2 * j, b + 2 * j, 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k > 0) {  // the step before this one is done: free its tiles in both blocks
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (thread < 2) barrier_arrive(empty + 8 * ((stage + STAGES - 1) % STAGES), thread);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int j = 0; j < 128; j++) asm volatile("" : "+f"(d[j])::"memory");
      if (thread < 2) barrier_arrive(empty + 8 * ((stage + STAGES - 1) % STAGES), thread);

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
      const float m0 = 0.f, m1 = 0.f;
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
      const float n0 = -m0 * s0, n1 = -m1 * s1;
#pragma unroll
      for (int j = 0; j < 32; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float z0 = fmaf(d[j * 4 + e], s0, n0), z1 = fmaf(d[j * 4 + 2 + e], s1, n1);
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
      unsigned short* at0 = out + (long long)r0 * pitch;
      unsigned short* at1 = out + (long long)r1 * pitch;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        u32 v0[4], v1[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          v0[n] = packed(d[(j + n) * 4] - m0, d[(j + n) * 4 + 1] - m0);
          v1[n] = packed(d[(j + n) * 4 + 2] - m1, d[(j + n) * 4 + 3] - m1);
        }
        store_group(at0, tile * COLS + j * 8, V, live0, v0, q);
        store_group(at1, tile * COLS + j * 8, V, live1, v1, q);
      }
#endif
    }
  }
  cluster_sync();  // no block leaves while the other may still write to its ring
}
