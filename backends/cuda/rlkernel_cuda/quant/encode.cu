// Symmetric int4 codes and scales of a bf16 weight, written into tiles of 16 rows x 64 columns (the layout `triton_w4`).
//
// A warp takes 16 rows of one group. Lane 4 r8 + c4 reads 16 bytes at columns 8 (c4 + 4 i) of rows r8 and r8 + 8, and codes
// them; bytes of two codes then change lanes within a quad, so that each lane holds the words that it writes.
// The arithmetic is that of `rlkernel_core.quant.grid`: one rounding each, none contracted but the exact division.
//
//   GROUP_   columns of a scale: 64, 128
//   LEAST    smallest code: 0 or 1
//
// Compiled after pair.cuh. N is a multiple of 16, K of 128.
#define INFINITE 0x7f800000u
#define CHUNKS (GROUP_ / 32)  // of 8 columns, a row and lane

__device__ __forceinline__ u32 picked(u32 a, u32 b, u32 which) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
  return r;
}

__device__ __forceinline__ u32 larger_of_two(u32 a, u32 b) {
  u32 r;
  asm("max.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

struct Divided {
  float by, reciprocal;
  bool usual;
};

// A group's scale as it is stored, and what its weights are divided by: inf where that is 0 or not finite.
__device__ __forceinline__ Divided scale_of(u32 bits, float largest, unsigned short* stored) {
  const float wide = __fdiv_rn(__uint_as_float(bits), largest);
  const u32 narrow = packed(wide, 0.f) & 0xffff;
  const float back = __uint_as_float(narrow << 16);
  const bool finite = bits < INFINITE && (__float_as_uint(back) & 0x7fffffffu) < INFINITE;
  Divided d;
  d.by = finite && back > 0 ? back : __uint_as_float(INFINITE);
  d.usual = d.by > 0x1p-90f && d.by < 0x1p90f;
  d.reciprocal = __fdiv_rn(1.f, d.by);
  *stored = finite ? narrow : 0x7fc0;
  return d;
}

// The bits of 1.5 * 2^23 + 8 + rint(x / s), cut: the code in the last four.
__device__ __forceinline__ u32 code_of(float x, const Divided& d) {
  float ratio;
  if (d.usual) {  // the rounded quotient by one fused step (Markstein 1990)
    const float q = __fmul_rn(x, d.reciprocal);
    ratio = __fmaf_rn(__fmaf_rn(-q, d.by, x), d.reciprocal, q);
  } else {
    ratio = __fdiv_rn(x, d.by);
    ratio = ratio == ratio ? ratio : 0.f;
  }
  return __float_as_uint(__fadd_rn(fminf(fmaxf(ratio, LEAST - 8.f), 7.f), 12582920.f));
}

// Eight codes: bytes of two, the first in the low nibble.
__device__ __forceinline__ u32 coded(const uint4& v, const Divided& d) {
  const u32 two[4] = {v.x, v.y, v.z, v.w};
  u32 byte[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    byte[i] = code_of(__uint_as_float(two[i] & 0xffff0000u), d) * 16 + code_of(__uint_as_float(two[i] << 16), d);
  return picked(picked(byte[0], byte[1], 0x0040), picked(byte[2], byte[3], 0x0040), 0x5410);
}

// Byte t of the result: byte c4 of the word of lane t of the quad.
__device__ __forceinline__ u32 turned(u32 word, int c4) {
  word = picked(word, __shfl_xor_sync(0xffffffffu, word, 1), c4 & 1 ? 0x3715 : 0x6240);
  return picked(word, __shfl_xor_sync(0xffffffffu, word, 2), c4 & 2 ? 0x3276 : 0x5410);
}

// Nibbles of four bytes: the low ones in the low half, the high ones in the high half.
__device__ __forceinline__ u32 halves(u32 bytes) {
  u32 low = bytes & 0x0f0f0f0fu, high = (bytes >> 4) & 0x0f0f0f0fu;
  low = (low | low >> 4) & 0x00ff00ffu, high = (high | high >> 4) & 0x00ff00ffu;
  return ((low | low >> 8) & 0xffffu) | (high | high >> 8) << 16;
}

extern "C" __global__ void __launch_bounds__(256)
encode(const uint4* w, uint4* words, unsigned short* scale, long long row_stride, float largest, int N, int K) {
  const int lane = threadIdx.x % 32, r8 = lane / 4, c4 = lane % 4, spans = K / 128;
  const int item = blockIdx.x * 8 + threadIdx.x / 32;  // 16 rows by 128 columns
  if (item >= N / 16 * spans) return;
  const int tile = item / spans, span = item % spans;
  const uint4* from = w + (long long)(tile * 16 + r8) * row_stride + span * 16 + c4;
  uint4 v[2][4];
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) v[r][i] = __ldcs(from + r * 8 * row_stride + 4 * i);
  u32 bytes[2][4];
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int g = 0; g < 4 / CHUNKS; g++) {
      u32 most = 0;
#pragma unroll
      for (int i = g * CHUNKS; i < (g + 1) * CHUNKS; i++) {
        most = larger_of_two(most, larger_of_two(v[r][i].x & 0x7fff7fffu, v[r][i].y & 0x7fff7fffu));
        most = larger_of_two(most, larger_of_two(v[r][i].z & 0x7fff7fffu, v[r][i].w & 0x7fff7fffu));
      }
      most = larger_of_two(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = larger_of_two(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const u32 bits = max(most & 0xffff0000u, most << 16);
      unsigned short stored;
      const Divided d = scale_of(bits, largest, &stored);
      if (c4 == 0) scale[(long long)(span * (4 / CHUNKS) + g) * N + tile * 16 + r8 + 8 * r] = stored;
#pragma unroll
      for (int i = g * CHUNKS; i < (g + 1) * CHUNKS; i++) bytes[r][i] = turned(coded(v[r][i], d), c4);
    }
  uint4* to = words + ((long long)tile * spans + span) * 64 + lane;  // two tiles of 64 columns
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 *a = bytes[0] + 2 * half, *b = bytes[1] + 2 * half;
    to[half * 32] = make_uint4(halves(picked(a[0], b[0], 0x5140)), halves(picked(a[0], b[0], 0x7362)),
                               halves(picked(a[1], b[1], 0x5140)), halves(picked(a[1], b[1], 0x7362)));
  }
}
