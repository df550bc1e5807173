// A CPU in the place of device.cuh: every CUDA thread is a coroutine, and whatever a warp, a block or a cluster does together
// is a place where coroutines wait for each other. For the tests: one cluster at a time, lanes in order, no speed.
#include <math.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <vector>
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
using std::max;
using std::min;
static inline u32 max(u32 a, int b) { return a > u32(b) ? a : u32(b); }
#define gridDim (Index{GRID})

#define __device__
#define __global__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)
#define __shared__
#define CLUSTERED
#define FULL 0xffffffffu
#define INF float(INFINITY)
#define LANES 32
#define THREADS (NT * CLUSTER)

struct Waiting { int here; u64 turn; };
struct Index { int x; };
static ucontext_t scheduler, threads[THREADS];
static bool finished[THREADS];
static int now;                       // the running thread of the cluster
static char shared_memory[CLUSTER][SHARED_BYTES] __attribute__((aligned(64)));
static u64 slots[THREADS / LANES][2][LANES];
static Waiting warps[THREADS / LANES], blocks[CLUSTER], finishers[CLUSTER], finishers_apart[CLUSTER], cluster;
static u64 warp_turn[THREADS], arrived_turn[THREADS];
static Index grid_block;
static int live[CLUSTER];             // threads of a block that have not returned
#define threadIdx (Index{now % NT})
#define blockIdx (Index{grid_block.x + now / NT})
#define memory (shared_memory[now / NT])

static inline void yield() { swapcontext(&threads[now], &scheduler); }
static inline void wait_for(Waiting& w, int all) {
  const u64 turn = w.turn;
  if (++w.here >= all) { w.here = 0, ++w.turn; return; }
  while (w.turn == turn) yield();
}
static inline void __syncthreads() { wait_for(blocks[now / NT], NT); }
template <int SIZE> static inline void sync() { wait_for(SIZE == NT ? blocks[now / NT] : finishers[now / NT], SIZE); }
template <int SIZE> static inline void sync_apart() { wait_for(finishers_apart[now / NT], SIZE); }
static inline void wait_until(const u32* counter, u32 n) { while (*counter < n) yield(); }
// What every lane gave; all 32 must come.
static inline const u64* exchange(u64 mine) {
  const int warp = now / LANES;
  u64* to = slots[warp][warp_turn[now]++ & 1];
  to[now % LANES] = mine;
  wait_for(warps[warp], LANES);
  return to;
}
static inline u32 bits_of(float x) { u32 b; memcpy(&b, &x, 4); return b; }
static inline float float_of(u32 b) { float x; memcpy(&x, &b, 4); return x; }
static inline float __int_as_float(int b) { return float_of(u32(b)); }
static inline float ex2(float x) { const float y = exp2f(x); return y < 1.17549435e-38f ? 0.f : y; }
static inline float divide(float a, float b) { return a / b; }
static inline float times_up(float a, float b) {
  const double exact = double(a) * b;
  const float c = float(exact);
  return double(c) < exact ? float_of(bits_of(c) + 1) : c;
}
static inline float reciprocal(float x) { return 1 / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline int whole_of(float x) { if (!(x >= 0 && x < 8388608.f)) abort(); return int(x); }
static inline int first_bit(u32 b) { return b ? __builtin_ctz(b) : -1; }
static inline int __popc(u32 b) { return __builtin_popcount(b); }
static inline int to_int(float x) { return x != x ? 0 : x > 2147483520.f ? 2147483647 : x < -2147483520.f ? -2147483647 - 1 : int(x); }

static inline u32 lanes_max(u32 v) { const u64* a = exchange(v); u32 r = 0; for (int i = 0; i < LANES; ++i) r = max(r, u32(a[i])); return r; }
static inline u32 lanes_min(u32 v) { const u64* a = exchange(v); u32 r = FULL; for (int i = 0; i < LANES; ++i) r = min(r, u32(a[i])); return r; }
static inline int lanes_add(int v) { const u64* a = exchange(u32(v)); u32 r = 0; for (int i = 0; i < LANES; ++i) r += u32(a[i]); return int(r); }
static inline u32 lanes_where(bool v) { const u64* a = exchange(v); u32 r = 0; for (int i = 0; i < LANES; ++i) r |= u32(a[i] != 0) << i; return r; }
static inline void __syncwarp() { exchange(0); }
static inline bool any_lane(bool v) { return lanes_where(v) != 0; }
template <typename V> static inline u64 packed(V v) { u64 b = 0; memcpy(&b, &v, sizeof v); return b; }
template <typename V> static inline V unpacked(u64 b) { V v; memcpy(&v, &b, sizeof v); return v; }
template <typename V> static inline V from_lane(V v, int lane) { return unpacked<V>(exchange(packed(v))[lane & 31]); }
template <typename V> static inline V from_across(V v, int mask) { return unpacked<V>(exchange(packed(v))[(now % LANES) ^ mask]); }
template <typename V> static inline V from_below(V v, int n) { const u64* a = exchange(packed(v)); const int l = now % LANES; return unpacked<V>(a[l >= n ? l - n : l]); }
static inline u32 atomicMax(u32* p, u32 v) { const u32 o = *p; *p = max(o, v); return o; }
template <typename V, typename W> static inline V atomicAdd(V* p, W v) { const V o = *p; *p = o + V(v); return o; }

static inline void add_seen(u32* counter) { *counter += 1; }

static inline float value_of_bits(u16 b) {
#if TYPE == 1
  return float_of(u32(b) << 16);
#else
  _Float16 h; memcpy(&h, &b, 2); return float(h);
#endif
}
static inline u32 load_word(const u32* p) { return *p; }
static inline float value_at(const float* p) { return *p; }
static inline float value_at(const u16* p) { return value_of_bits(*p); }
template <typename P> static inline void load4(float* x, const P* p) { for (int i = 0; i < 4; ++i) x[i] = value_at(p + i); }
template <typename P> static inline void load4_again(float* x, const P* p) { load4(x, p); }
static inline void prefetch(const void*) {}
#define MARK(i)
static inline void keep(u32&, u32&) {}
#if CLUSTER > 1
static inline void cluster_complete() {  // a thread that has returned is not waited for
  for (int i = 0; i < THREADS; ++i)
    if (!finished[i] && arrived_turn[i] != cluster.turn) return;
  ++cluster.turn;
}
static inline void cluster_arrive() { arrived_turn[now] = cluster.turn, cluster_complete(); }
static inline void cluster_wait() { while (cluster.turn <= arrived_turn[now]) yield(); }
template <typename S> static inline S* in_block(S* mine, int rank) {
  return reinterpret_cast<S*>(reinterpret_cast<char*>(mine) + (rank - now / NT) * i64(SHARED_BYTES));
}
#else
static inline void cluster_complete() {}
static inline void cluster_arrive() {}
static inline void cluster_wait() { __syncthreads(); }
template <typename S> static inline S* in_block(S* mine, int) { return mine; }
#endif
