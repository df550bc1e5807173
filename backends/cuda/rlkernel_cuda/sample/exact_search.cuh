// Exact threshold search for top-k, top-p and min-p: all blocks of the cluster read the row again, tile by tile.
//
// A filter keeps a prefix of the order, so it ends at a token: found by a histogram of the row, then by sorting the tokens
// of the one bin where it ends. The first histogram is linear in the logits that matter, then come three over the bits of all;
// what is left after those are ties, told apart by id. Masses in histograms are integers and guide only: what counts is
// summed in fp32, tile by tile in order. The draw is made in the pass that collects the bin.
#pragma once
#include "sample/tile.cuh"

enum { LEAVE, COUNT, FILL, PASS };
struct Order {          // what the cluster does next
  int kind, level, bin, by_mass, draw;
  float top, inv, log_m, scale;
  u32 prefix, shift;    // levels 0 to 2: bits of the logit above `shift + bits` are `prefix`
  u64 cut;              // level 3: tokens at or above it
};
struct Cut {            // the kept: how many, their mass, the last of them (0: none is dropped); the drawn token
  int kept;
  float mass, x;
  u64 last;
  int token;
};
struct Merged {         // what the tiles of a row add up to
  float top, low, Z, raw;
  int tokens, live, nan;  // live: tiles with a token
};
struct Shared {
  Stats st[BUFFERS];
  Row row[BUFFERS];
  u64 red[2][WARPS];
  int again[REREAD];
  int n_found, n_again, at, sure, live;
  float level, top;
  u64 before;
  u32 best[BUFFERS];
  Order order;
  Merged merged;
  Cut cut;
  int buffer;           // where the exact search finds its row
#if FINISHERS
  u32 full[BUFFERS], empty[BUFFERS];  // how often its statistics were complete, and read
  int pending[BUFFERS];               // whether its row needs the exact search
#endif
#ifdef CLOCKS
  i64 marks[10];
#endif
  union {
    u32 bins[BINS];
    float prefix[CANDIDATES];
    struct {            // of few candidates: in order, where each was found and what it weighs, and scores as they were found
      u64 sorted[RANKED];
      int from[RANKED];
      float weight[RANKED];
      u64 score[RANKED];
    };
  };
  u64 found[CANDIDATES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES && NT <= BINS / 2, "what the launch asks for");
__device__ __forceinline__ Stats& stats_in(Shared& sm) { return sm.st[BUFFERS > 1 ? sm.buffer : 0]; }
__device__ __forceinline__ Row& row_in(Shared& sm) { return sm.row[BUFFERS > 1 ? sm.buffer : 0]; }
__device__ __forceinline__ u32& best_in(Shared& sm) { return sm.best[BUFFERS > 1 ? sm.buffer : 0]; }

__device__ __forceinline__ void cluster_barrier(int blocks) {
  if (blocks > 1) cluster_arrive(), cluster_wait();
  else __syncthreads();
}
__device__ __forceinline__ u64 warp_max(u64 v) {
  const u32 high = lanes_max(u32(v >> 32));
  return u64(high) << 32 | lanes_max(u32(v >> 32) == high ? u32(v) : 0u);
}
template <int SIZE> __device__ u64 finishers_max(u64 v, Shared& sm) {
  v = warp_max(v);
  sync<SIZE>();
  if ((threadIdx.x & 31) == 0) sm.red[0][threadIdx.x >> 5] = v;
  sync<SIZE>();
  return warp_max(sm.red[0][(threadIdx.x & 31) % (SIZE / 32)]);
}
// First bin whose running sum reaches `target` -> sm.at (BINS if none does), and the sum before it -> sm.before.
__device__ __noinline__ void find(u64 before, u64 target, Shared& sm) {
  constexpr int EACH = (BINS + NT - 1) / NT;  // the last threads have fewer where NT does not divide them
  const int tid = threadIdx.x, warp = tid >> 5, i0 = min(tid * EACH, BINS), i1 = min(i0 + EACH, BINS);
  u64 part = 0;
  for (int i = i0; i < i1; ++i) part += sm.bins[i];
  const u64 upto = warp_scan(part);
  __syncthreads();
  if ((tid & 31) == 31) sm.red[0][warp] = upto;
  if (tid == 0) sm.at = BINS;
  __syncthreads();
  u64 run = before + upto - part, total = before;
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) run += sm.red[0][i];
    total += sm.red[0][i];
  }
  if (tid == 0 && total < target) sm.before = total;
  if (run < target && run + part >= target)
    for (int i = i0; i < i1; ++i) {
      const u64 next = run + sm.bins[i];
      if (next >= target) {
        sm.at = i, sm.before = run;
        break;
      }
      run = next;
    }
  __syncthreads();
}
template <int SIZE> __device__ __noinline__ void sort_descending(u64* a, int n) {
  int size = 2;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += SIZE) a[i] = 0;
  for (int width = 2; width <= size; width *= 2)
    for (int step = width / 2; step; step /= 2) {
      sync<SIZE>();
      for (int i = threadIdx.x; i < size / 2; i += SIZE) {
        const int l = (i / step) * 2 * step + i % step, h = l + step;
        const u64 x = a[l], y = a[h];
        if ((x < y) == ((l & width) == 0)) a[l] = y, a[h] = x;
      }
    }
  sync<SIZE>();
}
// Bin of a token in an order's level 0 to 2, best first; -1: above all bins, BINS: below. Level 3 tells kept from dropped.
__device__ __noinline__ int bin_of(const Order& o, float x, int id) {
  if (o.level == 3) return make_key(x, id) >= o.cut ? -1 : BINS;
  const int bits = o.level < 2 ? 11 : 10;
  const u32 v = ordered(x), high = o.level ? v >> (o.shift + bits) : 0u;
  if (high != o.prefix) return high > o.prefix ? -1 : BINS;
  return (1 << bits) - 1 - int((v >> o.shift) & ((1u << bits) - 1));
}
__device__ __forceinline__ int id_at(int tile, int i) {  // of what a lane holds at x[i / 4][i % 4]
  return tile * TILE + (i >> 2) * WIDTH + (threadIdx.x & 31) * 4 + (i & 3);
}
// What one block of the cluster does for an order; the answers go to the block that finishes.
__device__ __noinline__ void run_share(const Params& P, const Stored* src, int rank, int blocks, Shared& sm, Shared& head) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Order& o = sm.order;
  const Row& R = row_in(sm);
  const bool linear = o.level < 0, peers = o.top == INF;  // peers: all tokens at +inf, the law of the row
  // Copies: what atomics write could be these, for all the compiler knows.
  const float M = peers ? 0.f : o.top, inv = o.inv, s = R.s, scale = o.scale, log_m = o.log_m, lo = o.bin, hi = lo + 1.f;
  const int kind = o.kind, by_mass = o.by_mass, draw = o.draw, tiles = P.tiles;
  Stats& stats = stats_in(head);
  // Two histograms, of odd lanes and of even ones: neighbors meet less often.
  u32* bins = lane & 1 ? reinterpret_cast<u32*>(sm.found) : sm.bins;
  if (kind == FILL) {
    for (int i = threadIdx.x; i < BINS; i += NT) sm.bins[i] = reinterpret_cast<u32*>(sm.found)[i] = 0;
    __syncthreads();
  }
#pragma unroll 1
  for (int tile = rank + blocks * warp; tile < tiles; tile += blocks * WARPS) {
    Tile x;
    load_tile(x, P, src, tile);
    clean(x, P, tile);
    if (peers)
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i >> 2][i & 3] = x[i >> 2][i & 3] == INF ? 0.f : -INF;
    if (kind == COUNT) {
      int n = 0;
#pragma unroll
      for (int g = 0; g < 8; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) n += x[g][j] > -INF && scaled(x[g][j], M, R) >= log_m;
      n = lanes_add(n);
      if (lane == 0) stats.count[tile] = n;
      continue;
    }
    u32 kept = 0, inside = 0;
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    if (linear && kind == FILL) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float v = x[i >> 2][i & 3], at = (M - v) * inv, w = ex2((v - M) * s) * scale;
        // An amount below 2^22 is rounded by an addition: conversions are few at a time.
        if (at < BINS) atomicAdd(&bins[whole_of(at)], !by_mass ? 1u : scale <= 4194304.f ? bits_of(w + 8388608.f) & 0x7fffff : u32(w + 0.5f));
      }
    } else if (linear) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float v = x[i >> 2][i & 3], at = (M - v) * inv;
        const bool in = at < lo, on = v > -INF && !in && !(at >= hi);
        if (in) kept |= 1u << i;
        if (on) inside |= 1u << i;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const int id = id_at(tile, i);
        const float v = id < P.V ? value_at(src + id) : -INF;
        if (peers ? v != INF : !(v > -INF)) continue;
        const int b = bin_of(o, v, id);
        if (kind == PASS) kept |= u32(b < o.bin) << i, inside |= u32(b == o.bin && b >= 0) << i;
        else if (b >= 0 && b < BINS) atomicAdd(&bins[b], by_mass ? u32((peers ? 1.f : weight(v, M, R)) * scale + 0.5f) : 1u);
      }
    }
    if (kind == FILL) continue;
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[g][j] = kept >> (g * 4 + j) & 1 ? x[g][j] : -INF;
        part[j] += ex2((x[g][j] - M) * s);
      }
    for (; inside; inside &= inside - 1) {
      const int id = id_at(tile, first_bit(inside)), a = atomicAdd(&head.n_found, 1);
      if (a < CANDIDATES) head.found[a] = make_key(value_at(src + id), id);
    }
    __syncwarp();
    const float sum = warp_sum((part[0] + part[1]) + (part[2] + part[3]));
    const int n = lanes_add(__popc(kept));
    if (lane == 0) stats.count[tile] = n, stats.raw[tile] = sum;
    if (draw) {
      Winner w = {0.f, 0.f, -1};
      if (n) w = noise_tile(P, R, tile, x, M, sum, &best_in(sm));
      if (lane == 0) stats.winner[tile] = w;
    }
  }
  if (kind == FILL) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += NT) sm.bins[i] += reinterpret_cast<u32*>(sm.found)[i];
  }
}
// One order, carried out by the cluster. By the block that finishes, whose threads agree on `o`.
__device__ __noinline__ void run_order(const Params& P, const Stored* src, const Order& o, int blocks, Shared& sm) {
  __syncthreads();
  if (int(threadIdx.x) < blocks) {
    Shared* to = in_block(&sm, threadIdx.x);
    to->order = o, best_in(*to) = 0;
  }
  if (threadIdx.x == 0) sm.n_found = 0;
  cluster_barrier(blocks);
  if (o.kind == LEAVE) return;
  run_share(P, src, 0, blocks, sm, sm);
  cluster_barrier(blocks);
  if (o.kind == FILL && blocks > 1) {
    for (int i = threadIdx.x; i < BINS; i += NT) {
      u32 n = sm.bins[i];
#pragma unroll
      for (int c = 1; c < CLUSTER; ++c) n += in_block(&sm, c)->bins[i];
      sm.bins[i] = n;
    }
    __syncthreads();
  }
}
// The other blocks of the cluster.
__device__ __noinline__ void serve(const Params& P, const Stored* src, int rank, Shared& sm) {
  for (;;) {
    cluster_barrier(CLUSTER);
    if (sm.order.kind == LEAVE) return;
    run_share(P, src, rank, CLUSTER, sm, *in_block(&sm, 0));
    cluster_barrier(CLUSTER);
  }
}

// Sums of the tiles of the last pass: the same for all lanes of all warps.
__device__ __forceinline__ float mass_of_tiles(const Params& P, Shared& sm, int& n) {
  const Stats& st = stats_in(sm);
  float s = 0.f;
  n = 0;
  for (int t = threadIdx.x & 31; t < P.tiles; t += 32) s += st.raw[t], n += st.count[t];
  n = lanes_add(n);
  return warp_sum(s);
}
// The prefix with `count` tokens or, by mass, the shortest one with the mass `goal`; it ends above `reach`, as a rule.
__device__ __noinline__ Cut select(const Params& P, const Stored* src, float M, float reach, float Z, bool by_mass, int count, double goal, bool draw, int blocks, Shared& sm) {
  const Row& R = row_in(sm);
  const int tid = threadIdx.x, lane = tid & 31;
  Order o = {};
  o.kind = FILL, o.level = -1, o.by_mass = by_mass, o.top = M, o.inv = M < INF && M > reach ? BINS / (M - reach) : 0.f;
  if (!(o.inv < INF)) o.inv = 0.f;
  o.scale = 2147483648.f / Z;
  const u64 target = by_mass ? u64(max(1., goal * o.scale)) : u64(count);
  u64 before = 0;
  int n_above = 0;
  float above = 0.f;
  for (;;) {
    o.kind = FILL;
    run_order(P, src, o, blocks, sm);
    find(before, target, sm);
    if (o.level < 0 && sm.at == BINS) {  // it ends below the range
      o.level = 0, o.shift = 21;
      continue;
    }
    o.kind = PASS, o.draw = draw;
    o.bin = min(sm.at, BINS - 1);
    const u64 upto = sm.before;
    bool fits = true;
    for (int tries = 0; tries < 4; ++tries) {
      run_order(P, src, o, blocks, sm);
      above = mass_of_tiles(P, sm, n_above);
      fits = sm.n_found <= CANDIDATES;
      if (!fits) break;
      if (by_mass && above >= goal && o.bin > 0 && n_above) --o.bin;   // the guide was off by its rounding
      else break;
    }
    if (fits || o.level == 2) {
      if (fits) break;
      // ties beyond number: how many of them, and the id where they end
      const float one = M == INF ? 1.f : weight(unordered(o.prefix << 10 | u32(1023 - o.bin)), M, R);
      const double want = by_mass ? ceil((goal - above) / one) : count - n_above;
      const int r = max(1, min(int(min(want, 1e9)), sm.n_found));
      const u32 value = o.prefix << 10 | u32(1023 - o.bin);
      if (tid == 0) sm.at = P.V;
      __syncthreads();
      int seen = 0;
      if (tid < 32)
        for (int base = 0; base < P.V && seen < r; base += 32) {
          const int id = base + lane;
          const float v = id < P.V ? value_at(src + id) : -INF;
          const u32 ties = lanes_where(v == v && ordered(v) == value && id < P.V);
          const int upto_me = __popc(ties & (FULL >> (31 - lane)));
          if ((ties >> lane & 1) && seen + upto_me == r) sm.at = id;
          seen += __popc(ties);
        }
      __syncthreads();
      o.level = 3, o.bin = 0, o.cut = u64(value) << 32 | u32(~sm.at);
      run_order(P, src, o, blocks, sm);
      above = mass_of_tiles(P, sm, n_above);
      break;
    }
    if (o.level >= 0) before = upto, o.prefix = o.prefix << 11 | u32(2047 - o.bin);
    ++o.level;
    o.shift = o.level == 0 ? 21 : o.level == 1 ? 10 : 0;
  }
  const int n = o.level == 3 ? 0 : sm.n_found;
  Cut c = {n_above, above, 0.f, o.cut, -1};
  u64 best = 0;
  float best_x = 0.f;
  if (draw)
    for (int t = tid; t < P.tiles; t += NT) {
      const Winner w = stats_in(sm).winner[t];
      if (w.id < 0) continue;
      const u64 key = make_key((M == INF ? 0.f : scaled(w.x, M, R)) + w.g, w.id);
      if (key > best) best = key, best_x = w.x;
    }
  if (n) {
    sort_descending<NT>(sm.found, n);
    float* prefix = sm.prefix;
    if (tid < 32) {     // one warp: a few hundred at most, and the order of the sum is that of the tokens
      float run = above;
      for (int base = 0; base < n; base += 32) {
        const float w = base + lane < n ? (M == INF ? 1.f : weight(key_value(sm.found[base + lane]), M, R)) : 0.f;
        const float s = run + warp_scan(w);
        if (base + lane < n) prefix[base + lane] = s;
        run = from_lane(s, 31);
      }
    }
    __syncthreads();
    int inside = 0;
    for (int i = lane; i < n; i += 32) inside += by_mass ? (i ? prefix[i - 1] : above) < goal : n_above + i < count;
    inside = lanes_add(inside);
    inside = max(inside, 1);
    c.kept += inside, c.mass = prefix[inside - 1], c.last = sm.found[inside - 1];
    if (draw)
      for (int i = tid; i < inside; i += NT) {
        const u64 k = sm.found[i];
        const u64 key = make_key((M == INF ? 0.f : scaled(key_value(k), M, R)) + token_noise(key_id(k), R, P.stream), key_id(k));
        if (key > best) best = key, best_x = key_value(k);
      }
  }
  if (draw) {
    const u64 winner = finishers_max<NT>(best, sm);
    __syncthreads();
    if (best == winner) sm.red[1][0] = bits_of(best_x);
    __syncthreads();
    c.token = key_id(winner), c.x = float_of(u32(sm.red[1][0]));
  }
  return c;
}
// A row with +inf is uniform over those tokens.
__device__ __noinline__ int count_peers(const Params& P, const Stored* src, int blocks, Shared& sm) {
  Order o = {};
  int n;
  o.kind = COUNT, o.top = INF, o.log_m = -INF;
  run_order(P, src, o, blocks, sm);
  mass_of_tiles(P, sm, n);
  return n;
}
// The search, for rows whose candidates are too few.
__device__ __noinline__ void exact_search(const Params& P, const Stored* src, float top, float low, float Z, int tokens, int blocks, Shared& sm) {
  const Row& R = row_in(sm);
  int left = tokens;
  if (R.m > 0.f) {
    Order o = {};
    o.kind = COUNT, o.top = top, o.log_m = logf(R.m);
    run_order(P, src, o, blocks, sm);
    mass_of_tiles(P, sm, left);
    left = max(left, 1);
  }
  if (R.k) left = min(left, R.k);
  const float reach = top < INF ? top - 2.f * (top - low) : 0.f;
  const bool nucleus = R.p < 1.f;
  float mass = Z;
  if (nucleus && left < tokens) mass = select(P, src, top, reach, Z, false, left, 0., false, blocks, sm).mass;
  // All tokens below (1 - p) / (tokens) of the mass weigh less than what a nucleus leaves out: it ends above them.
  const float least = top + logf(0.5f * (1.f - R.p) * mass / float(left)) * R.T;
  const Cut c = select(P, src, top, nucleus && top < INF ? least : reach, Z, nucleus, left, double(R.p) * mass, true, blocks, sm);
  if (threadIdx.x == 0) sm.cut = c;
  __syncthreads();
}
