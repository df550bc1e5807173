// The parameters of a row, keys that order tokens, noise, and the pass over one tile of 1024 tokens by one warp.
//
// The tiling is fixed, so every sum has one order whatever the batch, the cluster or the number of threads.
// Order everywhere: value descending, token id ascending. NaN counts as -inf.
// Noise: Philox4x32-10 (Salmon et al., SC 2011), key = seed, counter = (id div 4, step, stream), word = id mod 4.

#define WIDTH 128      // tokens that a warp reads at once
#define TILE 1024
#define TILES 256      // most tiles of a row
#define PER_TILE 16    // groups of a tile: what two neighbouring lanes hold of it, 64 tokens
#define GROUPS (PER_TILE * TILES)
#define BINS 2048      // of the exact search
#define COARSE 256     // bins of the group maxima
#define CANDIDATES 2048
#define ASKED 512      // most of the best groups that are asked for
#define REREAD 1024    // groups that may be read again
#define RANKED 256     // candidates that are ordered by counting
#define SLACK 6        // tiles more than asked for that a level may let through
#define WARPS (NT / 32)
#define TEAM (FINISHERS ? FINISHERS * 32 : NT)  // threads that finish a row, from the first on
#define BUFFERS (FINISHERS ? 2 : 1)             // rows of which a block has statistics
#define LOG2E 1.4426950408889634f
#define LARGEST 3.4028234663852886e38f
#if TYPE == 0
typedef float Stored;
#else
typedef u16 Stored;
#endif

struct Given {         // a parameter of the law
  const void* at;      // its values, or none
  u64 number;          // the value of all rows where there are none
  int each;            // -1: the number; 0: one value for all; 1: one per row or slot
  int wide;            // 64-bit integers
};
struct Params {
  const void* logits;  // [N, >= V]
  i64 row_stride;
  int N, V, tiles, whole;  // whole: bit 0, quads of a row may be loaded at once; bit 1, the end of a row cuts none
  Given temperature, top_k, top_p, min_p, seed, step;
  const void* slot;    // [N] or none
  int slot_wide, last_slot;
  u32 stream;
  int raw;             // whether raw_logprob is asked for
  i64 invalid_token;
  i64 *token, *threshold_id;                          // out, all [N]
  float *logprob, *log_kept_mass, *threshold, *raw_logprob;
  int *kept_count, *status;
};

__device__ __forceinline__ u32 ordered(float x) { u32 b = bits_of(x + 0.f); return b ^ (u32(int(b) >> 31) | 0x80000000u); }
__device__ __forceinline__ float unordered(u32 u) { return float_of(u ^ ((u >> 31) ? 0x80000000u : FULL)); }
__device__ __forceinline__ u64 make_key(float x, int id) { return u64(ordered(x)) << 32 | u32(~id); }
__device__ __forceinline__ float key_value(u64 k) { return unordered(u32(k >> 32)); }
__device__ __forceinline__ int key_id(u64 k) { return int(~u32(k)); }

struct Row {           // one row's parameters, decoded
  float T, s, p, m;    // s = log2(e) / T; p = 1 and m = 0 are off
  int k;               // 0 is off
  bool greedy, filtered, bad, padding;
  u32 key0, key1, step0, step1;
};
struct Stored64 { u32 low, high; };
struct Undecoded {     // the same as it lies in memory: all loads are under way before one is waited for
  i64 place;
  u32 T, p, m;
  Stored64 k, seed, step;
};
__device__ __forceinline__ const u32* place_of(const Given& g, i64 place, int words) {
  return g.each < 0 ? reinterpret_cast<const u32*>(&g.number) : static_cast<const u32*>(g.at) + place * g.each * words;
}
__device__ __forceinline__ Stored64 integer_of(const Given& g, i64 place) {
  const u32* p = place_of(g, place, 1 + g.wide);
  Stored64 v = {load_word(p), load_word(p + g.wide)};
  return v;
}
__device__ __forceinline__ i64 decoded(Stored64 v, const Given& g) {
  return g.wide ? i64(u64(v.high) << 32 | v.low) : i64(int(v.low));
}
__device__ __forceinline__ Undecoded parameters_of(const Params& P, int r) {
  Undecoded u;
  u.place = r;
  if (P.slot) u.place = P.slot_wide ? static_cast<const i64*>(P.slot)[r] : i64(static_cast<const int*>(P.slot)[r]);
  const i64 at = u.place < 0 || !P.slot ? max(u.place, 0ll) : min(u.place, i64(P.last_slot));
  u.T = load_word(place_of(P.temperature, at, 1));
  u.k = integer_of(P.top_k, at);
  u.p = load_word(place_of(P.top_p, at, 1)), u.m = load_word(place_of(P.min_p, at, 1));
  u.seed = integer_of(P.seed, at), u.step = integer_of(P.step, at);
  return u;
}
__device__ __forceinline__ Row row_of(const Params& P, const Undecoded& u) {
  Row R;
  R.padding = P.slot && u.place < 0, R.bad = P.slot && u.place > P.last_slot;
  R.T = float_of(u.T);
  R.bad |= !(R.T >= 0.f && R.T < INF);
  R.greedy = R.T == 0.f && !R.bad;
  if (R.greedy || R.bad) R.T = 1.f;
  const float one = reciprocal(R.T), s = LOG2E * one;
  R.s = fminf(fmaf(fmaf(-s, R.T, LOG2E), one, s), 3e38f);
  const i64 k = decoded(u.k, P.top_k), seed = decoded(u.seed, P.seed), step = decoded(u.step, P.step);
  R.k = k <= 0 || k >= P.V ? 0 : int(k);
  R.p = float_of(u.p), R.m = float_of(u.m);
  if (!(R.p < 1.f)) R.p = 1.f;
  if (!(R.m > 0.f)) R.m = 0.f;
  if (R.p <= 0.f || R.m > 1.f) R.k = 1, R.p = 1.f, R.m = 0.f;  // the first of the order alone
  R.filtered = R.bad || R.k > 0 || R.p < 1.f || R.m > 0.f;
  R.key0 = u32(seed), R.key1 = u32(u64(seed) >> 32), R.step0 = u32(step), R.step1 = u32(u64(step) >> 32);
  return R;
}

struct Winner { float x, g; int id; };  // logit, noise and id of the best of a tile; id < 0: none
struct Stats {         // of every tile of a row, in the block that finishes it
  float top[TILES], sum[TILES], raw[TILES];  // best logit; sum of exp((x - top) / T); the same with T = 1
  int count[TILES];    // tokens above -inf; bit 16: the tile holds NaN
  Winner winner[TILES];
  float group[GROUPS]; // best logit
};

// ---- noise
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
__device__ __forceinline__ float sum_of(const Tile& x, float top, float s) {  // of exp2((x - top) s), top finite
  const float hi = top * s, lo = fmaf(top, s, -hi);
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int g = 0; g < 8; ++g)
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[j] += ex2(fmaf(x[g][j], s, -hi));
  float sum = warp_sum((acc[0] + acc[1]) + (acc[2] + acc[3])) * ex2(-lo);
  if (!(sum < INF)) {  // x s overflowed
    acc[0] = 0.f;
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[0] += x[g][j] > -INF ? ex2((x[g][j] - top) * s) : 0.f;
    sum = warp_sum(acc[0]);
  }
  return sum;
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
  float sum = 0.f, raw = 0.f;
  if (fabsf(top) < INF) {
    sum = sum_of(x, top, R.s);
    if (P.raw) raw = R.T == 1.f ? sum : sum_of(x, top, LOG2E);
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
  if (!NOISY) return;
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
