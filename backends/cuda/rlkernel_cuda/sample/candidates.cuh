// Candidates of a top-k, top-p or min-p row: the groups with the largest maxima hold its best tokens.
//
// The n groups with the largest maxima contain the n first tokens of the order: each of them supplies one at or above the
// n-th maximum. So the groups that reach a level are read again, 256 bytes each, and what reaches it there are candidates.
// A level that n groups reach is found among the tiles' best tokens, since a tile has as many groups at a level as tokens
// in different groups: in rows whose popular tokens stand apart it lets few more through. Other rows count their groups.
//
// By the threads that finish a row: all of a block, or its first warps.
#pragma once
#include "sample/write.cuh"

struct Tops {           // of the tiles of a row: the best, the least that is one, how many there are; each lane holds some
  float of[TILES / 32], top, low;
  int live;
};
__device__ __forceinline__ Tops tops_of(const Params& P, const Stats& st) {
  const int lane = threadIdx.x & 31;
  Tops t;
  u32 most = 0, least = FULL;
  int live = 0;
#pragma unroll
  for (int e = 0; e < TILES / 32; ++e) t.of[e] = lane + e * 32 < P.tiles ? st.top[lane + e * 32] : -INF;
#pragma unroll
  for (int e = 0; e < TILES / 32; ++e) {
    const u32 top = ordered(t.of[e]);
    most = max(most, top);
    if (top > ordered(-INF)) ++live, least = min(least, top);
  }
  t.top = unordered(lanes_max(most)), t.low = unordered(lanes_min(least)), t.live = lanes_add(live);
  return t;
}
#if !PLAIN
// What at least `want` tiles reach, and few more: 1 <= want <= t.live. Three trials at a time, whose counts share a word.
__device__ __forceinline__ float level_of(const Tops& t, int want) {
  float low = t.low, high = t.top;
  if (t.live > want + SLACK)
#pragma unroll 1
    for (int i = 0; i < 6; ++i) {
      const float one = 0.75f * low + 0.25f * high, two = 0.5f * low + 0.5f * high, three = 0.25f * low + 0.75f * high;
      int n = 0;
#pragma unroll
      for (int e = 0; e < TILES / 32; ++e) n += (t.of[e] >= one ? 1 : 0) + (t.of[e] >= two ? 1 << 10 : 0) + (t.of[e] >= three ? 1 << 20 : 0);
      n = lanes_add(n);
      const int ones = n & 1023, twos = n >> 10 & 1023, threes = n >> 20;
      if (threes >= want) low = three, n = threes;
      else if (twos >= want) low = two, high = three, n = twos;
      else if (ones >= want) low = one, high = two, n = ones;
      else high = one, n = 0;
      if (n >= want && n <= want + SLACK) break;
    }
  return low;
}
#endif
// By one warp: the best of the tiles, how many hold a token, and the level that `want` of them reach.
__device__ __forceinline__ void look(const Params& P, const Stats& st, int want, Shared& sm) {
  const Tops t = tops_of(P, st);
  float level = 0.f;
#if !PLAIN
  if (want && want <= t.live && t.top < INF) level = level_of(t, want);
#endif
  if ((threadIdx.x & 31) == 0) sm.top = t.top, sm.live = t.live, sm.level = level;
}
#if !PLAIN
__device__ __forceinline__ int below_me(u32 lanes) { return __popc(lanes & ((1u << (threadIdx.x & 31)) - 1)); }
__device__ __forceinline__ int room_for(int n, int* counter) {  // by whole warps
  int at = 0;
  if ((threadIdx.x & 31) == 0) at = atomicAdd(counter, n);
  return from_lane(at, 0);
}
__device__ __forceinline__ void append(bool mine, u64 key, int* counter, Shared& sm) {  // by whole warps
  const u32 who = lanes_where(mine);
  if (!who) return;
  const int at = room_for(__popc(who), counter) + below_me(who);
  if (mine && at < CANDIDATES) sm.found[at] = key;
}
// Lists the groups for which `mine` holds, by warp `warp` of `warps`.
template <typename Test> __device__ __forceinline__ void list_groups(const Params& P, const Stats& st, int warp, int warps, Shared& sm, Test mine) {
  constexpr int E = 5;
  const int lane = threadIdx.x & 31, groups = P.tiles * PER_TILE;
#pragma unroll 1
  for (int i0 = warp * 32; i0 < groups; i0 += warps * 32 * E) {
    u32 in[E];
    int n = 0;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int i = i0 + e * warps * 32 + lane;
      in[e] = lanes_where(mine(i < groups ? st.group[i] : -INF)), n += __popc(in[e]);
    }
    if (!n) continue;
    int at = room_for(n, &sm.n_again);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int a = at + below_me(in[e]);
      if (in[e] >> lane & 1 && a < REREAD) sm.again[a] = i0 + e * warps * 32 + lane;
      at += __popc(in[e]);
    }
  }
}
// Four tokens of one of two groups that a warp reads again, of `n` that are listed; returns the first one's id.
__device__ __forceinline__ int group_again(float (&x)[4], const Params& P, const Stored* src, int i, int n, const Shared& sm) {
  const int lane = threadIdx.x & 31, id = first_of(sm.again[min(i + (lane >> 4), n - 1)]);
  if (i + (lane >> 4) < n) {
    quad_again(x, P, src, id);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = -INF;
  }
  return id;
}
// How many candidates there are, by the tiles' level; -1 where it lets too many through. `want` <= live tiles. The last
// warp, which adds the tiles up, comes after the groups are listed.
__device__ __forceinline__ int by_tiles(const Params& P, const Stored* src, const Stats& st, int want, bool last, Shared& sm) {
  constexpr int E = 3;
  const int warp = threadIdx.x >> 5;
  if (!last) {
    const float level = sm.level;
    list_groups(P, st, warp, FINISHING_THREADS / 32 - 1, sm, [&](float v) { return v >= level; });
  }
  sync<FINISHING_THREADS>();
  MARK(4);
  const float level = sm.level;
  const int again = sm.n_again;
  if (again > want + max(64, want / 2)) return -1;
#pragma unroll 1
  for (int i = warp * 2; i < again; i += FINISHING_THREADS / 16 * E) {
    float x[E][4];
    int id[E];
#pragma unroll
    for (int e = 0; e < E; ++e) id[e] = group_again(x[e], P, src, i + e * (FINISHING_THREADS / 16), again, sm);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      int n = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) n += x[e][j] >= level;
      if (!n) continue;
      int at = atomicAdd(&sm.n_found, n);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (x[e][j] >= level) {
          if (at < CANDIDATES) sm.found[at] = make_key(x[e][j], id[e] + j);
          ++at;
        }
    }
  }
  sync<FINISHING_THREADS>();
  return sm.n_found > CANDIDATES ? -1 : sm.n_found;
}
__device__ __forceinline__ bool passes(float v, float M, float inv, int cut) { return v > -INF && to_int((M - v) * inv) <= cut; }
// Bins of the group maxima from M down: every warp finds the bin where `want` groups are reached, for itself.
__device__ __forceinline__ int coarse_cut(int want, Shared& sm, int& upto) {
  constexpr int E = COARSE / 32;
  const int lane = threadIdx.x & 31;
  int c[E], sum = 0, hit = -1, at = 0;
#pragma unroll
  for (int i = 0; i < E; ++i) sum += c[i] = int(sm.bins[i * 32 + lane]);
  int run = warp_scan(sum) - sum;
#pragma unroll
  for (int i = 0; i < E; ++i) {
    if (run < want && run + c[i] >= want) hit = lane * E + i, at = run + c[i];
    run += c[i];
  }
  const u32 who = lanes_where(hit >= 0);
  if (!who) {
    upto = GROUPS;
    return COARSE;
  }
  upto = from_lane(at, first_bit(who));
  return from_lane(hit, first_bit(who));
}
__device__ __forceinline__ void count_at(float at, Shared& sm) {
  const int bin = min(COARSE - 1, to_int(at));
  atomicAdd(&sm.bins[(bin % (COARSE / 32)) * 32 + bin / (COARSE / 32)], 1u);
}
__device__ __forceinline__ void clear_bins(Shared& sm) {
  sync<FINISHING_THREADS>();
#pragma unroll 1
  for (int i = threadIdx.x; i < COARSE; i += FINISHING_THREADS) sm.bins[i] = 0;
  if (threadIdx.x == 0) sm.n_found = sm.n_again = 0;
  sync<FINISHING_THREADS>();
}
// How many candidates there are, by a histogram of the maxima of the groups; -1: more than there is room for.
__device__ __noinline__ int by_groups(const Params& P, const Row& R, const Stored* src, const Stats& st, int want, Shared& sm) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, groups = P.tiles * PER_TILE;
  const float M = sm.merged.top;
  float low = sm.merged.low, inv;
  if (want > sm.merged.live) {  // fewer tiles than groups asked for
    u32 least = FULL;
#pragma unroll 1
    for (int i = lane; i < groups; i += 32)
      if (st.group[i] > -INF) least = min(least, ordered(st.group[i]));
    low = unordered(lanes_min(least));
  }
  int cut, upto;
#pragma unroll 1
  for (int round = 0;; ++round) {
    inv = M > low ? (COARSE - 2) / (M - low) : 0.f;
    clear_bins(sm);
#pragma unroll 1
    for (int i = tid; i < groups; i += FINISHING_THREADS) {
      const float v = st.group[i], at = (M - v) * inv;
      if (v > -INF && to_int(at) < COARSE) count_at(at, sm);
    }
    sync<FINISHING_THREADS>();
    cut = coarse_cut(want, sm, upto);
    if (upto <= want + max(64, want / 2) || cut >= COARSE / 2 || round == 3) break;
    low = M - (cut + 1) / inv;  // an outlier far below: again over the range that qualified
  }
  if (cut == COARSE) cut = 0x7fffffff;
  list_groups(P, st, warp, FINISHING_THREADS / 32, sm, [&](float v) { return passes(v, M, inv, cut); });
  sync<FINISHING_THREADS>();
  const int again = sm.n_again;
  if (again > REREAD) return -1;
  if (again > 4 && inv > 0.f) {  // popular tokens share groups: a finer cut, by all tokens of the groups read again
    const int enough = R.k ? R.k : 4 * want;
    const float wide = inv, inv2 = (COARSE - 1) / (cut < COARSE ? (cut + 1) / inv : M - low);
    sync<FINISHING_THREADS>();
#pragma unroll 1
    for (int i = tid; i < COARSE; i += FINISHING_THREADS) sm.bins[i] = 0;
    sync<FINISHING_THREADS>();
#pragma unroll 1
    for (int i = warp * 2; i < again; i += FINISHING_THREADS / 16) {
      float x[4];
      group_again(x, P, src, i, again, sm);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (passes(x[j], M, wide, cut)) count_at((M - x[j]) * inv2, sm);
    }
    sync<FINISHING_THREADS>();
    const int fine = min(coarse_cut(enough, sm, upto), COARSE - 1);
    if (fine < COARSE - 1) inv = inv2, cut = fine;
  }
#pragma unroll 1
  for (int i = warp * 2; i < again; i += FINISHING_THREADS / 16) {
    float x[4];
    const int id = group_again(x, P, src, i, again, sm);
#pragma unroll
    for (int j = 0; j < 4; ++j) append(passes(x[j], M, inv, cut), make_key(x[j], id + j), &sm.n_found, sm);
  }
  sync<FINISHING_THREADS>();
  return sm.n_found > CANDIDATES ? -1 : sm.n_found;
}
// Cuts n sorted candidates, by one warp: how many are kept, their mass, the last of them. False: they do not tell.
__device__ __forceinline__ bool cut_of(const Params& P, const Row& R, const Merged& m, const u64* sorted, int n, Cut& out) {
  const int lane = threadIdx.x & 31;
  const bool complete = n == m.tokens;
  int left = n;
  bool sure = complete || R.k || R.m > 0.f;
  if (R.m > 0.f) {
    const float log_m = logf(R.m);
    int by_m = 0;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) by_m += scaled(key_value(sorted[i]), m.top, R) >= log_m;
    left = max(lanes_add(by_m), 1);
    sure = complete || left < n;
  }
  if (R.k && R.k <= left) left = R.k, sure = true;
  const int per = (left + 31) / 32, i0 = min(left, lane * per), i1 = min(left, i0 + per);
  float part = 0.f;
#pragma unroll 1
  for (int i = i0; i < i1; ++i) part += weight(key_value(sorted[i]), m.top, R);
  const float incl = warp_scan(part), total = from_lane(incl, 31);
  // Equal logits add up exactly, and then p decides to its last bit. run < goal, as floats: below the first that is not.
  float bar = INF;
  if (R.p < 1.f) {
    const bool own = sure && (R.k || R.m > 0.f || complete);
    // Without another filter the nucleus is known where the candidates hold its mass.
    if (!sure) sure = R.k == 0 && R.m == 0.f && total >= double(R.p) * m.Z * 1.000001;
    bar = times_up(R.p, own ? total : m.Z);
  }
  if (!sure) return false;
  int kept = 0;
  float run = incl - part, mass = 0.f;
#pragma unroll 1
  for (int i = i0; i < i1; ++i) {
    if (!(run < bar || i == 0)) break;
    ++kept, run += weight(key_value(sorted[i]), m.top, R), mass = run;
  }
  out.kept = lanes_add(kept);
  out.mass = float_of(lanes_max(bits_of(mass)));
  out.last = sorted[out.kept - 1];
  return true;
}
__device__ __forceinline__ u64 score_of(const Params& P, const Row& R, float top, u64 key) {
  return make_key(scaled(key_value(key), top, R) + token_noise(key_id(key), R, P.stream), key_id(key));
}
// The best score of a warp's lanes, of tokens with the logit x, as the drawn token of a cut.
__device__ __forceinline__ void draw(u64 best, float x, Cut& c) {
  const u64 winner = warp_max(best);
  c.token = key_id(winner), c.x = from_lane(x, first_bit(lanes_where(best == winner)));
}
// Writes what a row keeps and draws, by one warp, from its n candidates in order. False: they do not tell.
__device__ __forceinline__ bool conclude(const Params& P, const Row& R, int row, int n, Shared& sm) {
  const Merged m = sm.merged;
  Cut c;
  if (!cut_of(P, R, m, sm.sorted, n, c)) return false;
  MARK(7);
  u64 best = 0;
  float x = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < c.kept; i += 32) {
    const u64 score = sm.score[sm.from[i]];
    if (score > best) best = score, x = key_value(sm.sorted[i]);
  }
  draw(best, x, c);
  MARK(8);
  write(P, R, row, m, c, 0);
  return true;
}
// The same under a top-k of at most 64: every lane has the candidates that cut_of gives it, two at most, in registers.
__device__ __forceinline__ void conclude_few(const Params& P, const Row& R, int row, int n, Shared& sm) {
  const int lane = threadIdx.x & 31, left = min(R.k, n), per = left > 32 ? 2 : 1, i = lane * per;
  const bool one = i < left, two = per == 2 && i + 1 < left;
  const u64 first = sm.sorted[i], second = sm.sorted[i + 1];
  const float w1 = one ? sm.weight[i] : 0.f, w2 = two ? sm.weight[i + 1] : 0.f;
  const u64 score1 = one ? sm.score[sm.from[i]] : 0, score2 = two ? sm.score[sm.from[i + 1]] : 0;
  const float part = w1 + w2, incl = warp_scan(part), run = incl - part;
  const float bar = R.p < 1.f ? times_up(R.p, from_lane(incl, 31)) : INF;
  const bool in1 = one && (run < bar || lane == 0), in2 = in1 && two && run + w1 < bar;
  Cut c;
  c.kept = __popc(lanes_where(in1)) + __popc(lanes_where(in2));
  c.mass = float_of(lanes_max(in2 ? bits_of(run + w1 + w2) : in1 ? bits_of(run + w1) : 0u));
  c.last = sm.sorted[c.kept - 1];
  MARK(7);
  const bool latter = in2 && score2 > score1;
  draw(latter ? score2 : in1 ? score1 : 0, key_value(latter ? second : first), c);
  MARK(8);
  write(P, R, row, sm.merged, c, 0);
}
// Ends a row by its n candidates: its results are written. False: they do not tell what it keeps.
__device__ __forceinline__ bool end_by(const Params& P, const Row& R, int row, int n, Shared& sm) {
  const int tid = threadIdx.x, lane = tid & 31;
  const Merged& m = sm.merged;
  constexpr int RANKING = FINISHING_THREADS < 512 ? FINISHING_THREADS / 2 : FINISHING_THREADS / 128 * 96;
  static_assert(RANKING % 32 == 0, "whole warps order candidates, the others draw their noise");
  const bool certain = R.k && !(R.m > 0.f);
  Cut c = {};
  if (n <= RANKED) {
    if (tid < RANKING) {  // a candidate's place is the number of those before it, counted by several threads
      const int split = n * 4 <= RANKING ? 2 : n * 2 <= RANKING ? 1 : 0;
#pragma unroll 1
      for (int base = 0; base < n; base += RANKING >> split) {
        const int i = base + (tid >> split);
        const u64 own = sm.found[min(i, n - 1)];
        int place = 0;
#pragma unroll 4
        for (int j = tid & ((1 << split) - 1); j < n; j += 1 << split) place += sm.found[j] > own;
        if (split > 0) place += from_across(place, 1);
        if (split > 1) place += from_across(place, 2);
        if (i < n) sm.sorted[place] = own, sm.from[place] = i, sm.weight[place] = weight(key_value(own), m.top, R);
      }
    } else {              // its noise, by the others
#pragma unroll 1
      for (int i = tid - RANKING; i < n; i += FINISHING_THREADS - RANKING) sm.score[i] = score_of(P, R, m.top, sm.found[i]);
    }
    sync<FINISHING_THREADS>();
    MARK(6);
    if (tid < 32) {
      if (certain && R.k <= 64) {
        conclude_few(P, R, row, n, sm);
      } else {
        const bool sure = conclude(P, R, row, n, sm);
        if (!certain && lane == 0) sm.sure = sure;
      }
    }
    if (certain) return true;
    sync<FINISHING_THREADS>();
    return sm.sure;
  }
  if (!certain && R.m == 0.f) {  // a nucleus that they do not hold needs no order of theirs
    float sum = 0.f;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) sum += weight(key_value(sm.found[i]), m.top, R);
    if (n < m.tokens && warp_sum(sum) < 0.999f * R.p * m.Z) return false;
  }
  sort_descending<FINISHING_THREADS>(sm.found, n);
  if (!cut_of(P, R, m, sm.found, n, c)) return false;
  u64 best = 0;
#pragma unroll 1
  for (int i = tid; i < c.kept; i += FINISHING_THREADS) {
    const u64 score = score_of(P, R, m.top, sm.found[i]);
    if (score > best) best = score, c.x = key_value(sm.found[i]);
  }
  const u64 winner = finishers_max<FINISHING_THREADS>(best, sm);
  c.token = key_id(winner);
  if (best == winner) sm.cut = c;
  sync<FINISHING_THREADS>();
  if (tid < 32) write(P, R, row, m, sm.cut, 0);
  return true;
}
#endif
