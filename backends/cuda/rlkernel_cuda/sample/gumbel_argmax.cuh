// The draw among many tokens: a race that E / w of a token decides, where E = -ln(1 - u) and exp(-score) = E / w.
//
// Reading leaves a bound of every group of 64 tokens below the times at which they arrive. At the end of the row the groups whose
// bound is not above 32 times the least are read again, and where that does not tell, those up to the first arrival, or up to
// 32 times as far.
#pragma once
#include "sample/exact_search.cuh"

__device__ __forceinline__ int first_of(int group) {  // the first of the four tokens that a lane of half a warp has of a group
  const int lane = threadIdx.x & 31;
  return group / PER_TILE * TILE + (lane & 15) / 2 * WIDTH + group % PER_TILE * 8 + (lane & 1) * 4;
}
__device__ __forceinline__ void quad_again(float (&x)[4], const Params& P, const Stored* src, int id) {
  if ((P.whole & 2) && id < P.V) {
    load4_again(x, src + id);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = id + j < P.V ? value_at(src + id + j) : -INF;
  }
}
#if GUMBEL_RACE
// The first token to arrive, as what a row draws. By the finishing threads.
__device__ __forceinline__ Cut race(const Params& P, const Stored* src, const Row& R, const Stats& st, Shared& sm) {
  const int tid = threadIdx.x, lane = tid & 31, groups = P.tiles * PER_TILE;
  const float M = sm.merged.top;
  const auto bound = [&](int group) { return divide(st.group[group], weight(st.top[group / PER_TILE], M, R)); };
  u32 least = bits_of(INF);
#pragma unroll 2
  for (int i = tid; i < groups; i += FINISHING_THREADS) {
    const float b = bound(i);
    if (b < INF) least = min(least, bits_of(b));
  }
  // A word of 0 may be that of a token that is not in the race; none arrives before half a word.
  float until = fminf(fmaxf(32.f * float_of(~u32(finishers_max<FINISHING_THREADS>(u64(~least) << 32, sm) >> 32)), 16.f), 3e38f);
  u64 best = 0;
  float x = 0.f;
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (int i0 = tid - lane; i0 < groups; i0 += FINISHING_THREADS) {
      u32 near = lanes_where(i0 + lane < groups && bound(i0 + lane) <= until);
#pragma unroll 1
      while (near) {  // two at a time, by half a warp each
        const int a = first_bit(near);
        near &= near - 1;
        const int b = near ? first_bit(near) : -1, mine = lane < 16 ? a : b;
        near &= near - 1;
        if (mine < 0) continue;
        const int id = first_of(i0 + mine);
        float y[4];
        u32 w[4];
        quad_again(y, P, src, id);
        philox(w, u32(id) >> 2, R, P.stream);
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
          if (y[0] > -INF && float(w[0]) <= weight(y[0], M, R) * until * 1.001f) {
            const u64 key = make_key(scaled(y[0], M, R) + gumbel(w[0]), id + j);
            if (key > best) best = key, x = y[0];
          }
          y[0] = y[1], y[1] = y[2], y[2] = y[3], w[0] = w[1], w[1] = w[2], w[2] = w[3];
        }
      }
    }
    // Whoever has not been looked at arrives after `until`; what rounding makes of bounds is less than the factor.
    const u64 winner = finishers_max<FINISHING_THREADS>(best, sm);
    const float time = winner ? ex2(fmaf(-key_value(winner), LOG2E, 32.f)) * 1.001f : INF;
    if (time <= until || until >= 3e38f) {
      if (best == winner) sm.cut = Cut{sm.merged.tokens, sm.merged.Z, x, 0, key_id(winner)};
      sync<FINISHING_THREADS>();
      return sm.cut;
    }
    until = fminf(winner ? time : 32.f * until, 3e38f);
  }
}
#endif
