// The quick way to what a row keeps: the groups with the largest maxima hold the best tokens, certified.
//
// The n groups with the largest maxima contain the n first tokens of the order: each of them supplies one at or above the
// n-th maximum. So the maxima themselves are candidates, and the few groups whose second could be one too are read again.
// A level that n groups reach is found among the tiles' best tokens, since a tile has as many groups at a level as tokens
// in different groups: in rows whose popular tokens stand apart it lets few more through. Other rows count their groups.
//
// By the team that finishes a row: all threads of a block, or its first warps. Put after wide.cuh.

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
// What at least `want` tiles reach, and few more: 1 <= want <= t.live.
__device__ __forceinline__ float level_of(const Tops& t, int want) {
  float low = t.low, high = t.top;
  if (t.live > want + SLACK)
#pragma unroll 1
    for (int i = 0; i < 12; ++i) {
      const float trial = 0.5f * low + 0.5f * high;
      int n = 0;
#pragma unroll
      for (int e = 0; e < TILES / 32; ++e) n += t.of[e] >= trial;
      n = lanes_add(n);
      if (n >= want) low = trial;
      else high = trial;
      if (n >= want && n <= want + SLACK) break;
    }
  return low;
}
__device__ __forceinline__ int below_me(u32 lanes) { return __popc(lanes & ((1u << (threadIdx.x & 31)) - 1)); }
__device__ __forceinline__ int room_for(int n, int* counter) {  // by whole warps
  int at = 0;
  if ((threadIdx.x & 31) == 0) at = atomicAdd(counter, n);
  return from_lane(at, 0);
}
__device__ __forceinline__ void append(bool mine, u64 key, int base, int* counter, Shared& sm) {  // by whole warps
  const u32 who = lanes_where(mine);
  if (!who) return;
  const int at = base + room_for(__popc(who), counter) + below_me(who);
  if (mine && at < CANDIDATES) sm.found[at] = key;
}
// Lists the groups that reach `level`: as candidates, or to be read again where their second could reach it too.
// By warp `warp` of `warps`.
__device__ __forceinline__ void list_groups(const Params& P, const Stats& st, float level, int warp, int warps, Shared& sm) {
  constexpr int E = 4;
  const int lane = threadIdx.x & 31, groups = P.tiles * 8;
  const u32 bar = ordered(level);
#pragma unroll 1
  for (int i0 = warp * 32; i0 < groups; i0 += warps * 32 * E) {
    u64 g[E];
    u32 one[E], two[E];
    int ones = 0, twos = 0;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int i = i0 + e * warps * 32 + lane;
      g[e] = i < groups ? st.group[i] : 0;
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const bool in = u32(g[e] >> 32) >= bar, more = in && (u32(g[e]) & 0xffff0000u) >= bar;
      one[e] = lanes_where(in && !more), two[e] = lanes_where(more);
      ones += __popc(one[e]), twos += __popc(two[e]);
    }
    int at = ones ? room_for(ones, &sm.n_found) : 0, again = twos ? room_for(twos, &sm.n_again) : 0;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int i = i0 + e * warps * 32 + lane;
      if (one[e] >> lane & 1) sm.found[at + below_me(one[e])] = (g[e] >> 32) << 32 | u32(~(i / 8 * TILE + int(u32(g[e]) & (TILE - 1))));
      if (two[e] >> lane & 1 && again + below_me(two[e]) < REREAD) sm.again[again + below_me(two[e])] = i;
      at += __popc(one[e]), again += __popc(two[e]);
    }
  }
}
// The tokens of a group that is read again, four a lane; returns the first one's id.
__device__ __forceinline__ int group_again(float (&x)[4], const Params& P, const Stored* src, int group) {
  const int lane = threadIdx.x & 31, id = group / 8 * TILE + lane / 4 * GROUP + (group % 8 * 4 + lane % 4) * 4;
  if ((P.whole & 2) && id < P.V) {
    load4_again(x, src + id);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = id + j < P.V ? value_at(src + id + j) : -INF;
  }
  return id;
}
// How many candidates there are, by the tiles' level; -1 where it lets too many through. `want` <= t.live. The tiles are
// added up by the last warp at the same time.
__device__ __forceinline__ int by_tiles(const Params& P, const Row& R, const Stored* src, const Stats& st, const Tops& t, int want, Shared& sm) {
  const int warp = threadIdx.x >> 5;
  if (warp == TEAM / 32 - 1) {
    merge(P, R, st, sm);
  } else {
    const float level = level_of(t, want);
    list_groups(P, st, level, warp, TEAM / 32 - 1, sm);
    if (threadIdx.x == 0) sm.level = level;
  }
  sync<TEAM>();
  MARK(4);
  const float level = sm.level;
  const int n = sm.n_found, again = sm.n_again;
  if (n + again > want + max(64, want / 2)) return -1;
  if (!again) return n;
#pragma unroll 1
  for (int i = warp; i < again; i += TEAM / 32) {
    float x[4];
    const int id = group_again(x, P, src, sm.again[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) append(x[j] >= level, make_key(x[j], id + j), n, &sm.n_more, sm);
  }
  sync<TEAM>();
  return n + sm.n_more > CANDIDATES ? -1 : n + sm.n_more;
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
  sync<TEAM>();
#pragma unroll 1
  for (int i = threadIdx.x; i < COARSE; i += TEAM) sm.bins[i] = 0;
  if (threadIdx.x == 0) sm.n_found = sm.n_again = 0;
  sync<TEAM>();
}
// How many candidates there are, by a histogram of the maxima of the groups; -1: more than there is room for.
__device__ __noinline__ int by_groups(const Params& P, const Row& R, const Stored* src, const Stats& st, int want, Shared& sm) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, groups = P.tiles * 8;
  const float M = sm.merged.top;
  float low = sm.merged.low, inv;
  if (want > sm.merged.live) {  // fewer tiles than groups asked for
    u32 least = FULL;
#pragma unroll 1
    for (int i = lane; i < groups; i += 32) {
      const u32 v = u32(st.group[i] >> 32);
      if (v > ordered(-INF)) least = min(least, v);
    }
    low = unordered(lanes_min(least));
  }
  int cut, upto;
#pragma unroll 1
  for (int round = 0;; ++round) {
    inv = M > low ? (COARSE - 2) / (M - low) : 0.f;
    clear_bins(sm);
#pragma unroll 1
    for (int i = tid; i < groups; i += TEAM) {
      const float v = unordered(u32(st.group[i] >> 32)), at = (M - v) * inv;
      if (v > -INF && to_int(at) < COARSE) count_at(at, sm);
    }
    sync<TEAM>();
    cut = coarse_cut(want, sm, upto);
    if (upto <= want + max(64, want / 2) || cut >= COARSE / 2 || round == 3) break;
    low = M - (cut + 1) / inv;  // an outlier far below: again over the range that qualified
  }
  if (cut == COARSE) cut = 0x7fffffff;
  // A group is a candidate by its maximum, or is read again where its second could be one too.
  auto maximum = [&](u64 g) { return unordered(u32(g >> 32)); };
  auto twice = [&](u64 g, float v, int c) { return passes(unordered(u32(g) & 0xffff0000u), M, v, c); };
  auto first = [&](u64 g, int i) { return (g >> 32) << 32 | u32(~(i / 8 * TILE + int(u32(g) & (TILE - 1)))); };
#pragma unroll 1
  for (int i0 = warp * 32; i0 < groups; i0 += TEAM) {
    const int i = i0 + lane;
    const u64 g = i < groups ? st.group[i] : u64(ordered(-INF)) << 32;
    const bool mine = passes(maximum(g), M, inv, cut), more = mine && twice(g, inv, cut);
    append(mine && !more, first(g, i), 0, &sm.n_found, sm);
    if (more) {
      const int a = atomicAdd(&sm.n_again, 1);
      if (a < REREAD) sm.again[a] = i;
    }
  }
  sync<TEAM>();
  const int again = sm.n_again;
  if (again > REREAD) return -1;
  if (again > 4 && inv > 0.f) {  // popular tokens share groups: a finer cut, by all tokens of the groups read again
    const int coarse = cut, enough = R.k ? R.k : 8 * want;
    const float wide = inv, inv2 = (COARSE - 1) / (cut < COARSE ? (cut + 1) / inv : M - low);
    clear_bins(sm);
#pragma unroll 1
    for (int i = tid; i < groups; i += TEAM) {
      const u64 g = st.group[i];
      if (passes(maximum(g), M, wide, coarse) && !twice(g, wide, coarse)) count_at((M - maximum(g)) * inv2, sm);
    }
#pragma unroll 1
    for (int i = warp; i < again; i += TEAM / 32) {
      float x[4];
      group_again(x, P, src, sm.again[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (passes(x[j], M, wide, coarse)) count_at((M - x[j]) * inv2, sm);
    }
    sync<TEAM>();
    const int fine = min(coarse_cut(enough, sm, upto), COARSE - 1);
    const bool all = fine == COARSE - 1;
    if (!all) inv = inv2, cut = fine;
#pragma unroll 1
    for (int i0 = warp * 32; i0 < groups; i0 += TEAM) {
      const u64 g = i0 + lane < groups ? st.group[i0 + lane] : u64(ordered(-INF)) << 32;
      const bool mine = passes(maximum(g), M, wide, coarse) && !twice(g, wide, coarse);
      append(mine && (all || passes(maximum(g), M, inv, cut)), first(g, i0 + lane), 0, &sm.n_found, sm);
    }
  }
#pragma unroll 1
  for (int i = warp; i < again; i += TEAM / 32) {
    float x[4];
    const int id = group_again(x, P, src, sm.again[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) append(passes(x[j], M, inv, cut), make_key(x[j], id + j), 0, &sm.n_found, sm);
  }
  sync<TEAM>();
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
    const double goal = double(R.p) * (sure && (R.k || R.m > 0.f || complete) ? total : m.Z);
    // Without another filter the nucleus is known where the candidates hold its mass.
    if (!sure) sure = R.k == 0 && R.m == 0.f && total >= goal * 1.000001;
    bar = float(goal);
    if (double(bar) < goal) bar = float_of(bits_of(bar) + 1);
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
  const u64 winner = warp_max(best);
  c.token = key_id(winner), c.x = from_lane(x, first_bit(lanes_where(best == winner)));
  MARK(8);
  write(P, R, row, m, c, 0);
  return true;
}
// Ends a row by its n candidates: its results are written. False: they do not tell what it keeps.
__device__ __forceinline__ bool end_by(const Params& P, const Row& R, int row, int n, Shared& sm) {
  const int tid = threadIdx.x, lane = tid & 31;
  const Merged& m = sm.merged;
  const bool certain = R.k && !(R.m > 0.f);
  Cut c = {};
  if (n <= RANKED) {
    if (tid < TEAM / 2) {  // a candidate's place is the number of those before it, counted by several threads
      const int split = n * 8 <= TEAM ? 2 : n * 4 <= TEAM ? 1 : 0;
#pragma unroll 1
      for (int base = 0; base < n; base += TEAM / 2 >> split) {
        const int i = base + (tid >> split);
        const u64 own = sm.found[min(i, n - 1)];
        int place = 0;
#pragma unroll 4
        for (int j = tid & ((1 << split) - 1); j < n; j += 1 << split) place += sm.found[j] > own;
        if (split > 0) place += from_across(place, 1);
        if (split > 1) place += from_across(place, 2);
        if (i < n) sm.sorted[place] = own, sm.from[place] = i;
      }
    } else {               // its noise, by the others
#pragma unroll 1
      for (int i = tid - TEAM / 2; i < n; i += TEAM / 2) sm.score[i] = score_of(P, R, m.top, sm.found[i]);
    }
    sync<TEAM>();
    MARK(6);
    if (tid < 32) {
      const bool sure = conclude(P, R, row, n, sm);
      if (!certain && lane == 0) sm.sure = sure;
    }
    if (certain) return true;
    sync<TEAM>();
    return sm.sure;
  }
  if (!certain && R.m == 0.f) {  // a nucleus that they do not hold needs no order of theirs
    float sum = 0.f;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) sum += weight(key_value(sm.found[i]), m.top, R);
    if (n < m.tokens && warp_sum(sum) < 0.999f * R.p * m.Z) return false;
  }
  sort_descending<TEAM>(sm.found, n);
  if (!cut_of(P, R, m, sm.found, n, c)) return false;
  u64 best = 0;
#pragma unroll 1
  for (int i = tid; i < c.kept; i += TEAM) {
    const u64 score = score_of(P, R, m.top, sm.found[i]);
    if (score > best) best = score, c.x = key_value(sm.found[i]);
  }
  const u64 winner = team_max<TEAM>(best, sm);
  c.token = key_id(winner);
  if (best == winner) sm.cut = c;
  sync<TEAM>();
  if (tid < 32) write(P, R, row, m, sm.cut, 0);
  return true;
}
#endif
