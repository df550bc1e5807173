// Sizes, the parameters of a launch and of a row, keys that order tokens: value descending, token id ascending.
#pragma once
#include "sample/device.cuh"

#define WIDTH 128      // tokens that a warp reads at once
#define TILE 1024
#define TILES 256      // most tiles of a row
#define PER_TILE 16    // groups of a tile: what two neighboring lanes hold of it, 64 tokens
#define GROUPS (PER_TILE * TILES)
#define BINS 2048      // of the exact search
#define COARSE 256     // bins of the group maxima
#define CANDIDATES 2048
#define ASKED 512      // most of the best groups that are asked for
#define REREAD 1024    // groups that may be read again
#define RANKED 256     // candidates that are ordered by counting
#define SLACK 6        // tiles more than asked for that a level may let through
#define WARPS (NT / 32)
#define FINISHING_THREADS (FINISHERS ? FINISHERS * 32 : NT)  // threads that finish a row, from the first on
#define BUFFERS (FINISHERS ? 2 : 1)             // rows of which a block has statistics
#define GUMBEL_RACE (PLAIN && CLUSTER == 1)            // rows without a filter are decided at their ends, by gumbel_argmax.cuh
#define LOG2E 1.4426950408889634f
#define LARGEST 3.4028234663852886e38f
#if TYPE == 0
typedef float Stored;
#else
typedef u16 Stored;
#endif

struct Given {         // a sampling parameter: one number, or one a row
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
__device__ __forceinline__ const u32* word_at(const Given& g, i64 place, int words) {
  return g.each < 0 ? reinterpret_cast<const u32*>(&g.number) : static_cast<const u32*>(g.at) + place * g.each * words;
}
__device__ __forceinline__ Stored64 integer_of(const Given& g, i64 place) {
  const u32* p = word_at(g, place, 1 + g.wide);
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
  u.T = load_word(word_at(P.temperature, at, 1));
  u.k = integer_of(P.top_k, at);
  u.p = load_word(word_at(P.top_p, at, 1)), u.m = load_word(word_at(P.min_p, at, 1));
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

