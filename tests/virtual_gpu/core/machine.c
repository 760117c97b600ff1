// Executes lowered PTX: ranks, CTAs, warps of 32 lanes, scheduled at random over a weak memory.
#include "types.h"
#include "alu.h"
#include "global.h"
#include "shared.h"
#include "async.h"
#include "tensor.h"
#include "schedule.h"

static void ld_st_global(const int *o, u32 m) {
  int n = I->width * I->vec, loads = I->op == OP_ld_global;
  const u64 *base = dbl(o[loads ? I->vec : 0], m);
  u8 data[LANES][16];
  if (!loads) {
    for (int i = 0; i < I->vec; i++)
      if (I->width == 8) { const u64 *x = dbl(o[1 + i], m); EACH(l, m) memcpy(data[l] + 8 * i, x + l, 8); }
      else { const u32 *x = word(o[1 + i], m); EACH(l, m) memcpy(data[l] + I->width * i, x + l, I->width); }
    store(base, m, n, data, 0);
    return;
  }
  EACH(l, m) load(base[l] + I->imm, n, W->view[l], data[l], l, 0);
  for (int i = 0; i < I->vec; i++)
    if (I->width == 8 || I->flags & WIDENED) {
      u64 t[LANES] = {0};
      EACH(l, m) {
        memcpy(t + l, data[l] + I->width * i, I->width);
        if (I->flags & SIGNED && I->width == 4) t[l] = (u64)(i64)(int)t[l];
      }
      set_double(o[i], m, t);
    } else { u32 t[LANES] = {0}; EACH(l, m) memcpy(t + l, data[l] + I->width * i, I->width); set_word(o[i], m, t); }
}
static void ld_st_shared(const int *o, u32 m) {
  int n = I->width * I->vec, loads = I->op == OP_ld_shared;
  const u32 *base = word(o[loads ? I->vec : 0], m);
  u8 data[LANES][16];
  if (!loads) {
    for (int i = 0; i < I->vec; i++)
      if (I->width == 8) { const u64 *x = dbl(o[1 + i], m); EACH(l, m) memcpy(data[l] + 8 * i, x + l, 8); }
      else { const u32 *x = word(o[1 + i], m); EACH(l, m) memcpy(data[l] + I->width * i, x + l, I->width); }
    EACH(l, m) write_shared(base[l] + (u32)I->imm, data[l], n, l);
    return;
  }
  // Of a vector, elements that nobody has written, such as what lies between values of other sizes, hold nothing.
  u32 nothing[4] = {0};
  EACH(l, m) {
    const u32 at = place(base[l] + (u32)I->imm, n, l);
    for (int i = 0; i < I->vec; i++) {
      const u32 from = at + (u32)(I->width * i);
      if (I->vec > 1 && untouched(from, I->width)) nothing[i] |= 1u << l;
      else reads(from, I->width, l);
    }
    memcpy(data[l], C->shared + at, n);
  }
  for (int i = 0; i < I->vec; i++)
    if (I->width == 8 || I->flags & WIDENED) {
      u64 t[LANES] = {0};
      EACH(l, m) {
        memcpy(t + l, data[l] + I->width * i, I->width);
        if (I->flags & SIGNED && I->width == 4) t[l] = (u64)(i64)(int)t[l];
      }
      set_double(o[i], m, t);
    } else { u32 t[LANES] = {0}; EACH(l, m) memcpy(t + l, data[l] + I->width * i, I->width); set_word(o[i], m, t); }
  for (int i = 0; i < I->vec; i++)
    if (nothing[i]) *(I->width == 8 || I->flags & WIDENED ? W->has_d + o[i] : W->has_w + o[i]) &= ~nothing[i];
}
static void strong_all(const int *o, u32 m) {
  int wide = I->width == 8, values = I->op == OP_ld_strong ? 0 : I->op == OP_atom_cas ? 2 : 1;
  const u64 *base = dbl(o[1], m);
  u64 v[2][LANES] = {0}, was[LANES] = {0};
  for (int i = 0; i < values; i++)
    if (wide) { const u64 *x = dbl(o[2 + i], m); EACH(l, m) v[i][l] = x[l]; }
    else { const u32 *x = word(o[2 + i], m); EACH(l, m) v[i][l] = x[l]; }
  EACH(l, m) was[l] = strong(l, base[l] + I->imm, I->width, I->flags, v[0][l], v[1][l]);
  if (wide) set_double(o[0], m, was);
  else { u32 t[LANES] = {0}; EACH(l, m) t[l] = (u32)was[l]; set_word(o[0], m, t); }
}

// bar.sync, barrier.sync and .arrive (PTX, Parallel Synchronization: bar, barrier; "aligned": all threads of a warp
// execute the same one). Who arrives goes on, and has told the others what is ordered before it.
static void barrier(u32 m, int number, int threads, int waits) {
  const int all = C->num_warps * LANES;
  if (m != W->live || W->live != ALL) fail("barrier reached by lanes %#x of %#x", m, W->live);
  if (number < 0 || number >= MOST_BARRIERS) fail("barrier %d of %d", number, MOST_BARRIERS);
  if (!threads) threads = all;
  if (threads % LANES || threads > all) fail("barrier %d for %d threads of %d", number, threads, all);
  Barrier *b = C->barriers + number;
  if (b->arrived && b->expected != threads)
    fail("barrier %d is for %d threads here and for %d elsewhere", number, threads, b->expected);
  b->expected = threads;
  tell(&b->known, W, ALL, C->clock++);
  b->came |= 1u << W->id;
  if (waits) b->waiting |= 1u << W->id, W->waiting = 1;
  if ((b->arrived += LANES) < threads) return;
  EACH(i, b->waiting) {
    learn(C->warps + i, ALL, &b->known);
    C->warps[i].waiting = 0;
  }
  // All of the CTA's reads are ordered before what comes.
  if (__builtin_popcount(b->waiting) == C->num_warps) C->num_ranges = 0;
  memset(b, 0, sizeof *b);
}
// bar.warp.sync: the lanes of one warp, which come together.
static void warp_sync(u32 m, u32 lanes) {
  if (m != ALL || lanes != ALL) fail("bar.warp.sync of lanes %#x reached by lanes %#x", lanes, m);
  Known k = {0};
  tell(&k, W, ALL, C->clock++);
  learn(W, ALL, &k);
}
// setmaxnreg (PTX): registers given back to the CTA's pool, or taken from it when there are enough. 1 if it is done.
static int setmaxnreg(u32 m, int count, int takes) {
  if (m != ALL) fail("setmaxnreg with lanes %#x only", m);
  if (!C->kernel->registers) fail("setmaxnreg in a kernel that begins with any number of registers");
  if (count < 24 || count > 256 || count % 8) fail("setmaxnreg to %d registers", count);
  int more = count - W->registers;
  if (takes ? more < 0 : more > 0) fail("setmaxnreg.%s from %d to %d", takes ? "inc" : "dec", W->registers, count);
  if (more > C->registers_left) return 0;
  C->registers_left -= more;
  W->registers = count;
  return 1;
}
static void leave(u32 m) {
  W->live &= ~m;
  if (W->live) return;
  if (W->num_copies || W->num_wgmmas) fail("a warp ends while its copies or wgmmas are under way");
  if (++C->done < C->num_warps) {
    for (int i = 0; i < MOST_BARRIERS; i++)
      if (C->barriers[i].waiting && C->barriers[i].expected == C->num_warps * LANES &&
          !(C->barriers[i].came >> W->id & 1))
        fail("a warp ends while others wait at a barrier");
    return;
  }
  if (C->num_tmas) fail("a CTA ends while its TMA copies are under way");
  bulk_end();
  for (int i = 0; i < C->num_bars; i++)
    if (C->bars[i].valid) fail("an mbarrier at %#x is never invalidated", C->bars[i].address);
}

static void step(void) {
  u32 m = W->live;
  int at = W->at;
  if (W->diverged) {
    // The lanes that are furthest behind: they meet the others where both come (PTX leaves the order open).
    at = 1 << 30;
    EACH(l, W->live) if (W->pc[l] < at) at = W->pc[l];
    m = 0;
    EACH(l, W->live) if (W->pc[l] == at) m |= 1u << l;
  }
  I = C->kernel->ins + at;
  const int *o = C->kernel->pool + I->ops;
  const u32 here = m;
  if (I->pred >= 0) { u32 p = pred(I->pred, m); m &= I->neg ? ~p : p; }
  executed++; W->steps++;
  if (m) C->kernel->count[at]++;
  u32 jump = 0;
  // Where the lanes that jump go to: one place, or for each lane its own.
  int target = (int)I->imm, targets[LANES], apart = 0;
  if (m || I->op == OP_barrier) switch (I->op) {
    ALU(ALU_CASE)
  case OP_unpack_32: {
    const u32 *x = word(o[2], m); u32 lo[LANES], hi[LANES];
    for (int l = 0; l < LANES; l++) lo[l] = LO(x[l]), hi[l] = HI(x[l]);
    set_word(o[0], m, lo); set_word(o[1], m, hi); break; }
  case OP_unpack_64: {
    const u64 *x = dbl(o[2], m); u32 lo[LANES], hi[LANES];
    for (int l = 0; l < LANES; l++) lo[l] = (u32)x[l], hi[l] = (u32)(x[l] >> 32);
    set_word(o[0], m, lo); set_word(o[1], m, hi); break; }
  case OP_bra: jump = m; break;
  case OP_brx: {
    // PTX, brx.idx: an index that is not in the list is undefined.
    const u32 *x = word(o[0], m);
    jump = m;
    target = -1;
    EACH(l, m) {
      if (x[l] >= (u32)I->vec) fail("brx.idx by %u in a list of %d", x[l], I->vec);
      targets[l] = o[1 + x[l]];
      if (target >= 0 && targets[l] != target) apart = 1;
      target = targets[l];
    }
    break; }
  case OP_ret: leave(m); break;
  case OP_barrier: barrier(m, (int)I->imm, I->vec, I->width); break;
  case OP_warp_sync: warp_sync(m, word(o[0], m)[__builtin_ctz(m)]); break;
  case OP_setmaxnreg:
    if (!setmaxnreg(m, (int)I->imm, I->width)) { yields = 1; return; }
    break;
  case OP_ld_global: case OP_st_global: ld_st_global(o, m); break;
  case OP_ld_shared: case OP_st_shared: ld_st_shared(o, m); break;
  case OP_ld_strong: case OP_atom_exch: case OP_atom_cas: case OP_atom_add:
    strong_all(o, m); break;
  case OP_cp_async: {
    const u32 *dst = word(o[0], m), *given = word(o[2], m); const u64 *src = dbl(o[1], m);
    EACH(l, m) cp_async(dst[l] + (u32)I->imm, src[l], I->width, (int)given[l], l);
    break; }
  case OP_cp_async_commit: W->group++; break;
  case OP_cp_async_wait: cp_async_wait((int)I->imm); break;
  case OP_ldmatrix: ldmatrix(o, m); break;
  case OP_stmatrix: stmatrix(o, m); break;
  case OP_mma: mma(o, m); break;
  case OP_elect: {
    if (m != ALL) fail("elect.sync with lanes %#x only", m);
    // One and the same for one and the same mask; which one is not said (PTX, elect.sync).
    u32 t[LANES]; for (int l = 0; l < LANES; l++) t[l] = elected;
    set_word(o[0], m, t); set_pred(o[1], m, 1u << elected); break; }
  case OP_shfl_idx: {
    if (m != ALL) fail("shfl.sync with lanes %#x only", m);
    const u32 *x = word(o[1], m), *from = word(o[2], m); u32 t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = x[from[l] & 31];
    set_word(o[0], m, t); break; }
  case OP_fence_proxy_global: fence_proxy(m, 0); break;
  case OP_fence_proxy_alias: fence_alias(m); break;
  case OP_multimem_ld: multimem_ld(o, m); break;
  case OP_multimem_st: multimem_st(o, m); break;
  case OP_fence_proxy_shared: fence_proxy(m, 1); break;
  case OP_mbarrier_init: {
    const u32 *a = word(o[0], m); EACH(l, m) mbarrier_init(a[l] + (u32)I->imm, I->width, l); break; }
  case OP_mbarrier_inval: { const u32 *a = word(o[0], m); EACH(l, m) mbarrier_inval(a[l] + (u32)I->imm, l); break; }
  case OP_mbarrier_arrive: {
    const u32 *a = word(o[0], m); EACH(l, m) mbarrier_arrive(a[l] + (u32)I->imm, I->vec, I->width, l); break; }
  case OP_mbarrier_try_wait: {
    const u32 *a = word(o[1], m), *parity = word(o[2], m); u32 t = 0;
    EACH(l, m) t |= (u32)mbarrier_try_wait(a[l] + (u32)I->imm, parity[l] & 1, l) << l;
    set_pred(o[0], m, t);
    yields = !t;
    break; }
  case OP_tma_load: case OP_tma_store: {
    const int loads = I->op == OP_tma_load;
    const u32 *of_tile = word(o[0], m), *bar = loads ? word(o[2], m) : NULL; const u64 *map = dbl(o[1], m);
    EACH(l, m) {
      int coordinates[5];
      for (int i = 0; i < I->vec; i++) coordinates[i] = (int)word(o[2 + loads + i], m)[l];
      if (loads) tma_load(map[l], of_tile[l], bar[l], coordinates, I->vec, l);
      else tma_store(map[l], of_tile[l], coordinates, I->vec, l);
    }
    break; }
  case OP_bulk_commit: bulk_commit(m); break;
  case OP_bulk_wait: bulk_wait(m, (int)I->imm, I->width); break;
  case OP_wgmma: wgmma_issue(o, m); break;
  case OP_wgmma_fence: W->fenced_at = W->steps; break;
  case OP_wgmma_commit: wgmma_commit(); break;
  case OP_wgmma_wait: wgmma_wait((int)I->imm); break;
  default: fail("no such operation, %d", I->op);
  }
  if (!W->diverged && !apart && (jump == 0 || jump == here)) { W->at = jump ? target : at + 1; return; }
  if (!W->diverged) for (int l = 0; l < LANES; l++) W->pc[l] = at;
  EACH(l, here) W->pc[l] = jump >> l & 1 ? (apart ? targets[l] : target) : at + 1;
  W->diverged = 0;
  if (!W->live) return;
  W->at = W->pc[__builtin_ctz(W->live)];
  EACH(l, W->live) if (W->pc[l] != W->at) W->diverged = 1;
}

size_t size_of_instruction(void) { return sizeof(Ins); }
int op_of(const char *name) {
  for (int i = 0; i < NUM_OPS; i++) if (!strcmp(op_names[i], name)) return i;
  return -1;
}

// Runs all that is launched to its end. 0, or 1 if something failed: what, in `out`.
int run(const Plan *plan, char *out, size_t size, u64 *stats) {
  error[0] = 0;
  C = NULL; W = NULL; I = NULL;
  int code = setjmp(failed);
  if (!code) schedule(plan);
  else if (C && W && I) where(error + strlen(error), sizeof error - strlen(error));
  snprintf(out, size, "%s", error);
  stats[0] = executed; stats[1] = stale_reads; stats[2] = late_drains;
  clear();
  return code;
}
