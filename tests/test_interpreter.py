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
