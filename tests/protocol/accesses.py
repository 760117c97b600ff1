"""What torch's own operators load and store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class TorchAccesses(TorchDispatchMode):
    """Torch ops that read or write arenas, as loads and stores of the host."""

    def __init__(self, touched: Callable[..., None], emit: Callable[[Any], None]) -> None:
        super().__init__()
        self._touched, self._emit = touched, emit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        values = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            write = argument.alias_info is not None and argument.alias_info.is_write
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Tensor) and each.numel():
                    self._touched(_addresses(each), write, self._emit)
        return result


def _addresses(x: Tensor) -> np.ndarray[Any, Any]:
    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    return x.data_ptr() + x.element_size() * offsets.reshape(-1)
