"""Repairs of Triton's interpreter, for supported versions that need them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.nn import functional as F
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

from fusedtp.epilogue import Epilogue
from fusedtp.kernels import INTERPRETED
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.launch import INTERPRETER
from fusedtp.kernels.matmul import matmul

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (2, 2)])
def test_a_shape_that_is_known_is_that_of_the_type(shape: tuple[int, ...]) -> None:
    for dtype in (tl.int32, tl.float32):
        made = tl.block_type(dtype, list(shape)) if shape else dtype
        for _ in range(2):
            each = tl.tensor(interpreter.TensorHandle(np.zeros(shape, np.int32), tl.int32), made)
            assert [int(size.value) for size in each.shape] == list(shape)
            assert each.numel.value == np.prod(shape, dtype=int)
            assert (each.type, each.dtype) == (made, dtype)


def test_types_of_operands_are_told_apart() -> None:
    of = interpreter.interpreter_semantic.computation_type_impl
    for _ in range(2):
        assert of(tl.float16, False, tl.float16, False, False) == tl.float16
        assert of(tl.float16, False, tl.float16, False, True) == tl.float32
        assert of(tl.int32, True, tl.int64, False, False) == tl.int64
        assert of(tl.int64, False, tl.int32, False, False) == tl.int64


def test_operands_that_are_alike_are_taken_as_they_are() -> None:
    semantic = interpreter.interpreter_semantic

    def block(dtype: tl.dtype, *shape: int) -> tl.tensor:
        data = np.ones(shape or (1,), interpreter._get_np_dtype(dtype))
        return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)

    for dtype in (tl.int32, tl.int64, tl.float16, tl.float32):
        for shape in ((), (4,), (2, 4)):
            one, other = block(dtype, *shape), block(dtype, *shape)
            assert all(map(operator.is_, semantic.binary_op_type_checking_impl(one, other), (one, other)))
    # Halves are divided in float32.
    assert semantic.truediv(block(tl.float16, 4), block(tl.float16, 4)).dtype == tl.float32
    assert semantic.truediv(block(tl.int32), 2).dtype == tl.float32
    assert semantic.fdiv(block(tl.float32, 4), block(tl.float32, 4), False).dtype == tl.float32
    for shape in ((), (4,)):
        found = semantic.add(block(tl.int32, *shape), block(tl.int64, *shape), False)
        assert (found.dtype, [size.value for size in found.shape]) == (tl.int64, list(shape))
    assert [size.value for size in semantic.add(block(tl.int32, 4, 1), block(tl.int32, 1, 2), False).shape] == [4, 2]
    # A number takes the type of the integer that it meets, and is refused if that cannot hold it.
    for value in (-(2**31), -1, 0, 2**31 - 1):
        found = semantic.minimum(block(tl.int32), value, tl.PropagateNan.NONE)
        assert (found.dtype, found.handle.data.item()) == (tl.int32, min(1, value))
    with pytest.raises(ValueError, match="out of range"):
        semantic.add(block(tl.int32), 2**31, False)
    pointers = block(tl.pointer_type(tl.int32), 4)
    with pytest.raises(IncompatibleTypeErrorImpl):
        semantic.mul(pointers, pointers, False)


OPERATIONS = {
    "add": (False,), "sub": (False,), "mul": (False,), "and_": (), "shl": (), "less_than": (), "equal": (),
    "truediv": (), "floordiv": (), "mod": (), "minimum": (tl.PropagateNan.NONE,),
}  # fmt: skip
NUMBERS = (0, 1, -3, 2**31, 0.0, -0.0, 1.5, float("nan"), True)


def of_operation(name: str, operands: Sequence[Any]) -> object:
    """Return the type of a result and its bits, or the error that the operation raises."""
    semantic = interpreter.interpreter_semantic
    try:
        if name == "where":
            made = semantic.where(operands[0] == operands[0], *operands)
        else:
            made = getattr(semantic, name)(*operands, *OPERATIONS[name])
    except Exception as error:
        return type(error)
    shape = [size.value for size in made.shape] if made.type.is_block() else [1]
    data = np.broadcast_to(made.handle.data, shape)
    assert made.handle.data.size == np.prod(shape, dtype=int)
    return str(made.type), shape, data.dtype, data.tobytes()


@pytest.mark.parametrize("name", [*OPERATIONS, "where"])
def test_operations_are_those_of_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With operands of unlike types and shapes, pointers, and Python's numbers on either side."""
    random = np.random.default_rng(0)

    def operand(dtype: tl.dtype, *shape: int) -> tl.tensor:
        data = random.integers(1, 5, shape or (1,)).astype(interpreter._get_np_dtype(dtype))
        handle = interpreter.TensorHandle(data, dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)

    dtypes = (tl.int32, tl.int64, tl.uint32, tl.int1, tl.float16, tl.float32, tl.pointer_type(tl.int32))
    tensors = [operand(dtype, *shape) for dtype in dtypes for shape in ((), (4,), (1, 4), (2, 1), (2, 4))]
    pairs = [*itertools.product(tensors, repeat=2)]
    pairs += [pair for each in tensors for number in NUMBERS for pair in ((each, number), (number, each))]
    semantic = type(interpreter.interpreter_semantic)
    with np.errstate(all="ignore"):
        found = [of_operation(name, pair) for pair in pairs]
        monkeypatch.setattr(semantic, "binary_op_type_checking_impl", semantic.binary_op_type_checking_impl.__wrapped__)
        for pair, each in zip(pairs, found, strict=True):
            assert each == of_operation(name, pair), (name, pair)


def test_bfloat16_is_converted_and_multiplied_exactly() -> None:
    builder, every = interpreter.interpreter_builder, torch.arange(2**16, dtype=torch.int32)
    bits = every.to(torch.int16).view(torch.bfloat16)
    # Includes ties, infinities, NaN and subnormal numbers.
    floats = torch.cat([(every * 2**16 + low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    wide = builder.create_fp_ext(interpreter.TensorHandle(bits.view(torch.uint16).numpy(), tl.bfloat16), tl.float32)
    assert torch.equal(torch.from_numpy(wide.data).nan_to_num(nan=1.5), bits.float().nan_to_num(nan=1.5))
    short = builder.create_fp_trunc(interpreter.TensorHandle(floats.numpy(), tl.float32), tl.bfloat16)
    found = torch.from_numpy(short.data.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), floats.isnan())
    kept = ~floats.isnan()
    assert torch.equal(found[kept].view(torch.int16), floats.bfloat16()[kept].view(torch.int16))

    a, b = bits[0x3F80:0x3F90].view(4, 4), bits[0x0001:0x0011].view(4, 4)
    handles = [interpreter.TensorHandle(each.view(torch.uint16).numpy(), tl.bfloat16) for each in (a, b)]
    acc = interpreter.TensorHandle(np.ones((4, 4), np.float32), tl.float32)
    made = builder.create_dot(*handles, acc, None, 0)
    assert torch.equal(torch.from_numpy(made.data), a.float() @ b.float() + 1)


def test_infinities_and_nan_warn_of_nothing() -> None:
    """Warnings are errors here. Large magnitudes overflow in the activation's exp, in products and in sums."""
    large, inf = 3e38, torch.inf
    a = torch.ones(1, 2)
    b = torch.tensor([[-200.0, 200.0, inf, -inf, large, inf, torch.nan], [0.0, 0.0, 0.0, 0.0, large, -inf, 1.0]])
    c = torch.empty(1, 7)
    matmul(a, b, c, epilogue_of([Epilogue(activation="silu")]), config=INTERPRETER)
    torch.testing.assert_close(c, F.silu(b.sum(0, keepdim=True)), equal_nan=True)
    matmul(a * large, b, c, epilogue_of(()), config=INTERPRETER)
    torch.testing.assert_close(c, (b * large).sum(0, keepdim=True), equal_nan=True)
