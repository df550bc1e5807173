// y = x W' for a few tokens: every weight goes once from memory to the registers that `mma.sync` takes it from, through no
// shared memory, and a scale multiplies the sum over its group in fp32, so that no weight is rounded.
//
//   BM      tokens: 8 or 16
//   SETS    tiles of JOINED x 16 rows of a block
//   PARTS   parts of the depth of a tile, a warp each, added up in their order
//   JOINED  tiles of 16 rows of a warp
//   STAGES  pieces of 256 of depth (of each part) of x in shared memory
//   GROUP_  columns of a scale: 64, 128; 0: one a row
//   ZEROS   zero-points, uint8; else 8
//
// Compiled after pair.cuh and fragments.cuh. N is a multiple of 16, K of 256 * PARTS.
#define WARPS (SETS * PARTS)
#define BOX_BYTES (BM * 128)  // 64 of depth
#define STAGE (PARTS * 4 * BOX_BYTES)
#define AHEAD (JOINED > 1 ? 4 : 8)  // loads in flight of a tile of 16 rows, each 64 of depth
#define TURNS (AHEAD / 4)
#define BLOCKS (BM / 8)
#define SPAN (GROUP_ ? GROUP_ / 64 : 1)  // loads of a scale

__device__ __forceinline__ uint4 streamed(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ void matrices(u32 (&b)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." T16 "." T16 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
narrow(const __grid_constant__ Map x_map, const uint4* words, const unsigned short* scale, const unsigned char* zero,
       const unsigned short* bias, unsigned short* y, int M, int N, int K) {
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

  if (warp == WARPS) {
    __syncthreads();
    int stage = 0;
    u32 phase = 0;
    for (int piece = 0; piece < pieces; piece++) {
      const u32 bar = full + 8 * stage, at = base + stage * STAGE;
      barrier_wait(empty + 8 * stage, phase ^ 1);
      if (lane == 0) barrier_expect(bar, STAGE);
      __syncwarp();
      for (int i = lane; i < 4 * PARTS; i += 32)
        fetch(at + i * BOX_BYTES, &x_map, (i / 4 * pieces + piece) * 256 + i % 4 * 64, 0, bar);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    return;
  }

  const int part = warp % PARTS, set = warp / PARTS, r8 = lane / 4, c4 = lane % 4;
  const int rows = N / 16, steps = K / 64;
  int tile[JOINED];
  const uint4* from[JOINED];
  uint4 v[JOINED][AHEAD];
  u32 s_raw[JOINED][AHEAD / SPAN][2], z_raw[JOINED][AHEAD / SPAN][2];
  const int step0 = part * pieces * 4;
#pragma unroll
  for (int j = 0; j < JOINED; j++) {
    tile[j] = (blockIdx.x * SETS + set) * JOINED + j;
    from[j] = words + ((long long)min(tile[j], rows - 1) * steps + step0) * 32 + lane;
  }
  // The scales of the group that starts at a step of this part.
  auto ask = [&](int j, int slot, int step) {
    const long long at = (long long)(GROUP_ ? (step0 + step) / SPAN : 0) * N + min(tile[j], rows - 1) * 16 + r8;
    s_raw[j][slot][0] = scale[at], s_raw[j][slot][1] = scale[at + 8];
    if (ZEROS) z_raw[j][slot][0] = zero[at], z_raw[j][slot][1] = zero[at + 8];
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
#pragma unroll
    for (int j = 0; j < JOINED; j++)
      if (i < pieces * 4) {
        v[j][i] = streamed(from[j] + i * 32);
        if (i % SPAN == 0 && (GROUP_ || i == 0)) ask(j, i / SPAN, i);
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
            if (more) v[j][slot] = streamed(from[j] + ((piece + turn + TURNS) * 4 + q) * 32);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              u32 a[4];
              decoded(word[i], z0, z1, a);
#pragma unroll
              for (int n = 0; n < BLOCKS; n++)
                multiply(sum[j][n], a, b[n][i / 2][i % 2 * 2], b[n][i / 2][i % 2 * 2 + 1]);
            }
            if (GROUP_ && slot % SPAN == SPAN - 1) {
              const float s0 = wide_of(s_raw[j][own][0]), s1 = wide_of(s_raw[j][own][1]);
#pragma unroll
              for (int n = 0; n < BLOCKS; n++) {
                acc[j][n][0] += sum[j][n][0] * s0, acc[j][n][1] += sum[j][n][1] * s0;
                acc[j][n][2] += sum[j][n][2] * s1, acc[j][n][3] += sum[j][n][3] * s1;
#pragma unroll
                for (int i = 0; i < 4; i++) sum[j][n][i] = 0.f;
              }
              if (more) ask(j, own, (piece + turn + TURNS) * 4 + q - (SPAN - 1));
            }
          }
        }
        if (lane == 0) arrive(empty + 8 * stage);
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

#if PARTS > 1
  meet(1, WARPS * 32);  // every piece has been read: the ring holds sums now
  float4* sums = (float4*)ring;
  const int stride = SETS * JOINED * BLOCKS * 32;
  const int mine = set * JOINED * BLOCKS * 32 + lane;
  if (part > 0) {
#pragma unroll
    for (int j = 0; j < JOINED; j++)
#pragma unroll
      for (int n = 0; n < BLOCKS; n++)
        sums[(part - 1) * stride + mine + (j * BLOCKS + n) * 32] =
            make_float4(acc[j][n][0], acc[j][n][1], acc[j][n][2], acc[j][n][3]);
  }
  meet(1, WARPS * 32);
  if (part > 0) return;
#pragma unroll
  for (int p = 0; p < PARTS - 1; p++)
#pragma unroll
    for (int j = 0; j < JOINED; j++)
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        const float4 t = sums[p * stride + mine + (j * BLOCKS + n) * 32];
        acc[j][n][0] += t.x, acc[j][n][1] += t.y, acc[j][n][2] += t.z, acc[j][n][3] += t.w;
      }
#endif
#pragma unroll
  for (int j = 0; j < JOINED; j++) {
    if (tile[j] >= rows) continue;
    const int row = tile[j] * 16 + r8;
    const float b0 = bias ? wide_of(bias[row]) : 0.f, b1 = bias ? wide_of(bias[row + 8]) : 0.f;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int m = n * 8 + 2 * c4 + i;
        if (m < M) {
          const u32 two = rounded_pair(acc[j][n][i] + b0, acc[j][n][2 + i] + b1);
          y[(long long)m * N + row] = (unsigned short)two;
          y[(long long)m * N + row + 8] = (unsigned short)(two >> 16);
        }
      }
    }
  }
}
