// What the machine is made of: instructions, warps, CTAs, memory. One run at a time, all of it in one thread.
//
// This is a model of the PTX ISA (version 8.7, docs.nvidia.com/cuda/parallel-thread-execution), cited as "PTX" and the
// section's name. No GPU has confirmed it.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t u64;
typedef int64_t i64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;

enum { LANES = 32, MOST_WARPS = 32, MOST_RANKS = 8, MOST_ENTRIES = 256, MOST_TMA = 64, MOST_WGMMA = 64 };
enum { MOST_BARS = 32, MOST_RANGES = 4096, MOST_BARRIERS = 16, MOST_STORES = 64 };
// Dynamic shared memory does not begin at address 0: the system has the first KiB on sm_90.
enum { SHARED_BASE = 1024 };
static const u32 ALL = ~0u;

// Flags of an instruction that reads or writes strongly (PTX, Memory Consistency Model: Scope, Operation types).
enum { RELEASE = 1, ACQUIRE = 2, AT_SYS = 4, AT_GPU = 8, TRANSPOSED = 16, TYPE_BF16 = 32, TRANSPOSED_A = 64 };
// What wgmma's operands are: two bits of the flags for each, A first; whether A is in registers.
enum { TYPE_F16, TYPE_BFLOAT16, TYPE_E4M3, TYPE_E5M2, TYPES_AT = 7, A_IN_REGISTERS = 1 << 11 };
// A load of less than its registers of 64 bits; of a signed number.
enum { WIDENED = 1 << 12, SIGNED = 1 << 13 };

// pred: a predicate register or -1. ops: where its operands begin in the kernel's pool.
typedef struct { int op, pred, neg, width, vec, flags, ops, unused; i64 imm; } Ins;
// Registers of 32 bits and less, of 64 bits, and predicates; %tid.x, %ctaid.x, %nctaid.x are the first three words.
// registers: of each thread when the kernel begins, if it says so.
typedef struct { const Ins *ins; const int *pool; int n, words, doubles, preds; u64 *count; int registers; } Kernel;
// Operands below 0 are constants, the same for all threads of a launch.
typedef struct { const u32 (*words)[LANES]; const u64 (*doubles)[LANES]; const u32 *preds; } Constants;

// Memory is kept by granules of 16 bytes, the widest access. Of each: its bytes before the last store to it that could
// be seen by all, when that was, whose it was, and when that thread stored, by its CTA's clock.
typedef struct { u64 base, len, first; int rank; u8 *old; i64 *when; u32 *who, *stored; u16 *pending; } Region;
// What one launch may touch.
typedef struct { u64 begin, end; int region, writable; } Span;

typedef struct {
  const Kernel *kernel;
  Constants constants;
  const Span *spans;
  int num_spans, rank, grid, num_warps, next, left;
  u32 shared_bytes;
  // Where the launch's tensor maps are.
  u64 maps, bytes_of_maps;
} Launch;

// Stores of one instruction that are not seen by others yet: by lane. `marked` were released at gpu scope, at `when`.
typedef struct {
  int warp, len;
  // The CTA's clock when it was stored.
  u32 stored, mask, marked;
  // Stored by the proxy of aliases; which lanes a fence of it has put in order since.
  int alias;
  u32 fenced;
  i64 when;
  u64 lowest, highest, address[LANES];
  u8 data[LANES][16];
} Entry;
typedef struct { u32 dst; u64 src; int bytes, given, group, lane, done; i64 view; } Copy;
// What wgmma or a TMA store reads, or has read up to a time. lane: the one that knows of it, or -1 for the warp.
typedef struct { u32 begin, end, when; int warp, lane; } Range;
// since: when it was issued, in steps of its warp.
typedef struct { const Ins *ins; u64 a, b, since; int add, group, done; Range reads[2]; } Wgmma;
// A tensor map: innermost dimension first, strides in bytes.
typedef struct { i64 ndim, swizzle, base, size, dim[5], stride[5], box[5]; } TensorMap;
typedef struct { const TensorMap *map; int at[5]; u32 dst, bar; i64 view, own; } Tma;
// A TMA store of a lane: it reads shared memory into `data` at some time, then brings out rows up to `row`. A lazy one
// does neither before it is waited for.
typedef struct { const TensorMap *map; int at[5], warp, lane, group, row, waited, ended, lazy; u32 src; u8 *data; } TmaStore;

// What is ordered before a warp: what each warp of its CTA did up to a time of the CTA's clock, and wrote up to a time
// with a proxy fence behind it; and the copies that each mbarrier has counted up to a time.
typedef struct { u32 warps[MOST_WARPS], fenced[MOST_WARPS], bars[MOST_BARS]; } Order;
// The same as threads tell it to others at a barrier or an mbarrier, with what they are sure to see (`Warp`).
typedef struct { Order order; i64 view, async_view, alias_view, own_fenced_at, alias_fenced_at; } Known;
typedef struct {
  u32 address;
  int valid, count, pending, phase, warp;
  i64 tx;
  u32 since, completed;
  // What arrivals have told: in the running phase, and in those before.
  Known gathered, known;
} Mbarrier;
// One of a CTA's 16 barriers: threads that are expected and have come, warps that have come, and those that wait.
typedef struct { int expected, arrived; u32 came, waiting; Known known; } Barrier;

// Two bytes of shared memory, or one where a kernel touches single ones: when it was last written and by which thread,
// and which warps have read it since (when, is in `read_at`). bar: the mbarrier that counted the copy to it.
typedef struct { u32 written, readers; u16 writer, bar; } Cell;
// Writers that are no threads: nobody yet, a copy under way, one that has ended, an mbarrier.
enum { NOBODY = 0xffff, UNDER_WAY = 0xfffe, ARRIVED_BY_TMA = 0xfffd, IS_MBARRIER = 0xfffc, THREADS = 0x8000 };

typedef struct {
  u32 (*w)[LANES], *p, *has_w, *has_d, *has_p, *set_w;
  u64 (*d)[LANES];
  int pc[LANES], at, diverged, waiting, id, registers;
  u32 live;
  // What each lane is sure to see: all that was committed up to then, by ordinary accesses and by asynchronous ones.
  i64 view[LANES], async_view[LANES], alias_view[LANES];
  // Up to when its CTA's own stores were brought out for the asynchronous proxy.
  i64 own_fenced_at[LANES], alias_fenced_at[LANES];
  u64 steps, fenced_at;
  Order order;
  // The open group of a lane's TMA stores.
  int bulk_group[LANES];
  Copy *copies;
  int num_copies, most_copies, group;
  Wgmma wgmmas[MOST_WGMMA];
  int num_wgmmas, wgmma_group;
} Warp;

typedef struct {
  Launch *launch;
  const Kernel *kernel;
  int rank, id, index, num_warps, done, polls, registers_left;
  Warp *warps;
  u8 *shared;
  Cell *cells;
  u32 *read_at;
  // A cell has 1 << cell bytes.
  int cell;
  u32 shared_bytes, clock;
  Entry *entries[MOST_ENTRIES];
  int num_entries;
  Tma tmas[MOST_TMA];
  int num_tmas;
  TmaStore stores[MOST_STORES];
  int num_stores;
  Barrier barriers[MOST_BARRIERS];
  Mbarrier bars[MOST_BARS];
  int num_bars;
  Range ranges[MOST_RANGES];
  int num_ranges, reading;
} Cta;

static Launch *launches;
static Region *regions;
static int num_regions;
static Cta **resident;
static int num_resident;
static Cta *C;
static Warp *W;
static const Ins *I;
static i64 now;
static u64 rng, executed, progress_at, stale_reads, late_drains;
// For the TMA copy that is carried out: its CTA's stores that a fence has brought out.
static i64 own_fenced;
static double p_stale, p_drain, p_async;
// The running warp polls in vain: its turn ends.
static int yields;
// Whether other processes touch the memory too: then a load reads what is there, and atomics are the host's.
static int shared_with_others;
static char error[4096];
static jmp_buf failed;

static void fail(const char *what, ...) {
  int n = 0;
  if (C) n = snprintf(error, sizeof error, "rank %d, launch %d, CTA %d, warp %d, ins %d: ", C->rank,
                      (int)(C->launch - launches), C->id, W ? W->id : -1, I ? (int)(I - C->kernel->ins) : -1);
  va_list args;
  va_start(args, what);
  vsnprintf(error + n, sizeof error - n, what, args);
  va_end(args);
  longjmp(failed, 1);
}

static inline u64 rnd(void) { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng; }
static inline int chance(double p) { return p > 0 && (rnd() >> 11) * 0x1p-53 < p; }

static inline float flt(u32 u) { float f; memcpy(&f, &u, 4); return f; }
static inline u32 bits(float f) { u32 u; memcpy(&u, &f, 4); return u; }
// PTX, prmt, default mode: each nibble of c picks one of eight bytes, or its sign.
static inline u32 prmt(u32 a, u32 b, u32 c) {
  u32 d = 0;
  for (int i = 0; i < 4; i++) {
    u32 pick = c >> 4 * i & 15, byte = (u32)(((u64)b << 32 | a) >> 8 * (pick & 7)) & 255;
    d |= (pick & 8 ? (byte & 128 ? 255u : 0) : byte) << 8 * i;
  }
  return d;
}
// PTX, lop3: of each bit the table has what comes of the three, a's the highest of its number.
static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 d = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return d;
}
static inline u32 to_bf16(u32 u) {
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline u32 from_bf16(u32 u) { return u << 16; }
static u32 f16_table[1 << 16];
static inline u32 from_f16(u32 u) { return f16_table[u & 0xffff]; }
// To nearest even; PTX, cvt: NaN becomes the canonical one.
static inline u32 to_f16(u32 u) {
  u32 sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return 0x7fff;
  if (a >= 0x477ff000) return sign | 0x7c00;
  if (a < 0x38800000) return sign | (u32)lrintf(flt(a) * 0x1p24f);
  return sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13);
}
static void make_f16_table(void) {
  for (u32 u = 0; u < 1 << 16; u++) {
    u32 e = u >> 10 & 31, f = u & 1023;
    float x = e == 31 ? (f ? NAN : INFINITY) : e ? ldexpf(1024 + f, (int)e - 25) : ldexpf(f, -24);
    f16_table[u] = bits(x) | (u & 0x8000) << 16;
  }
}
// e4m3 has one NaN and no infinity, e5m2 is the upper half of f16 (PTX, Alternate floating-point data formats).
static float f8_table[2][256];
static void make_f8_tables(void) {
  for (u32 u = 0; u < 256; u++) {
    u32 e = u >> 3 & 15, f = u & 7;
    float x = (u & 127) == 127 ? NAN : e ? ldexpf(8 + f, (int)e - 10) : ldexpf(f, -9);
    f8_table[0][u] = u & 128 ? -x : x;
    f8_table[1][u] = flt(f16_table[u << 8]);
  }
}
// Exact (PTX, cvt: the upper half is made of the upper one; NaN becomes the canonical one).
static inline u32 f8_to_f16(u32 u, int e5m2) { return to_f16(bits(f8_table[e5m2][u])); }
// To nearest even, no further than the largest number (PTX, cvt: .satfinite; NaN becomes the canonical one).
static u32 to_f8(u32 u, int e5m2) {
  const int m = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  u32 sign = u >> 24 & 128, most = e5m2 ? 0x7b : 0x7e;
  float a = fabsf(flt(u));
  if (isnan(a)) return 0x7f;
  if (a >= f8_table[e5m2][most]) return sign | most;
  int e = a ? ilogbf(a) : -127;
  if (e < 1 - bias) e = 1 - bias;
  // A subnormal number's exponent is that of the smallest normal one; what is rounded up to a power of two carries.
  return sign | ((u32)(e + bias - 1) << m) + (u32)lrintf(ldexpf(a, m - e));
}

// Exact too: cvt.bf16.f16 has no rounding mode, and of what would take one it is not known.
static inline u32 f16_to_bf16(u32 u, u32 asked) {
  u32 x = from_f16(u);
  if (x & 0xffff && asked && (x & 0x7fffffff) <= 0x7f800000) fail("cvt.bf16.f16 of %#x, no number of bfloat16", u);
  return to_bf16(x);
}
// Rounded once (PTX, Half Precision Floating Point: mul; subnormal numbers are supported). In float64 a product is
// exact; on the way float32 takes what is cut off into its last bit, so that it is on the same side of every middle.
static inline u32 bf16_product(double x, double y) {
  float f = (float)(x * y);
  u32 u = bits(f);
  if (f != x * y) u = (u - (fabs(f) > fabs(x * y))) | 1;
  return to_bf16(u);
}

// Operands of the running warp. A register that was never written, or that work under way will write, cannot be read.
static void unwritten(char kind, int r) {
  fail("register %c%d is read and holds nothing: never written, or written by what is not waited for", kind, r);
}
static inline const u32 *word(int r, u32 m) {
  if (r < 0) return C->launch->constants.words[~r];
  if ((W->has_w[r] & m) != m) unwritten('w', r);
  return W->w[r];
}
static inline const u64 *dbl(int r, u32 m) {
  if (r < 0) return C->launch->constants.doubles[~r];
  if ((W->has_d[r] & m) != m) unwritten('d', r);
  return W->d[r];
}
static inline u32 pred(int r, u32 m) {
  if (r < 0) return C->launch->constants.preds[~r];
  if ((W->has_p[r] & m) != m) unwritten('p', r);
  return W->p[r];
}
static inline void set_word(int r, u32 m, const u32 *t) {
  u32 *d = W->w[r];
  if (m == ALL) memcpy(d, t, sizeof(u32) * LANES);
  else for (int l = 0; l < LANES; l++) d[l] = m >> l & 1 ? t[l] : d[l];
  W->has_w[r] |= m;
  W->set_w[r] = (u32)W->steps;
}
static inline void set_double(int r, u32 m, const u64 *t) {
  u64 *d = W->d[r];
  if (m == ALL) memcpy(d, t, sizeof(u64) * LANES);
  else for (int l = 0; l < LANES; l++) d[l] = m >> l & 1 ? t[l] : d[l];
  W->has_d[r] |= m;
}
static inline void set_pred(int r, u32 m, u32 t) {
  W->p[r] = (W->p[r] & ~m) | (t & m);
  W->has_p[r] |= m;
}
#define EACH(l, m) for (u32 m_ = (m), l; m_ && (l = __builtin_ctz(m_), 1); m_ &= m_ - 1)

// Order between the warps of a CTA (PTX, Causality Order): what a warp's lanes tell, and what they learn.
static inline void later(u32 *a, const u32 *b, int n) { for (int i = 0; i < n; i++) if (b[i] > a[i]) a[i] = b[i]; }
static inline void later_view(i64 *a, i64 b) { if (b > *a) *a = b; }
static void merge(Known *k, const Known *other) {
  later((u32 *)&k->order, (const u32 *)&other->order, sizeof(Order) / sizeof(u32));
  later_view(&k->view, other->view);
  later_view(&k->async_view, other->async_view);
  later_view(&k->alias_view, other->alias_view);
  later_view(&k->own_fenced_at, other->own_fenced_at);
  later_view(&k->alias_fenced_at, other->alias_fenced_at);
}
// upto: what the whole warp did up to this time of the clock is ordered before.
static void tell(Known *k, const Warp *w, u32 lanes, u32 upto) {
  later((u32 *)&k->order, (const u32 *)&w->order, sizeof(Order) / sizeof(u32));
  later(&k->order.warps[w->id], &upto, 1);
  EACH(l, lanes) {
    later_view(&k->view, w->view[l]);
    later_view(&k->async_view, w->async_view[l]);
    later_view(&k->alias_view, w->alias_view[l]);
    later_view(&k->own_fenced_at, w->own_fenced_at[l]);
    later_view(&k->alias_fenced_at, w->alias_fenced_at[l]);
  }
}
static void learn(Warp *w, u32 lanes, const Known *k) {
  later((u32 *)&w->order, (const u32 *)&k->order, sizeof(Order) / sizeof(u32));
  EACH(l, lanes) {
    later_view(&w->view[l], k->view);
    later_view(&w->async_view[l], k->async_view);
    later_view(&w->alias_view[l], k->alias_view);
    later_view(&w->own_fenced_at[l], k->own_fenced_at);
    later_view(&w->alias_fenced_at[l], k->alias_fenced_at);
  }
}
