// Copies that run late, and what their end is told by: cp.async, mbarriers, TMA.

// cp.async (PTX, Data Movement and Conversion: Non-bulk copy). Nobody may touch the target until the thread that issued
// the copy has waited for its group; what is read, is read at any time until then.
static void copy_data(Copy *c) {
  u8 data[16] = {0};
  if (c->given == c->bytes && c->src % c->bytes == 0) load(c->src, c->given, c->view, data, c->lane, 0);
  else if (c->given) fail("cp.async of %d bytes of %d from %#llx", c->given, c->bytes, (unsigned long long)c->src);
  memcpy(C->shared + c->dst, data, c->bytes);
  c->done = 1;
}
static void cp_async(u32 dst, u64 src, int bytes, int given, int lane) {
  u32 at = place(dst, bytes, lane);
  may_write(at, bytes, lane, NULL);
  wrote(at, bytes, UNDER_WAY);
  memset(C->shared + at, 0xff, bytes);
  if (W->num_copies == W->most_copies) {
    W->most_copies = W->most_copies ? 2 * W->most_copies : 1024;
    W->copies = realloc(W->copies, W->most_copies * sizeof(Copy));
  }
  W->copies[W->num_copies++] = (Copy){at, src, bytes, given, W->group, lane, 0, W->view[lane]};
}
static void cp_async_wait(int leave) {
  int n = 0;
  for (int i = 0; i < W->num_copies; i++) {
    Copy *c = W->copies + i;
    if (c->group < W->group - leave) {
      if (!c->done) copy_data(c);
      wrote(c->dst, c->bytes, (u16)(W->id << 5 | c->lane));
    } else W->copies[n++] = *c;
  }
  W->num_copies = n;
}

// mbarrier (PTX, Parallel Synchronization: mbarrier; tx-count; phases).
static Mbarrier *mbarrier(u32 a, int lane) {
  u32 at = place(a, 8, lane);
  for (int i = 0; i < C->num_bars; i++)
    if (C->bars[i].address == at && C->bars[i].valid) {
      Mbarrier *b = C->bars + i;
      if (b->since > W->order.warps[b->warp] && b->warp != W->id)
        fail("race: the mbarrier at %#x was initialised by warp %d since the last barrier", at, b->warp);
      return b;
    }
  fail("no mbarrier at %#x", at);
  return NULL;
}
static void mbarrier_check(Mbarrier *b) {
  if (b->pending < 0) fail("mbarrier at %#x: more arrivals than the %d of its phase", b->address, b->count);
  if (b->tx > (1 << 20) - 1 || b->tx < -((1 << 20) - 1))
    fail("mbarrier at %#x: tx-count %lld", b->address, (long long)b->tx);
  if (b->pending || b->tx) return;
  b->phase ^= 1;
  b->pending = b->count;
  b->completed = tick();
  b->gathered.order.bars[b - C->bars] = b->completed;
  merge(&b->known, &b->gathered);
  memset(&b->gathered, 0, sizeof b->gathered);
  progress_at = executed;
}
static void mbarrier_init(u32 a, int count, int lane) {
  u32 at = place(a, 8, lane);
  may_write(at, 8, lane, NULL);
  wrote(at, 8, IS_MBARRIER);
  int i = 0;
  while (i < C->num_bars && C->bars[i].valid) i++;
  if (i == MOST_BARS) fail("more than %d mbarriers", MOST_BARS);
  if (i == C->num_bars) C->num_bars++;
  C->bars[i] =
      (Mbarrier){.address = at, .valid = 1, .count = count, .pending = count, .since = C->clock, .warp = W->id};
}
static void mbarrier_inval(u32 a, int lane) {
  Mbarrier *b = mbarrier(a, lane);
  for (int i = 0; i < C->num_tmas; i++)
    if (C->tmas[i].bar == b->address) fail("mbarrier at %#x is invalidated while copies count there", b->address);
  if (b->tx) fail("mbarrier at %#x is invalidated with a tx-count of %lld", b->address, (long long)b->tx);
  b->valid = 0;
  wrote(b->address, 8, (u16)(W->id << 5 | lane));
}
// An arrival, of `count` threads, with bytes to expect. It releases what is ordered before its lane (mbarrier.arrive).
static void mbarrier_arrive(u32 a, int count, int bytes, int lane) {
  Mbarrier *b = mbarrier(a, lane);
  b->tx += bytes;
  b->pending -= count;
  tell(&b->gathered, W, 1u << lane, W->order.warps[W->id]);
  mbarrier_check(b);
}
static int mbarrier_try_wait(u32 a, int parity, int lane) {
  Mbarrier *b = mbarrier(a, lane);
  if (b->phase == parity) return 0;
  // It may say no although the phase is complete: it waits for a time that the system chooses.
  if (chance(.05)) return 0;
  learn(W, 1u << lane, &b->known);
  return 1;
}

// TMA: cp.async.bulk.tensor, tiled, global to shared memory (PTX, Data Movement: Tensor copy; Tensors: Tiled mode,
// Swizzling modes). It runs in the asynchronous proxy.
static u32 swizzled(u32 a, int mode) { return a ^ (a >> 7 & (mode == 3 ? 7 : mode == 2 ? 3 : mode == 1 ? 1 : 0)) << 4; }
static void tma_data(const Tma *t) {
  own_fenced = t->own;
  const TensorMap *map = t->map;
  i64 bytes = box_bytes(map), size = map->size, row = map->box[0] * size;
  for (i64 begin = 0; begin < bytes; begin += row) {
    i64 rest = begin / row, from = map->base, inside = 1, first = t->at[0];
    for (int i = 1; i < map->ndim; i++) {
      i64 at = t->at[i] + rest % map->box[i];
      rest /= map->box[i];
      from += at * map->stride[i];
      inside &= at >= 0 && at < map->dim[i];
    }
    for (i64 j = 0; j < row; j += 16) {
      u8 data[16] = {0};
      i64 at = first + j / size, n = 16 / size;
      // Out of bounds are zeros, at both ends.
      if (inside && at >= 0 && at + n <= map->dim[0] && (from + at * size) % 16 == 0)
        load(from + at * size, 16, t->view, data, 0, 1);
      else if (inside)
        for (int k = 0; k < n; k++)
          if (at + k >= 0 && at + k < map->dim[0]) load(from + (at + k) * size, size, t->view, data + k * size, 0, 1);
      memcpy(C->shared + swizzled(t->dst + (u32)(begin + j) + SHARED_BASE, map->swizzle) - SHARED_BASE, data, 16);
    }
  }
  progress_at = executed;
  for (int i = 0; i < C->num_bars; i++)
    if (C->bars[i].address == t->bar && C->bars[i].valid) {
      wrote(t->dst, (int)bytes, ARRIVED_BY_TMA);
      for (Cell *h = cell_at(t->dst), *end = cell_end(t->dst, (int)bytes); h < end; h++) h->bar = (u16)i;
      C->bars[i].tx -= bytes;
      mbarrier_check(C->bars + i);
      return;
    }
  fail("TMA counts at %#x, where no mbarrier is", t->bar);
}
static const TensorMap *tensor_map(u64 map, int ndim, int lane) {
  u64 place = map - C->launch->maps;
  if (place % sizeof(TensorMap) || place >= C->launch->bytes_of_maps)
    fail("TMA by what is no tensor map, lane %d", lane);
  const TensorMap *found = (const TensorMap *)map;
  if (found->ndim != ndim) fail("TMA of %d dimensions by a tensor map of %d", ndim, (int)found->ndim);
  return found;
}
static void tma_load(u64 at_map, u32 dst, u32 bar, const int *at, int ndim, int lane) {
  const TensorMap *map = tensor_map(at_map, ndim, lane);
  if (C->num_tmas == MOST_TMA) fail("more than %d TMA copies under way", MOST_TMA);
  i64 bytes = box_bytes(map);
  u32 to = dst - SHARED_BASE;
  if (dst % 128 || dst < SHARED_BASE || to + bytes > C->shared_bytes)
    fail("TMA to shared memory at %#x, %d bytes", to, (int)bytes);
  for (u32 a = to; a < to + bytes; a += 2) {
    const Cell *h = cell_at(a);
    if (h->writer == ARRIVED_BY_TMA && ordered_write(h) && !h->readers) continue;
    may_write(a, 2, lane, NULL);
    // A write of the ordinary proxy before one of the asynchronous takes a proxy fence.
    if (h->writer < THREADS && h->written > W->order.fenced[h->writer >> 5])
      fail("TMA writes shared memory at %#x, which warp %d wrote, without fence.proxy.async", a, h->writer >> 5);
  }
  not_read_late(to, (int)bytes, lane);
  forget_reads(to, (int)bytes);
  Tma t = {map, {0}, to, mbarrier(bar, lane)->address, W->async_view[lane], W->own_fenced_at[lane]};
  memcpy(t.at, at, ndim * sizeof(int));
  wrote(to, (int)bytes, UNDER_WAY);
  memset(C->shared + to, 0xff, bytes);
  C->tmas[C->num_tmas++] = t;
}

// What runs in the asynchronous proxy may read 16 bytes of shared memory.
static void readable(u32 at, const char *who) {
  for (int i = 0; i < 16; i += 15) {
    const Cell *h = cell_at(at + i);
    if (!ordered_write(h) && (h->writer >= THREADS || h->writer >> 5 != W->id)) {
      char what[32];
      snprintf(what, sizeof what, "read by %s", who);
      who_wrote(h, at, what);
    }
    if (h->writer < THREADS && h->written > W->order.fenced[h->writer >> 5])
      fail("%s reads shared memory at %#x, which warp %d wrote, without fence.proxy.async", who, at, h->writer >> 5);
  }
}

// TMA: cp.async.bulk.tensor, tiled, shared to global memory, and its groups (PTX, cp.async.bulk.commit_group,
// cp.async.bulk.wait_group). It reads the tile at any time until its thread has waited for its group with .read, and
// brings rows out at any time until the thread has waited without .read; others see them by that thread's release.
static int rows_of(const TmaStore *s) { return (int)(box_bytes(s->map) / (s->map->box[0] * s->map->size)); }
static void tma_store_reads(TmaStore *s) {
  i64 bytes = box_bytes(s->map);
  if (s->data) return;
  s->data = malloc(bytes);
  for (i64 i = 0; i < bytes; i += 16)
    memcpy(s->data + i, C->shared + swizzled(s->src + (u32)i + SHARED_BASE, s->map->swizzle) - SHARED_BASE, 16);
}
// Brings out rows up to `end`, as far as they are inside. stamp: only tells when, by the CTA's clock, they were waited
// for.
static void tma_store_rows(TmaStore *s, int end, u32 stamp) {
  const TensorMap *map = s->map;
  const u32 who = (u32)C->index << 10 | (u32)s->warp << 5 | (u32)s->lane;
  const i64 size = map->size, row = map->box[0] * size;
  for (int r = stamp ? 0 : s->row; r < end; r++) {
    i64 rest = r, to = map->base, inside = 1;
    for (int i = 1; i < map->ndim; i++) {
      i64 at = s->at[i] + rest % map->box[i];
      rest /= map->box[i];
      to += at * map->stride[i];
      inside &= at >= 0 && at < map->dim[i];
    }
    for (i64 j = 0, n; inside && j < row; j += n) {
      i64 at = s->at[0] + j / size;
      u64 a = (u64)(to + at * size);
      n = at >= 0 && at + 16 / size <= map->dim[0] && !(a % 16) ? 16 : size;
      if (at < 0 || at >= map->dim[0]) continue;
      Region *region = checked(a, (int)n, 1, "store of TMA", s->lane);
      u64 g = granule(region, a);
      if (stamp) {
        if (region->who[g] == who && region->stored[g] == ALL) region->stored[g] = stamp;
        continue;
      }
      if (region->pending[g])
        fail("TMA stores to %#llx, to which an ordinary store is under way", (unsigned long long)a);
      commit(region, a, s->data + r * row + j, (int)n, who, ALL);
    }
  }
  if (!stamp) s->row = end;
}
static void tma_store_ends(TmaStore *s) {
  tma_store_rows(s, rows_of(s), 0);
  s->ended = 1;
}
// A failure may leave the list at any time before: here nothing fails.
static void sweep_stores(void) {
  int n = 0;
  for (int i = 0; i < C->num_stores; i++)
    if (C->stores[i].ended) free(C->stores[i].data);
    else C->stores[n++] = C->stores[i];
  C->num_stores = n;
}
static void tma_store(u64 at_map, u32 src, const int *at, int ndim, int lane) {
  const TensorMap *map = tensor_map(at_map, ndim, lane);
  i64 bytes = box_bytes(map);
  u32 from = src - SHARED_BASE;
  if (src % 128 || src < SHARED_BASE || from + bytes > C->shared_bytes)
    fail("TMA from shared memory at %#x, %d bytes", from, (int)bytes);
  for (u32 a = from; a < from + bytes; a += 16) readable(a, "a TMA store");
  if (C->num_stores == MOST_STORES) {
    for (int i = 0; i < C->num_stores; i++) if (C->stores[i].data) tma_store_ends(C->stores + i);
    sweep_stores();
  }
  if (C->num_stores == MOST_STORES) fail("more than %d TMA stores read shared memory", MOST_STORES);
  TmaStore s = {.map = map, .warp = W->id, .lane = lane, .group = -1, .src = from, .lazy = chance(.3)};
  memcpy(s.at, at, ndim * sizeof(int));
  C->stores[C->num_stores++] = s;
}
// One more step of a store that nobody has waited for.
static void tma_store_goes_on(TmaStore *s) {
  int left = rows_of(s) - s->row;
  if (s->lazy) return;
  if (!s->data) tma_store_reads(s);
  else if (left) tma_store_rows(s, s->row + 1 + (int)(rnd() % left), 0);
}
static void bulk_commit(u32 m) {
  for (int i = 0; i < C->num_stores; i++) {
    TmaStore *s = C->stores + i;
    if (s->warp == W->id && s->group < 0 && m >> s->lane & 1) s->group = W->bulk_group[s->lane];
  }
  EACH(l, m) W->bulk_group[l]++;
}
static void bulk_wait(u32 m, int leave, int only_read) {
  for (int i = 0; i < C->num_stores; i++) {
    TmaStore *s = C->stores + i;
    if (s->warp != W->id || s->group < 0 || !(m >> s->lane & 1) || s->group >= W->bulk_group[s->lane] - leave) continue;
    tma_store_reads(s);
    if (!s->waited++) was_read(s->src, s->src + (u32)box_bytes(s->map), s->lane);
    if (only_read) continue;
    tma_store_ends(s);
    tma_store_rows(s, rows_of(s), tick());
  }
  sweep_stores();
}
// A CTA ends: what its stores have read comes out.
static void bulk_end(void) {
  for (int i = 0; i < C->num_stores; i++) {
    if (!C->stores[i].data) fail("a CTA ends while its TMA stores read shared memory");
    tma_store_ends(C->stores + i);
  }
  sweep_stores();
}

// fence.proxy.async (PTX, membar / fence: Proxy fence).
static void fence_proxy(u32 m, int shared) {
  EACH(l, m) W->async_view[l] = W->view[l];
  if (!shared) {
    // What this thread has stored, or others before a barrier, is there for the asynchronous proxy.
    for (int i = 0; i < C->num_entries; i++) EACH(l, m) drain(C, C->entries[i], ordered(C->entries[i], l));
    sweep(C);
    EACH(l, m) W->own_fenced_at[l] = now;
    return;
  }
  for (int w = 0; w < C->num_warps; w++) {
    u32 upto = w == W->id ? C->clock : W->order.warps[w];
    if (upto > W->order.fenced[w]) W->order.fenced[w] = upto;
  }
}
