// Shared memory: who may touch what when. A thread may touch what another has written, or write what another has
// touched, only behind a barrier (PTX, Causality Order; Parallel Synchronization: bar); what a copy brings only once it
// has been waited for (Data Movement: Non-blocking mechanisms; mbarrier).

static u32 place(u32 a, int len, int lane) {
  u32 at = a - SHARED_BASE;
  if (at % len) fail("misaligned access to shared memory, %d bytes at %#x, lane %d", len, at, lane);
  if (at + len > C->shared_bytes || a < SHARED_BASE)
    fail("access to shared memory, %d bytes at %#x, out of bounds (%u), lane %d", len, at, C->shared_bytes, lane);
  return at;
}
static inline u32 tick(void) { return ++C->clock; }
static inline Cell *cell_at(u32 at) { return C->cells + (at >> C->cell); }
static inline Cell *cell_end(u32 at, int len) { return cell_at(at + len - 1) + 1; }

static void who_wrote(const Cell *h, u32 at, const char *what) {
  switch (h->writer) {
  case NOBODY: fail("uninitialised shared memory at %#x is %s", at, what); break;
  case UNDER_WAY: fail("race: shared memory at %#x is %s while a copy to it is under way", at, what); break;
  case ARRIVED_BY_TMA: fail("race: shared memory at %#x is %s before the copy was waited for", at, what); break;
  case IS_MBARRIER: fail("shared memory at %#x is %s where an mbarrier lies", at, what); break;
  default:
    fail("race: shared memory at %#x is %s by warp %d and was written by lane %d of warp %d since the last barrier", at,
         what, W->id, h->writer & 31, h->writer >> 5);
  }
}
static inline void reads(u32 at, int len, int lane) {
  u16 me = (u16)(W->id << 5 | lane);
  u32 t = C->clock;
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++) {
    if (h->writer != me && (h->writer == ARRIVED_BY_TMA ? h->written > W->tma_seen
                            : h->writer >= THREADS || h->written > C->barrier_at))
      who_wrote(h, at, "read");
    if (h->read <= C->barrier_at) h->readers = 0;
    h->readers |= 1u << W->id;
    h->read = t;
  }
}
static void not_read_by_wgmma(u32 at, int len) {
  for (int i = 0; i < C->num_ranges; i++) {
    Range *r = C->ranges + i;
    if (r->begin < at + len && at < r->end && (r->when > C->barrier_at) && r->warp != W->id)
      fail("race: shared memory at %#x is written and was read by a wgmma of warp %d since the last barrier", at,
           r->warp);
  }
  if (!C->reading) return;
  for (int w = 0; w < C->num_warps; w++)
    for (int i = 0; i < C->warps[w].num_wgmmas; i++)
      for (int j = 0; j < 2; j++) {
        const Range *r = C->warps[w].wgmmas[i].reads + j;
        if (r->begin < at + len && at < r->end)
          fail("race: shared memory at %#x is written while a wgmma of warp %d reads it", at, w);
      }
}
static inline void may_write(u32 at, int len, int lane, const u8 *data) {
  // data: what is written; two threads may write the same.
  u16 me = (u16)(W->id << 5 | lane);
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++) {
    if (h->writer != me && h->writer != NOBODY) {
      if (h->writer == ARRIVED_BY_TMA ? h->written > W->tma_seen : h->writer >= THREADS) who_wrote(h, at, "written");
      if (h->writer < THREADS && h->written > C->barrier_at && !(data && !memcmp(data, C->shared + at, len)))
        who_wrote(h, at, "written");
    }
    if (h->read > C->barrier_at && h->readers & ~(1u << W->id))
      fail("race: shared memory at %#x is written by warp %d and was read by warps %#x since the last barrier", at,
           W->id, h->readers);
  }
  not_read_by_wgmma(at, len);
}
static inline void wrote(u32 at, int len, u16 writer) {
  u32 t = tick();
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++) h->writer = writer, h->written = t;
}
static inline const u8 *read_shared(u32 a, int len, int lane) {
  u32 at = place(a, len, lane);
  reads(at, len, lane);
  return C->shared + at;
}
static inline void write_shared(u32 a, const u8 *data, int len, int lane) {
  u32 at = place(a, len, lane);
  may_write(at, len, lane, data);
  wrote(at, len, (u16)(W->id << 5 | lane));
  memcpy(C->shared + at, data, len);
}
