// Who runs next, and for how long; when buffers drain and copies end. All by one seed.
static void step(void);
static u32 elected;

// How one run goes. `clocks` are words of the host's memory that advance while kernels run, at a chance of `tick` a
// turn, by up to `most_tick`. `held` is a rank that does nothing until the clock has come to `held_until`; or
// from when `held_after` instructions have been executed on, for `held_until` of its ticks.
typedef struct {
  u64 seed, limit, idle_limit, held_after;
  double stale, drain, tick;
  int quantum, residents, most_tick, held, held_until, num_clocks, shared_with_others;
  const u64 *clocks;
} Plan;

static int num_launches, first_launch[MOST_RANKS], num_ctas;
enum { MOST_LAUNCHES = 4096, MOST_RESIDENT = 1024 };

void reset(int most_regions) {
  if (!launches) {
    make_f16_table();
    make_f8_tables();
    launches = malloc(MOST_LAUNCHES * sizeof *launches);
    resident = malloc(MOST_RESIDENT * sizeof *resident);
  }
  regions = calloc(most_regions, sizeof *regions);
  num_regions = num_launches = num_resident = num_ctas = 0;
  now = 0;
  executed = progress_at = stale_reads = late_drains = 0;
  memset(first_launch, 0, sizeof first_launch);
  memset(messages, 0, sizeof messages);
  window_ranks = 0;
}
// One address for the memory of all ranks, which begins at `at`.
void set_window(u64 base, u64 len, const u64 *at, int ranks) {
  window_base = base; window_len = len; window_ranks = ranks;
  memcpy(window_at, at, ranks * sizeof *at);
}
int add_region(u64 base, u64 len, int rank) {
  u64 first = base >> 4, n = ((base + len + 15) >> 4) - first;
  regions[num_regions] = (Region){
      base, len, first, rank, calloc(n, 16), calloc(n, 8), calloc(n, 4), calloc(n, 4), calloc(n, 2)};
  return num_regions++;
}
// Kernels of one rank run one after another, as on one stream.
void launch(const Kernel *k, const void *words, const void *doubles, const void *preds, const Span *spans,
            int num_spans, int rank, int grid, int num_warps, u32 shared_bytes, u64 maps, u64 bytes_of_maps) {
  if (num_launches == MOST_LAUNCHES) abort();
  launches[num_launches++] = (Launch){
      k, {words, doubles, preds}, spans, num_spans, rank, grid, num_warps, 0, grid, shared_bytes, maps, bytes_of_maps};
}

static Cta *start(Launch *launch) {
  const Kernel *k = launch->kernel;
  Cta *c = calloc(1, sizeof *c);
  c->launch = launch; c->kernel = k; c->rank = launch->rank; c->id = launch->next++; c->index = num_ctas++;
  c->num_warps = launch->num_warps; c->warps = calloc(c->num_warps, sizeof(Warp));
  c->shared_bytes = launch->shared_bytes; c->clock = 1;
  c->shared = malloc(c->shared_bytes + 16);
  memset(c->shared, 0xff, c->shared_bytes + 16);
  for (int i = c->cell = 1; i <= k->n; i++)
    if ((k->ins[i - 1].op == OP_st_shared || k->ins[i - 1].op == OP_ld_shared) && k->ins[i - 1].width == 1) c->cell = 0;
  size_t cells = (c->shared_bytes >> c->cell) + 16;
  c->cells = calloc(cells, sizeof(Cell));
  c->read_at = calloc(cells * c->num_warps, 4);
  for (size_t i = 0; i < cells; i++) c->cells[i].writer = NOBODY;
  for (int i = 0; i < c->num_warps; i++) {
    Warp *w = c->warps + i;
    w->id = i; w->live = ALL; w->registers = k->registers;
    w->w = calloc(k->words, sizeof *w->w); w->d = calloc(k->doubles + 1, sizeof *w->d); w->p = calloc(k->preds + 1, 4);
    w->has_w = calloc(k->words, 4); w->has_d = calloc(k->doubles + 1, 4); w->has_p = calloc(k->preds + 1, 4);
    w->set_w = calloc(k->words, 4);
    for (int l = 0; l < LANES; l++) {
      // What ran before on this rank's stream is seen.
      w->view[l] = w->async_view[l] = w->alias_view[l] = now;
      w->w[0][l] = i * LANES + l; w->w[1][l] = c->id; w->w[2][l] = launch->grid;
    }
    w->has_w[0] = w->has_w[1] = w->has_w[2] = ALL;
  }
  progress_at = executed;
  return c;
}
static void finish(Cta *c) {
  for (int i = 0; i < c->num_warps; i++) {
    Warp *w = c->warps + i;
    free(w->w); free(w->d); free(w->p); free(w->has_w); free(w->has_d); free(w->has_p); free(w->set_w); free(w->copies);
  }
  for (int i = 0; i < c->num_entries; i++) free(c->entries[i]);
  for (int i = 0; i < c->num_stores; i++) free(c->stores[i].data);
  free(c->warps); free(c->shared); free(c->cells); free(c->read_at); free(c);
}
static void clear(void) {
  for (int i = 0; i < num_resident; i++) finish(resident[i]);
  for (int i = 0; i < num_regions; i++) {
    Region *r = regions + i;
    free(r->old); free(r->when); free(r->who); free(r->stored); free(r->pending);
  }
  free(regions);
  regions = NULL;
  num_resident = num_regions = 0;
}
// Which instructions all warps are at, for a report.
static void where(char *to, size_t size) {
  int n = 0;
  for (int i = 0; i < num_resident && n < (int)size - 64; i++) {
    n += snprintf(to + n, size - n, "%srank %d CTA %d:", i ? "; " : " | ", resident[i]->rank, resident[i]->id);
    for (int j = 0; j < resident[i]->num_warps && n < (int)size - 64; j++) {
      const Warp *w = resident[i]->warps + j;
      n += snprintf(to + n, size - n, " %s%d", !w->live ? "x" : w->waiting ? "b" : "", w->at);
    }
  }
}

// The next CTA of each rank's running kernel, while there is room: in the order of their ids, as GPUs do it, so that
// kernels cannot rely on two programs being resident at once.
static int fill(const Plan *plan, int ranks) {
  int left = 0;
  for (int r = 0; r < ranks; r++) {
    int *first = first_launch + r;
    while (*first < num_launches && (launches[*first].rank != r || !launches[*first].left)) ++*first;
    if (first_launch[r] == num_launches) continue;
    left = 1;
    Launch *launch = launches + first_launch[r];
    int here = 0;
    for (int i = 0; i < num_resident; i++) here += resident[i]->rank == r;
    for (; launch->next < launch->grid && here < plan->residents && num_resident < MOST_RESIDENT; here++)
      resident[num_resident++] = start(launch);
  }
  return left;
}
static void tick_clocks(const Plan *plan) {
  u32 by = 1 + rnd() % plan->most_tick;
  for (int i = 0; i < plan->num_clocks; i++) {
    u32 t;
    memcpy(&t, (void *)plan->clocks[i], 4);
    t += by;
    u64 was = progress_at;
    commit(find(plan->clocks[i], 4), plan->clocks[i], &t, 4, ALL, 0);
    progress_at = was;
  }
}
// Something that was under way happens.
static void happen(void) {
  if (C->num_entries && chance(p_drain)) {
    Entry *e = C->entries[rnd() % C->num_entries];
    drain(C, e, chance(.5) ? ALL : (u32)rnd());
    sweep(C);
  }
  if (C->num_tmas && chance(p_async)) {
    int i = (int)(rnd() % C->num_tmas);
    Tma t = C->tmas[i];
    C->tmas[i] = C->tmas[--C->num_tmas];
    tma_data(&t);
  }
  if (C->num_stores && chance(p_async)) tma_store_goes_on(C->stores + rnd() % C->num_stores);
  if (W->num_copies && chance(p_async)) {
    Copy *c = W->copies + rnd() % W->num_copies;
    if (!c->done) copy_data(c);
  }
  if (W->num_wgmmas && chance(p_async))
    for (int i = 0; i < W->num_wgmmas; i++) if (!W->wgmmas[i].done) { wgmma_data(W->wgmmas + i); break; }
}
static void schedule(const Plan *plan) {
  int ranks = 0, slow_rank = -1, slow_cta = -1, slow_warp = -1, quantum = plan->quantum;
  u64 idle = 0, held = 0;
  u32 until = (u32)plan->held_until;
  int holding = !plan->held_after;
  rng = plan->seed * 0x9e3779b97f4a7c15ull + 88172645463325252ull;
  for (int i = 0; i < 8; i++) rnd();
  elected = rnd() % LANES;
  p_stale = plan->stale; p_drain = plan->drain; p_async = .3;
  shared_with_others = plan->shared_with_others;
  for (int i = 0; i < num_launches; i++) if (launches[i].rank >= ranks) ranks = launches[i].rank + 1;
  fill(plan, ranks);
  for (u64 turn = 0; num_resident; turn++) {
    if (turn % 1024 == 0) {
      // For a stretch some rank, CTA or warp hardly runs, and turns are short or long.
      int kind = rnd() % 5;
      slow_rank = kind == 1 ? resident[rnd() % num_resident]->rank : -1;
      slow_cta = kind == 2 ? resident[rnd() % num_resident]->index : -1;
      // A kernel with roles has more than 8 warps.
      slow_warp = kind == 3 ? (int)(rnd() % (resident[0]->num_warps > 8 ? resident[0]->num_warps : 8)) : -1;
      quantum = 1 << rnd() % plan->quantum;
      p_async = (double[]){.01, .1, .5}[rnd() % 3];
      p_drain = plan->drain * (double[]){.1, 1, 4}[rnd() % 3];
    }
    int ci = (int)(rnd() % num_resident);
    C = resident[ci];
    W = C->warps + rnd() % C->num_warps;
    I = C->kernel->ins + W->at;
    if (C->rank == plan->held && executed >= plan->held_after) {
      u32 t;
      memcpy(&t, (void *)plan->clocks[0], 4);
      if (!holding) until += t, holding = 1;
      if ((int)(t - until) < 0) {
        if (++held > 100000) tick_clocks(plan), held = 0;
        continue;
      }
    }
    happen();
    if (C->done == C->num_warps) {
      // What it has stored may be under way for a while. The next kernel of a stream begins when all CTAs of this one
      // have ended, and sees what they did.
      if (!chance(.0002)) continue;
      Launch *launch = C->launch;
      drain_all(C);
      resident[ci] = resident[--num_resident];
      finish(C);
      C = NULL; W = NULL;
      launch->left--;
      fill(plan, ranks);
      idle = held = 0;
      continue;
    }
    if (++idle > 200000) fail("deadlock: nobody can run");
    if (!W->live || W->waiting) continue;
    // Who polls in vain has fewer turns: nothing else changes until others run.
    if (C->polls && rnd() % 8) continue;
    if ((C->rank == slow_rank || C->index == slow_cta || W->id == slow_warp) && rnd() % 64) continue;
    yields = 0;
    for (int n = 1 + (int)(rnd() % quantum); n && W->live && !W->waiting && !yields; n--) step();
    idle = held = 0;
    if (plan->num_clocks && chance(plan->tick)) tick_clocks(plan);
    if (executed > plan->limit) fail("not finished after %llu instructions", (unsigned long long)executed);
    // Others may run in other processes: the kernel's own budget ends its waits.
    if (shared_with_others && executed - progress_at > 100000) nanosleep(&(struct timespec){0, 200000}, NULL);
    if (!shared_with_others && executed - progress_at > plan->idle_limit)
      fail("deadlock: nothing has changed for %llu instructions", (unsigned long long)plan->idle_limit);
  }
}
