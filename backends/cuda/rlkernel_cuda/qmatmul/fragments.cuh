// Packed 4-bit weights as operands of matrix instructions.
//
// A tile of 16 rows x 64 columns is 512 bytes (the layout `triton_w4`): lane l reads 16 of them, a word for each 16 of the
// depth, whose eight nibbles are the eight values that the lane gives to an m16 x k16 operand, `mma.sync` and `wgmma` alike:
// nibble 4 p + 2 kh + rh is row l / 4 + 8 rh, column 8 kh + 2 (l % 4) + p.
//
// HALF, of the compile line: float16, else bfloat16. 0x4300 | q is the bfloat16 128 + q, 0x6400 | q the float16 1024 + q.
#pragma once
#include "common/cluster_pair.cuh"

#if HALF
#define T16 "f16"
#define ONES 0x3c003c00u
#define BIASED 0x64006400u
#else
#define T16 "bf16"
#define ONES 0x3f803f80u
#define BIASED 0x43004300u
#endif
#define NEGATIVE 0x80008000u

__device__ __forceinline__ u32 multiplied(u32 a, u32 b) {
  u32 r;
  asm("mul.rn." T16 "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// base + z, twice, for a zero-point z: what turns 0x4300 | q into q - z by one subtraction, exactly.
__device__ __forceinline__ u32 offset_of(u32 zero) { return BIASED | zero | zero << 16; }

// The operand of one word: codes less the zero-points of both rows.
__device__ __forceinline__ void decoded(u32 word, u32 low_row, u32 high_row, u32* a) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 v;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(v) : "r"(word >> 4 * i), "r"(BIASED));
    asm("sub.rn." T16 "x2 %0, %1, %2;" : "=r"(a[i]) : "r"(v), "r"(i & 1 ? high_row : low_row));
  }
}

__device__ __forceinline__ u32 twice(u32 v) { return v | v << 16; }

__device__ __forceinline__ float wide_of(u32 bits) {
#if HALF
  float r;
  asm("{\n.reg .b16 h, z;\nmov.b32 {h, z}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(r) : "r"(bits));
  return r;
#else
  return __uint_as_float(bits << 16);
#endif
}

__device__ __forceinline__ u32 rounded_pair(float lo, float hi) {
  u32 r;
  asm("cvt.rn." T16 "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ uint4 shared_quad(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ u32 shared_half(u32 at) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ u32 shared_byte(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Boxes of x, which is described as [K / 64, M, 64].
__device__ __forceinline__ void fetch_tokens(u32 to, const Map* map, int token, int k, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(token), "r"(k) : "memory");
}

// The next kernel of the stream may be put on multiprocessors that this one leaves; it waits as this one does.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What the kernels before this one wrote is there, and nobody reads any more what this one writes.
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// `bytes` next to one another, a multiple of 16, as both addresses are.
__device__ __forceinline__ void fetch_line(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 16 bytes that nothing reads again.
__device__ __forceinline__ uint4 streamed(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// d + a b: 16 rows by 8 columns, 16 of depth.
__device__ __forceinline__ void multiply(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." T16 "." T16 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
