"""Record the launches of the real launchers, and compile them for a GPU that is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.language import constexpr

from fusedtp.activations import GATED
from fusedtp.epilogue import Epilogue
from fusedtp.kernels.choices import Choice, applied
from fusedtp.kernels.configs import compiled_config
from fusedtp.kernels.layout import pitch_of
from fusedtp.scaled import packed_bytes, scale_bytes

from .cases import TARGETS, VARIANTS, Case

PACKAGE = "fusedtp.kernels"
WORLD_SIZE, OP, PROGRAMS = 8, 1, 132
# A half of more than 2 GiB: a number of two registers.
_HALF_BYTES, _DATA_OFFSET = 1 << 32, 1 << 12


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments and the compiler's options, as a launcher gives them to `compiled_for`."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    compiled_for: Callable[..., Any]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants by name; A_BY and B_BY are the ways of reading."""
        return dict(_constants(self.kernel.arg_names, self.args))

    def compiled(self, target: str) -> Any:
        """Return Triton's compiled kernel for a target."""
        import triton
        from triton.backends.compiler import GPUTarget

        gpu = SimpleNamespace(
            get_current_device=lambda: target, get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget(*TARGETS[target].backend),
        )  # fmt: skip
        with mock.patch.object(triton.runtime.driver, "_active", gpu):
            return self.compiled_for(self.kernel, self.args, self.options)


def _constants(names: Iterable[str], values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for name, value in zip(names, values, strict=True):
        if hasattr(value, "_fields"):
            for field, each in _constants(value._fields, value):
                yield f"{name.upper()}_BY" if field == "BY" else field, each
        elif name.isupper():
            yield name, getattr(value, "value", value)


def recorded(start: Callable[[], object], package: str = PACKAGE) -> Launch:
    """Return the launch of a call of the package's launchers, which is not made, nor those that write its table."""
    found: list[Launch] = []
    loading = importlib.import_module(f"{package}.loading")

    def load(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        found.append(Launch(kernel, args, options, loading.compiled_for))

    with mock.patch.object(loading, "_load", load), loading.only_loading():
        start()
    *writes, launch = found
    assert all(each.kernel.__name__ == "_write_blocks_kernel" for each in writes)
    return launch


def config_of(case: Case) -> Any:
    """Return the configuration that a case's launcher is given: the table's, or a choice."""
    config = compiled_config(case.target, case.dtype.itemsize, case.shape, blocks=case.blocks, tree=case.is_tree)
    config = applied(config, Choice(*case.choice) if case.choice else None)
    return replace(
        config, programs=PROGRAMS, splits=case.flags.get("SPLITS", 0), flatten=config.flatten and case.flatten,
        descriptors=config.descriptors and not case.a_by == case.b_by == "pointers",
    )  # fmt: skip


def launched(case: Case, package: str = PACKAGE, **fields: int) -> Launch:
    """Return what the package's launcher launches for a case; fields: of another configuration than the case's."""
    call, variant = _Call(case, package, replace(config_of(case), **fields)), VARIANTS[case.variant]
    launch = recorded(getattr(call, variant.kernel[1:].removesuffix("_kernel")), package)
    expected = case.flags | ({"A_BY": case.a_by, "B_BY": case.b_by} if variant.multiplies else {})
    found = expected | launch.constants
    assert {name: found[name] for name in expected} == expected, f"{case} is not what is launched: {found}"
    if case.blocks and variant.module == "matmul":
        # No launcher multiplies blocks alone; those that also communicate are compared with this.
        a, b, c, epilogue, _, tiles, M = launch.args
        tiles = tiles._replace(SCALES=constexpr("blocks"))
        launch = replace(launch, args=(a, b, c, epilogue, call.scales(call.rows), tiles, M))
    return launch


class _Call:
    """The call of a case's launcher. Lengths and strides are multiples of 16, or else no more so than they must be."""

    def __init__(self, case: Case, package: str, config: Any) -> None:
        self.case, self.config, self.flags, self.variant = case, config, case.flags, VARIANTS[case.variant]
        self.of = lambda name: importlib.import_module(f"{package}.{name}")
        self.dtype = torch.bfloat16 if case.is_float8 else case.dtype
        self.leaves, self.switch = self.flags.get("LEAVES", 0), self.flags.get("SWITCH", False)
        self.scaled = "" if not case.is_float8 else "blocks" if case.blocks else "rows"
        self.piece = self.flags.get("PIECE", config.block_m)
        # A shard that all pushers push, or few rows; columns of which a pitch is no multiple of 16 either.
        self.rows = (128 if self.variant.module == "matmul_all_reduce" else 16 * 128) + case.loose
        self.cols = 993 if case.loose else 1024
        # By descriptors, leaves and chunks of a contraction are whole blocks.
        whole = (self.leaves or self.flags.get("CONTRACTION")) and not case.a_by == case.b_by == "pointers"
        self.depth = 1024 if whole else self.cols
        # Of rows that are gathered, and of tiles and rows that are added.
        self.pitch = packed_bytes(self.depth, blocks=case.blocks) if self.scaled else pitch_of(self.depth, case.dtype)
        self.sums_pitch = pitch_of(self.cols, torch.float32 if self.leaves or self.flags.get("TREE") else self.dtype)
        self.channel = self.of("launch").Channel(
            torch.empty(WORLD_SIZE + 2, dtype=torch.int64), torch.empty(64, dtype=torch.uint8), 0, WORLD_SIZE,
            _HALF_BYTES, _DATA_OFFSET,
        )  # fmt: skip
        self.table = torch.empty(WORLD_SIZE + 1, dtype=torch.int32)

    def matrix(self, rows: int, cols: int, dtype: torch.dtype, by: str = "", *, turned: bool = False) -> Tensor:
        """Return a matrix with contiguous rows, or with contiguous columns (turned), that is read so (by)."""
        if turned:
            return self.matrix(cols, rows, dtype, by).t()
        described = by in ("rows", "columns")
        pitch, first = pitch_of(cols, dtype) if described else cols, int(self.case.loose and not described)
        whole = torch.empty(first + rows * pitch, dtype=dtype)
        if by == "pointers" and self.config.descriptors and not self.case.loose:
            # Rows that overlap, which no descriptor can have.
            pitch = 16
        return whole.as_strided((rows, cols), (pitch, 1), first)

    def lefts(self, rows: int, count: int = 1) -> list[Tensor]:
        # The rows of a shard that the kernel does not read in place are not contiguous, unless tiles are joined.
        turned = self.case.a_by == "columns" or not (self.flags.get("IN_PLACE", True) or self.flags["JOINED"])
        return [self.matrix(rows, self.depth, self.case.dtype, self.case.a_by, turned=turned) for _ in range(count)]

    def rights(self, rows: int) -> list[Tensor]:
        dtype, by = self.case.b_dtype or self.case.dtype, self.case.b_by
        return [self.matrix(rows, self.cols, dtype, by, turned=by != "rows") for _ in range(1 + self.variant.more)]

    def result(self, rows: int) -> Tensor:
        return self.matrix(rows, self.cols, self.dtype, turned=self.variant.transposed)

    def scale(self, rows: int) -> Tensor | None:
        if self.scaled == "blocks":
            return torch.empty(rows, scale_bytes(self.depth), dtype=torch.uint8)
        return self.matrix(1, rows, torch.float32)[0] if self.scaled else None

    def scales(self, rows: int, lefts: int = 1, *, sent: bool = False) -> Any:
        if not self.scaled:
            return None
        a, b, end = (self.scale(rows),) * lefts, (self.scale(self.cols),) * (1 + self.variant.more), constexpr(0)
        return self.of("operands").Scales(a, b, self.channel.data.view(self.dtype) if sent else end, end)

    def epilogue(self, *results: Tensor) -> Any:
        per_row, dtype = self.flags.get("PER_ROW", False), self.dtype
        residual = self.matrix(self.rows, self.cols, dtype) if self.variant.adds else None
        function, gated = self.flags.get("ACTIVATION"), {one: name for name, one in GATED.items()}
        steps = Epilogue(residual=residual, activation=gated[function] if self.flags.get("GATED") else function)
        biases = [self.matrix(1, c.shape[0 if per_row else 1], dtype)[0] for c in results]
        return self.of("epilogue").epilogue_of(
            [steps._replace(bias=bias if self.flags.get("BIAS", True) else None) for bias in biases], results,
            per_row=per_row, zs=[torch.empty_like(c) for c in results] if self.flags.get("KEEPS") else (),
        )  # fmt: skip

    def matmul(self) -> None:
        (a,), (b,), c = self.lefts(self.rows), self.rights(self.depth), self.result(self.rows)
        self.of("matmul").matmul(a, b, c, self.epilogue(c), config=self.config, leaves=self.leaves)

    def gather_matmul(self) -> None:
        on_rows, (a,) = not self.flags["CONTRACTION"], self.lefts(self.rows)
        sizes = (self.rows if on_rows else self.depth,) * WORLD_SIZE
        bs = self.rights(self.depth if on_rows else sum(sizes))
        cs = [self.result(sum(sizes) if on_rows else self.rows) for _ in bs]
        cs = cs[:1] * len(cs) if self.flags.get("GATED") else cs
        self.of("gather_matmul").GatherMatmul(
            OP, sizes, on_rows=on_rows, pitch=self.pitch, piece_rows=self.piece, config=self.config, scales=self.scaled,
            leaves=self.leaves, switch=self.switch, joined=self.flags["JOINED"],
        )(
            self.channel, a, bs, cs, self.epilogue(*cs), self.table, pushed=self.flags["PUSHERS"] == 0,
            last=self.flags["LAST"], scales=self.scales(self.rows),
        )  # fmt: skip

    def matmul_scatter(self) -> None:
        sizes, count = (self.rows,) * WORLD_SIZE, 1 + self.variant.more
        self.of("matmul_scatter").MatmulScatter(
            OP, sizes, region_rows=self.rows, pitch=self.sums_pitch, to_all=self.flags["TO_ALL"], config=self.config,
            scales=self.scaled, leaves=self.leaves, switch=self.switch, joined=self.flags.get("JOINED", False),
        )(
            self.channel, self.lefts(sum(sizes), count), self.rights(self.depth), self.table,
            self.scales(sum(sizes), count, sent=True),
        )  # fmt: skip

    def matmul_all_reduce(self) -> None:
        (a,), (b,), out = self.lefts(self.rows), self.rights(self.depth), self.result(self.rows)
        module, to_all = self.of("matmul_all_reduce"), self.flags["TO_ALL"]
        room = module.room_of(self.rows, self.cols, WORLD_SIZE, self.config, to_all=to_all)
        module.MatmulAllReduce(
            OP, WORLD_SIZE, 0, to_all=to_all, pitch=pitch_of(room.cols, self.dtype), config=self.config,
            scales=self.scaled, switch=self.switch,
        )(
            self.channel, a, b, self.scales(self.rows, sent=True), out, self.epilogue(out),
            torch.empty(PROGRAMS, dtype=torch.int32), sums_pitch=0 if to_all else self.sums_pitch,
        )  # fmt: skip

    def push(self) -> None:
        x = self.matrix(self.rows, self.cols, self.case.dtype)
        self.of("push").push(
            self.channel, OP, x, self.table, dst_row=0, pitch=self.pitch, scatter=self.flags["SCATTER"],
            with_own=self.flags["WITH_OWN"], config=self.config, piece_rows=self.piece, scale=self.scale(self.rows),
            switch=self.switch,
        )  # fmt: skip

    def collect(self) -> None:
        self.of("push").collect(
            self.channel, OP, self.result(self.rows), self.table, first_slot=5, region_row=self.rows, pitch=self.pitch,
            config=self.config, piece_rows=self.piece,
        )  # fmt: skip

    def reduce(self) -> None:
        out, own, tree = self.result(self.rows), self.result(self.rows), self.flags["TREE"]
        broadcast, pitch = self.flags["BROADCAST"], pitch_of(self.cols, self.dtype)
        self.of("reduce").reduce(
            self.channel, OP, out, self.epilogue(out), region_rows=self.rows, pitch=self.sums_pitch,
            per_piece=self.flags["PER_PIECE"], config=self.config, own=own if self.flags["OWN_IN_PLACE"] else None,
            result_row=0 if broadcast else None, result_pitch=pitch if broadcast and tree else None, tree=tree,
            switch=self.switch,
        )  # fmt: skip

    def ring(self) -> None:
        x = self.matrix(self.rows, self.cols, self.dtype)
        self.of("ring").ring(
            self.channel, OP, x, torch.empty_like(x), self.table, (self.rows,) * WORLD_SIZE,
            reduces=self.flags["REDUCE"], gathers=self.flags["GATHER"], pitch=self.pitch, config=self.config,
        )  # fmt: skip

    def write_blocks(self) -> None:
        blocks = self.of("blocks").Blocks(self.flags["COUNT"], self.table.device)
        blocks.lengths(range(self.flags["COUNT"]))
        blocks.write()

    def step(self) -> None:
        self.of("steps").step(self.channel, OP, self.flags["STEP"])
