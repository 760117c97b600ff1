"""torch's CPU kernels in place of its CUDA kernels: a stub's device memory is host memory.

Every operator that torch registers for CUDA is registered again: tensors of the device become CPU tensors on the same
memory, the operator runs on these, and its results are copied to the device. So the allocator, streams, events,
autograd and symmetric memory are torch's own CUDA code, and arithmetic, random numbers and casts are its CPU code.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import cuda

# These run no kernel: they allocate, or make another tensor of the same memory.
_KEPT = {
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "as_strided", "empty", "empty_strided", "is_pinned",
    "record_stream", "resize_", "set_", "unfold", "view", "view_as_complex", "view_as_real",
}  # fmt: skip

_library: Any = None
# CPU generators that stand for a device's: the same seed gives the same numbers on every rank.
_generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}


def _on_cpu(x: torch.Generator) -> torch.Generator:
    known = _generators.get(id(x))
    if known is None or known[0] is not x:
        known = _generators[id(x)] = x, torch.Generator().manual_seed(x.initial_seed())
    return known[1]


def _on_host(x: Tensor) -> Tensor:
    """Return a CPU tensor on the memory of a device tensor."""
    storage, size = x.untyped_storage(), x.element_size()
    length = storage.nbytes() // size * size
    if not length:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * length).from_address(storage.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    given: list[tuple[Tensor, Tensor]] = []
    device = None

    def there(x: Any) -> Any:
        nonlocal device
        if isinstance(x, Tensor) and x.is_cuda:
            device = x.device
            given.append((_on_host(x), x))
            return given[-1][0]
        if isinstance(x, torch.device) and x.type == "cuda":
            device = x
            return torch.device("cpu")
        return _on_cpu(x) if isinstance(x, torch.Generator) and x.device.type == "cuda" else x

    host_args, host_kwargs = tree_unflatten([there(each) for each in leaves], tree)
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device is None else device.index or 0)
    if cuda.is_capturing(stream):
        return _captured(op, host_args, host_kwargs, given, device, stream)
    made = cuda.counted(lambda: op(*host_args, **host_kwargs))
    for host, own in given:
        # An `out` that was empty.
        if host.shape != own.shape:
            _on_host(own.resize_(host.shape)).copy_(host)

    def back(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        for host, own in given:
            if x is host:
                return own
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        _on_host(out).copy_(x)
        return out

    return tree_map(back, made)


def _captured(op: Any, args: Any, kwargs: Any, given: list[tuple[Tensor, Tensor]], device: Any, stream: int) -> Any:
    """Run an operator at each replay; its results are allocated now, with shapes from meta tensors."""
    leaves, tree = tree_flatten((args, kwargs))
    metas = [each.to("meta") if isinstance(each, Tensor) else each for each in leaves]
    owns = {id(meta): own for meta, host in zip(metas, leaves, strict=True) for it, own in given if it is host}
    meta_args, meta_kwargs = tree_unflatten(metas, tree)
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    made, made_tree = tree_flatten(op(*meta_args, **meta_kwargs))
    for place, meta in enumerate(metas):
        # An `out` that was empty.
        if isinstance(meta, Tensor) and meta.shape != leaves[place].shape:
            leaves[place] = _on_host(owns[id(meta)].resize_(meta.shape))
    args, kwargs = tree_unflatten(leaves, tree)
    outs = [
        each if not isinstance(each, Tensor) else owns.get(id(each))
        if id(each) in owns else torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
        for each in made
    ]  # fmt: skip

    def again() -> None:
        found, _ = tree_flatten(op(*args, **kwargs))
        for out, meta, result in zip(outs, made, found, strict=True):
            if isinstance(out, Tensor) and id(meta) not in owns:
                _on_host(out).copy_(result)

    cuda.put(again, stream)
    return tree_unflatten(outs, made_tree)


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None, scale_result: Any = None,
               out_dtype: Any = None, use_fast_accum: bool = False) -> Tensor:  # fmt: skip
    """Compute torch._scaled_mm with scales by row, which torch's CPU kernel lacks."""
    made = a.float() @ b.float() * scale_a.float() * scale_b.float()
    return (made if bias is None else made + bias.float()).to(out_dtype or a.dtype)


def _fused_rms_norm_backward(
    dy: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of RMSNorm, for which torch has no CPU kernel; the norm is over the last dim."""
    normed, given = x.float() * rstd, dy.float()
    grad = given if weight is None else given * weight.float()
    dx = rstd * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    dw = (given * normed).flatten(0, -2).sum(0)
    return dx.to(x.dtype) if mask[0] else None, dw.to(x.dtype) if mask[1] and weight is not None else None


# In place of operators that torch's CPU kernels lack.
_LACKING = {"_scaled_mm": _scaled_mm, "_fused_rms_norm_backward": _fused_rms_norm_backward}


def _as(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(op, args, kwargs)


def install() -> None:
    """Register torch's CPU kernels for CUDA, for as long as the process lives."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    # Both are registered for all devices, with a kernel for each device.
    names = {*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_", "aten::fill_.Scalar"}
    with warnings.catch_warnings():
        # Each registration warns that it overrides another, as intended.
        warnings.simplefilter("ignore", UserWarning)
        for name in sorted(each.removeprefix("aten::") for each in names if each.startswith("aten::")):
            base, _, overload = name.partition(".")
            if base not in _KEPT:
                op = _LACKING.get(name) or getattr(getattr(torch.ops.aten, base), overload or "default")
                _library.impl(name, _as(op), "CUDA", allow_override=True)
    # Attention by its definition, as its kernels for CUDA are operators that a CPU lacks.
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    # The kernel that spins before a timing, at 2 GHz: it lets the device's time run ahead, and the host goes on.
    torch._C._cuda_sleep = lambda cycles: cuda.spin(cycles / 2e6)  # type: ignore[attr-defined]
