"""What Triton's interpreter is mended in, where one of the versions supported needs it."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from fusedtp.kernels import INTERPRETED
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_bound_of_a_loop_is_an_integer_whatever_array_holds_it(shape: tuple[int, ...]) -> None:
    bound = tl.tensor(interpreter.TensorHandle(np.full(shape, 3, np.int32), tl.int32), tl.int32)
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_tensor(tl.tensor, scope)
    try:
        assert list(range(bound)) == [0, 1, 2]  # type: ignore[call-overload]
    finally:
        scope.restore()


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


def test_a_scalar_condition_is_broadcast_as_one() -> None:
    """A mask must be of bools from Triton 3.9 on."""
    builder = interpreter.interpreter_builder
    handles = [interpreter.TensorHandle(np.array([value], np.int32), tl.int32) for value in (1, 1, 0)]
    for other, expected in ((handles[1], True), (handles[2], False)):
        found = builder.create_splat(tl.block_type(tl.int1, [4]), builder.create_icmpEQ(handles[0], other))
        assert (found.data.dtype, found.data.tolist()) == (np.dtype(bool), [expected] * 4)
