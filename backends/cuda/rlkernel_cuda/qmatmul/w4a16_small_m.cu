// y = x W' for a few tokens: every weight goes once from memory to the registers that `mma.sync` takes it from, through no
// shared memory, and a scale multiplies the sum over its group in fp32, so that no weight is rounded.
//
//   BM      tokens: 8 or 16
//   SETS    tiles of JOINED x 16 rows of a block
//   PARTS   parts of the depth of a tile, a warp each
//   CLUSTER blocks that share a tile's depth, each with its parts; all parts of a tile are added up in their order
//   JOINED  tiles of 16 rows of a warp
//   AHEAD   loads in flight of a tile of 16 rows, each 64 of depth
//   STAGES  pieces of 256 of depth (of each part) of x in shared memory
//   GROUP_  columns of a scale: 64, 128; 0: one a row
//   ZEROS   zero-points, uint8; else 8
//
// N is a multiple of 16, K of 256 * PARTS * CLUSTER.
#include "qmatmul/fragments.cuh"

#define WARPS (SETS * PARTS)
#define BOX_BYTES (BM * 128)  // 64 of depth
#define STAGE (PARTS * 4 * BOX_BYTES)
#define TURNS (AHEAD / 4)
#define BLOCKS (BM / 8)
#define DEEP (PARTS * CLUSTER)  // parts of a tile
#define TILES (SETS * JOINED)   // of a cluster
#define SPAN (GROUP_ ? GROUP_ / 64 : 1)  // loads of a scale

__device__ __forceinline__ void matrices(u32 (&b)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}

// The first product of a sum.
__device__ __forceinline__ void begin(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." T16 "." T16 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WARPS * 32, 1)
w4a16_small_m(const __grid_constant__ Map x_map, const uint4* words, const unsigned short* scale, const unsigned char* zero,
       const unsigned short* bias, unsigned short* y, int M, int N, int K) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[STAGES];
  const u32 base = shared_address(ring), full = shared_address(full_);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = K / (256 * DEEP);
  const int rank = CLUSTER > 1 ? (int)cluster_rank() : 0, first = blockIdx.x / CLUSTER * TILES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  let_next_start();
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif

  auto fetch_piece = [&](int piece, int stage) {
    barrier_expect(full + 8 * stage, STAGE);
    fetch_tokens(base + stage * STAGE, &x_map, 0, (rank * pieces + piece) * PARTS * 4, full + 8 * stage);
  };

  const int part = warp % PARTS, set = warp / PARTS, r8 = lane / 4, c4 = lane % 4;
  const int rows = N / 16, steps = K / 64;
  // A part takes every PARTS-th piece of 4 steps of a block's depth.
  const int step0 = (rank * pieces * PARTS + part) * 4;
  const uint4* from[JOINED];
  u32 scales[JOINED];
  uint4 v[JOINED][AHEAD];
  u32 s_raw[JOINED][AHEAD / SPAN][2], z_raw[JOINED][AHEAD / SPAN][2];
#pragma unroll
  for (int j = 0; j < JOINED; j++) {
    const int tile = min(first + set * JOINED + j, rows - 1);
    from[j] = words + ((long long)tile * steps + step0) * 32 + lane;
    scales[j] = (GROUP_ ? step0 / SPAN * N : 0) + tile * 16 + r8;
  }
  // The scales of a tile's group that starts with a load, `ahead` pieces from the one that `scales` is at.
  auto ask = [&](int j, int slot, int ahead) {
    const u32 at = scales[j] + (GROUP_ ? (ahead * PARTS * 4 / SPAN + slot % (4 / SPAN)) * N : 0);
    s_raw[j][slot][0] = scale[at], s_raw[j][slot][1] = scale[at + 8];
    if (ZEROS) z_raw[j][slot][0] = zero[at], z_raw[j][slot][1] = zero[at + 8];
  };
  wait_for_last();
  if (threadIdx.x == 0)
    for (int piece = 0; piece < STAGES && piece < pieces; piece++) fetch_piece(piece, piece);
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
#pragma unroll
    for (int j = 0; j < JOINED; j++)
      if (i < pieces * 4) {
        v[j][i] = streamed(from[j] + (i / 4 * PARTS * 4 + i % 4) * 32);
        if (i % SPAN == 0 && (GROUP_ || i == 0)) ask(j, i / SPAN, i / 4);
      }
  __syncthreads();

  float acc[JOINED][BLOCKS][4], sum[JOINED][BLOCKS][4];
#pragma unroll
  for (int j = 0; j < JOINED; j++)
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[j][n][i] = sum[j][n][i] = 0.f;

  // A lane's row of the matrices of a token block: token lane % 8, 8 of depth lane / 8, swizzled by 128 bytes.
  const u32 low = lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16, high = low ^ 64;
  int stage = 0;
  u32 phase = 0;
  for (int piece = 0; piece < pieces; piece += TURNS) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (piece + turn < pieces) {
        if (piece + turn > 0 && (piece + turn) % (STAGES / 2) == 0 && piece + turn + STAGES / 2 < pieces) {
          named_barrier(1, WARPS * 32);  // half of the ring has been read
          if (threadIdx.x == 0)
            for (int i = 0; i < STAGES / 2 && piece + turn + STAGES / 2 + i < pieces; i++)
              fetch_piece(piece + turn + STAGES / 2 + i, (piece + turn + STAGES / 2 + i) % STAGES);
        }
        barrier_wait(full + 8 * stage, phase);
        const u32 at = base + stage * STAGE + part * 4 * BOX_BYTES;
        const bool more = piece + turn + TURNS < pieces;
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const int slot = turn * 4 + q;
          u32 b[BLOCKS][2][4];
#pragma unroll
          for (int n = 0; n < BLOCKS; n++) {
            matrices(b[n][0], at + q * BOX_BYTES + n * 1024 + low);
            matrices(b[n][1], at + q * BOX_BYTES + n * 1024 + high);
          }
#pragma unroll
          for (int j = 0; j < JOINED; j++) {
            const u32 word[4] = {v[j][slot].x, v[j][slot].y, v[j][slot].z, v[j][slot].w};
            const int own = GROUP_ ? slot / SPAN : 0;
            const u32 z0 = offset_of(ZEROS ? z_raw[j][own][0] : 8), z1 = offset_of(ZEROS ? z_raw[j][own][1] : 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              u32 a[4];
              decoded(word[i], z0, z1, a);
#pragma unroll
              for (int n = 0; n < BLOCKS; n++) {
                const u32 b0 = b[n][i / 2][i % 2 * 2], b1 = b[n][i / 2][i % 2 * 2 + 1];
                if (GROUP_ && slot % SPAN == 0 && i == 0) begin(sum[j][n], a, b0, b1);
                else multiply(sum[j][n], a, b0, b1);
              }
            }
            if (more) v[j][slot] = streamed(from[j] + (TURNS * PARTS * 4 + q) * 32);
            if (GROUP_ && slot % SPAN == SPAN - 1) {
              const float s0 = wide_of(s_raw[j][own][0]), s1 = wide_of(s_raw[j][own][1]);
#pragma unroll
              for (int n = 0; n < BLOCKS; n++) {
                acc[j][n][0] += sum[j][n][0] * s0, acc[j][n][1] += sum[j][n][1] * s0;
                acc[j][n][2] += sum[j][n][2] * s1, acc[j][n][3] += sum[j][n][3] * s1;
              }
              if (more) ask(j, own, TURNS);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < JOINED; j++) from[j] += PARTS * 4 * 32, scales[j] += GROUP_ ? PARTS * 4 / SPAN * N : 0;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
  }
  if (!GROUP_) {
#pragma unroll
    for (int j = 0; j < JOINED; j++) {
      const float s0 = wide_of(s_raw[j][0][0]), s1 = wide_of(s_raw[j][0][1]);
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        acc[j][n][0] = sum[j][n][0] * s0, acc[j][n][1] = sum[j][n][1] * s0;
        acc[j][n][2] = sum[j][n][2] * s1, acc[j][n][3] = sum[j][n][3] * s1;
      }
    }
  }

  // The 16 rows of a tile.
  auto store = [&](int tile, const float (&t)[BLOCKS][4]) {
    if (tile >= rows) return;
    const int row = tile * 16 + r8;
    const float b0 = bias ? wide_of(bias[row]) : 0.f, b1 = bias ? wide_of(bias[row + 8]) : 0.f;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int m = n * 8 + 2 * c4 + i;
        if (m < M) {
          const u32 two = rounded_pair(t[n][i] + b0, t[n][2 + i] + b1);
          y[(long long)m * N + row] = (unsigned short)two;
          y[(long long)m * N + row + 8] = (unsigned short)(two >> 16);
        }
      }
    }
  };
#if DEEP == 1
#pragma unroll
  for (int j = 0; j < JOINED; j++) store(first + set * JOINED + j, acc[j]);
#else
  // Every part of a tile goes to the block that adds it up: of a cluster, each takes every CLUSTER-th tile.
  const u32 sums = base + STAGES * STAGE + lane * 16;
#define SUM(slot, deep, n) (sums + (((slot) * DEEP + (deep)) * BLOCKS + (n)) * 512)
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // every block has begun
#endif
#pragma unroll
  for (int j = 0; j < JOINED; j++) {
    const int of = set * JOINED + j;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
      u32 there = SUM(of / CLUSTER, rank * PARTS + part, n);
      if (CLUSTER > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(of % CLUSTER));
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                   ::"r"(there), "f"(acc[j][n][0]), "f"(acc[j][n][1]), "f"(acc[j][n][2]), "f"(acc[j][n][3]) : "memory");
    }
  }
#if CLUSTER > 1
  cluster_sync();
#else
  named_barrier(1, WARPS * 32);
#endif
#pragma unroll 1
  for (int of = warp * CLUSTER + rank; of < TILES; of += WARPS * CLUSTER) {
    float t[BLOCKS][4];
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) t[n][i] = 0.f;
#pragma unroll
    for (int p = 0; p < DEEP; p++)
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        const uint4 f = shared_quad(SUM(of / CLUSTER, p, n));
        t[n][0] += __uint_as_float(f.x), t[n][1] += __uint_as_float(f.y);
        t[n][2] += __uint_as_float(f.z), t[n][3] += __uint_as_float(f.w);
      }
    store(first + of, t);
  }
#endif
}
