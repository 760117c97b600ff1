"""Train a split model with Hugging Face's Trainer: every rank sees the same batches, and one rank writes.

Trainer and accelerate count the ranks as data-parallel processes: they wrap the model in DDP and give every rank other
batches. Here accelerate sees one process. Checkpoints are those of one process: gathered from all ranks, written by
rank 0, and split again when training resumes, on any number of ranks.

Only this module knows what is private in Trainer and accelerate, read in transformers 5.23 and 5.24, accelerate 1.15.
`_check` compares it by name.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..calls.parameters import part_of
from .pretrained import on_all_ranks

# Methods of Trainer that are overridden here, with their parameters.
_METHODS = {
    "create_accelerator_and_postprocess": ("self",),
    "_get_dataloader": None,
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "_save": ("self", "output_dir", "state_dict"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_save_rng_state": ("self", "output_dir"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}
# Options of TrainingArguments that are refused, with what to do.
_REFUSED = {
    "fsdp": "write the loop as in docs/examples/train.py, with FSDP2 on the other dim of the mesh",
    "deepspeed": "leave it out",
    "parallelism_config": "leave it out: the mesh of parallelize is what splits the model",
    "auto_find_batch_size": "set per_device_train_batch_size: a rank alone cannot change it",
    "save_on_each_node": "leave it out: rank 0 writes",
    "fp16": "use bf16=True",
}


@functools.cache
def trainer_class(trainer: type) -> Any:
    """Return a subclass of Hugging Face's Trainer, or of one of its subclasses, that trains a split model.

    The model is one that `parallelize` or `from_pretrained` of this package has split over a 1-D mesh of all ranks.
    Start with torchrun, and give every rank the same datasets and arguments:

    - Every rank gets the batches of one process; losses, gradient norms and steps are those of one process.
    - `save_model` writes an ordinary checkpoint. Checkpoints of `save_steps` have Trainer's files: model, optimizer,
      scheduler, random states. All ranks gather, rank 0 writes and logs.
    - `train(resume_from_checkpoint=...)` continues on the same or on another number of ranks.

    Raises TypeError for another class, RuntimeError if its methods are not as they are known here. The class raises
    ValueError for a model that is not split and for arguments that do not fit, and NotImplementedError for data
    parallelism beside the mesh.
    """
    _check(trainer)
    return type(f"Split{trainer.__name__}", (_Split, trainer), {"__module__": __name__, "__doc__": trainer.__doc__})


def _check(trainer: Any) -> None:
    # Raise unless everything that is used here is there.
    try:
        import accelerate
        import transformers
        from accelerate.state import DistributedType, PartialState
    except ImportError as error:
        raise RuntimeError(f"fusedtp.trainer_class needs transformers and accelerate: {error}") from error
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise TypeError(f"fusedtp.trainer_class takes transformers.Trainer or a subclass, not {trainer!r}")
    missing = []
    for name, known in _METHODS.items():
        method: Any = getattr(trainer, name, None)
        if method is None or (known and tuple(inspect.signature(method).parameters) != known):
            missing.append(f"{trainer.__name__}.{name}" + (f"({', '.join(known)})" if known else ""))
    fields = {"distributed_type", "num_processes", "process_index", "local_process_index"}
    missing += [f"PartialState.{each}" for each in sorted(fields - {*getattr(PartialState, "_known_attrs", ())})]
    missing += [] if hasattr(DistributedType, "NO") else ["DistributedType.NO"]
    if missing:
        raise RuntimeError(
            f"transformers {transformers.__version__} and accelerate {accelerate.__version__} are not as "
            f"fusedtp.trainer_class knows them: they have no {', no '.join(missing)}"
        )


def _mesh_of(model: Any) -> DeviceMesh:
    if model is None:
        raise ValueError("pass Trainer a model that is split, not model_init")
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise NotImplementedError(
            "transformers has split this model itself: pass it to Trainer, or split it with fusedtp.parallelize"
        )
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, DTensor)}
    if not meshes:
        raise ValueError(f"this {type(model).__name__} is not split: call fusedtp.parallelize(model, mesh) first")
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1 or mesh.size() != dist.get_world_size():
        raise NotImplementedError(
            f"Trainer trains a model that is split over one 1-D mesh of all {dist.get_world_size()} ranks, and this "
            f"{type(model).__name__} is on {mesh}: for data parallelism beside it, write the loop as in "
            "docs/examples/train.py, with FSDP2"
        )
    return mesh


class _Split:
    # To stand before Trainer among the bases.
    args: Any
    model: Any
    optimizer: Any

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate.state import DistributedType

        self._mesh = _mesh_of(self.model)
        for name, instead in _REFUSED.items():
            if getattr(self.args, name, None):
                raise ValueError(f"Trainer of a split model takes no {name}: {instead}")
        device = next(each.device for each in self.model.parameters())
        if self.args.n_gpu > 1 or self.args.device.type != device.type:
            raise ValueError(
                f"the model is on {device}, and TrainingArguments chose {self.args.device} of {self.args.n_gpu} GPUs: "
                "start with torchrun, which numbers the ranks, and pass use_cpu=True for a model on CPUs"
            )
        state, rank = self.args.distributed_state, dist.get_rank()
        local = state.local_process_index if state.num_processes > 1 else int(os.environ.get("LOCAL_RANK", rank))
        # One process for all that counts processes. Its index tells who writes and logs.
        state.distributed_type, state.num_processes = DistributedType.NO, 1
        state.process_index, state.local_process_index = rank, local
        # Otherwise process 0 would read an iterable dataset for all.
        self.args.accelerator_config.dispatch_batches = False
        _super(self).create_accelerator_and_postprocess()

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        # The index is also in the seeds of a loader's workers.
        state = self.args.distributed_state
        rank, state.process_index = state.process_index, 0
        try:
            return _super(self)._get_dataloader(*args, **options)
        finally:
            state.process_index = rank

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return _full(_super(self)._get_grad_norm(model, grad_norm=grad_norm))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state_dict = get_model_state_dict(self.model, options=options)
        # Nobody goes on before the files are there.
        with on_all_ranks(self._mesh.get_group(), "model", {}, "save"):
            _super(self)._save(output_dir, state_dict=state_dict)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with on_all_ranks(self._mesh.get_group(), "checkpoint", {}, "save_checkpoint"):
            _super(self)._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        whole = _gathered(self.optimizer.state_dict(), self.optimizer.param_groups, self.args.should_save)
        with _hooked(self.optimizer, "register_state_dict_post_hook", lambda _, state: whole):
            _super(self)._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        # Equal on all ranks.
        if self.args.should_save:
            _super(self)._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        def split(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            return _split(state, self.optimizer.param_groups)

        with _hooked(self.optimizer, "register_load_state_dict_pre_hook", split):
            _super(self)._load_optimizer_and_scheduler(checkpoint)


def _super(trainer: _Split) -> Any:
    return super(_Split, trainer)


@contextmanager
def _hooked(optimizer: Any, register: str, hook: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    # accelerate wraps the optimizer in one that has no hooks.
    handle = getattr(getattr(optimizer, "optimizer", optimizer), register)(hook)
    try:
        yield
    finally:
        handle.remove()


def _full(each: Any) -> Any:
    return each.full_tensor() if isinstance(each, DTensor) else each


def _of_parameters(state: Mapping[str, Any], groups: list[dict[str, Any]]) -> Iterator[tuple[int, Tensor, Any]]:
    # The number of each parameter that has a state, the parameter, and its state, in the same order on every rank.
    for saved, group in zip(state["param_groups"], groups, strict=False):
        for number, parameter in zip(saved["params"], group["params"], strict=False):
            if number in state["state"]:
                yield number, parameter, state["state"][number]


def _gathered(state: dict[str, Any], groups: list[dict[str, Any]], keep: bool) -> dict[str, Any]:
    """Return an optimizer's state with whole tensors, on the CPU; without tensors on a rank that does not keep it."""
    by_number: dict[int, dict[str, Any]] = {}
    for number, parameter, values in _of_parameters(state, groups):
        for name, value in values.items():
            if isinstance(value, DTensor) and value.shape != parameter.shape:
                raise NotImplementedError(
                    f"the optimizer's {name} {list(value.shape)} has another shape than its parameter "
                    f"{list(parameter.shape)}: use an optimizer such as AdamW, or pass save_only_model=True"
                )
            whole = _full(value)
            if keep:
                by_number.setdefault(number, {})[name] = whole.cpu() if isinstance(whole, Tensor) else whole
    return {**state, "state": by_number}


def _split(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state with this rank's part of every tensor that has its parameter's shape."""

    def part(name: str, value: Any, of: Tensor) -> Any:
        if name == "step" or not isinstance(of, DTensor) or getattr(value, "shape", None) != of.shape:
            return value
        return part_of(value, of)

    by_number = {
        number: {name: part(name, value, parameter) for name, value in values.items()}
        for number, parameter, values in _of_parameters(state, groups)
    }
    return {**state, "state": {**state["state"], **by_number}}
