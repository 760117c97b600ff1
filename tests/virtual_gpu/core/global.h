// Global memory, weak as PTX's model has it, by an abstraction that is sound for programs without data races.
//
// A weak store waits in a buffer of its CTA and is committed at any time, in any order (PTX, Memory Consistency Model:
// nothing but causality orders it for others). A weak load may give what was there before the last commit, unless that
// is ordered before it (Causality Order): the lane's own, another thread's of the CTA before a barrier that both have
// passed, or one committed before what the lane has acquired, its `view`. A release commits all that is ordered before
// it (Release and Acquire Patterns); an acquire that observes it, itself or through read-modify-writes, takes its time
// for a view, if the scopes of both include the other's thread (Morally strong operations). At gpu scope what goes to
// another rank's memory is only marked, and committed by a later release at system scope that is ordered after it.
//
// Strong operations read and write the newest value. The asynchronous proxy has a view of its own, that of the last
// fence.proxy.async (Proxies; Proxy-preserved base causality order). So has that of aliases, by which multimem reaches
// all ranks' memory at once; what it stores is ordered by no release before a fence.proxy.alias.

static Region *find(u64 a, int len) {
  static int last;
  for (int i = 0; i < num_regions; i++) {
    Region *r = regions + (last + i) % num_regions;
    if (a >= r->base && a + len <= r->base + r->len) { last = (int)(r - regions); return r; }
  }
  return NULL;
}
static inline u64 granule(const Region *r, u64 a) { return (a >> 4) - r->first; }
static inline u32 thread_of(int lane) { return (u32)C->index << 10 | (u32)W->id << 5 | (u32)lane; }

// PTX, Addresses as Operands: naturally aligned; and within what the launch was given.
static Region *checked(u64 a, int len, int writes, const char *what, int lane) {
  static int last;
  if (a % len) fail("misaligned %s of %d bytes at %#llx, lane %d", what, len, (unsigned long long)a, lane);
  const Launch *launch = C->launch;
  for (int i = 0, n = launch->num_spans; i < n; i++) {
    int j = last + i < n ? last + i : (last + i) % n;
    const Span *s = launch->spans + j;
    if (a >= s->begin && a + len <= s->end) {
      if (writes && !s->writable) continue;
      last = j;
      return regions + s->region;
    }
  }
  fail("%s of %d bytes out of bounds at %#llx, lane %d", what, len, (unsigned long long)a, lane);
  return NULL;
}

static void commit(Region *r, u64 a, const void *data, int len, u32 who, u32 stored) {
  u64 g = granule(r, a), begin = a & ~15ull;
  if (memcmp((void *)a, data, len)) progress_at = executed;
  memcpy(r->old + 16 * g, (void *)begin, 16);
  memcpy((void *)a, data, len);
  r->when[g] = ++now;
  r->who[g] = who;
  r->stored[g] = stored;
}

static void drain_lane(Cta *c, Entry *e, int l);
static void drain_older(Cta *c, const Entry *e, u64 at) {
  // Stores of one thread to one place are in order (PTX, Coherence Order).
  for (int i = 0; i < c->num_entries && c->entries[i] != e; i++)
    if (c->entries[i]->lowest >> 4 <= at && at <= c->entries[i]->highest >> 4)
      EACH(k, c->entries[i]->mask) if (c->entries[i]->address[k] >> 4 == at) drain_lane(c, c->entries[i], k);
}
static void drain_lane(Cta *c, Entry *e, int l) {
  u64 a = e->address[l];
  Region *r = find(a, e->len);
  e->mask &= ~(1u << l);
  e->marked &= ~(1u << l);
  if (--r->pending[granule(r, a)]) drain_older(c, e, a >> 4);
  commit(r, a, e->data[l], e->len, (u32)c->index << 10 | (u32)e->warp << 5 | (u32)l, e->stored);
}
static void drain(Cta *c, Entry *e, u32 mask) { EACH(l, e->mask & mask) drain_lane(c, e, l); }
static void sweep(Cta *c) {
  int n = 0;
  for (int i = 0; i < c->num_entries; i++)
    if (c->entries[i]->mask) c->entries[n++] = c->entries[i];
    else free(c->entries[i]);
  c->num_entries = n;
}
static void drain_all(Cta *c) {
  for (int i = 0; i < c->num_entries; i++) drain(c, c->entries[i], ALL);
  sweep(c);
}
// The lanes of an entry that are ordered before `lane` of the running warp: its own, or before a barrier.
static u32 ordered(const Entry *e, int lane) {
  return e->stored <= W->order.warps[e->warp] ? ALL : e->warp == W->id ? 1u << lane : 0;
}
static void drain_own(u64 a, int len, int lane) {
  int drained = 0;
  for (int i = 0; i < C->num_entries; i++) {
    Entry *e = C->entries[i];
    if (e->lowest >= a + len || a >= e->highest + e->len) continue;
    EACH(l, e->mask & ordered(e, lane))
      if (e->address[l] < a + len && a < e->address[l] + e->len) drain_lane(C, e, l), drained = 1;
  }
  if (drained) sweep(C);
}

// What a signal carries: up to when what is ordered before it was committed, for acquires at system scope, and for
// those of one rank.
typedef struct { u64 address; i64 at_sys, at_gpu; int rank; } Message;
static Message messages[1 << 14];
static Message *message(u64 a) {
  u64 i = (a >> 2) * 0x9e3779b97f4a7c15ull >> 50;
  for (int n = 0; n < 1 << 14; n++, i = (i + 1) & ((1 << 14) - 1)) {
    if (messages[i].address == a) return messages + i;
    if (!messages[i].address) { messages[i] = (Message){a, 0, 0, -1}; return messages + i; }
  }
  fail("too many places are read or written strongly");
  return NULL;
}
static void release(int lane, int flags, Message *to) {
  for (int i = 0; i < C->num_entries; i++) {
    Entry *e = C->entries[i];
    EACH(l, e->mask & ordered(e, lane) & (e->alias ? e->fenced : ALL)) {
      if (flags & AT_SYS || find(e->address[l], e->len)->rank == C->rank) drain_lane(C, e, l), late_drains++;
      else e->marked |= 1u << l, e->when = now;
    }
  }
  sweep(C);
  if (flags & AT_SYS)
    for (int i = 0; i < num_resident; i++) {
      Cta *c = resident[i];
      if (c->rank != C->rank || c == C) continue;
      for (int j = 0; j < c->num_entries; j++)
        if (c->entries[j]->when <= W->view[lane]) drain(c, c->entries[j], c->entries[j]->marked);
      sweep(c);
    }
  i64 at = ++now;
  if (flags & AT_SYS) to->at_sys = at;
  if (to->rank != C->rank) to->at_gpu = 0;
  to->rank = C->rank;
  to->at_gpu = at;
}
static void acquire(int lane, int flags, const Message *from) {
  i64 at = flags & AT_SYS ? from->at_sys : 0;
  if (from->rank == C->rank && from->at_gpu > at) at = from->at_gpu;
  if (at > W->view[lane]) W->view[lane] = at;
}

static void load(u64 a, int len, i64 view, void *out, int lane, int proxy) {
  Region *r = checked(a, len, 0, proxy ? "load of TMA" : "load", lane);
  u64 g = granule(r, a);
  if (r->pending[g]) drain_own(a, len, lane);
  int sure = r->when[g] <= view;
  if (!sure && (int)(r->who[g] >> 10) == C->index)
    sure = proxy ? r->when[g] <= own_fenced
                 : r->stored[g] <= W->order.warps[r->who[g] >> 5 & 31] || r->who[g] == thread_of(lane);
  if (!sure && !shared_with_others && chance(p_stale)) {
    memcpy(out, r->old + 16 * g + (a & 15), len);
    stale_reads++;
  } else memcpy(out, (void *)a, len);
}

static void store(const u64 *base, u32 m, int len, u8 (*data)[16], int alias) {
  if (!m) return;
  if (C->num_entries == MOST_ENTRIES) { drain(C, C->entries[rnd() % MOST_ENTRIES], ALL); sweep(C); }
  C->polls = 0;
  Entry *e = malloc(sizeof *e);
  C->entries[C->num_entries++] = e;
  e->warp = W->id; e->stored = C->clock; e->len = len; e->alias = alias;
  e->mask = e->marked = e->fenced = 0; e->when = 0;
  e->lowest = ~0ull; e->highest = 0;
  EACH(l, m) {
    u64 a = base[l] + I->imm;
    Region *r = checked(a, len, 1, "store", l);
    e->address[l] = a;
    if (a < e->lowest) e->lowest = a;
    if (a > e->highest) e->highest = a;
    e->mask |= 1u << l;
    r->pending[granule(r, a)]++;
    memcpy(e->data[l], data[l], len);
  }
}

// A strong operation as the host's own.
#define OF_HOST(bits)                                                                                    \
  static u64 of_host_##bits(u64 a, uint##bits##_t x, uint##bits##_t y) {                                 \
    uint##bits##_t *at = (uint##bits##_t *)a;                                                            \
    if (I->op == OP_ld_strong) return __atomic_load_n(at, __ATOMIC_SEQ_CST);                             \
    if (I->op == OP_atom_exch) return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                      \
    if (I->op == OP_atom_add) return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                        \
    __atomic_compare_exchange_n(at, &x, y, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                       \
    return x;                                                                                            \
  }
OF_HOST(32)
OF_HOST(64)

// Strong operations of one lane (PTX, Operation types; Atomicity).
static u64 strong(int lane, u64 a, int len, int flags, u64 x, u64 y) {
  int reads = I->op == OP_ld_strong;
  Region *r = checked(a, len, !reads, "strong access", lane);
  if (r->pending[granule(r, a)]) drain_own(a, len, lane);
  Message *place = message(a);
  C->polls = reads;
  u64 was = 0, to;
  if (!shared_with_others) memcpy(&was, (void *)a, len);
  if (!reads && flags & RELEASE) release(lane, flags, place);
  if (shared_with_others) {
    was = len == 8 ? of_host_64(a, x, y) : of_host_32(a, (u32)x, (u32)y);
    if (!reads) progress_at = executed;
  } else if (!reads) {
    to = I->op == OP_atom_exch ? x : I->op == OP_atom_cas ? (was == x ? y : was) : was + x;
    commit(r, a, &to, len, thread_of(lane), C->clock);
  }
  if (flags & ACQUIRE) acquire(lane, flags, place);
  return was;
}

// multimem (PTX, Data Movement and Conversion: multimem.ld_reduce, multimem.st). An address is all ranks' at once. In
// which order a sum is made is not said: from a rank on, at random; of 16 bits in float32, and rounded.
static u64 window_base, window_len, window_at[MOST_RANKS];
static int window_ranks;
static u64 of_rank(u64 a, int rank) {
  if (a < window_base || a + 16 > window_base + window_len || !window_ranks)
    fail("multimem at %#llx, which is no address of all ranks", (unsigned long long)a);
  return window_at[rank] + (a - window_base);
}
enum { SUM_F32, SUM_BF16, SUM_F16 };
static void multimem_ld(const int *o, u32 m) {
  const u64 *base = dbl(o[4], m);
  u32 t[4][LANES] = {{0}};
  EACH(l, m) {
    float sums[8] = {0};
    own_fenced = W->alias_fenced_at[l];
    for (int i = 0, first = (int)(rnd() % window_ranks); i < window_ranks; i++) {
      u32 words[4];
      load(of_rank(base[l] + I->imm, (first + i) % window_ranks), 16, W->alias_view[l], words, l, 2);
      for (int j = 0; j < 4; j++) {
        u32 low = words[j] & 0xffff, high = words[j] >> 16;
        if (I->vec == SUM_F32) sums[j] += flt(words[j]);
        else sums[2 * j] += flt(I->vec == SUM_BF16 ? from_bf16(low) : from_f16(low)),
             sums[2 * j + 1] += flt(I->vec == SUM_BF16 ? from_bf16(high) : from_f16(high));
      }
    }
    for (int j = 0; j < 4; j++) {
      u32 low = bits(sums[2 * j]), high = bits(sums[2 * j + 1]);
      t[j][l] = I->vec == SUM_F32 ? bits(sums[j])
              : I->vec == SUM_BF16 ? to_bf16(low) | to_bf16(high) << 16 : to_f16(low) | to_f16(high) << 16;
    }
  }
  for (int j = 0; j < 4; j++) set_word(o[j], m, t[j]);
}
static void multimem_st(const int *o, u32 m) {
  const u64 *base = dbl(o[0], m);
  u8 data[LANES][16];
  for (int i = 0; i < 4; i++) { const u32 *x = word(o[1 + i], m); EACH(l, m) memcpy(data[l] + 4 * i, x + l, 4); }
  for (int rank = 0; rank < window_ranks; rank++) {
    u64 at[LANES] = {0};
    EACH(l, m) at[l] = of_rank(base[l], rank);
    store(at, m, 16, data, 1);
  }
}
// fence.proxy.alias (PTX, membar / fence: Proxy fence): between the two ways to one memory, in both directions.
static void fence_alias(u32 m) {
  for (int i = 0; i < C->num_entries; i++) {
    Entry *e = C->entries[i];
    EACH(l, m) {
      if (e->alias) e->fenced |= ordered(e, l);
      else drain(C, e, ordered(e, l));
    }
  }
  sweep(C);
  EACH(l, m) W->alias_view[l] = W->view[l], W->alias_fenced_at[l] = now;
}
