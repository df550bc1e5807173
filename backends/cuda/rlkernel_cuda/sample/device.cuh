// What the sampler asks of the hardware, and nothing else: the tests put an emulation on a CPU in the place of this file.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define FULL 0xffffffffu
#define INF __int_as_float(0x7f800000)

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 b) { return __uint_as_float(b); }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float times_up(float a, float b) { return __fmul_ru(a, b); }
__device__ __forceinline__ float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ int to_int(float x) { return __float2int_rz(x); }  // the nearest where it is out of range, 0 of NaN
__device__ __forceinline__ int whole_of(float x) { return bits_of(__fadd_rz(x, 8388608.f)) & 0x7fffff; }  // of 0 <= x < 2^23
__device__ __forceinline__ int first_bit(u32 b) { return __ffs(b) - 1; }

// ---- collectives of 32 lanes
__device__ __forceinline__ u32 lanes_max(u32 v) { return __reduce_max_sync(FULL, v); }
__device__ __forceinline__ u32 lanes_min(u32 v) { return __reduce_min_sync(FULL, v); }
__device__ __forceinline__ int lanes_add(int v) { return __reduce_add_sync(FULL, v); }
__device__ __forceinline__ u32 lanes_where(bool v) { return __ballot_sync(FULL, v); }
__device__ __forceinline__ bool any_lane(bool v) { return __any_sync(FULL, v); }
template <typename V> __device__ __forceinline__ V from_lane(V v, int lane) { return __shfl_sync(FULL, v, lane); }
template <typename V> __device__ __forceinline__ V from_across(V v, int mask) { return __shfl_xor_sync(FULL, v, mask); }
template <typename V> __device__ __forceinline__ V from_below(V v, int n) { return __shfl_up_sync(FULL, v, n); }

// ---- memory: logits are read once, so they pass by the L1
__device__ __forceinline__ float value_of_bits(u16 b) {
#if TYPE == 1
  return __uint_as_float(u32(b) << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(b));
  return y;
#endif
}
__device__ __forceinline__ u32 load_word(const u32* p) { u32 v; asm volatile("ld.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v; }
__device__ __forceinline__ float value_at(const float* p) { return __ldg(p); }
__device__ __forceinline__ float value_at(const u16* p) { return value_of_bits(__ldg(p)); }
__device__ __forceinline__ void load4(float* x, const float* p) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(p));
}
__device__ __forceinline__ void load4(float* x, const u16* p) {
  u32 a, b;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "l"(p));
#if TYPE == 1
  x[0] = __uint_as_float(a << 16), x[1] = __uint_as_float(a & 0xffff0000u);
  x[2] = __uint_as_float(b << 16), x[3] = __uint_as_float(b & 0xffff0000u);
#else
  x[0] = value_of_bits(u16(a)), x[1] = value_of_bits(u16(a >> 16)), x[2] = value_of_bits(u16(b)), x[3] = value_of_bits(u16(b >> 16));
#endif
}
__device__ __forceinline__ void load4_again(float* x, const float* p) {
  const float4 v = __ldg(reinterpret_cast<const float4*>(p));
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void load4_again(float* x, const u16* p) {
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = value_at(p + j);
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Keeps one copy of the key schedule in registers.
__device__ __forceinline__ void keep(u32& a, u32& b) { asm volatile("" : "+r"(a), "+r"(b)); }

// ---- threads of a block
template <int SIZE> __device__ __forceinline__ void sync() {  // of its first ones
  if (SIZE == NT) __syncthreads();
  else asm volatile("bar.sync 1, %0;" ::"n"(SIZE) : "memory");
}
template <int SIZE> __device__ __forceinline__ void sync_apart() {  // of its first ones, while a warp that ends a row does not come
  asm volatile("bar.sync 2, %0;" ::"n"(SIZE) : "memory");
}
// A counter that one part of a block advances and another watches: what was written before is seen after.
__device__ __forceinline__ void add_seen(u32* counter) { __threadfence_block(), atomicAdd(counter, 1u); }
__device__ __forceinline__ u32 seen(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
__device__ __forceinline__ void wait_until(const u32* counter, u32 n) {  // by whole warps
  while (seen(counter) < n) __nanosleep(100);
  __syncwarp();
}

// ---- blocks of a cluster: all of a row
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <typename S> __device__ __forceinline__ S* in_block(S* mine, int rank) {  // the same place in another block
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(mine), "r"(rank));
  return reinterpret_cast<S*>(there);
}
#else
#define CLUSTERED
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
template <typename S> __device__ __forceinline__ S* in_block(S* mine, int) { return mine; }
#endif

// Cycles at which the finishing block passes some points, for measurements: the first thread's, in the results' place.
#ifdef CLOCKS
__device__ __forceinline__ long long ticks() { return clock64(); }
#define MARK(i) if (threadIdx.x == 0) sm.marks[i] = ticks()
#else
#define MARK(i)
#endif
