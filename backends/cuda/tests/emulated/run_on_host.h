// Put after the kernel's sources: runs it for every row. extern "C" int run(Params*).
static const Params* given;
static void body() {
  sample(*given);
  finished[now] = true;
  --live[now / NT];
  cluster_complete();
  yield();
}
extern "C" int run(const Params* P) {
  static std::vector<char> stacks(size_t(THREADS) * 65536);
  given = P;
  const int rows = FINISHERS ? min(P->N, GRID) : P->N;  // or blocks, which take several
  for (int row = 0; row < rows; ++row) {
    grid_block.x = row * CLUSTER;
    memset(shared_memory, 0xA5, sizeof shared_memory);  // garbage, as on a GPU
    memset(warp_turn, 0, sizeof warp_turn);
    memset(warps, 0, sizeof warps), memset(blocks, 0, sizeof blocks), memset(finishers, 0, sizeof finishers), memset(finishers_apart, 0, sizeof finishers_apart), memset(&cluster, 0, sizeof cluster), memset(arrived_turn, 0, sizeof arrived_turn), cluster.turn = 1;
    for (int i = 0; i < CLUSTER; ++i) live[i] = NT;
    for (int i = 0; i < THREADS; ++i) {
      finished[i] = false;
      getcontext(&threads[i]);
      threads[i].uc_stack.ss_sp = &stacks[size_t(i) * 65536], threads[i].uc_stack.ss_size = 65536, threads[i].uc_link = nullptr;
      makecontext(&threads[i], body, 0);
    }
    u64 seen = 0;
    for (int idle = 0;;) {
      bool any = false;
      for (now = 0; now < THREADS; ++now)
        if (!finished[now]) any = true, swapcontext(&scheduler, &threads[now]);
      if (!any) break;
      u64 turns = cluster.turn;
      for (auto& w : warps) turns += w.turn;
      for (auto& b : blocks) turns += b.turn;
      for (auto& t : finishers) turns += t.turn;
      for (auto& t : finishers_apart) turns += t.turn;
      for (int i = 0; i < CLUSTER; ++i) turns += NT - live[i];
      idle = turns == seen ? idle + 1 : 0, seen = turns;
      if (idle > 3) return 1 + row;  // nobody moves: a barrier that not all come to
    }
  }
  return 0;
}
