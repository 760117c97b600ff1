// Tensor cores and the instructions that feed them (PTX, Warp-level and Asynchronous Warpgroup-level Matrix
// Instructions). Products are added in float32 in the order of k; in what order tensor cores add is not known, and that
// they keep fewer bits of a sum of 8-bit products is not modelled.

static void ldmatrix(const int *o, u32 m) {
  if (m != ALL) fail("ldmatrix with lanes %#x only", m);
  const u32 *at = word(o[I->vec], m);
  int n = I->vec;
  u16 rows[LANES][8];
  for (int l = 0; l < 8 * n; l++) memcpy(rows[l], read_shared(at[l] + (u32)I->imm, 16, l), 16);
  for (int j = 0; j < n; j++) {
    u32 t[LANES];
    for (int l = 0; l < LANES; l++) {
      int a = 8 * j + (l >> 2), b = 2 * (l & 3);
      t[l] = I->flags & TRANSPOSED ? rows[8 * j + b][l >> 2] | (u32)rows[8 * j + b + 1][l >> 2] << 16
                                   : rows[a][b] | (u32)rows[a][b + 1] << 16;
    }
    set_word(o[j], m, t);
  }
}
static void stmatrix(const int *o, u32 m) {
  if (m != ALL) fail("stmatrix with lanes %#x only", m);
  const u32 *at = word(o[0], m);
  int n = I->vec;
  u16 rows[LANES][8];
  for (int j = 0; j < n; j++) {
    const u32 *x = word(o[1 + j], m);
    for (int l = 0; l < LANES; l++)
      for (int h = 0; h < 2; h++) {
        int a = l >> 2, b = 2 * (l & 3) + h;
        rows[8 * j + (I->flags & TRANSPOSED ? b : a)][I->flags & TRANSPOSED ? a : b] = (u16)(x[l] >> 16 * h);
      }
  }
  for (int l = 0; l < 8 * n; l++) write_shared(at[l] + (u32)I->imm, (u8 *)rows[l], 16, l);
}

static inline float widened(u32 h, int bf) { return flt(bf ? from_bf16(h & 0xffff) : from_f16(h)); }

// mma.sync m16n8k16 (PTX, Matrix Fragments for mma.m16n8k16 with floating point type).
static void mma(const int *o, u32 m) {
  if (m != ALL) fail("mma with lanes %#x only", m);
  int bf = I->flags & TYPE_BF16;
  float a[16][16], b[16][8], d[16][8] = {{0}};
  for (int i = 0; i < 4; i++) {
    const u32 *x = word(o[4 + i], m);
    for (int l = 0; l < LANES; l++)
      for (int h = 0; h < 2; h++)
        a[(l >> 2) + (i & 1 ? 8 : 0)][(l & 3) * 2 + h + (i & 2 ? 8 : 0)] = widened(x[l] >> 16 * h, bf);
  }
  for (int i = 0; i < 2; i++) {
    const u32 *x = word(o[8 + i], m);
    for (int l = 0; l < LANES; l++)
      for (int h = 0; h < 2; h++) b[(l & 3) * 2 + h + 8 * i][l >> 2] = widened(x[l] >> 16 * h, bf);
  }
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) d[r][n] += a[r][k] * b[k][n];
  for (int i = 0; i < 4; i++) {
    const u32 *c = word(o[10 + i], m);
    u32 t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = bits(flt(c[l]) + d[(l >> 2) + (i & 2 ? 8 : 0)][(l & 3) * 2 + (i & 1)]);
    set_word(o[i], m, t);
  }
}

// wgmma (PTX, Asynchronous wgmma: Matrix-Descriptor Format; Strides; Canonical layouts). An operand's element in shared
// memory; `across` if it is adjacent along M or N, not along K.
typedef struct { u32 start, lead, stride; int mode; } Matrix;
static Matrix matrix(u64 d) {
  Matrix x = {(u32)(d & 0x3fff) << 4, (u32)(d >> 16 & 0x3fff) << 4, (u32)(d >> 32 & 0x3fff) << 4, (int)(d >> 62)};
  if (!x.mode) fail("wgmma's operand is not swizzled, descriptor %#llx", (unsigned long long)d);
  if (d >> 49 & 7) fail("wgmma's operand has a base offset, descriptor %#llx", (unsigned long long)d);
  return x;
}
static u32 element(const Matrix *x, int across, int mn, int k, int size) {
  u32 span = x->mode == 1 ? 128 : x->mode == 2 ? 64 : 32, t = span / 2;
  u32 a = across ? x->start + mn / t * x->lead + k / 8 * x->stride + k % 8 * span + mn % t * 2
                 : x->start + mn / 8 * x->stride + mn % 8 * span + k * size;
  a = swizzled(a, 4 - x->mode) - SHARED_BASE;
  if (a + 16 > C->shared_bytes) fail("wgmma reads shared memory at %#x, out of bounds (%u)", a, C->shared_bytes);
  return a;
}
// 16 bytes of adjacent elements at a time, of types of 16 or 8 bits; `to` gets [k][mn].
static void operand(const Matrix *x, int across, int first, int count, int type, float *to, int pitch, int check,
                    Range *range) {
  int size = type < TYPE_E4M3 ? 2 : 1, n = 16 / size;
  for (int i = 0; i < count * 2; i++) {
    int mn = across ? i / 16 * 8 : i / 2, k = across ? i % 16 : i % 2 * n;
    u32 a = element(x, across, first + mn, k, size);
    if (a < range->begin) range->begin = a;
    if (a + 16 > range->end) range->end = a + 16;
    if (check) { readable(a, "wgmma"); continue; }
    u16 h[8];
    memcpy(h, C->shared + a, 16);
    for (int j = 0; j < n; j++) {
      float value = size == 2 ? widened(h[j], type) : f8_table[type - TYPE_E4M3][h[j / 2] >> 8 * (j % 2) & 255];
      if (across) to[k * pitch + mn + j] = value;
      else to[(k + j) * pitch + mn] = value;
    }
  }
}
static float of_a[32][16], of_b[32][256], sums[16][256];
// A's fragments (PTX, Register Fragments for wgmma.mma_async.m64nNk16): of each warp's 16 rows as those of mma.
static void fragments(const int *o, int bf, float (*to)[16]) {
  for (int i = 0; i < 4; i++)
    for (int l = 0; l < LANES; l++)
      for (int h = 0; h < 2; h++)
        to[(l & 3) * 2 + h + (i & 2 ? 8 : 0)][(l >> 2) + (i & 1 ? 8 : 0)] = widened(W->w[o[i]][l] >> 16 * h, bf);
}
// One warp's 16 rows of the warpgroup's 64.
static void wgmma_operands(Wgmma *g, int check) {
  int n = g->ins->vec * 2, types = g->ins->flags >> TYPES_AT;
  for (int i = 0; i < 2; i++) g->reads[i] = (Range){ALL, 0, 0, W->id, -1};
  Matrix b = matrix(g->b);
  if (!(g->ins->flags & A_IN_REGISTERS)) {
    Matrix a = matrix(g->a);
    operand(&a, g->ins->flags & TRANSPOSED_A, W->id % 4 * 16, 16, types & 3, of_a[0], 16, check, g->reads);
  } else if (!check) fragments(C->kernel->pool + g->ins->ops + g->ins->vec, types & 3, of_a);
  operand(&b, g->ins->flags & TRANSPOSED, 0, n, types >> 2 & 3, of_b[0], 256, check, g->reads + 1);
}
static void wgmma_data(Wgmma *g) {
  const int *o = C->kernel->pool + g->ins->ops, n = g->ins->vec * 2;
  const int depth = g->ins->flags >> TYPES_AT & 2 ? 32 : 16;
  wgmma_operands(g, 0);
  for (int r = 0; r < 16; r++) {
    for (int c = 0; c < n; c++) sums[r][c] = 0;
    for (int k = 0; k < depth; k++)
      for (int c = 0; c < n; c++) sums[r][c] += of_a[k][r] * of_b[k][c];
  }
  for (int i = 0; i < n / 2; i++) {
    u32 *d = W->w[o[i]];
    for (int l = 0; l < LANES; l++) {
      float x = sums[(l >> 2) + (i & 2 ? 8 : 0)][i / 4 * 8 + (l & 3) * 2 + (i & 1)];
      d[l] = bits(g->add ? flt(d[l]) + x : x);
    }
  }
  g->done = 1;
}
// A's fragments may not be touched until the wgmma has been waited for (PTX, wgmma.wait_group).
static int fragment(const Wgmma *g, int i) { return C->kernel->pool[g->ins->ops + g->ins->vec + i]; }
static int num_fragments(const Wgmma *g) { return g->ins->flags & A_IN_REGISTERS ? 4 : 0; }
static int held(int r) {
  for (int i = 0; i < W->num_wgmmas; i++)
    for (int j = 0; j < num_fragments(W->wgmmas + i); j++) if (fragment(W->wgmmas + i, j) == r) return 1;
  return 0;
}
static void wgmma_issue(const int *o, u32 m) {
  if (m != ALL) fail("wgmma with lanes %#x only", m);
  if (W->num_wgmmas == MOST_WGMMA) fail("more than %d wgmmas under way", MOST_WGMMA);
  int n = I->vec, in_registers = I->flags & A_IN_REGISTERS ? 4 : 0, queued = 0;
  const int *rest = o + n + (in_registers ? 4 : 1);
  const u64 a = in_registers ? 0 : dbl(o[n], m)[0], b = dbl(rest[0], m)[0];
  for (int i = 0; i < W->num_wgmmas; i++) {
    int first = C->kernel->pool[W->wgmmas[i].ins->ops];
    if (first == o[0]) queued = 1;
  }
  int add = pred(rest[1], m) & 1;
  if (!W->fenced_at) fail("wgmma without wgmma.fence");
  for (int i = 0; i < n; i++) {
    // Registers that were written otherwise take wgmma.fence before (PTX, wgmma.fence).
    if (!queued && add) word(o[i], m);
    if (!queued && W->set_w[o[i]] > (u32)W->fenced_at)
      fail("wgmma's register w%d was written after the last wgmma.fence", o[i]);
    W->has_w[o[i]] = 0;
  }
  for (int i = n; i < n + in_registers; i++) {
    // Several may read the same ones at once.
    if (!held(o[i])) word(o[i], m);
    if (W->set_w[o[i]] > (u32)W->fenced_at)
      fail("wgmma's register w%d was written after the last wgmma.fence", o[i]);
  }
  for (int i = n; i < n + in_registers; i++) W->has_w[o[i]] = 0;
  Wgmma *g = W->wgmmas + W->num_wgmmas++;
  *g = (Wgmma){I, a, b, W->steps, add, -1, 0, {{0}}};
  wgmma_operands(g, 1);
  C->reading++;
}
static void wgmma_commit(void) {
  for (int i = 0; i < W->num_wgmmas; i++) if (W->wgmmas[i].group < 0) W->wgmmas[i].group = W->wgmma_group;
  W->wgmma_group++;
}
static void wgmma_wait(int leave) {
  int n = 0;
  for (int i = 0; i < W->num_wgmmas; i++) {
    Wgmma *g = W->wgmmas + i;
    if (g->group < 0 || g->group >= W->wgmma_group - leave) { W->wgmmas[n++] = *g; continue; }
    if (!g->done) wgmma_data(g);
    const int *o = C->kernel->pool + g->ins->ops;
    for (int j = 0; j < g->ins->vec; j++) W->has_w[o[j]] = ALL, W->set_w[o[j]] = 0;
    for (int j = 0; j < num_fragments(g); j++) {
      if (W->set_w[fragment(g, j)] > (u32)g->since)
        fail("register w%d is written while a wgmma reads it", fragment(g, j));
      W->has_w[fragment(g, j)] = ALL;
    }
    for (int j = 0; j < 2; j++) if (g->reads[j].end) was_read(g->reads[j].begin, g->reads[j].end, -1);
    C->reading--;
  }
  W->num_wgmmas = n;
  // Those that go on have their registers still.
  for (int i = 0; i < n; i++) {
    const int *o = C->kernel->pool + W->wgmmas[i].ins->ops;
    for (int j = 0; j < W->wgmmas[i].ins->vec + num_fragments(W->wgmmas + i); j++) W->has_w[o[j]] = 0;
  }
}
