"""Hugging Face's Trainer with a split model trains, saves and resumes as in one process."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.hf import trainer

from .harness import LARGE, mesh_of, on_ranks
from .test_decoders import VOCABULARY, small
from .test_guide import world

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("accelerate") is None, reason="needs transformers and accelerate"
    ),
]

STEPS, SAVED = 4, 2


@contextlib.contextmanager
def started_by_torchrun(group: ProcessGroup) -> Iterator[None]:
    """Make this rank's group and environment those of a program that torchrun has started."""
    names = {"RANK": group.rank(), "LOCAL_RANK": group.rank(), "WORLD_SIZE": group.size()}
    names |= {"LOCAL_WORLD_SIZE": group.size(), "OMP_NUM_THREADS": 1}
    with world(group), mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        yield


def data(length: int = 44) -> list[dict[str, Any]]:
    tokens = torch.randint(3, VOCABULARY, (length, 9), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": each, "labels": each} for each in tokens]


class Iterated(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from data()


def made(
    kind: Any, model: nn.Module, folder: Path, given: Any = None, optimizers: Any = (None, None), **changes: Any
) -> Any:
    """Make a Trainer that prints nothing."""
    from transformers import PrinterCallback, TrainingArguments

    options = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5,
        "weight_decay": 0.1, "logging_steps": 1, "save_steps": SAVED, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "seed": 5, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})  # type: ignore[arg-type]
    found = kind(model=model, args=args, train_dataset=given or data(), optimizers=optimizers)
    found.remove_callback(PrinterCallback)
    return found


def logged(of: Any) -> dict[int, tuple[float, float]]:
    return {each["step"]: (each["loss"], each["grad_norm"]) for each in of.state.log_history if "loss" in each}


def compared(found: Any, of_one: dict[int, tuple[float, float]], first: int = 1) -> None:
    """Assert that losses and gradient norms of all steps from `first` on are those of one process."""
    got = logged(found)
    assert [*of_one] == [*range(1, STEPS + 1)]
    for step in range(first, STEPS + 1):
        assert got[step] == pytest.approx(of_one[step], rel=1e-5), step


def weights_are_those(folder: Path, expected: nn.Module) -> None:
    again = type(expected).from_pretrained(folder, dtype=torch.float64)  # type: ignore[attr-defined]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


def trained_in_one_process(name: str, folder: Path) -> Any:
    """Return the Trainer that has trained a decoder."""
    from transformers import Trainer

    one = made(Trainer, small(name), folder, save_strategy="no")
    assert one.args.world_size == 1
    one.train()
    return one


def trains(
    group: ProcessGroup, name: str, folder: Path, sequence_parallel: bool, of_one: dict[int, tuple[float, float]]
) -> None:
    from transformers import Trainer

    with started_by_torchrun(group):
        mesh, kind = mesh_of(group), fusedtp.trainer_class(Trainer)

        def split() -> Any:
            return fusedtp.parallelize(small(name), mesh, sequence_parallel=sequence_parallel)

        ours = made(kind, split(), folder / "split")
        assert ours.is_world_process_zero() == ours.args.should_save == (group.rank() == 0)
        ours.train()
        assert ours.model_wrapped is ours.model
        assert any(isinstance(each, DTensor) for each in ours.model.parameters())
        compared(ours, of_one)
        # Files are those of Trainer in one process, and there once on every rank.
        assert {each.name for each in (folder / "split" / f"checkpoint-{SAVED}").iterdir()} >= {
            "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"
        }  # fmt: skip
        ours.save_model(str(folder / "final"))
        again = made(kind, split(), folder / "again", save_strategy="no")
        again.train(resume_from_checkpoint=str(folder / "split" / f"checkpoint-{SAVED}"))
        compared(again, of_one, SAVED + 1)
        for mine, theirs in zip(again.model.parameters(), ours.model.parameters(), strict=True):
            mine, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (mine, theirs))
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [("Llama, tied", False), *([("Phi3", True), ("Llama, tied", True), ("Qwen3", False)] if LARGE else [])],
)
def test_as_in_one_process(pool: RankPool, tmp_path: Path, name: str, sequence_parallel: bool) -> None:
    one = trained_in_one_process(name, tmp_path / "one")
    pool.run(trains, name, tmp_path, sequence_parallel, logged(one), world_size=2)
    weights_are_those(tmp_path / "final", one.model)
    weights_are_those(tmp_path / "split" / f"checkpoint-{STEPS}", one.model)


def saves_or_resumes(
    group: ProcessGroup, name: str, folder: Path, resumed: str | None, of_one: dict[int, tuple[float, float]]
) -> None:
    from transformers import Trainer

    with started_by_torchrun(group):
        model = fusedtp.parallelize(small(name), mesh_of(group))
        ours = made(fusedtp.trainer_class(Trainer), model, folder)
        ours.train(resume_from_checkpoint=resumed)
    compared(ours, of_one)


def test_resumes_on_other_ranks_and_in_one_process(pool: RankPool, tmp_path: Path) -> None:
    from transformers import Trainer

    name, folder = "Llama with one key head", tmp_path / "split"
    resumed = str(folder / f"checkpoint-{SAVED}")
    of_one = logged(trained_in_one_process(name, tmp_path / "one"))
    pool.run(saves_or_resumes, name, folder, None, of_one, world_size=4)
    pool.run(saves_or_resumes, name, folder, resumed, of_one, world_size=2)
    again = made(Trainer, small(name), tmp_path / "again", save_strategy="no")
    again.train(resume_from_checkpoint=resumed)
    compared(again, of_one, SAVED + 1)


def evaluated(trainer_class: Any, model: nn.Module, folder: Path) -> list[float]:
    """Train on a dataset that is iterated, with accumulation, and return losses of evaluation, the last of the best."""
    options = {
        "eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "max_steps": 10, "load_best_model_at_end": True,
        "gradient_accumulation_steps": 2, "save_total_limit": 1,
    }  # fmt: skip
    found = made(lambda **given: trainer_class(eval_dataset=data(6), **given), model, folder, Iterated(), **options)
    found.train()
    found.evaluate()
    return [each["eval_loss"] for each in found.state.log_history if "eval_loss" in each]


def evaluates(group: ProcessGroup, folder: Path, expected: list[float]) -> None:
    from transformers import Trainer

    with started_by_torchrun(group):
        model = fusedtp.parallelize(small("Llama"), mesh_of(group))
        assert evaluated(fusedtp.trainer_class(Trainer), model, folder) == pytest.approx(expected, rel=1e-5)


def test_evaluates_and_loads_the_best_model(pool: RankPool, tmp_path: Path) -> None:
    from transformers import Trainer

    expected = evaluated(Trainer, small("Llama"), tmp_path / "one")
    assert expected[2] == expected[0] < expected[1]
    pool.run(evaluates, tmp_path / "split", expected, world_size=2)


@on_ranks(2)
def test_adapters(group: ProcessGroup, tmp_path: Path) -> None:
    """LoRA's adapters alone are saved, and training resumes with them."""
    peft = pytest.importorskip("peft")
    from transformers import Trainer

    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights="gaussian")

    def adapted() -> Any:
        model = small("Llama").float()
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    one = made(Trainer, adapted(), tmp_path / "one", save_strategy="no")
    one.train()
    with started_by_torchrun(group):
        kind = fusedtp.trainer_class(Trainer)
        ours = made(kind, fusedtp.parallelize(adapted(), mesh_of(group)), tmp_path / "split")
        ours.train()
        again = made(kind, fusedtp.parallelize(adapted(), mesh_of(group)), tmp_path / "again", save_strategy="no")
        again.train(resume_from_checkpoint=str(tmp_path / "split" / f"checkpoint-{SAVED}"))
        for found in (ours, again):
            got, of_one = logged(found), logged(one)
            for step in range(SAVED + 1, STEPS + 1):
                assert got[step] == pytest.approx(of_one[step], rel=1e-4), step


class Rows(torch.optim.SGD):
    """Keep a state with one dim more than the parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["rows"] = torch.zeros_like(each).unsqueeze(0)
        return super().step(closure)


@on_ranks(4)
def test_what_is_refused(group: ProcessGroup, tmp_path: Path) -> None:
    from transformers import Trainer

    with started_by_torchrun(group):
        kind = fusedtp.trainer_class(Trainer)
        dense = small("Llama")
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is not split: call fusedtp.parallelize"):
            made(kind, dense, tmp_path)
        with pytest.raises(ValueError, match="not model_init"):
            made(lambda model, **given: kind(model_init=lambda: model, **given), dense, tmp_path)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        half = fusedtp.parallelize(copy.deepcopy(dense), mesh["tp"])
        with pytest.raises(NotImplementedError, match=r"one 1-D mesh of all 4 ranks.*docs/examples/train.py"):
            made(kind, half, tmp_path)
        model = fusedtp.parallelize(dense, mesh_of(group))
        for options, said in (
            ({"save_on_each_node": True}, "rank 0 writes"),
            ({"auto_find_batch_size": True}, "alone"),
        ):
            with pytest.raises(ValueError, match=said):
                made(kind, model, tmp_path, **options)
        # An optimizer may keep what is not an element for each of a parameter.
        rows = Rows(model.parameters(), lr=0.1)
        ours = made(kind, model, tmp_path / "rows", max_steps=1, save_steps=1, optimizers=(rows, None))
        with pytest.raises(NotImplementedError, match=r"optimizer's rows \[1, .*another shape than its parameter"):
            ours.train()
        # An error of the rank that writes is an error of all.
        fails = mock.patch.object(Trainer, "_save", side_effect=OSError("disk full"))
        with (
            fails if group.rank() == 0 else contextlib.nullcontext(),
            pytest.raises(fusedtp.RanksDisagree, match="disk full"),
        ):
            ours.save_model(str(tmp_path / "full"))


def test_another_transformers_is_refused() -> None:
    from transformers import Trainer, TrainingArguments

    assert fusedtp.trainer_class(Trainer) is fusedtp.trainer_class(Trainer)
    with pytest.raises(TypeError, match=r"takes transformers\.Trainer or a subclass"):
        fusedtp.trainer_class(TrainingArguments)

    class Renamed(Trainer):
        def _save(self, folder: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(RuntimeError, match=r"they have no Renamed._save\(self, output_dir, state_dict\)"):
        fusedtp.trainer_class(Renamed)
    with (
        mock.patch.dict(trainer._METHODS, {"_gone": None}),
        pytest.raises(RuntimeError, match=r"no Renamed\._save.*_gone"),
    ):
        fusedtp.trainer_class(Renamed)
