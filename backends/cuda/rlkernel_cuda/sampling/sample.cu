// sample@1 in one launch: the blocks of a cluster read a row once, the first of them finishes it.
//
// One warp reads a tile of 1024 tokens (8 groups of 128) and writes to the finishing block, of every group, its best token
// and a bound on its second, and of every tile sum exp((x - top) / T). The n groups with the largest maxima contain the n
// first tokens of the order: each of them supplies one at or above the n-th maximum. So the finish takes the maxima themselves
// as candidates, reads again the few groups whose second could be one too, sorts a few dozen keys and cuts. What keeps more
// than the candidates tell goes the exact way (wide.cuh). A row without a filter takes the best of its tiles' winners.
//
// Put after device.cuh, tile.cuh and wide.cuh. Macros: NT threads, CLUSTER blocks a row, PER_SM blocks a multiprocessor,
// TYPE of the logits (0 fp32, 1 bf16, 2 fp16), PLAIN: no row has a filter.

struct Merged {         // what the tiles of a row add up to; the same in all threads
  float top, low, Z, raw;
  int tokens, live, nan;  // live: tiles with a token
};
__device__ __forceinline__ Merged merge(const Params& P, const Row& R, Shared& sm) {
  const int lane = threadIdx.x & 31;
  u32 most = 0, least = FULL;
  int n = 0, nan = 0, live = 0;
#pragma unroll 4
  for (int t = lane; t < P.tiles; t += 32) {
    const u32 top = ordered(sm.st.top[t]);
    const int c = sm.st.count[t];
    n += c & 0xffff, nan |= c >> 16, most = max(most, top);
    if (top > ordered(-INF)) ++live, least = min(least, top);
  }
  Merged m;
  m.top = unordered(lanes_max(most)), m.low = unordered(lanes_min(least));
  m.tokens = lanes_add(n), m.live = lanes_add(live), m.nan = any_lane(nan);
  m.Z = m.raw = 0.f;
  if (fabsf(m.top) < INF) {
#pragma unroll 4
    for (int t = lane; t < P.tiles; t += 32) {
      const float top = sm.st.top[t];
      if (top == -INF) continue;
      m.Z += sm.st.sum[t] * weight(top, m.top, R);
      if (P.raw) m.raw += sm.st.raw[t] * (R.T == 1.f ? weight(top, m.top, R) : ex2((top - m.top) * LOG2E));
    }
    m.Z = warp_sum(m.Z);
    if (P.raw) m.raw = warp_sum(m.raw);
  }
  return m;
}
// By one thread.
__device__ __forceinline__ void write(const Params& P, const Row& R, int row, const Merged& m, const Cut& c, int flags) {
  const bool none = R.bad || m.tokens == 0, all = c.kept == m.tokens && m.top < INF;
  P.token[row] = none || R.padding ? P.invalid_token : c.token;
  P.kept_count[row] = none || R.padding ? 0 : c.kept;
  float lp = -INF, held = -INF, cut = INF, raw = __int_as_float(0x7fc00000);
  i64 cut_id = -1;
  if (R.padding) {
    lp = held = cut = raw = 0.f;
  } else if (!none) {
    const bool peers = m.top == INF;
    const float y = peers ? 0.f : scaled(c.x, m.top, R);
    lp = R.greedy ? 0.f : fminf(y - logf(c.mass), 0.f);
    held = R.greedy || c.kept == m.tokens ? 0.f : fminf(logf(divide(c.mass, m.Z)), 0.f);
    cut = all ? -INF : peers ? INF : key_value(c.last);
    cut_id = all ? -1 : key_id(c.last);
    // The raw law of a row with +inf is uniform over those tokens too.
    raw = fminf((peers || c.x == m.top ? 0.f : c.x - m.top) - logf(m.raw), 0.f);
  }
  P.logprob[row] = lp, P.log_kept_mass[row] = held, P.threshold[row] = cut, P.threshold_id[row] = cut_id;
  P.status[row] = R.padding ? 0 : (m.nan ? 2 : 0) | (R.bad ? 8 : (m.top == INF ? 4 : 0) | (m.tokens == 0 ? 1 : 0)) | flags;
  if (P.raw) P.raw_logprob[row] = raw;
}
#if !PLAIN
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
__device__ __forceinline__ void append(bool mine, u64 key, Shared& sm) {  // by whole warps
  const u32 who = lanes_where(mine);
  if (!who) return;
  int base = 0;
  if ((threadIdx.x & 31) == 0) base = atomicAdd(&sm.n_found, __popc(who));
  base = from_lane(base, 0) + __popc(who & ((1u << (threadIdx.x & 31)) - 1));
  if (mine && base < CANDIDATES) sm.found[base] = key;
}
// Keeps what the candidates of `want` groups tell. False: they do not tell enough.
__device__ __forceinline__ bool quick(const Params& P, const Row& R, const Stored* src, const Merged& m, int want, bool first, Shared& sm, Cut& out) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, groups = P.tiles * 8;
  const float M = m.top;
  float low = m.low, inv;
  if (want > m.live) {  // fewer tiles than groups asked for
    u32 least = FULL;
#pragma unroll 1
    for (int i = lane; i < groups; i += 32) {
      const u32 v = u32(sm.st.group[i] >> 32);
      if (v > ordered(-INF)) least = min(least, v);
    }
    low = unordered(lanes_min(least));
  }
  int cut, upto;
#pragma unroll 1
  for (int round = 0;; ++round) {
    inv = M > low ? (COARSE - 2) / (M - low) : 0.f;
    if (round || !first) {
      __syncthreads();
#pragma unroll 1
      for (int i = tid; i < COARSE; i += NT) sm.bins[i] = 0;
      if (tid == 0) sm.n_found = sm.n_again = 0;
      __syncthreads();
    }
#pragma unroll 2
    for (int i = tid; i < groups; i += NT) {
      const float v = unordered(u32(sm.st.group[i] >> 32));
      const int b = to_int((M - v) * inv);
      if (v > -INF && b < COARSE) atomicAdd(&sm.bins[(b % (COARSE / 32)) * 32 + b / (COARSE / 32)], 1u);
    }
    __syncthreads();
    MARK(4);
    cut = coarse_cut(want, sm, upto);
    MARK(5);
    if (upto <= want + max(64, want / 2) || cut >= COARSE / 2 || round == 3) break;
    low = M - (cut + 1) / inv;       // an outlier far below: again over the range that qualified
  }
  if (cut == COARSE) cut = 0x7fffffff;
  // A group is a candidate by its maximum, or is read again where its second could be one too.
#pragma unroll 1
  for (int i0 = warp * 32; i0 < groups; i0 += NT) {
    const int i = i0 + lane;
    const u64 g = i < groups ? sm.st.group[i] : u64(ordered(-INF)) << 32;
    const float v = unordered(u32(g >> 32));
    const bool mine = passes(v, M, inv, cut), more = mine && passes(unordered(u32(g) & 0xffff0000u), M, inv, cut);
    append(mine && !more, make_key(v, i / 8 * TILE + int(u32(g) & (TILE - 1))), sm);
    if (more) {
      const int a = atomicAdd(&sm.n_again, 1);
      if (a < REREAD) sm.again[a] = i;
    }
  }
  __syncthreads();
  MARK(6);
  const int again = sm.n_again;
  if (again > REREAD) return false;
  auto read = [&](int i, float(&x)[4]) {
    const int group = sm.again[i], id = group / 8 * TILE + lane / 4 * GROUP + (group % 8 * 4 + lane % 4) * 4;
    if ((P.whole & 2) && id < P.V) {
      load4_again(x, src + id);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = id + j < P.V ? value_at(src + id + j) : -INF;
    }
    return id;
  };
  if (again > 4 && inv > 0.f) {      // popular tokens share groups: a finer cut, by all tokens of the groups read again
    const int coarse = cut, enough = R.k ? R.k : 8 * want;
    const float inv2 = (COARSE - 1) / (cut < COARSE ? (cut + 1) / inv : M - low);
    auto count = [&](float v) {
      const int bin = min(COARSE - 1, to_int((M - v) * inv2));
      if (passes(v, M, inv, coarse)) atomicAdd(&sm.bins[(bin % (COARSE / 32)) * 32 + bin / (COARSE / 32)], 1u);
    };
#pragma unroll 1
    for (int i = tid; i < COARSE; i += NT) sm.bins[i] = 0;
    if (tid == 0) sm.n_found = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < groups; i += NT) {
      const u64 g = sm.st.group[i];
      if (!passes(unordered(u32(g) & 0xffff0000u), M, inv, coarse)) count(unordered(u32(g >> 32)));
    }
#pragma unroll 1
    for (int i = warp; i < again; i += WARPS) {
      float x[4];
      read(i, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) count(x[j]);
    }
    __syncthreads();
    const int fine = min(coarse_cut(enough, sm, upto), COARSE - 1);
    const bool all = fine == COARSE - 1;
#pragma unroll 1
    for (int i0 = warp * 32; i0 < groups; i0 += NT) {
      const u64 g = i0 + lane < groups ? sm.st.group[i0 + lane] : u64(ordered(-INF)) << 32;
      const float v = unordered(u32(g >> 32));
      const bool mine = passes(v, M, inv, coarse) && !passes(unordered(u32(g) & 0xffff0000u), M, inv, coarse);
      append(mine && (all || passes(v, M, inv2, fine)), make_key(v, (i0 + lane) / 8 * TILE + int(u32(g) & (TILE - 1))), sm);
    }
    if (!all) inv = inv2, cut = fine;
  }
  if (again) {
#pragma unroll 1
    for (int i = warp; i < again; i += WARPS) {
      float x[4];
      const int id = read(i, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) append(passes(x[j], M, inv, cut), make_key(x[j], id + j), sm);
    }
    __syncthreads();
  }
  const int n = sm.n_found;
  if (n > CANDIDATES) return false;
  MARK(7);
  u64* sorted = sm.sorted;
  if (n <= NT) {        // a candidate's place is the number of those before it, counted by four threads where they suffice
    const int split = n <= NT / 4 ? 2 : 0, i = tid >> split;
    const u64 own = sm.found[min(i, n - 1)];
    int place = 0;
#pragma unroll 4
    for (int j = tid & ((1 << split) - 1); j < n; j += 1 << split) place += sm.found[j] > own;
    if (split) {
      place += from_across(place, 1);
      place += from_across(place, 2);
    }
    if (i < n) sorted[place] = own;
    __syncthreads();
  } else {
    sorted = sm.found;
    sort_descending(sorted, n, sm);
  }
  MARK(8);
  // Every warp cuts for itself.
  const bool complete = n == m.tokens;
  int left = n;
  bool sure = complete || R.k || R.m > 0.f;
  if (R.m > 0.f) {
    const float log_m = logf(R.m);
    int by_m = 0;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) by_m += scaled(key_value(sorted[i]), M, R) >= log_m;
    left = max(lanes_add(by_m), 1);
    sure = complete || left < n;
  }
  if (R.k && R.k <= left) left = R.k, sure = true;
  const int per = (left + 31) / 32, i0 = min(left, lane * per), i1 = min(left, i0 + per);
  float part = 0.f;
#pragma unroll 1
  for (int i = i0; i < i1; ++i) part += weight(key_value(sorted[i]), M, R);
  const float incl = warp_scan(part), total = from_lane(incl, 31);
  double goal = INF;    // equal logits add up exactly, and then p decides to its last bit
  if (R.p < 1.f) {
    goal = double(R.p) * (sure && (R.k || R.m > 0.f || complete) ? total : m.Z);
    // Without another filter the nucleus is known where the candidates hold its mass.
    if (!sure) sure = R.k == 0 && R.m == 0.f && total >= goal * 1.000001;
  }
  if (!sure) return false;
  // run < goal, as floats: below the first float that is not.
  float bar = INF;
  if (goal < INF) {
    bar = float(goal);
    if (double(bar) < goal) bar = float_of(bits_of(bar) + 1);
  }
  int kept = 0;
  float run = incl - part, mass = 0.f;
#pragma unroll 1
  for (int i = i0; i < i1; ++i) {
    if (run < bar || i == 0) {
      ++kept, run += weight(key_value(sorted[i]), M, R), mass = run;
    } else {
      break;
    }
  }
  kept = lanes_add(kept);
  mass = float_of(lanes_max(bits_of(mass)));
  MARK(9);
  u64 best = 0;
  float best_x = 0.f;
#pragma unroll 1
  for (int i = tid; i < kept; i += NT) {
    const u64 k = sorted[i];
    const u64 key = make_key(scaled(key_value(k), M, R) + token_noise(key_id(k), R, P.stream), key_id(k));
    if (key > best) best = key, best_x = key_value(k);
  }
  MARK(10);
  const u64 winner = block_max(best, sm);
  MARK(11);
  out.kept = kept, out.mass = mass, out.last = sorted[kept - 1], out.token = key_id(winner), out.x = best_x;
  if (best != winner) out.token = -1;  // another thread's
  return true;
}
#endif
// A row with +inf is uniform over those tokens.
__device__ __noinline__ int count_peers(const Params& P, const Stored* src, int crew, Shared& sm) {
  Order o = {};
  int n;
  o.kind = COUNT, o.top = INF, o.log_m = -INF;
  command(P, src, o, crew, sm);
  mass_of_tiles(P, sm, n);
  return n;
}
// The exact way, for rows that need it.
__device__ __noinline__ void widely(const Params& P, const Stored* src, float top, float low, float Z, int tokens, int crew, Shared& sm) {
  const Row& R = sm.row;
  int left = tokens;
  if (R.m > 0.f) {
    Order o = {};
    o.kind = COUNT, o.top = top, o.log_m = logf(R.m);
    command(P, src, o, crew, sm);
    mass_of_tiles(P, sm, left);
    left = max(left, 1);
  }
  if (R.k) left = min(left, R.k);
  const float reach = top < INF ? top - 2.f * (top - low) : 0.f;
  const bool nucleus = R.p < 1.f;
  float mass = Z;
  if (nucleus && left < tokens) mass = select(P, src, top, reach, Z, false, left, 0., false, crew, sm).mass;
  // All tokens below (1 - p) / (tokens) of the mass weigh less than what a nucleus leaves out: it ends above them.
  const float least = top + logf(0.5f * (1.f - R.p) * mass / float(left)) * R.T;
  const Cut c = select(P, src, top, nucleus && top < INF ? least : reach, Z, nucleus, left, double(R.p) * mass, true, crew, sm);
  if (threadIdx.x == 0) sm.cut = c;
  __syncthreads();
}
// One row, from its tiles, by the block that they were written to.
__device__ __forceinline__ void finish(const Params& P, const Stored* src, int row, int crew, Shared& sm) {
  const int tid = threadIdx.x;
  const Row& R = sm.row;
  Merged m = {};
  m.top = -INF;
  Cut c = {0, 1.f, 0.f, 0, 0};
  int flags = 0;
  bool mine = tid == 0; // whether this thread writes the results
  if (!R.padding) m = merge(P, R, sm);
  MARK(3);
  if (m.top == INF && !R.bad) m.tokens = count_peers(P, src, crew, sm), m.Z = m.raw = float(m.tokens);
  if (R.padding || R.bad || m.top == -INF) {
  } else if (R.greedy) {
    u64 key = 0;
#pragma unroll 1
    for (int t = tid; t < P.tiles; t += NT)
      if (sm.st.top[t] == m.top) key = max(key, make_key(m.top, sm.st.winner[t].id));
    key = block_max(key, sm);
    c.kept = 1, c.x = m.top, c.last = key, c.token = key_id(key);
  } else {
    bool done = false;
#if !PLAIN
    if (R.filtered && m.top < INF && R.k <= REREAD)
#pragma unroll 1
      for (int want = R.k ? R.k : 32; want <= REREAD && !done; want *= 4) {
        done = quick(P, R, src, m, want, want == (R.k ? R.k : 32), sm, c);
        if (R.k && !(R.m > 0.f)) break;
      }
#endif
    if (!R.filtered && m.top < INF) {
      u64 best = 0;
#pragma unroll 1
      for (int t = tid; t < P.tiles; t += NT) {
        const Winner w = sm.st.winner[t];
        if (w.id < 0) continue;
        const u64 key = make_key(scaled(w.x, m.top, R) + w.g, w.id);
        if (key > best) best = key, c.x = w.x;
      }
      c.kept = m.tokens, c.mass = m.Z;
      const u64 winner = block_max(best, sm);
      c.token = best == winner ? key_id(winner) : -1;
      done = true;
    }
    if (done) mine = c.token >= 0;
    else widely(P, src, m.top, m.low, m.Z, m.tokens, crew, sm), c = sm.cut, flags = 32;
  }
  MARK(12);
  if (mine) write(P, R, row, m, c, flags);
  MARK(13);
#ifdef CLOCKS
  __syncthreads();
  if (tid < 14) P.threshold_id[row * 14 + tid] = sm.marks[tid];
#endif
  if (crew > 1) {
    __syncthreads();
    if (tid < crew) in_block(&sm, tid)->order.kind = LEAVE;
    meet(crew);
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(NT, PER_SM) sample(const __grid_constant__ Params P) {
  extern __shared__ __align__(16) char memory[];
  Shared& sm = *reinterpret_cast<Shared*>(memory);
  const int tid = threadIdx.x, row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, step = CLUSTER * WARPS;
  MARK(0);
  cluster_arrive();     // this block runs: others may write to its memory
  const Stored* src = static_cast<const Stored*>(P.logits) + row * P.row_stride;
  int tile = rank + CLUSTER * (tid >> 5);
  const Undecoded given = parameters_of(P, row);
  Stats* to = &in_block(&sm, 0)->st;
  if (tile < P.tiles) prefetch(src + min(tile * TILE + (tid & 31) * (TILE / 32), P.V - 1));
  for (int i = tid; i < COARSE; i += NT) sm.bins[i] = 0;
  const Row R = row_of(P, given);
  if (tid == 0) sm.n_found = sm.n_again = 0, sm.best = 0, sm.row = R;
  __syncthreads();
  cluster_wait();
  if (!R.padding)
#pragma unroll 1
    for (; tile < P.tiles; tile += step) {
      Tile x;
      load_tile(x, P, src, tile);
      stream_tile(P, R, sm.row, src, tile, x, &sm.best, to);
    }
  // Blocks of a row that may need the exact way wait for it; the others leave.
  const bool stays = CLUSTER > 1 && !R.bad && !R.padding && R.filtered && !R.greedy && (R.k == 0 || R.k > REREAD);
  MARK(1);
  cluster_arrive();
  if (rank) {
    if (stays) cluster_wait(), serve(P, src, rank, sm);
    return;
  }
  cluster_wait();
  MARK(2);
  finish(P, src, row, stays ? CLUSTER : 1, sm);
}
