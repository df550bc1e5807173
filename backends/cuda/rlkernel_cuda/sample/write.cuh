// What a row's tiles add up to, and its results. Each by one warp.
#pragma once
#include "sample/gumbel_argmax.cuh"

__device__ __forceinline__ const Merged& merge(const Params& P, const Row& R, const Stats& st, Shared& sm) {
  const int lane = threadIdx.x & 31;
  u32 most = 0, least = FULL;
  int n = 0, nan = 0, live = 0;
#pragma unroll 1
  for (int t = lane; t < P.tiles; t += 32) {
    const u32 top = ordered(st.top[t]);
    const int c = st.count[t];
    n += c & 0xffff, nan |= c >> 16, most = max(most, top);
    if (top > ordered(-INF)) ++live, least = min(least, top);
  }
  Merged m;
  m.top = unordered(lanes_max(most)), m.low = unordered(lanes_min(least));
  m.tokens = lanes_add(n), m.live = lanes_add(live), m.nan = any_lane(nan);
  m.Z = m.raw = 0.f;
  if (fabsf(m.top) < INF) {
#pragma unroll 1
    for (int t = lane; t < P.tiles; t += 32) {
      const float top = st.top[t];
      if (top == -INF) continue;
      m.Z += st.sum[t] * weight(top, m.top, R);
      if (P.raw) m.raw += st.raw[t] * (R.T == 1.f ? weight(top, m.top, R) : ex2((top - m.top) * LOG2E));
    }
    m.Z = warp_sum(m.Z);
    if (P.raw) m.raw = warp_sum(m.raw);
  }
  if (lane == 0) sm.merged = m;
  __syncwarp();
  return sm.merged;
}
__device__ __forceinline__ void write(const Params& P, const Row& R, int row, const Merged& m, const Cut& c, int flags) {
  const bool none = R.bad || m.tokens == 0, all = c.kept == m.tokens && m.top < INF, peers = m.top == INF;
  const int lane = threadIdx.x & 31;
  const float log = logf(lane == 0 ? c.mass : lane == 1 ? divide(c.mass, m.Z) : m.raw);  // three at once
  const float log_mass = from_lane(log, 0), log_held = from_lane(log, 1), log_raw = from_lane(log, 2);
  if (lane) return;
  float lp = -INF, held = -INF, cut = INF, raw = __int_as_float(0x7fc00000);
  i64 cut_id = -1;
  if (R.padding) {
    lp = held = cut = raw = 0.f;
  } else if (!none) {
    const float y = peers ? 0.f : scaled(c.x, m.top, R);
    lp = R.greedy ? 0.f : fminf(y - log_mass, 0.f);
    held = R.greedy || c.kept == m.tokens ? 0.f : fminf(log_held, 0.f);
    cut = all ? -INF : peers ? INF : key_value(c.last);
    cut_id = all ? -1 : key_id(c.last);
    // The raw law of a row with +inf is uniform over those tokens too.
    raw = fminf((peers || c.x == m.top ? 0.f : c.x - m.top) - log_raw, 0.f);
  }
  P.token[row] = none || R.padding ? P.invalid_token : c.token;
  P.kept_count[row] = none || R.padding ? 0 : c.kept;
  P.logprob[row] = lp, P.log_kept_mass[row] = held, P.threshold[row] = cut, P.threshold_id[row] = cut_id;
  P.status[row] = R.padding ? 0 : (m.nan ? 2 : 0) | (R.bad ? 8 : (peers ? 4 : 0) | (m.tokens == 0 ? 1 : 0)) | flags;
  if (P.raw) P.raw_logprob[row] = raw;
}
