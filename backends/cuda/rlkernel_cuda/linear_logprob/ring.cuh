// How the kernels of heads begin: a ring of tiles that two blocks share. For sm_90a.
#pragma once
#include "common/cluster_pair.cuh"

// The barriers of a ring, before its first step; both blocks of the cluster wait for each other.
template <int stages>
__device__ __forceinline__ void ring_begin(u32 full, u32 empty) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);  // two warpgroups of two blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
}
