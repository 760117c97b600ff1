"""The decoder of the training example: the same losses on a 2 x 2 mesh as in one process, with every schedule."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fusedtp.bench import train as training
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.train import TrainedDecoder, Training, sharded, train
from fusedtp.scaled import RECIPES

from .command import command
from .harness import LARGE, by_torchao

SMALL = Training(vocabulary=16, hidden=32, intermediate=48, heads=2, blocks=1, sequence=12, batch=4, steps=8)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return train(SMALL)


@pytest.mark.parametrize(
    ("schedule", "steps"), [("unfused", 8 if LARGE else 2), ("decomposed", 8 if LARGE else 4), ("fused", 2)]
)
def test_losses_equal_one_process(pool: RankPool, reference: list[float], schedule: str, steps: int) -> None:
    curves = pool.run(sharded, replace(SMALL, steps=steps), 2, schedule, timeout=400)
    assert all(curve == curves[0] for curve in curves)
    # Another order of sums changes the last bits of a float32; eight steps of Adam stay within this tolerance.
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(reference[:steps]), rtol=2e-6, atol=0)


def test_it_learns_in_float8(pool: RankPool) -> None:
    """Every loss is within 2 % of float32's, and of torchao's linears in one process."""

    def close(losses: torch.Tensor, expected: torch.Tensor) -> bool:
        near = bool(((losses - expected).abs() <= 0.02 * expected).all())
        return near and not torch.equal(losses, expected)

    def theirs(*given: Any) -> nn.Module:
        return by_torchao(TrainedDecoder(*given), "rowwise", "blocks")

    of_float32 = torch.tensor(train(replace(SMALL, steps=20 if LARGE else 8)))
    for recipe in RECIPES:
        settings = replace(SMALL, steps=len(of_float32) if recipe == "rowwise" else 5 if LARGE else 3)
        expected = of_float32[: settings.steps]
        (curve, *_) = pool.run(sharded, replace(settings, float8=recipe), 2, "decomposed", timeout=400)
        losses = torch.tensor(curve)
        assert close(losses, expected), recipe
        if recipe == "rowwise":
            assert losses[-1] < losses[0] - 0.5
            with mock.patch.object(training, "TrainedDecoder", theirs):
                by_others = torch.tensor(train(settings))
            assert close(losses, by_others)
            assert not torch.equal(by_others, expected)


def test_the_farthest_loss_is_found_in_any_run_at_any_step() -> None:
    curves = {"one process": [4.0, 3.0, 2.0], "unfused": [4.0, 3.25, 2.0], "fused": [3.5]}
    assert training.farthest(curves) == 0.5
    assert training.farthest({**curves, "fused": [4.0]}) == 0.25


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves are written before the bits are compared."""

    def compare(*given: Any) -> dict[str, list[float]]:
        for name in training.runs(*given[:2]):
            given[3]()
            curves[name] = [1.0]
        return curves

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    curves: dict[str, list[float]] = {}
    for compares, kept in (
        (stopped, "no step had ended, and no file was changed"),
        (compare, "train.csv\nis written once its 4 runs have ended"),
    ):
        monkeypatch.setattr(training, "compare", compares)
        monkeypatch.setattr(training, "compare_bits", stopped)
        said = command("train", "--out", tmp_path, code=130, columns=300)
        assert kept in said
    assert re.search(r"3/7, after \d+ s, about \d+ s left: 2 x 2 mesh, decomposed, 50 steps", said)
    assert list(training.runs(Training(order="tree"), 3).items()) == [("one process", 50), ("2 x 2 mesh, fused", 3)]


def test_it_learns_and_another_seed_is_another_run(reference: list[float]) -> None:
    assert reference[-1] < reference[0] - 0.2
    torch.manual_seed(1)
    first = next(TrainedDecoder(SMALL).parameters()).detach().clone()
    assert not torch.equal(first, next(TrainedDecoder(SMALL).parameters()))
    assert train(replace(SMALL, steps=1, seed=1))[0] != reference[0]
