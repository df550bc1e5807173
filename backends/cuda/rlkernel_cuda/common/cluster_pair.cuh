// What kernels of clusters of two share: barriers, TMA, wgmma on tiles of 128 x 256 a block, 64 of depth a step, the order
// of tiles, and stores of rounded rows. For sm_90a.
#pragma once
#include "common/wgmma.cuh"

struct alignas(64) Map { char bytes[128]; };

constexpr int ROWS = 128, COLS = 256, DEPTH = 64;  // of a block's tile, and of a step
constexpr int A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLS * DEPTH * 2, STAGE_BYTES = A_BYTES + B_BYTES;

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

// In any block of the cluster. Not .release.cluster: that is a fence of the whole GPU's memory at every step, a third of
// the time; what is released here was read by wgmma, which has been waited for.
__device__ __forceinline__ void barrier_arrive(u32 bar, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(block) : "memory");
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

__device__ __forceinline__ u32 packed(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ u32 packed_fp16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
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

// Two rows of a tile to memory, less a number of each row, as bfloat16 or float16; `limit` columns are there.
template <bool half>
__device__ __forceinline__ void store_rounded(const float (&d)[128], unsigned short* out, int pitch, int r0, bool live0,
                                              bool live1, float less0, float less1, int col, int limit, int q) {
  unsigned short* at0 = out + (long long)r0 * pitch;
  unsigned short* at1 = out + (long long)(r0 + 8) * pitch;
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    u32 v0[4], v1[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float* s = d + (j + n) * 4;
      v0[n] = half ? packed_fp16(s[0] - less0, s[1] - less0) : packed(s[0] - less0, s[1] - less0);
      v1[n] = half ? packed_fp16(s[2] - less1, s[3] - less1) : packed(s[2] - less1, s[3] - less1);
    }
    store_group(at0, col + j * 8, limit, live0, v0, q);
    store_group(at1, col + j * 8, limit, live1, v1, q);
  }
}

// Pair of row tiles and column tile of step i: group pairs share each tile of the weight while it is in L2.
template <int group>
__device__ __forceinline__ void tile_at(int i, int pairs, int tiles, int& pair, int& tile) {
  int per_group = group * tiles, first = i / per_group * group, height = min(pairs - first, group), r = i % per_group;
  pair = first + r % height;
  tile = r / height;
}

// After the matmuls of a step: frees, in both blocks, the tiles of the step before it (`lag`), whose matmuls are done while
// those of this one run, or its own tiles once its matmuls are done.
template <int stages, bool lag>
__device__ __forceinline__ void free_step(u32 empty, int stage, bool later, int thread) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if constexpr (lag) {
    if (later) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (thread < 2) barrier_arrive(empty + 8 * ((stage + stages - 1) % stages), thread);
    }
  } else {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (thread < 2) barrier_arrive(empty + 8 * stage, thread);
  }
}

// After the last step of a tile, if there was one: frees what `free_step` has not. The sums are complete then.
template <int stages, bool lag>
__device__ __forceinline__ void free_last(u32 empty, int stage, bool any, int thread, float (&d)[128]) {
  if constexpr (lag) {
    if (any) {
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread < 2) barrier_arrive(empty + 8 * ((stage + stages - 1) % stages), thread);
    }
  }
#pragma unroll
  for (int j = 0; j < 128; j++) asm volatile("" : "+f"(d[j])::"memory");  // nothing that reads them moves above
}
