"""One address for all ranks' arenas (NVLS): NVLink's switch stores to every rank, and loads the sum over all ranks.

The address is the last word of the table of arenas, 0 if the memory has none. Accesses are 16 bytes, the widest of
`multimem` (PTX ISA, "Data Movement and Conversion Instructions: multimem"); rows of an arena are padded to that. The
switch adds in its own order and precision: elements of 16 bits are added in more bits, and the sum is rounded to 16.

Such accesses use the alias proxy, which neither a release nor an acquire orders ("Memory Consistency Model: Proxies"):
`behind_wait` and `behind_store` are the fences. The interpreter adds the last rank first, as any order will do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .signal import _INTERPRETED, fenced, half


@triton.jit
def empty_sum(mask):
    """Return float32 -0.0 for each element of mask: adding -0.0 changes no number, but +0.0 would change -0.0."""
    # `tl.full` turns -0.0 into +0.0.
    return tl.full(mask.shape, -(2**31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def behind_wait(index, ok):
    """Return `index` after a fence, for the address of a load that follows a wait; `ok`: the wait's result."""
    return fenced("fence.proxy.alias", index, ok)


@triton.jit
def behind_store():
    """Order stores to all ranks before the signals that release them."""
    nothing = tl.full((), 0, tl.int32)
    fenced("fence.proxy.alias", nothing, nothing)


@triton.jit
def _address_of_all(link):
    # The address of this epoch's half of every rank.
    begin = link.group.data_offset + (link.epoch & 1).to(tl.int64) * link.group.half_bytes
    return tl.load(link.group.peers + link.group.WORLD_SIZE + 1) + begin


@triton.jit
def _chunks(link, places, inside, width, BYTES: tl.constexpr, COLS: tl.constexpr):
    # Addresses of 16 bytes each on all ranks, and a mask of those that are in the block.
    EACH: tl.constexpr = 16 // BYTES
    offs_c = tl.arange(0, COLS // EACH) * EACH
    addresses = _address_of_all(link) + (places + offs_c.to(tl.int64)[None, :]) * BYTES
    return addresses, (inside & (offs_c < width)[None, :]).to(tl.int32)


@triton.jit
def _elements(w0, w1, w2, w3, dtype: tl.constexpr):
    # Four words [R, C] as float32 [R, C * elements in 16 bytes], in order.
    R: tl.constexpr = w0.shape[0]
    C: tl.constexpr = w0.shape[1]
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.reshape(pairs, (R, 4 * C))
    if dtype == tl.float32:
        return words.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), (R, 8 * C))
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (R, 8 * C))


@triton.jit
def _words(block):
    # The inverse of `_elements`, for a block [R, C] in the wire dtype.
    R: tl.constexpr = block.shape[0]
    C: tl.constexpr = block.shape[1]
    QUADS: tl.constexpr = C * block.dtype.primitive_bitwidth // 128
    if block.dtype == tl.float32:
        words = block.to(tl.uint32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(block.to(tl.uint16, bitcast=True), (R, C // 2, 2)))
        words = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    even, odd = tl.split(tl.reshape(words, (R, QUADS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def sum_of_all(link, dtype: tl.constexpr, places, inside, width, COLS: tl.constexpr):
    """Return the sum over ranks of a block of their halves, as float32 [R, COLS].

    places: offsets of the rows [R, 1], in elements. inside: mask of the rows [R, 1]. width: columns of the block.
    Elements outside are undefined.
    """
    if _INTERPRETED:
        offs_n = tl.arange(0, COLS)
        mask = inside & (offs_n < width)[None, :]
        acc = empty_sum(mask)
        for i in range(link.group.WORLD_SIZE):
            base = half(link, link.group.WORLD_SIZE - 1 - i, dtype)
            acc += tl.load(base + places + offs_n.to(tl.int64)[None, :], mask=mask, other=0.0).to(tl.float32)
        return acc.to(dtype).to(tl.float32)
    else:
        addresses, there = _chunks(link, places, inside, width, dtype.primitive_bitwidth // 8, COLS)
        if dtype == tl.float32:
            w0, w1, w2, w3 = _load("v4.f32", addresses, there)
        elif dtype == tl.bfloat16:
            w0, w1, w2, w3 = _load("acc::f32.v4.bf16x2", addresses, there)
        else:
            w0, w1, w2, w3 = _load("acc::f32.v4.f16x2", addresses, there)
        return _elements(w0, w1, w2, w3, dtype)


@triton.jit
def _load(KIND: tl.constexpr, addresses, there):
    return tl.inline_asm_elementwise(
        "{ .reg .pred there; setp.ne.b32 there, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@there multimem.ld_reduce.relaxed.sys.global.add." + KIND + " {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r", [addresses, there], dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def store_to_all(link, block, places, inside, width, COLS: tl.constexpr):
    """Store a block [R, COLS] to every rank's half, the own one too; places, inside, width: as in `sum_of_all`.

    The last 16 bytes of a row are stored whole: columns past `width` are padding.
    """
    if _INTERPRETED:
        offs_n = tl.arange(0, COLS)
        mask = inside & (offs_n < width)[None, :]
        for dst in range(link.group.WORLD_SIZE):
            tl.store(half(link, dst, block.dtype) + places + offs_n.to(tl.int64)[None, :], block, mask=mask)
    else:
        addresses, there = _chunks(link, places, inside, width, block.dtype.primitive_bitwidth // 8, COLS)
        w0, w1, w2, w3 = _words(block)
        tl.inline_asm_elementwise(
            "{ .reg .pred there; setp.ne.b32 there, $2, 0; "
            "@there multimem.st.relaxed.sys.global.v4.f32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r", [addresses, there, w0, w1, w2, w3], dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip
