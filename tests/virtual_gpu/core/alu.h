// Arithmetic: name, what it gives and takes (W: a word, D: 64 bits, P: a predicate, N: nothing), and how.
// Registers of 16 bits are words whose upper half is 0. PTX: Integer Arithmetic, Floating Point, Half Precision,
// Comparison and Selection, Logic and Shift, Data Movement and Conversion Instructions.
#define LO(x) ((x) & 0xffff)
#define HI(x) ((x) >> 16)
#define HI8(x) ((x) >> 8 & 255)
#define BF(x) flt(from_bf16(LO(x)))
#define BF_HI(x) flt((x) & 0xffff0000u)
#define HF(x) flt(from_f16(LO(x)))
#define HF_HI(x) flt(from_f16(HI(x)))
#define BF_OF(f) to_bf16(bits(f))
#define HF_OF(f) to_f16(bits(f))
#define ALU(X) \
  X(add_16, W, W, W, N, LO(x + y)) X(sub_16, W, W, W, N, LO(x - y)) X(mul_16, W, W, W, N, LO(x * y)) \
  X(add_32, W, W, W, N, x + y) X(sub_32, W, W, W, N, x - y) X(mul_32, W, W, W, N, x * y) \
  X(mad_32, W, W, W, W, x * y + z) X(neg_32, W, W, N, N, 0 - x) X(abs_32, W, W, N, N, (int)x < 0 ? 0 - x : x) \
  X(add_64, D, D, D, N, x + y) X(sub_64, D, D, D, N, x - y) X(mul_64, D, D, D, N, x * y) \
  X(mad_64, D, D, D, D, x * y + z) X(neg_64, D, D, N, N, 0 - x) \
  X(mulhi_u32, W, W, W, N, (u64)x * y >> 32) X(mulhi_s32, W, W, W, N, (u64)((i64)(int)x * (int)y) >> 32) \
  X(mulwide_s32, D, W, W, N, (i64)(int)x * (int)y) X(mulwide_u32, D, W, W, N, (u64)x * y) \
  X(mulwide_s16, W, W, W, N, (int)(int16_t)x * (int16_t)y) X(mulwide_u16, W, W, W, N, LO(x) * LO(y)) \
  X(madwide_s32, D, W, W, D, (i64)(int)x * (int)y + z) X(madwide_u32, D, W, W, D, (u64)x * y + z) \
  X(and_32, W, W, W, N, x & y) X(or_32, W, W, W, N, x | y) X(xor_32, W, W, W, N, x ^ y) X(not_32, W, W, N, N, ~x) \
  X(not_16, W, W, N, N, LO(~x)) X(and_64, D, D, D, N, x & y) X(or_64, D, D, D, N, x | y) X(xor_64, D, D, D, N, x ^ y) \
  X(not_64, D, D, N, N, ~x) \
  X(shl_16, W, W, W, N, y > 15 ? 0 : LO(x << y)) X(shl_32, W, W, W, N, y > 31 ? 0 : x << y) \
  X(shl_64, D, D, W, N, y > 63 ? 0 : x << y) X(shr_u16, W, W, W, N, y > 15 ? 0 : x >> y) \
  X(shr_s16, W, W, W, N, LO((int)(int16_t)x >> (y > 15 ? 15 : y))) X(shr_u32, W, W, W, N, y > 31 ? 0 : x >> y) \
  X(shr_s32, W, W, W, N, (int)x >> (y > 31 ? 31 : y)) X(shr_u64, D, D, W, N, y > 63 ? 0 : x >> y) \
  X(shr_s64, D, D, W, N, (i64)x >> (y > 63 ? 63 : y)) \
  X(min_s32, W, W, W, N, (int)x < (int)y ? x : y) X(max_s32, W, W, W, N, (int)x > (int)y ? x : y) \
  X(min_u32, W, W, W, N, x < y ? x : y) X(max_u32, W, W, W, N, x > y ? x : y) \
  X(min_s64, D, D, D, N, (i64)x < (i64)y ? x : y) X(max_s64, D, D, D, N, (i64)x > (i64)y ? x : y) \
  X(min_u64, D, D, D, N, x < y ? x : y) X(max_u64, D, D, D, N, x > y ? x : y) \
  X(div_s32, W, W, W, N, y ? (u32)((i64)(int)x / (int)y) : ALL) \
  X(rem_s32, W, W, W, N, y ? (u32)((i64)(int)x % (int)y) : x) \
  X(div_u32, W, W, W, N, y ? x / y : ALL) X(rem_u32, W, W, W, N, y ? x % y : x) \
  X(div_s64, D, D, D, N, y ? ((i64)y == -1 ? 0 - x : (u64)((i64)x / (i64)y)) : ~0ull) \
  X(rem_s64, D, D, D, N, y ? ((i64)y == -1 ? 0 : (u64)((i64)x % (i64)y)) : x) \
  X(div_u64, D, D, D, N, y ? x / y : ~0ull) X(rem_u64, D, D, D, N, y ? x % y : x) \
  X(bfe_u32, W, W, W, W, z ? (u32)(((u64)x >> y) & ((1ull << z) - 1)) : 0) \
  X(bfe_s32, W, W, W, W, z ? (u32)((i64)((u64)(i64)(int)x << (64 - y - z)) >> (64 - z)) : 0) \
  X(bfe_s64, D, D, W, W, z ? (u64)((i64)(x << (64 - y - z)) >> (64 - z)) : 0) \
  X(bfe_u64, D, D, W, W, z ? (x << (64 - y - z)) >> (64 - z) : 0) \
  X(mov_32, W, W, N, N, x) X(mov_64, D, D, N, N, x) X(mov_1, P, P, N, N, x) \
  X(selp_32, W, W, W, P, z ? x : y) X(selp_64, D, D, D, P, z ? x : y) \
  X(and_1, P, P, P, N, x & y) X(or_1, P, P, P, N, x | y) X(xor_1, P, P, P, N, x ^ y) X(not_1, P, P, N, N, !x) \
  X(sext8_16, W, W, N, N, LO((int)(int8_t)x)) X(sext8_32, W, W, N, N, (int)(int8_t)x) X(low16, W, W, N, N, LO(x)) \
  X(sext16_32, W, W, N, N, (int)(int16_t)x) X(low8, W, W, N, N, x & 0xff) \
  X(low32, W, D, N, N, (u32)x) X(zext64, D, W, N, N, x) X(sext64, D, W, N, N, (i64)(int)x) \
  X(sext64_low, D, D, N, N, (i64)(int)(u32)x) X(prmt, W, W, W, W, prmt(x, y, z)) \
  X(lop3, W, W, W, W, lop3(x, y, z, (u32)I->imm)) \
  X(eq_32, P, W, W, N, x == y) X(ne_32, P, W, W, N, x != y) X(lt_s32, P, W, W, N, (int)x < (int)y) \
  X(le_s32, P, W, W, N, (int)x <= (int)y) X(gt_s32, P, W, W, N, (int)x > (int)y) \
  X(ge_s32, P, W, W, N, (int)x >= (int)y) \
  X(lt_u32, P, W, W, N, x < y) X(le_u32, P, W, W, N, x <= y) X(gt_u32, P, W, W, N, x > y) \
  X(ge_u32, P, W, W, N, x >= y) \
  X(eq_64, P, D, D, N, x == y) X(ne_64, P, D, D, N, x != y) X(lt_s64, P, D, D, N, (i64)x < (i64)y) \
  X(le_s64, P, D, D, N, (i64)x <= (i64)y) X(gt_s64, P, D, D, N, (i64)x > (i64)y) \
  X(ge_s64, P, D, D, N, (i64)x >= (i64)y) \
  X(lt_u64, P, D, D, N, x < y) X(le_u64, P, D, D, N, x <= y) X(gt_u64, P, D, D, N, x > y) \
  X(ge_u64, P, D, D, N, x >= y) \
  X(lt_f32, P, W, W, N, flt(x) < flt(y)) X(le_f32, P, W, W, N, flt(x) <= flt(y)) \
  X(gt_f32, P, W, W, N, flt(x) > flt(y)) X(ge_f32, P, W, W, N, flt(x) >= flt(y)) \
  X(neg_f32, W, W, N, N, x ^ 0x80000000u) X(abs_f32, W, W, N, N, x & 0x7fffffff) \
  X(add_f32, W, W, W, N, bits(flt(x) + flt(y))) X(sub_f32, W, W, W, N, bits(flt(x) - flt(y))) \
  X(mul_f32, W, W, W, N, bits(flt(x) * flt(y))) X(fma_f32, W, W, W, W, bits(fmaf(flt(x), flt(y), flt(z)))) \
  X(div_f32, W, W, W, N, bits(flt(x) / flt(y))) X(ex2_f32, W, W, N, N, bits(exp2f(flt(x)))) \
  X(cvt_f32_bf16, W, W, N, N, from_bf16(x)) X(cvt_bf16_f32, W, W, N, N, to_bf16(x)) \
  X(cvt_bf16x2_f32, W, W, W, N, to_bf16(x) << 16 | to_bf16(y)) \
  X(cvt_f32_f16, W, W, N, N, from_f16(x)) X(cvt_f16_f32, W, W, N, N, to_f16(x)) \
  X(cvt_f16x2_f32, W, W, W, N, to_f16(x) << 16 | to_f16(y)) \
  X(cvt_e4m3x2_f32, W, W, W, N, to_f8(x, 0) << 8 | to_f8(y, 0)) \
  X(cvt_e5m2x2_f32, W, W, W, N, to_f8(x, 1) << 8 | to_f8(y, 1)) \
  X(cvt_f16x2_e4m3x2, W, W, N, N, f8_to_f16(HI8(x), 0) << 16 | f8_to_f16(x & 255, 0)) \
  X(cvt_f16x2_e5m2x2, W, W, N, N, f8_to_f16(HI8(x), 1) << 16 | f8_to_f16(x & 255, 1)) \
  X(cvt_rn_bf16_f16, W, W, N, N, to_bf16(from_f16(x))) \
  X(cvt_bf16_f16, W, W, N, N, f16_to_bf16(x, m >> l & 1)) \
  X(mul_bf16, W, W, W, N, bf16_product(BF(x), BF(y))) \
  X(mul_bf16x2, W, W, W, N, bf16_product(BF(x), BF(y)) | bf16_product(BF_HI(x), BF_HI(y)) << 16) \
  X(add_bf16, W, W, W, N, BF_OF(BF(x) + BF(y))) X(add_f16, W, W, W, N, HF_OF(HF(x) + HF(y))) \
  X(add_bf16x2, W, W, W, N, BF_OF(BF(x) + BF(y)) | BF_OF(BF_HI(x) + BF_HI(y)) << 16) \
  X(add_f16x2, W, W, W, N, HF_OF(HF(x) + HF(y)) | HF_OF(HF_HI(x) + HF_HI(y)) << 16) \
  X(fma_bf16, W, W, W, W, BF_OF(fmaf(BF(x), BF(y), BF(z)))) \
  X(fma_bf16x2, W, W, W, W, \
    BF_OF(fmaf(BF(x), BF(y), BF(z))) | BF_OF(fmaf(BF_HI(x), BF_HI(y), BF_HI(z))) << 16) \
  X(pack_32, W, W, W, N, LO(x) | y << 16) X(pack_64, D, W, W, N, (u64)x | (u64)y << 32)

// All other operations.
#define OTHER(X) \
  X(unpack_32) X(unpack_64) X(bra) X(brx) X(ret) X(barrier) X(warp_sync) X(setmaxnreg) X(ld_global) X(st_global) X(ld_shared) X(st_shared) X(ld_strong) \
  X(atom_exch) X(atom_cas) X(atom_add) X(cp_async) X(cp_async_commit) X(cp_async_wait) X(ldmatrix) \
  X(stmatrix) X(mma) X(elect) X(shfl_idx) X(fence_proxy_global) X(fence_proxy_shared) X(mbarrier_init) \
  X(mbarrier_arrive) X(mbarrier_try_wait) X(mbarrier_inval) X(tma_load) X(tma_store) X(bulk_commit) X(bulk_wait) X(wgmma) X(wgmma_fence) X(wgmma_commit) \
  X(wgmma_wait) X(fence_proxy_alias) X(multimem_ld) X(multimem_st)

enum {
#define E(name, ...) OP_##name,
  ALU(E) OTHER(E)
#undef E
  NUM_OPS
};
static const char *const op_names[] = {
#define E(name, ...) #name,
  ALU(E) OTHER(E)
#undef E
};

#define TAKE_W(v, i) const u32 *const v = word(o[i], m);
#define TAKE_D(v, i) const u64 *const v = dbl(o[i], m);
#define TAKE_P(v, i) const u32 v = pred(o[i], m);
#define TAKE_N(v, i)
#define LANE_W(v) v[l]
#define LANE_D(v) v[l]
#define LANE_P(v) (v >> l & 1)
#define LANE_N(v) 0
#define TYPE_W u32
#define TYPE_D u64
#define TYPE_P u32
#define TYPE_N u32
#define BODY(tx, ty, tz) const TYPE_##tx x = LANE_##tx(a); const TYPE_##ty y = LANE_##ty(b); \
  const TYPE_##tz z = LANE_##tz(c); (void)x; (void)y; (void)z;
#define GIVE_W(tx, ty, tz, e) u32 t[LANES]; for (int l = 0; l < LANES; l++) { BODY(tx, ty, tz) t[l] = (u32)(e); } \
  set_word(o[0], m, t);
#define GIVE_D(tx, ty, tz, e) u64 t[LANES]; for (int l = 0; l < LANES; l++) { BODY(tx, ty, tz) t[l] = (u64)(e); } \
  set_double(o[0], m, t);
#define GIVE_P(tx, ty, tz, e) u32 t = 0; for (int l = 0; l < LANES; l++) { BODY(tx, ty, tz) t |= (u32)(e) << l; } \
  set_pred(o[0], m, t);
#define ALU_CASE(name, td, tx, ty, tz, e) \
  case OP_##name: { TAKE_##tx(a, 1) TAKE_##ty(b, 2) TAKE_##tz(c, 3) GIVE_##td(tx, ty, tz, e) break; }
