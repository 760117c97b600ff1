"""Call torch's private APIs: each is named here once, as it was read in torch 2.11 to 2.15.

None of these APIs has a public counterpart. `bench` names further private modules, in its peers and in `doctor`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_in_torch_dispatch_mode

P = ParamSpec("P")
R = TypeVar("R")

# torch/csrc/autograd: the id of this thread's backward pass, -1 for none.
graph_task = torch._C._current_graph_task_id
# torch/csrc/autograd: whether torch.profiler, or a range for NVIDIA's tools, records this thread.
profiler_is_on: Any = torch._C._autograd._profiler_enabled
# torch/_functorch: active transforms of torch.func, batched gradients of is_grads_batched, torch.func's wrappers.
transforms_active = torch._C._are_functorch_transforms_active
is_batched = torch._C._functorch.is_legacy_batchedtensor
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
unwrapped = torch._C._functorch.get_unwrapped
# A guard that is active as soon as it is made.
InferenceMode = torch._C._InferenceMode
# torch/distributed/_functional_collectives.py: the ops that its functions call.
c10d: Any = torch.ops._c10d_functional
scaled_mm: Any = torch._scaled_mm
# The lookup of group names in the functional collectives.
_by_name: Any = getattr(dist.distributed_c10d, "_resolve_process_group", None) if dist.is_available() else None
group_by_name: Callable[[str], dist.ProcessGroup] = _by_name

# Spin for a number of GPU cycles on the current stream.
spin: Any = torch.cuda._sleep


# A context in which DTensors act as their local tensors.
without_dispatch: Any = torch._C._DisableTorchDispatch


# torch/_compile.py: let a function run outside of compiled graphs. The public counterpart imports the compiler at once.
outside_compiler: Any = torch._compile._disable_dynamo


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Let the compiler call the function as it traces, on constants, and take the result for a constant.

    torch/_dynamo/decorators.py: `assume_constant_result`, which would import the compiler at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_tracing() -> bool:
    """Return whether torch.jit.trace is tracing."""
    return torch._C._get_tracing_state() is not None


def has_saved_tensors_hooks() -> bool:
    """Return whether this thread has hooks for saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def forward_mode_active() -> bool:
    """Return whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def remove_batch(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor of `is_batched` with the batch as its first dim, and its level (torch/_vmap_internals)."""
    level = 1
    # With another level than the tensor's, the result is still a batch.
    while is_batched(found := torch._remove_batch_dim(x, level, 1, 0)):
        level += 1
    return found, level


def add_batch(x: Tensor, level: int) -> Tensor:
    """Undo `remove_batch`."""
    return torch._add_batch_dim(x, 0, level)


@functools.cache
def is_random(function: Callable[..., Any]) -> bool:
    """Return whether a function or a tensor's method draws random numbers: a tag of its operators (torch/_ops.py)."""
    # These have no operator of their own name.
    if function in (F.dropout1d, F.dropout2d, F.dropout3d, F.gumbel_softmax):
        return True
    packet: Any = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    operators = [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in operators)


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the group's own store."""
    return dist.distributed_c10d._get_process_group_store(group)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of devices whose tensors the group carries."""
    return [device.type for device in group._device_types]


def backend_names(group: dist.ProcessGroup) -> list[str]:
    """Return the names of the group's backends."""
    return [group._get_backend(device).name() for device in group._device_types]


def timeout_seconds(group: dist.ProcessGroup) -> float:
    """Return the group's timeout in torch.distributed, in seconds."""
    backend: Any = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let torch's C++ code find `group`, which it does not keep alive, by `name`."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def unregister_group(name: str) -> None:
    """Undo `register_group`."""
    torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]


def symmetric_empty(num_bytes: int, device: torch.device) -> Tensor:
    """Return a new uint8 tensor of symmetric memory (torch/distributed/_symmetric_memory).

    Raises RuntimeError if there is no memory, or if another backend than torch's own for CUDA would make it.
    """
    memory = torch._C._distributed_c10d._SymmetricMemory
    # Others, such as NVSHMEM, allocate and free collectively over the job, and ranks would wait for each other here.
    if (backend := memory.get_backend(device)) not in (None, "CUDA"):
        raise RuntimeError(f"torch's symmetric memory is {backend}'s here, by TORCH_SYMMMEM or set_backend, not CUDA's")
    return memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def symmetric_rendezvous(own: Tensor, name: str) -> Any:
    """Exchange symmetric memory in the group `name`. The result has `get_buffer` and `multicast_ptr`."""
    return torch._C._distributed_c10d._SymmetricMemory.rendezvous(own, name)


@functools.cache
def _symm_mem() -> Any:
    # A late import: it defines `torch.ops.symm_mem`.
    return importlib.import_module("torch.distributed._symmetric_memory")


def symm_mem_function(op: str, *, fallback: bool = False) -> Any:
    """Return torch's implementation of `torch.ops.symm_mem.<op>` for CUDA, or by collectives; None if there is none."""
    return getattr(_symm_mem(), f"_{op}{'_fallback' * fallback}", None)


def symm_mem_schemas(text: str) -> tuple[Any, Any]:
    """Return the schema `text`, parsed, and that of torch's op of this name, None for no op."""
    _symm_mem()
    packet = getattr(torch.ops.symm_mem, text.partition("(")[0], None)
    return torch._C.parse_schema(f"symm_mem::{text}"), None if packet is None else packet.default._schema


def in_symm_mem_test_mode() -> bool:
    """Return whether `_test_mode` is on, in which the ops must run their fallbacks."""
    return bool(_symm_mem()._is_test_mode)


def dtype_of(scalar_type: Any) -> torch.dtype | None:
    """Return the dtype of a number: the dispatcher passes dtypes in lists as numbers."""
    found: torch.dtype | None = _symm_mem()._maybe_convert_scalar_types_to_dtypes([scalar_type])[0]
    return found


def has_kernel(op: str, key: str) -> bool:
    """Return whether an operator, such as aten::mm.dtype, is implemented for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def unregister(library: torch.library.Library) -> None:
    """Remove what a library has registered. Implementations from before come back."""
    library._destroy()


_PASS = "torch._inductor.fx_passes.micro_pipeline_tp"


def open_micro_pipeline() -> Callable[[], None]:
    """Let Inductor's pass for `_micro_pipeline_tp` run without NCCL, for any group. Return a function that undoes it.

    The pass asks `is_nccl_available` and `is_symm_mem_enabled_for_group` before it takes an op of `torch.ops.symm_mem`.
    Only the pass gets another answer. Cached graphs of the two states are told apart by a tag.
    """
    symm: Any = _symm_mem()
    config: Any = importlib.import_module("torch.compiler.config")
    nccl, enabled, tag = dist.is_nccl_available, symm.is_symm_mem_enabled_for_group, config.cache_key_tag

    def asked_by_pass() -> bool:
        return sys._getframe(2).f_globals.get("__name__") == _PASS

    def is_nccl_available() -> bool:
        return asked_by_pass() or nccl()

    def is_symm_mem_enabled_for_group(group_name: Any) -> bool:
        return asked_by_pass() or enabled(group_name)

    def close() -> None:
        dist.is_nccl_available, symm.is_symm_mem_enabled_for_group = nccl, enabled
        config.cache_key_tag = tag

    dist.is_nccl_available, symm.is_symm_mem_enabled_for_group = is_nccl_available, is_symm_mem_enabled_for_group
    config.cache_key_tag = f"{tag} fusedtp.drop_in".strip()
    return close


# Return a DTensor's local tensor, outside of any graph. Faster than a Python function, because every warm call uses it.
local_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def dtensor_like(values: Tensor, dtensor: Any) -> Tensor:
    """Return a DTensor with these local values and the layout of `dtensor`, outside of any graph."""
    # The spec is copied, as in torch's to_local, because sharding propagation may change it.
    made: Tensor = type(dtensor)(values, copy.copy(dtensor._spec), requires_grad=False)
    return made


_MIXED = (
    "some of these tensors are DTensors, as split parameters and their gradients are, and others are plain. Plain "
    "gradients that are equal on all ranks: call clip_grad_norm_ inside "
    "torch.distributed.tensor.experimental.implicit_replication(), with foreach at its default, and leave foreach of "
    "an optimizer at its default too. If tokens are split, each rank has the plain gradients of its own tokens only: "
    "give such a norm fusedtp.FusedNormParallel, which makes its parameters DTensors"
)


def on_multi_tensor_changes(count: Callable[[Any], None]) -> None:
    """Call `count` with each DTensor that a multi-tensor op has changed in place: `torch._foreach_*_`, `_fused_*_`.

    torch raises the version of a plain tensor then, and on a CPU neither a DTensor's nor its local tensor's. A handler
    of DTensor's dispatcher replaces the dispatch of an op (torch/distributed/tensor/_dispatch.py).
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher

    def explained(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handler: Any) -> Any:
        # Without a handler the dispatcher runs the op itself.
        dispatcher._custom_op_handlers.pop(op, None)
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            if "got mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(f"{_MIXED} ({error})") from error
        finally:
            dispatcher._custom_op_handlers[op] = handler

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return explained(op, args, kwargs, read)

    def changed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = explained(op, args, kwargs, changed)
        # The first argument has the parameters, the others gradients and an optimizer's state.
        for each in args[0]:
            if isinstance(each, DTensor):
                count(each)
        return made

    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet.startswith(("_foreach_", "_fused_")) and packet.endswith("_"):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            dispatcher._custom_op_handlers.setdefault(op, changed)
    dispatcher._custom_op_handlers.setdefault(torch.ops.aten._foreach_norm.Scalar, read)


# Tensors that later calls use are always made outside of torch.inference_mode: an op in training may neither write nor
# view an inference tensor.
def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run outside of inference mode.

    torch's context manager is not safe here. If it is interrupted as it begins or ends, the mode is reset only when the
    exception is released. A program that trains would lose gradients.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        guard = None
        try:
            try:
                guard = InferenceMode(False)
                return function(*args, **kwargs)
            finally:
                if guard is not None:
                    guard.__exit__(None, None, None)
        finally:
            # For an interruption before the line above. Otherwise this does nothing.
            if guard is not None:
                guard.__exit__(None, None, None)

    return outside
