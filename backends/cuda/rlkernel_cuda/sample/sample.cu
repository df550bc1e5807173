// sample@1 in one launch: every warp reads tiles of 1024 tokens, the finishing warps end the row they belong to.
//
// One warp writes to the finishing block the best logit of each of the 16 groups of a tile, and of the tile sum
// exp((x - top) / T). What the groups tell is candidates.cuh's; what keeps more than they tell needs the search of
// exact_search.cuh. A row without a filter takes the best of its tiles' winners or, where rows are many, holds a race (gumbel_argmax.cuh).
//
// Few rows: a cluster of blocks reads each, its first block finishes. Many rows: a block reads its rows one after the
// other, while its first FINISHERS warps finish those that were read.
//
// Macros: NT threads,
// CLUSTER blocks a row, FINISHERS warps (0: all, after they have read), PER_SM blocks a multiprocessor, AHEAD: a warp
// reads a tile while it works on one, TYPE of the logits (0 fp32, 1 bf16, 2 fp16), PLAIN: no row has a filter.
#include "sample/candidates.cuh"

// What a row keeps and draws whose tiles tell: without a filter all, or the first of its best. By one warp.
__device__ __forceinline__ Cut best_of_tiles(const Params& P, const Row& R, const Stats& st, const Merged& m) {
  u64 best = 0;
  float x = 0.f;
#pragma unroll 2
  for (int i = threadIdx.x & 31; i < P.tiles; i += 32) {
    const Winner w = st.winner[i];
    if (w.id < 0 || (R.greedy && w.x != m.top)) continue;
    const u64 key = make_key(R.greedy ? w.x : scaled(w.x, m.top, R) + w.g, w.id);
    if (key > best) best = key, x = w.x;
  }
  const u64 winner = warp_max(best);
  x = from_lane(x, first_bit(lanes_where(best == winner)));
  if (R.greedy) return Cut{1, 1.f, x, winner, key_id(winner)};
  return Cut{m.tokens, m.Z, x, 0, key_id(winner)};
}
// One row, from its tiles, by the finishing threads. False: it needs the exact search. The last warp adds the tiles up; the first looks for
// the level that lets candidates through.
__device__ __forceinline__ bool finish(const Params& P, const Stored* src, int row, const Row& R, const Stats& st, Shared& sm) {
  const int warp = threadIdx.x >> 5, few = R.k ? R.k : 32;
  const bool last = warp == FINISHING_THREADS / 32 - 1, off = R.padding || R.bad;
  float top;
  int live;
  if (last) {
    const Merged& m = merge(P, R, st, sm);
    top = m.top, live = m.live;
  } else {
    if (warp == 0) look(P, st, off ? 0 : few, sm);
    sync_apart<FINISHING_THREADS - 32>();
    top = sm.top, live = sm.live;
  }
  MARK(3);
  const bool none = off || top == -INF;
  if (none || (top < INF && (R.greedy || (!R.filtered && !GUMBEL_RACE)))) {
    if (last) write(P, R, row, sm.merged, none ? Cut{} : best_of_tiles(P, R, st, sm.merged), 0);
    return true;
  }
#if GUMBEL_RACE
  if (top < INF && !R.filtered) {
    sync<FINISHING_THREADS>();  // the tiles have been added up
    const Cut c = race(P, src, R, st, sm);
    if (warp == 0) write(P, R, row, sm.merged, c, 0);
    return true;
  }
#endif
#if !PLAIN
  if (R.filtered && top < INF && R.k <= ASKED) {
    int n = -1;
    if (few <= live) n = by_tiles(P, src, st, few, last, sm);
    else sync<FINISHING_THREADS>();
    // A nucleus without another filter that the largest number of candidates could not hold
    if (!R.k && !(R.m > 0.f) && R.p * sm.merged.Z > float(CANDIDATES)) return false;
#pragma unroll 1
    for (int want = few; want <= ASKED; want *= 4) {
      if (want > few || n < 0) n = by_groups(P, R, src, st, want, sm);
      MARK(5);
      if (n >= 0 && end_by(P, R, row, n, sm)) return true;
      if (R.k && !(R.m > 0.f)) break;
    }
  }
#endif
  return false;
}
// A row that the tiles do not settle, by all threads of the block.
__device__ __noinline__ void finish_exactly(const Params& P, const Stored* src, int row, int blocks, Shared& sm) {
  __syncthreads();
  const Row& R = row_in(sm);
  Merged m = sm.merged;
  if (m.top == INF) m.tokens = count_peers(P, src, blocks, sm), m.Z = m.raw = float(m.tokens);  // uniform over +inf
  if (!R.greedy) exact_search(P, src, m.top, m.low, m.Z, m.tokens, blocks, sm);
  if (threadIdx.x < 32) write(P, R, row, m, R.greedy ? best_of_tiles(P, R, stats_in(sm), m) : sm.cut, R.greedy ? 0 : 32);
}
#ifdef CLOCKS
#define SHOW_MARKS() __syncthreads(); if (threadIdx.x < 10) P.threshold_id[row * 10 + threadIdx.x] = sm.marks[threadIdx.x]
#else
#define SHOW_MARKS()
#endif

#if FINISHERS
#define READERS (WARPS - FINISHERS)
__device__ __forceinline__ void refill(const Params& P, int row, int buffer, Shared& sm) {  // for the next row of a buffer
  if (row < P.N) sm.row[buffer] = row_of(P, parameters_of(P, row));
  sm.best[buffer] = 0, sm.pending[buffer] = 0;
}
__device__ __forceinline__ const Stored* logits_of(const Params& P, int row) { return static_cast<const Stored*>(P.logits) + row * P.row_stride; }
// A row by the exact search, by all threads, once the next one has been read.
__device__ __noinline__ void exactly_now(const Params& P, int row, int buffer, Shared& sm) {
  __syncthreads();
  if (threadIdx.x == 0) sm.buffer = buffer;
  finish_exactly(P, logits_of(P, row), row, 1, sm);
  __syncthreads();
  if (threadIdx.x == 0) refill(P, row + 2 * gridDim.x, buffer, sm);
  __syncthreads();
}
template <bool NOISY> __device__ __forceinline__ int read_row(const Params& P, const Stored* src, int tile, const Row& row, u32* row_best, Stats* st) {
  const Row R = row;
#pragma unroll 1
  for (; tile < P.tiles; tile += READERS) {
    Tile x;
    load_tile(x, P, src, tile);
    const int count = clean(x, P, tile);
    stream_tile<NOISY>(P, R, row, src, tile, x, count, row_best, st);
  }
  return tile;
}
__device__ __forceinline__ void read_rows(const Params& P, Shared& sm) {
  const int lane = threadIdx.x & 31, step = gridDim.x;
  int tile = (threadIdx.x >> 5) - FINISHERS;
#pragma unroll 1
  for (int i = 0, row = blockIdx.x; row < P.N + 2 * step; ++i, row += step) {
    const int b = i & 1;
    if (i >= 2) {
      wait_until(&sm.empty[b], i / 2);
      if (sm.pending[b]) exactly_now(P, row - 2 * step, b, sm);
    }
    if (row >= P.N) continue;
    const Row& R = sm.row[b];
    const Stored* src = logits_of(P, row);
    if (R.padding)
      while (tile < P.tiles) tile += READERS;
    else if (R.filtered || R.greedy) tile = read_row<false>(P, src, tile, R, &sm.best[b], &sm.st[b]);
    else tile = read_row<true>(P, src, tile, R, &sm.best[b], &sm.st[b]);
    tile -= P.tiles;
    __syncwarp();
    if (lane == 0) add_seen(&sm.full[b]);
  }
}
__device__ __forceinline__ void finish_rows(const Params& P, Shared& sm) {
  const int step = gridDim.x;
#pragma unroll 1
  for (int i = 0, row = blockIdx.x; row < P.N; ++i, row += step) {
    const int b = i & 1;
    if (threadIdx.x == 0) sm.n_found = sm.n_again = 0;
    MARK(1);
    if (threadIdx.x < 32) wait_until(&sm.full[b], (i / 2 + 1) * READERS);
    sync<FINISHING_THREADS>();
    MARK(2);
    const bool done = finish(P, logits_of(P, row), row, sm.row[b], sm.st[b], sm);
    sync<FINISHING_THREADS>();
    MARK(9);
    if (threadIdx.x == 0) {
      if (done) refill(P, row + 2 * step, b, sm);
      else sm.pending[b] = 1;
      add_seen(&sm.empty[b]);
    }
    if (!done) exactly_now(P, row, b, sm);
  }
}
extern "C" __global__ void __launch_bounds__(NT, PER_SM) sample(const __grid_constant__ Params P) {
  extern __shared__ __align__(16) char memory[];
  Shared& sm = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x >= FINISHING_THREADS) prefetch(logits_of(P, blockIdx.x) + min(int(threadIdx.x - FINISHING_THREADS) * (TILE / 32), P.V - 1));  // its first tiles
  if (threadIdx.x < 2) {
    const int b = threadIdx.x;
    sm.full[b] = sm.empty[b] = 0;
    refill(P, blockIdx.x + b * gridDim.x, b, sm);
  }
  __syncthreads();
  if (threadIdx.x < FINISHING_THREADS) finish_rows(P, sm);
  else read_rows(P, sm);
}
#else
#define EARLY (NT * PER_SM <= 512)  // registers suffice to hold a tile while something else is done
static_assert(!AHEAD || EARLY, "two tiles");
extern "C" __global__ void CLUSTERED __launch_bounds__(NT, PER_SM) sample(const __grid_constant__ Params P) {
  extern __shared__ __align__(16) char memory[];
  Shared& sm = *reinterpret_cast<Shared*>(memory);
  const int tid = threadIdx.x, row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, step = CLUSTER * WARPS;
  MARK(0);
  cluster_arrive();     // this block runs: others may write to its memory
  const Stored* src = static_cast<const Stored*>(P.logits) + row * P.row_stride;
  int tile = CLUSTER - 1 - rank + CLUSTER * (tid >> 5);  // the last warps have the least to read, first in the block that ends
  Tile x, y;
  if (tile < P.tiles) {  // before anything is waited for
    if (EARLY) load_tile(x, P, src, tile);
    else prefetch(src + min(tile * TILE + (tid & 31) * (TILE / 32), P.V - 1));
  }
  const Row R = row_of(P, parameters_of(P, row));
  if (tid == 0) sm.n_found = sm.n_again = 0, sm.best[0] = 0, sm.row[0] = R;
  __syncthreads();
  cluster_wait();
  Stats* to = &in_block(&sm, 0)->st[0];
#define READ(NOISY) \
  _Pragma("unroll 1") while (tile < P.tiles) { \
    if (!EARLY) load_tile(x, P, src, tile); \
    if (AHEAD && tile + step < P.tiles) load_tile(y, P, src, tile + step); \
    const int count = clean(x, P, tile); \
    stream_tile<NOISY>(P, R, sm.row[0], src, tile, x, count, &sm.best[0], to); \
    tile += step; \
    if (AHEAD) copy_tile(x, y); \
    else if (EARLY && tile < P.tiles) load_tile(x, P, src, tile); \
  }
  if (R.padding) {}
  else if (R.filtered || R.greedy) { READ(false) }
  else { READ(true) }
  // Blocks of a row that may need the exact search wait for it; the others leave.
  const bool stays = CLUSTER > 1 && !R.bad && !R.padding && R.filtered && !R.greedy && (R.k == 0 || R.k > ASKED);
  const int blocks = stays ? CLUSTER : 1;
  MARK(1);
  cluster_arrive();
  if (rank) {
    if (stays) cluster_wait(), serve(P, src, rank, sm);
    return;
  }
  cluster_wait();
  MARK(2);
  if (!finish(P, src, row, R, sm.st[0], sm)) finish_exactly(P, src, row, blocks, sm);
  MARK(9);
  SHOW_MARKS();
  if (blocks > 1) {
    __syncthreads();
    if (tid < blocks) in_block(&sm, tid)->order.kind = LEAVE;
    cluster_barrier(blocks);
  }
}
#endif
