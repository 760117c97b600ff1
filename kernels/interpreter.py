"""Patches of Triton's interpreter, read in Triton 3.6 to 3.9: a bearable pace, exact bfloat16, and fixes.

Ranks may outnumber cores, and a polling program would keep the core that the awaited rank needs. So every atomic
read-modify-write yields to other processes, and polls of an unchanged word sleep.

Costs that are removed:
- All language functions are found and patched at every call of a device function, a millisecond each. They are patched
  once a launch, as all our device functions see the same `triton.language`, and found once a process.
- Every integer operation is computed again in 64 bits, for an overflow check that only debug mode makes.
- Every look-up rebuilds the table of NumPy types, every tensor and block type its shape, every operation its operands'
  common type, and the constant that a number is. Operands are repeated to one shape, which NumPy does by itself.
- Every argument is looked at for constants in it, and every array's items for their width.

Warnings that are left out: those of NumPy for overflow, and for operations without a value such as inf - inf. Kernels
compute with infinities and NaN, as on a GPU.

Errors that are fixed:
- float32 is truncated to bfloat16, subnormal bfloat16 becomes zero, and matrix products take its bits for integers.
- Matrix products are NumPy's. Its BLAS may add a row in another order at another position of a tile, as OpenBLAS does
  for processors with AVX2 but without AVX-512. A matrix unit adds every row alike.
- Triton 3.6 calls `int` on a loop's bounds, arrays of one element, which NumPy 2.4 refuses unless 0-dimensional.
- Triton 3.9 refuses masks that are not bool, and makes a scalar comparison an integer when it broadcasts the result.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import time
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

# Polls of one unchanged word before the first sleep, and the longest sleep.
_SPINS, _SLEEP_SECONDS = 8, 4e-3


def _give_way_after_atomics() -> None:
    atomic_rmw = InterpreterBuilder.create_atomic_rmw
    last, polls = (-1, 0), 0

    def create_atomic_rmw(self: InterpreterBuilder, op: Any, ptr: Any, *args: Any) -> Any:
        nonlocal last, polls
        result = atomic_rmw(self, op, ptr, *args)
        seen = int(ptr.data.flat[0]), int(result.data.flat[0])
        polls, last = polls + 1 if seen == last else 0, seen
        if polls < _SPINS:
            os.sched_yield()
        else:
            time.sleep(min(_SLEEP_SECONDS, 50e-6 * (polls - _SPINS + 1)))
        return result

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _patch_once_a_launch() -> None:
    call_and_patch = InterpretedFunction.__call__
    package = __name__.rpartition(".")[0]

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.rpartition(".")[0] != package:
            return call_and_patch(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except InterpreterError:
            raise
        except Exception as error:
            raise InterpreterError(f"{self.fn.__name__}: {error!r}") from error

    InterpretedFunction.__call__ = call
    interpreter._patch_builtin = _patch_builtin


@lru_cache
def _replaced(package: Any) -> list[tuple[str, Callable[..., Any]]]:
    def interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        return call

    # What they wrap; the wrapper checks that there is a `_semantic`.
    return [
        (name, interpreted(getattr(each, "__wrapped__", each)))
        for name, each in inspect.getmembers(package)
        if tl.core.is_builtin(each)
    ]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _replaced(package):
        scope.set_attr(package, name, member)


def _leave_out_needless_work() -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    of_scalar, pointer = lru_cache(interpreter._get_np_dtype), interpreter._get_np_dtype(tl.pointer_type(tl.int8))
    # A pointer's type cannot be hashed.
    interpreter._get_np_dtype = lambda dtype: pointer if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    semantic = type(interpreter.interpreter_semantic)
    tl.core._unwrap_if_constexpr = _but_for_tensors(tl.core._unwrap_if_constexpr)
    semantic.computation_type_impl = _remembered(semantic.computation_type_impl)
    semantic.binary_op_type_checking_impl = _unless_it_is_known(semantic.binary_op_type_checking_impl)
    interpreter.TensorHandle.__init__ = _unchecked
    tl.tensor.__init__ = _with_shapes_that_are_kept(tl.tensor.__init__)
    tl.block_type.__init__ = _with_shapes_of_types_that_are_kept(tl.block_type.__init__)


def _but_for_tensors(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is tl.tensor else unwrap(value)


def _remembered(of_types: Callable[..., Any]) -> Callable[..., Any]:
    # The result depends on the arguments alone, not on `self`.
    of = lru_cache(partial(of_types, interpreter.interpreter_semantic))
    return lambda self, *types: of(*types)


def _with_shapes_that_are_kept(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def new(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        found = known.get(shape)
        if found is None:
            init(self, handle, type)
            known[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    return new


def _with_shapes_of_types_that_are_kept(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def new(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        found = known.get(sizes)
        if found is None:
            init(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = found
        self.name = f"{name}{element_ty}>"

    return new


def _unless_it_is_known(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a faster way to the same pair of operands: of one dtype, and of one shape by their types alone.

    NumPy repeats rows, columns and scalars by itself, so their data stay as they are.
    """

    @lru_cache
    def constant(value: float, dtype: Any) -> Any:
        return interpreter.interpreter_semantic.scalar_constant(value, dtype)

    def number(value: Any, dtype: Any) -> Any:
        """Return a Python number as an operand for one of `dtype`, or None."""
        if type(value) is int and -(2**31) <= value < 2**31:
            if dtype.is_ptr():
                return constant(value, tl.int32)
            return constant(value, dtype) if dtype.name in ("int32", "int64") else None
        # Zero has a sign, by which the cache does not tell it apart. It counts in Triton 3.9.
        return constant(value, dtype) if type(value) is float and value and dtype.name == "fp32" else None

    @lru_cache
    def together(left: tuple[int, ...], right: tuple[int, ...]) -> list[int] | None:
        try:
            return list(interpreter.np.broadcast_shapes(left, right))
        except ValueError:
            return None

    def of_shape(each: Any, shape: list[int]) -> Any:
        if each.type.is_block() and list(each.type.shape) == shape:
            return each
        return tl.tensor(each.handle, tl.block_type(each.dtype, shape))

    def widened(each: Any) -> Any:
        made = interpreter.TensorHandle(each.handle.data.astype("int64"), tl.int64)
        return tl.tensor(made, tl.block_type(tl.int64, each.type.shape) if each.type.is_block() else tl.int64)

    def alike(lhs: Any, rhs: Any, flags: tuple[bool, ...], is_named: bool) -> tuple[Any, Any] | None:
        """Return the operands with one dtype, a pointer's offset with its own; None if `check` must decide."""
        left, right = lhs.dtype, rhs.dtype
        if left.is_ptr():
            return (lhs, rhs) if flags == (True, True) and right.name in ("int32", "int64") else None
        if left.name == right.name:
            # The fourth flag is for a division: halves have a quotient in float32. In Triton 3.9 it has a name.
            return None if ((len(flags) > 3 or is_named) and left.is_floating()) or right.is_ptr() else (lhs, rhs)
        if (left.name, right.name) == ("int64", "int32"):
            return lhs, widened(rhs)
        return (widened(lhs), rhs) if (left.name, right.name) == ("int32", "int64") else None

    @wraps(check)
    def new(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        left: Any = lhs if type(lhs) is tl.tensor else number(lhs, rhs.dtype) if type(rhs) is tl.tensor else None
        right = rhs if type(rhs) is tl.tensor else number(rhs, lhs.dtype) if left is lhs else None
        if left is None or right is None or (pair := alike(left, right, flags, bool(named))) is None:
            return check(self, lhs, rhs, *flags, **named)
        left, right = pair
        if left.shape is right.shape:
            return pair
        shapes = [tuple(each.type.shape) if each.type.is_block() else () for each in pair]
        shape = together(*shapes)
        if shape is None:
            return check(self, lhs, rhs, *flags, **named)
        return of_shape(left, shape), of_shape(right, shape)

    return new


def _unchecked(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _compute_without_warnings() -> None:
    launch = GridExecutor.__call__

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with interpreter.np.errstate(over="ignore", invalid="ignore"):
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = call


def _take_bounds_from_arrays() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _keep_conditions() -> None:
    splat = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, to: Any, scalar: Any) -> Any:
        result = splat(self, to, scalar)
        # The scalar's declared type is that of the compared values.
        if scalar.data.dtype == bool:
            result.data = result.data.astype(bool)
        return result

    InterpreterBuilder.create_splat = create_splat


def _in_order(a: Any, b: Any, acc: Any) -> Any:
    """Return acc [M, N] + a [M, K] @ b [K, N], each element added from the first product to the last."""
    total = acc.astype("float32")
    for column, row in zip(a.T.copy(), b, strict=True):
        total += column[:, None] * row
    return total


def _convert_exactly() -> None:
    convert, every = interpreter._convert_float, torch.arange(256, dtype=torch.uint8, device="cpu")
    tables = {
        str(name): every.view(dtype).float().numpy().view("uint32")
        for name, dtype in (
            (tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2),
            (tl.float8e4b8, torch.float8_e4m3fnuz),
        )
    }  # fmt: skip

    def convert_float(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and to == tl.float32:
            return data.astype("uint32") << 16
        if source == tl.float32 and to == tl.bfloat16:
            bits = data.view("uint32")
            # Round to nearest even. The addition must not carry NaN into another number.
            is_number = data == data
            even = (bits + (0x7FFF + ((bits >> 16) & 1)) * is_number) >> 16
            return (even | 0x40 * ~is_number).astype("uint16")
        table = tables.get(str(source)) if to == tl.float32 else None
        return convert(data, source, to, rounding) if table is None else table[data.view("uint8")]

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        wide = [
            each.data.astype("float32") if each.dtype in (tl.float16, tl.float32)
            else convert_float(each.data, each.dtype, tl.float32, None).view("float32")
            for each in (a, b)
        ]  # fmt: skip
        return interpreter.TensorHandle(_in_order(wide[0], wide[1], acc.data), acc.dtype.scalar)

    def get_bf16(self: InterpreterBuilder, value: float) -> Any:
        wide = interpreter.np.array([value], dtype="float32")
        return interpreter.TensorHandle(convert_float(wide, tl.float32, tl.bfloat16, None), tl.bfloat16)

    interpreter._convert_float = convert_float
    InterpreterBuilder.create_dot = create_dot
    # A constant, such as NaN.
    InterpreterBuilder.get_bf16 = get_bf16


def prepare() -> None:
    """Patch the interpreter. Call this once, before the first kernel runs."""
    _give_way_after_atomics()
    _patch_once_a_launch()
    _leave_out_needless_work()
    _compute_without_warnings()
    _take_bounds_from_arrays()
    _keep_conditions()
    _convert_exactly()
