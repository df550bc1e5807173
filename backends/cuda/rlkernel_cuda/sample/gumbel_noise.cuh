// Noise, scores and weights of tokens.
//
// Philox4x32-10 (Salmon et al., SC 2011), key = seed, counter = (id div 4, step, stream), word = id mod 4.
#pragma once
#include "sample/params.cuh"

__device__ __forceinline__ void philox(u32 (&w)[4], u32 block, const Row& R, u32 stream) {
  u32 c0 = block, c1 = R.step0, c2 = R.step1, c3 = stream, k0 = R.key0, k1 = R.key1;
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const u64 a = u64(0xD2511F53u) * c0, b = u64(0xCD9E8D57u) * c2;
    c0 = u32(b >> 32) ^ c1 ^ k0, c1 = u32(b), c2 = u32(a >> 32) ^ c3 ^ k1, c3 = u32(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
}
__device__ __forceinline__ void philox_min4(u32 (&low)[4], u32 block, const Row& R, u32 stream) {  // of blocks block + 32 g
  u32 c[4][4], k0 = R.key0, k1 = R.key1;
#pragma unroll
  for (int g = 0; g < 4; ++g) c[g][0] = block + 32 * g, c[g][1] = R.step0, c[g][2] = R.step1, c[g][3] = stream;
#pragma unroll
  for (int i = 0; i < 10; ++i) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const u64 a = u64(0xD2511F53u) * c[g][0], b = u64(0xCD9E8D57u) * c[g][2];
      c[g][0] = u32(b >> 32) ^ c[g][1] ^ k0, c[g][1] = u32(b), c[g][2] = u32(a >> 32) ^ c[g][3] ^ k1, c[g][3] = u32(a);
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    keep(k0, k1);
  }
#pragma unroll
  for (int g = 0; g < 4; ++g) low[g] = min(min(c[g][0], c[g][1]), min(c[g][2], c[g][3]));
}
__device__ __forceinline__ float gumbel(u32 r) {  // -ln(-log1p(-(r + 1/2) / 2^32)), accurate at both ends
  const float e = r < 0x80000000u ? -log1pf(-(float(r) + 0.5f) * 0x1p-32f) : -logf((float(~r) + 0.5f) * 0x1p-32f);
  return -logf(e);
}
__device__ __noinline__ float token_noise(int id, const Row& R, u32 stream) {
  u32 w[4];
  philox(w, u32(id) >> 2, R, stream);
  const int j = id & 3;
  return gumbel(j == 0 ? w[0] : j == 1 ? w[1] : j == 2 ? w[2] : w[3]);
}
__device__ __forceinline__ float scaled(float x, float M, const Row& R) { return x == M ? 0.f : divide(x - M, R.T); }
__device__ __forceinline__ float weight(float x, float M, const Row& R) { return x == M ? 1.f : ex2((x - M) * R.s); }

