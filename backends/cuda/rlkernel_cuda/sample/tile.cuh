// The pass over one tile of 1024 tokens by one warp. NaN counts as -inf.
//
// The tiling is fixed, so every sum has one order whatever the batch, the cluster or the number of threads.
#pragma once
#include "sample/gumbel_noise.cuh"

struct Winner { float x, g; int id; };  // logit, noise and id of the best of a tile; id < 0: none
struct Stats {         // of every tile of a row, in the block that finishes it
  float top[TILES], sum[TILES], raw[TILES];  // best logit; sum of exp((x - top) / T); the same with T = 1
  int count[TILES];    // tokens above -inf; bit 16: the tile holds NaN
  Winner winner[TILES];
  float group[GROUPS]; // best logit; in a race, a bound below the times at which its tokens arrive
};

// ---- reading a tile: lane l holds ids 4 l .. 4 l + 3 of each of the 8 groups
typedef float Tile[8][4];
__device__ __forceinline__ void load_tile(Tile& x, const Params& P, const Stored* src, int tile) {
  const int base = tile * TILE + (threadIdx.x & 31) * 4;
  if ((P.whole & 1) && tile * TILE + TILE <= P.V) {
#pragma unroll
    for (int g = 0; g < 8; ++g) load4(x[g], src + base + g * WIDTH);
#if CLUSTER == 1  // the end of a row, where it cuts no quad; more code costs a few rows more than it brings them
  } else if (P.whole & 2) {
#pragma unroll
    for (int g = 0; g < 8; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[g][j] = -INF;
      if (base + g * WIDTH < P.V) load4(x[g], src + base + g * WIDTH);
    }
#endif
  } else {
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int id = base + g * WIDTH + j;
        x[g][j] = id < P.V ? value_at(src + id) : -INF;
      }
  }
}
__device__ __forceinline__ void copy_tile(Tile& x, const Tile& y) {
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i >> 2][i & 3] = y[i >> 2][i & 3];
}
// Puts -inf in the place of NaN. Returns how many tokens are above -inf, with bit 16 where there was NaN.
__device__ __forceinline__ int clean(Tile& x, const Params& P, int tile) {
  float probe[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int g = 0; g < 8; ++g)
#pragma unroll
    for (int j = 0; j < 4; ++j) probe[j] += x[g][j];
  const float odd = (probe[0] + probe[1]) + (probe[2] + probe[3]);
  if (!any_lane(!(fabsf(odd) < INF))) return TILE;
  int n = 0, nan = 0;
#pragma unroll
  for (int g = 0; g < 8; ++g)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (x[g][j] != x[g][j]) x[g][j] = -INF, nan = 1;
      n += x[g][j] > -INF;
    }
  return lanes_add(n) | (any_lane(nan) ? 1 << 16 : 0);
}
template <typename V> __device__ __forceinline__ V warp_sum(V v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += from_across(v, o);
  return v;
}
template <typename V> __device__ __forceinline__ V warp_scan(V v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const V w = from_below(v, o);
    if (lane >= o) v += w;
  }
  return v;
}
// Sum of exp2((x - top) s), top finite. Quads: the sums of four tokens, times 2^lo.
struct Quads { float of[8], lo; };
template <bool STORE> __device__ __forceinline__ float sum_of(const Tile& x, float top, float s, Quads& q) {
  const float hi = top * s, lo = fmaf(top, s, -hi);
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    float e[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) e[j] = ex2(fmaf(x[g][j], s, -hi)), acc[j] += e[j];
    if (STORE) q.of[g] = (e[0] + e[1]) + (e[2] + e[3]);
  }
  float sum = warp_sum((acc[0] + acc[1]) + (acc[2] + acc[3])) * ex2(-lo);
  if (STORE) q.lo = lo;
  if (!(sum >= 0.5f && sum < INF)) {  // x s overflowed, or lo is beyond the range of exp2: top alone adds 1
    acc[0] = 0.f;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      if (STORE) q.of[g] = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float e = x[g][j] > -INF ? ex2((x[g][j] - top) * s) : 0.f;
        acc[0] += e;
        if (STORE) q.of[g] += e;
      }
    }
    sum = warp_sum(acc[0]);
    if (STORE) q.lo = 0.f;
  }
  return sum;
}
__device__ __forceinline__ float sum_of(const Tile& x, float top, float s) {
  Quads none;
  return sum_of<false>(x, top, s, none);
}
// A bound below the times E / w, in words of noise, of a lane's tokens: E >= u, and the smallest word of four tokens with the
// sum of their weights stands for all four.
__device__ __forceinline__ float least_time(const Params& P, const Row& R, int tile, const Quads& q) {
  const u32 block = u32(tile * TILE + (threadIdx.x & 31) * 4) >> 2;
  float least = INF;
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    u32 word[4];
    philox_min4(word, block + half * (WIDTH / 4), R, P.stream);
#pragma unroll
    for (int g = 0; g < 4; ++g) least = fminf(least, float(word[g]) * reciprocal(q.of[half + g]));
  }
  return least * ex2(q.lo);
}

// The token of a tile with the best noised score. A token can win only if its E / w is below a bound, where E >= u: most
// need their word of noise and one comparison, of the smallest of four words with the largest of four weights. The bound is
// that of the best score seen in the row, or 8 / (sum of weights), which one tile in 3000 misses and tries again, wider.
__device__ __forceinline__ Winner noise_tile(const Params& P, const Row& R, int tile, const Tile& x, float top, float sum, u32* row_best) {
  const int lane = threadIdx.x & 31, base = tile * TILE + lane * 4;
  // One lane's word for all: what follows must not part the warp.
  const float hi = top * R.s, seen = unordered(from_lane(*reinterpret_cast<volatile u32*>(row_best), 0));
  // Scores in the row are top / T + score in the tile; the margin covers the rounding of the first.
  const float margin = 32.01f + 1e-6f * fabsf(hi);
  const float from_seen = seen > -INF ? ex2(fmaf(-seen, LOG2E, hi) + margin) : INF;
  Winner best = {0.f, 0.f, -1};
  for (float bound = __fdividef(8.f, sum);; bound *= 8.f) {
    const float limit = fminf(fminf(from_seen < INF ? from_seen : 3e38f, bound * 4299262263.f), 3e38f);
    u32 hits = 0;
    u64 key = 0;
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      u32 word[4];
      philox_min4(word, u32(base + half * WIDTH) >> 2, R, P.stream);
#pragma unroll
      for (int g = half; g < half + 4; ++g) {
        const float most = fmaxf(fmaxf(x[g][0], x[g][1]), fmaxf(x[g][2], x[g][3]));
        if (float(word[g - half]) < weight(most, top, R) * limit) hits |= 1u << g;
      }
    }
    while (any_lane(hits != 0)) {
      if (hits) {
        const int g = first_bit(hits), id = base + g * WIDTH;
        hits &= hits - 1;
        float y[4];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i == g) y[0] = x[i][0], y[1] = x[i][1], y[2] = x[i][2], y[3] = x[i][3];
        u32 w[4];
        philox(w, u32(id) >> 2, R, P.stream);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (y[j] > -INF && float(w[j]) < weight(y[j], top, R) * limit) {
            const float noise = gumbel(w[j]);
            const u64 mine = make_key(scaled(y[j], top, R) + noise, id + j);
            if (mine > key) key = mine, best.x = y[j], best.g = noise, best.id = id + j;
          }
      }
    }
    const u32 score = lanes_max(u32(key >> 32));
    if (score) {
      const u32 id = lanes_max(u32(key >> 32) == score ? u32(key) : 0u);
      const int owner = first_bit(lanes_where(key == (u64(score) << 32 | id)));
      best.x = from_lane(best.x, owner), best.g = from_lane(best.g, owner), best.id = from_lane(best.id, owner);
      const float of_row = unordered(score) + hi * 0.69314718f;
      if (lane == 0 && fabsf(of_row) < INF) atomicMax(row_best, ordered(of_row));
    }
    // Every token that was passed over has E / w above the bound.
    if (limit >= 3e38f || limit == from_seen) return best;
    if (score && unordered(score) > -logf(bound) + 1e-3f) return best;
  }
}
__device__ __forceinline__ float lane_best(const Tile& x) {
  float l[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) l[j] = x[0][j];
#pragma unroll
  for (int g = 1; g < 8; ++g)
#pragma unroll
    for (int j = 0; j < 4; ++j) l[j] = fmaxf(l[j], x[g][j]);
  return fmaxf(fmaxf(l[0], l[1]), fmaxf(l[2], l[3]));
}
#if !PLAIN  // rows without a filter among rows with one: the noise must not cost the others registers
__device__ __noinline__ Winner noise_again(const Params& P, const Row& R, const Stored* src, int tile, float top, float sum, u32* row_best) {
  Tile x;
  load_tile(x, P, src, tile);
  clean(x, P, tile);
  return noise_tile(P, R, tile, x, top, sum, row_best);
}
#endif
// x has been cleaned. R: the row's parameters in registers; `row`: the same in memory. NOISY: the row has no filter. Rows with one are read by
// a loop of their own, in which nothing is called: what lives across calls would be kept in memory.
template <bool NOISY> __device__ __forceinline__ void stream_tile(const Params& P, const Row& R, const Row& row, const Stored* src, int tile, Tile& x, int count, u32* row_best, Stats* st) {
  const int lane = threadIdx.x & 31;
  float top;
  if (PLAIN) {
    top = unordered(lanes_max(ordered(lane_best(x))));
  } else {
    const float best = lane_best(x), across = from_across(best, 1);
    if (!(lane & 1)) st->group[tile * PER_TILE + lane / 2] = fmaxf(best, across);
    top = unordered(lanes_max(ordered(best)));
  }
  float sum = 0.f, raw = 0.f, least = INF;
  if (fabsf(top) < INF) {
    Quads q;
    sum = sum_of<NOISY && GUMBEL_RACE>(x, top, R.s, q);
    if (P.raw) raw = R.T == 1.f ? sum : sum_of(x, top, LOG2E);
    if (NOISY && GUMBEL_RACE) least = least_time(P, R, tile, q);
  }
  if (NOISY && GUMBEL_RACE) {
    const float across = from_across(least, 1);
    if (!(lane & 1)) st->group[tile * PER_TILE + lane / 2] = fminf(least, across);
  }
  if (lane == 0) st->top[tile] = top, st->sum[tile] = sum, st->raw[tile] = raw, st->count[tile] = count;
  if (!NOISY && R.greedy) {  // the first of the best
    u32 id = FULL;
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (x[g][j] == top) id = min(id, u32(tile * TILE + g * WIDTH + lane * 4 + j));
    id = lanes_min(id);
    if (lane == 0) st->winner[tile] = Winner{top, 0.f, int(id)};
  }
  if (!NOISY || GUMBEL_RACE) return;
  Winner w = {0.f, 0.f, -1};
  if (fabsf(top) < INF) {
#if PLAIN
    w = noise_tile(P, R, tile, x, top, sum, row_best);
#else
    w = noise_again(P, row, src, tile, top, sum, row_best);
#endif
  }
  if (lane == 0) st->winner[tile] = w;
}
