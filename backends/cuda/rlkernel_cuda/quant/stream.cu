// y = x W' for a few tokens. One warp fetches pieces of 256 of the depth, of x, of the weight and of its scales, into shared
// memory, many at a time; the others decode and multiply by `mma.sync`. A scale multiplies the sum over its group in fp32,
// so no weight is rounded.
//
//   BM      tokens: 8 or 16
//   SETS    tiles of JOINED x 16 rows of a block
//   PARTS   parts of the depth of a tile, a warp each, added up in their order
//   JOINED  tiles of 16 rows of a warp
//   STAGES  pieces in shared memory
//   GROUP_  columns of a scale: 32, 64, 128; 0: one a row
//   ZEROS   zero-points, uint8; else 8
//
// Compiled after pair.cuh and fragments.cuh. N is a multiple of 16, K of 256 * PARTS.
#define WARPS (SETS * PARTS)
#define TILES (SETS * JOINED)  // of 16 rows
#define BOX_BYTES (BM * 128)   // 64 of depth
#define GROUPS (GROUP_ ? 256 / (GROUP_ ? GROUP_ : 1) : 0)
#define X_BYTES (PARTS * 4 * BOX_BYTES)
#define WORD_BYTES (PARTS * TILES * 2048)
#define SCALE_BYTES (PARTS * GROUPS * TILES * 32)
#define ZERO_BYTES (ZEROS * PARTS * GROUPS * TILES * 16)
#define STAGE ((X_BYTES + WORD_BYTES + SCALE_BYTES + ZERO_BYTES + 1023) / 1024 * 1024)
#define BLOCKS (BM / 8)

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
stream(const __grid_constant__ Map x_map, const char* words, const unsigned short* scale, const unsigned char* zero,
       const unsigned short* bias, unsigned short* y, int M, int N, int K) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 full_[STAGES], empty_[STAGES];
  const u32 base = shared_address(ring), full = shared_address(full_), empty = shared_address(empty_);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = K / (256 * PARTS), rows = N / 16, first = blockIdx.x * TILES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == WARPS) {
    const int here = min(TILES, rows - first);
    const u32 bytes = X_BYTES + PARTS * here * (2048 + GROUPS * (ZEROS ? 48 : 32));
    int stage = 0;
    u32 phase = 0;
    for (int piece = 0; piece < pieces; piece++) {
      const u32 bar = full + 8 * stage, at = base + stage * STAGE;
      barrier_wait(empty + 8 * stage, phase ^ 1);
      if (lane == 0) barrier_expect(bar, bytes);
      __syncwarp();
      for (int i = lane; i < PARTS * here; i += 32) {
        const int part = i / here, tile = i % here;
        const long long from = (long long)(first + tile) * (K / 64) + (part * pieces + piece) * 4;
        fetch_line(at + X_BYTES + (part * TILES + tile) * 2048, words + from * 512, 2048, bar);
      }
      for (int i = lane; i < 4 * PARTS; i += 32)
        fetch(at + i * BOX_BYTES, &x_map, (i / 4 * pieces + piece) * 256 + i % 4 * 64, 0, bar);
      for (int i = lane; i < GROUPS * PARTS; i += 32) {
        const int part = i / max(GROUPS, 1), group = (part * pieces + piece) * GROUPS + i % max(GROUPS, 1);
        const long long from = (long long)group * N + first * 16;
        fetch_line(at + X_BYTES + WORD_BYTES + i * (TILES * 32), scale + from, here * 32, bar);
        if (ZEROS) fetch_line(at + X_BYTES + WORD_BYTES + SCALE_BYTES + i * (TILES * 16), zero + from, here * 16, bar);
      }
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    return;
  }

  const int part = warp % PARTS, set = warp / PARTS, r8 = lane / 4, c4 = lane % 4;
  float acc[JOINED][BLOCKS][4], sum[JOINED][BLOCKS][4];
#pragma unroll
  for (int j = 0; j < JOINED; j++)
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[j][n][i] = sum[j][n][i] = 0.f;

  // A lane's row of the matrices of a token block: token lane % 8, 8 of depth lane / 8, swizzled by 128 bytes.
  const u32 low = lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16, high = low ^ 64;
  const u32 my_x = base + part * 4 * BOX_BYTES, my_words = base + X_BYTES + (part * TILES + set * JOINED) * 2048 + lane * 16;
  const u32 my_scales = base + X_BYTES + WORD_BYTES + (part * GROUPS * TILES + set * JOINED) * 32 + r8 * 2;
  const u32 my_zeros = base + X_BYTES + WORD_BYTES + SCALE_BYTES + (part * GROUPS * TILES + set * JOINED) * 16 + r8;
  u32 of_rows[JOINED][2];  // zero-points of whole rows
#pragma unroll
  for (int j = 0; j < JOINED; j++) {
    const int row = min(first + set * JOINED + j, rows - 1) * 16 + r8;
    of_rows[j][0] = ZEROS && !GROUP_ ? zero[row] : 8, of_rows[j][1] = ZEROS && !GROUP_ ? zero[row + 8] : 8;
  }
  int stage = 0;
  u32 phase = 0;
  for (int piece = 0; piece < pieces; piece++) {
    const u32 at = stage * STAGE;
    barrier_wait(full + 8 * stage, phase);
#pragma unroll
    for (int q = 0; q < 4; q++) {
      u32 b[BLOCKS][2][4];
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        matrices(b[n][0], my_x + at + q * BOX_BYTES + n * 1024 + low);
        matrices(b[n][1], my_x + at + q * BOX_BYTES + n * 1024 + high);
      }
#pragma unroll
      for (int j = 0; j < JOINED; j++) {
        const uint4 v = shared_quad(my_words + at + j * 2048 + q * 512);
        const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int done = q * 64 + i * 16 + 16, group = GROUP_ ? (done - 16) / (GROUP_ ? GROUP_ : 1) : 0;
          const u32 beside = at + group * TILES * 16 + j * 16;
          const u32 z0 = offset_of(ZEROS && GROUP_ ? shared_byte(my_zeros + beside) : of_rows[j][0]);
          const u32 z1 = offset_of(ZEROS && GROUP_ ? shared_byte(my_zeros + beside + 8) : of_rows[j][1]);
          u32 a[4];
          decoded(word[i], z0, z1, a);
#pragma unroll
          for (int n = 0; n < BLOCKS; n++)
            multiply(sum[j][n], a, b[n][i / 2][i % 2 * 2], b[n][i / 2][i % 2 * 2 + 1]);
          if (GROUP_ && done % (GROUP_ ? GROUP_ : 1) == 0) {
            const u32 scales = my_scales + at + group * TILES * 32 + j * 32;
            const float s0 = wide_of(shared_half(scales)), s1 = wide_of(shared_half(scales + 16));
#pragma unroll
            for (int n = 0; n < BLOCKS; n++) {
              acc[j][n][0] += sum[j][n][0] * s0, acc[j][n][1] += sum[j][n][1] * s0;
              acc[j][n][2] += sum[j][n][2] * s1, acc[j][n][3] += sum[j][n][3] * s1;
#pragma unroll
              for (int k = 0; k < 4; k++) sum[j][n][k] = 0.f;
            }
          }
        }
      }
    }
    if (lane == 0) arrive(empty + 8 * stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  if (!GROUP_) {
#pragma unroll
    for (int j = 0; j < JOINED; j++) {
      const int row = min(first + set * JOINED + j, rows - 1) * 16 + r8;
      const float s0 = wide_of(scale[row]), s1 = wide_of(scale[row + 8]);
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
    const int tile = first + set * JOINED + j, row = tile * 16 + r8;
    if (tile >= rows) continue;
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
