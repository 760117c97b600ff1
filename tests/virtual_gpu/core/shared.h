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
static i64 box_bytes(const TensorMap *map) {
  i64 n = map->size;
  for (int i = 0; i < map->ndim; i++) n *= map->box[i];
  return n;
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
// Whether what was written last, by other threads or by a copy, is ordered before the running warp.
static inline int ordered_write(const Cell *h) {
  return h->writer == ARRIVED_BY_TMA ? h->written <= W->order.bars[h->bar]
                                     : h->writer < THREADS && h->written <= W->order.warps[h->writer >> 5];
}
// Other warps that read a cell after what is ordered before the running warp.
static inline u32 racing_readers(const Cell *h) {
  u32 found = 0;
  EACH(w, h->readers & ~(1u << W->id))
    if (C->read_at[(h - C->cells) * C->num_warps + w] > W->order.warps[w]) found |= 1u << w;
  return found;
}
static inline int untouched(u32 at, int len) {
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++) if (h->writer != NOBODY) return 0;
  return 1;
}
static inline void reads(u32 at, int len, int lane) {
  u16 me = (u16)(W->id << 5 | lane);
  u32 t = C->clock;
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++) {
    if (h->writer != me && !ordered_write(h)) who_wrote(h, at, "read");
    h->readers |= 1u << W->id;
    C->read_at[(h - C->cells) * C->num_warps + W->id] = t;
  }
}
static void not_read_late(u32 at, int len, int lane) {
  for (int i = 0; i < C->num_ranges; i++) {
    Range *r = C->ranges + i;
    if (r->begin < at + len && at < r->end && r->when > W->order.warps[r->warp] &&
        (r->warp != W->id || (r->lane >= 0 && r->lane != lane)))
      fail("race: shared memory at %#x is written and was read by a %s of warp %d since the last barrier", at,
           r->lane < 0 ? "wgmma" : "TMA store", r->warp);
  }
  for (int i = 0; i < C->num_stores; i++) {
    const TmaStore *s = C->stores + i;
    if (!s->data && s->src < at + len && at < s->src + box_bytes(s->map))
      fail("race: shared memory at %#x is written while a TMA store of warp %d reads it", at, s->warp);
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
// What was read asynchronously up to now. A later read of the same place by the same warp stands for an earlier one.
static void was_read(u32 begin, u32 end, int lane) {
  Range found = {begin, end, tick(), W->id, lane};
  for (int i = 0; i < C->num_ranges; i++) {
    Range *r = C->ranges + i;
    if (r->begin == begin && r->end == end && r->warp == W->id && r->lane == lane) { *r = found; return; }
  }
  if (C->num_ranges == MOST_RANGES) fail("more than %d operands are read between two barriers", MOST_RANGES);
  C->ranges[C->num_ranges++] = found;
}
// Who writes here next is ordered behind the copy that is, and so behind these reads.
static void forget_reads(u32 at, int len) {
  int n = 0;
  for (int i = 0; i < C->num_ranges; i++)
    if (C->ranges[i].begin < at || C->ranges[i].end > at + len) C->ranges[n++] = C->ranges[i];
  C->num_ranges = n;
}
static inline void may_write(u32 at, int len, int lane, const u8 *data) {
  // data: what is written; two threads may write the same.
  u16 me = (u16)(W->id << 5 | lane);
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++) {
    if (h->writer != me && h->writer != NOBODY) {
      const int same = h->writer < THREADS && data && !memcmp(data, C->shared + at, len);
      if (!ordered_write(h) && !same) who_wrote(h, at, "written");
    }
    if (racing_readers(h))
      fail("race: shared memory at %#x is written by warp %d and was read by warps %#x since the last barrier", at,
           W->id, racing_readers(h));
  }
  not_read_late(at, len, lane);
}
static inline void wrote(u32 at, int len, u16 writer) {
  u32 t = tick();
  for (Cell *h = cell_at(at), *end = cell_end(at, len); h < end; h++)
    h->writer = writer, h->written = t, h->readers = 0;
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
