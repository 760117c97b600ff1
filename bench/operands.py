"""One rank's operands of a case, the expected results, and the closure of a differentiable call.

Every rank draws the same whole x, w and dy, standard normal, from the case's seed and cuts its shards out of them, as
evenly as possible. So each rank can compare its part of y, dx and dw with the unsharded products in float64. With
inputs of ones, swapped chunks would pass.

In a float8 case each shard is cast to float8 before anything is timed, with a scale for each row, or for each 32
elements of a row in mxfp8. x and w are `Scaled`; whole tensors are data * scale in float64, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fusedtp import collectives, functional, reference, trace
from fusedtp.float8 import E8M0
from fusedtp.reference import ExactProduct
from fusedtp.scaled import Quantized, Scaled, pack_into, packed_bytes, scaled, unpacked
from fusedtp.schedules.local import mm
from fusedtp.sharding.plan import made_of
from fusedtp.shards import even_sizes

from .cases import MXFP8, Case

# A list is one tensor in several pieces, to be concatenated along rows.
Results = tuple[Tensor | list[Tensor], ...]
Runner = Callable[[], Results]

# Dims along which x, w and y are split; y of an all-reduce is whole.
_SPLIT = {"gather": {"x": 0, "w": 0, "y": 1}, "scatter": {"x": 1, "w": 1, "y": 0}, "all_reduce": {"x": 1, "w": 1}}


def finished(value: Any) -> Any:
    """Wait for every asynchronous part of what a runner returned, and return the value with plain tensors.

    Waits for functional collectives, the local part of a DTensor, and whatever else has a `wait` (Work, Future), in
    tuples, lists and dicts. A GPU's stream waits, not the host. Anything else is returned as it is.
    """
    # Most results are plain tensors, and this runs inside the clock.
    if type(value) is Tensor:
        return value
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)([finished(each) for each in value])
    if isinstance(value, Mapping):
        return {name: finished(each) for name, each in value.items()}
    if isinstance(value, DTensor):
        with torch.no_grad():
            return finished(value.to_local())
    if is_unfinished(value):
        found = value.wait()
        # Work.wait gives True; an AsyncCollectiveTensor or a Future gives its value.
        return value if found is None or isinstance(found, bool) else finished(found)
    return value


def is_unfinished(value: object) -> bool:
    """Return True if `finished` would have something to wait for, or to unwrap, in this value."""
    return isinstance(value, DTensor) or callable(getattr(value, "wait", None))


def device_here() -> torch.device:
    """Return the GPU of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Workload:
    """One case on this rank of a group: closures that run each variant, and the check of what they return.

    `runner` and `check` are collective. said: the answer of a variant that gives one.
    """

    said = ""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        self.case, self.rank, self.device = case, rank, device
        self._runners: dict[tuple[str, str], Runner] = {}

    def runner(self, variant: str, direction: str = "forward") -> Runner:
        """Return the closure to time, whose results are `finished`. Made once: a backward pass needs a forward pass."""
        if (variant, direction) not in self._runners:
            self._runners[variant, direction] = self._runner(variant, direction)
        run = self._runners[variant, direction]
        return lambda: finished(run())

    def _runner(self, variant: str, direction: str) -> Runner:
        raise NotImplementedError

    def check(self, variant: str, results: Results, direction: str = "forward") -> tuple[float, float]:
        """Return (largest error, largest error / allowed error) on this rank; AssertionError if a part is wrong."""
        raise NotImplementedError

    def glance(self, variant: str, results: Results, direction: str, place: float) -> None:
        """Check a few rows of each result, at `place` from 0 to 1; AssertionError if one is wrong."""

    def turn(self, direction: str) -> None:
        """Change the inputs of a pass in place, so that its results must change."""

    def restore(self) -> None:
        """Undo all turns."""

    def forget_runners(self, before: Callable[[str, str], None] = lambda direction, variant: None) -> None:
        """Free the closures' graphs, gathered tensors and arenas. Collective, as `close` of some closures is.

        before: called with direction and variant ahead of each `close`.
        """
        for (variant, direction), run in self._runners.items():
            if close := getattr(run, "close", None):
                before(direction, variant)
                close()
        self.restore()
        self._runners = {}


class Operands(Workload):
    """x, w and dy of `case`: this rank's shards, in the layout of the op, and whole. Made without communication."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        super().__init__(case, rank, device)
        # dtype of the results, and of the operands unless float8.
        self.dtype: torch.dtype = getattr(torch, made_of(case.dtype))
        self.gathers = case.kind == "gather"
        self.m_sizes, self.n_sizes, self.k_sizes = (
            even_sizes(size, case.world_size) for size in (case.M, case.N, case.K)
        )
        # A GPU draws as others of its kind do; a core would take seconds for a large matrix.
        self._generator = torch.Generator(device).manual_seed(case.seed)
        self.x_whole = self._normal(case.M, case.K)  # [M, K]
        self.w_whole = self._normal(case.N, case.K)  # [N, K]
        self._dy_whole: Tensor | None = None
        if case.is_float8:
            self._quantize()
        # The values of this rank's shards, then the shards as functions get them.
        self.x_own, self.w_own = self.own("x", self.x_whole), self.own("w", self.w_whole)
        self.x: Any = self._scaled["x"][rank] if case.is_float8 else self.x_own
        self.w: Any = self._scaled["w"][rank] if case.is_float8 else self.w_own
        self._dy: Tensor | None = None
        self._products: dict[str, ExactProduct] = {}
        # How often each operand is doubled now, and tensors that were computed from operands, with the part they are.
        self.doubled: dict[str, int] = {}
        self._made_of: list[tuple[Tensor, str]] = []

    def _normal(self, rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=self._generator, device=self.device).to(self.dtype)

    def _sizes(self, name: str, dim: int) -> tuple[int, ...]:
        return {"x": (self.m_sizes, self.k_sizes), "w": (self.n_sizes, self.k_sizes),
                "y": (self.m_sizes, self.n_sizes)}[name][dim]  # fmt: skip

    def _quantize(self) -> None:
        # Quantize every rank's shards of x and w, and replace x and w by the shards' values.
        made = partial(scaled, recipe="mxfp8")
        if self.case.dtype != MXFP8:
            made = partial(scaled, recipe="rowwise", dtype=getattr(torch, self.case.dtype))
        self._scaled: dict[str, list[Scaled]] = {}
        for name in "xw":
            dim = _SPLIT[self.case.kind][name]
            shards = getattr(self, f"{name}_whole").split(self._sizes(name, dim), dim)
            self._scaled[name] = [made(shard) for shard in shards]
            setattr(self, f"{name}_whole", torch.cat([_values(shard) for shard in self._scaled[name]], dim))

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Cut this rank's shard out of the whole x, w or y, or of a tensor sharded alike."""
        dim = _SPLIT[self.case.kind].get(name)
        if dim is None:
            return whole
        shard = reference.chunk(whole, dim, self.rank, self._sizes(name, dim))
        return shard.clone(memory_format=torch.contiguous_format)

    @property
    def dy_whole(self) -> Tensor:
        """Return the gradient of the whole y [M, N], drawn at first use."""
        if self._dy_whole is None:
            self._dy_whole = self._normal(self.case.M, self.case.N)
        return self._dy_whole

    @property
    def dy(self) -> Tensor:
        """Return this rank's shard of `dy_whole`, sharded like y."""
        if self._dy is None:
            self._dy = self.own("y", self.dy_whole)
        return self._dy

    def follows(self, made: Tensor, part: str) -> None:
        """Keep a tensor that set-up computed, a term of y or dx or a copy of x or dy, in step with its operands."""
        self._made_of.append((made, part))

    def scale_of(self, part: str) -> float:
        """Return the factor of y, dx, dw, x or dy through the operands that are doubled now."""
        return 2.0 ** sum(self.doubled.get(name, 0) for name in _FACTORS[part.removesuffix("_partial")])

    def turn(self, direction: str) -> None:
        """Change the inputs of a pass in place, so that its results must change: times 2, and from then on 4 or 2.

        Powers of two change no rounding, so the expected results are those of before, scaled. Backward alone has dy as
        its input: x and w belong to a forward pass that was made before.
        """
        names = {"forward": ("x", "w"), "backward": ("dy",), "both": ("x", "w", "dy")}[direction]
        self._double({name: 2 if self.doubled.get(name) == 1 else 1 for name in names})

    def restore(self) -> None:
        """Undo all turns, and forget what runners have computed."""
        self._double({})
        self._made_of = []

    def _double(self, times: dict[str, int]) -> None:
        before = [self.scale_of(part) for _, part in self._made_of]
        for name in self.doubled.keys() | times:
            for tensor in self._inputs(name):
                _scale(tensor, 2.0 ** (times.get(name, 0) - self.doubled.get(name, 0)))
        self.doubled = times
        for (made, part), old in zip(self._made_of, before, strict=True):
            _scale(made, self.scale_of(part) / old)

    def _inputs(self, name: str) -> list[Tensor]:
        # All tensors of an operand that variants read, each memory once. No variant reads the whole w.
        found = {
            "x": [self.x_own, *([self.x_whole] if self.gathers else [])],
            "w": [self.w_own],
            "dy": [self.dy, *([] if self.gathers else [self.dy_whole])] if name == "dy" else [],
        }[name]
        if self.case.is_float8:
            found += [part.scale for part in self._scaled[name]]
        return list({tensor.data_ptr(): tensor for tensor in found}.values())

    def linear(self, group: ProcessGroup, **options: Any) -> Callable[[Any, Any], Tensor]:
        """Return this package's op as a call of x and w."""
        if self.case.kind == "all_reduce":
            return partial(functional.linear_all_reduce, group=group, **options)
        call = functional.all_gather_linear if self.gathers else functional.linear_reduce_scatter
        return partial(call, group=group, sizes=self.m_sizes, **options)

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the factors of this rank's matmul for y, dx or dw, after any gather."""
        x = self.x_whole if self.gathers else self.x_own
        if name == "y":
            return x, self.w_own.t()
        dy = self.dy if self.gathers else self.dy_whole
        return (dy, self.w_own) if name == "dx" else (dy.t(), x)

    def multiply(self, name: str) -> Callable[[], Tensor]:
        """Return the library's matmul of those factors; for float8, torch's scaled matmul or a stand-in."""
        if not self.case.is_float8:
            return partial(torch.mm, *self.factors(name))
        x: Scaled = self.x
        if self.gathers:
            parts = self._scaled["x"]
            scales = torch.cat([part.scale.view(torch.uint8) for part in parts]).view(self.x.scale.dtype)
            x = Scaled(torch.cat([part.data for part in parts]), scales)
            self.follows(scales, "x")
        return partial(mm, Quantized.of(x, self.dtype), Quantized.of(self.w, self.dtype).t())

    def travelling(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the shard of x or dy that is gathered, and the whole.

        Float8 is gathered as bytes, each row followed by its scale. The bytes are viewed as the results' dtype, as no
        collective takes bytes.
        """
        if name == "dy":
            return self.dy, self.dy_whole
        if not self.case.is_float8:
            return self.x, self.x_whole
        packed = []
        for part in self._scaled["x"]:
            cols = packed_bytes(part.data.shape[1], blocks=self.case.dtype == MXFP8)
            rows = part.data.new_zeros(part.data.shape[0], cols, dtype=torch.uint8)
            pack_into(rows, Quantized.of(part, self.dtype))
            packed.append(rows.view(self.dtype))
        return packed[self.rank], torch.cat(packed)

    def product(self, name: str) -> ExactProduct:
        """Return the expected part of y, dx or dw on this rank, made once, of operands that are not doubled."""
        if name not in self._products:
            assert not self.doubled, f"{name} must be made before operands change"
            a, b = self.factors(name)
            cut: tuple[int, ...] = (b.shape[0],)
            if name == ("dx" if self.gathers else "y"):
                # The sum over ranks of their products, cut to this rank's rows unless all-reduced.
                a, b, cut = (
                    (self.dy_whole, self.w_whole, self.n_sizes)
                    if self.gathers
                    else (self.x_whole, self.w_whole.t(), self.k_sizes)
                )
                if self.case.kind != "all_reduce":
                    a = reference.chunk(a, 0, self.rank, self.m_sizes)
            self._products[name] = ExactProduct(a, b, cut, self.dtype)
        return self._products[name]


# Operands that are factors of each result, and of what a gather alone sends.
_FACTORS = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x"), "x": ("x",), "dy": ("dy",)}


def _scale(tensor: Tensor, factor: float) -> None:
    # Scales of blocks are bytes that hold an exponent.
    if tensor.dtype == torch.uint8 or tensor.dtype == E8M0:
        tensor.view(torch.uint8).add_(int(math.log2(factor)))
    else:
        tensor.mul_(factor)


def _values(x: Scaled) -> Tensor:
    # A block scale is a power of two, so values are exact in float32 too.
    return x.values().double() if x.scale.dtype == E8M0 else x.data.double() * x.scale.double()


def passes(
    call: Callable[[Any, Any], Tensor],
    x: Any,
    w: Any,
    operands: Operands,
    direction: str,
    local: Callable[[Tensor], Tensor] | None = None,
) -> Runner:
    """Return a direction of y = call(x, w) to time; collective, as backward differentiates one y repeatedly.

    `local` takes this rank's shard out of a gradient that is not a plain tensor.
    """

    def forward() -> Results:
        with torch.no_grad():
            return (call(x, w),)

    if direction == "forward":
        return forward
    assert not operands.case.is_float8, "float8 operands have no gradient"
    leaves = [each if each.requires_grad else each.detach().requires_grad_() for each in (x, w)]

    def differentiate(y: Tensor, keep: bool) -> Results:
        grads = torch.autograd.grad(y, leaves, operands.dy, retain_graph=keep)
        return grads if local is None else tuple([local(grad) for grad in grads])

    def both() -> Results:
        with torch.enable_grad():
            y = call(*leaves)
        return (y.detach(), *differentiate(y, False))

    if direction == "both":
        return both
    with torch.enable_grad():
        y = call(*leaves)
    return lambda: differentiate(y, True)


def sequential(operands: Operands, group: ProcessGroup) -> Callable[[Any, Any], Tensor]:
    """Return y = call(x, w) by this package's own collective and one whole matmul; float8 has no gradient.

    The transport is that of `decomposed`: the same symmetric memory, on a GPU the copy engine. No matmul is split, and
    nothing overlaps. So unfused / sequential is what the transport gains, sequential / a schedule what overlap gains.

        kind         forward               dx                     dw
        gather       gather(x) @ w.T       scatter(dy @ w)        dy.T @ gather(x)
        scatter      scatter(x @ w.T)      gather(dy) @ w         gather(dy).T @ x
        all_reduce   reduce(x @ w.T)       dy @ w                 dy.T @ x

    As in the schedules, forward keeps its own shards alone, backward gathers again, and dx and dw share a gather.
    """
    given: dict[str, Any] = {"group": group, "schedule": "decomposed"}
    even = {**given, "sizes": operands.m_sizes}
    gather, scatter = partial(collectives.all_gather, **even), partial(collectives.reduce_scatter, **even)
    reduce = {"scatter": scatter, "all_reduce": partial(collectives.all_reduce, **given)}.get(operands.case.kind)
    if operands.case.is_float8:
        return partial(_float8, operands.dtype, gather, reduce)
    apply: Any = _Sequential.apply
    return lambda x, w: apply(x, w, gather, scatter, reduce)


def _multiplied(a: Any, b: Any) -> Tensor:
    with trace.span("multiply"):
        return mm(a, b)


class _Sequential(torch.autograd.Function):
    """y = x @ w.T with a gather of x, or with a `reduce` of the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, gather: Any, scatter: Any, reduce: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.gather, ctx.scatter, ctx.reduce = gather, scatter, reduce
        if reduce is None:
            return _multiplied(gather(x), w.t())
        return reduce(_multiplied(x, w.t()))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, w) = grads, ctx.saved_tensors
        if ctx.reduce is ctx.scatter:
            dy = ctx.gather(dy)
        dx = _multiplied(dy, w)
        if ctx.reduce is None:
            dx, x = ctx.scatter(dx), ctx.gather(x)
        return dx, _multiplied(dy.t(), x), None, None, None


def _float8(out: torch.dtype, gather: Any, reduce: Any, x: Scaled, w: Scaled) -> Tensor:
    # Scales travel with rows, in a matrix of bytes that is viewed as the results' dtype, as no collective takes bytes.
    own, other = Quantized.of(x, out), Quantized.of(w, out).t()
    if reduce is not None:
        return reduce(_multiplied(own, other))  # type: ignore[no-any-return]
    rows = own.data.new_zeros(
        own.shape[0], packed_bytes(own.shape[1], blocks=own.blocks is not None), dtype=torch.uint8
    )
    pack_into(rows, own)
    whole = gather(rows.view(out)).view(torch.uint8)
    return _multiplied(unpacked(whole, own.shape[1], own), other)
