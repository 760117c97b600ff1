"""The decoder of the training example: the same losses on a 2 x 2 mesh as in one process, with every schedule."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from fusedtp.bench import train as training
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.train import TrainedDecoder, Training, sharded, train
from fusedtp.recipes import NAMES

from .harness import by_torchao

SMALL = Training(vocabulary=16, hidden=32, intermediate=48, heads=2, blocks=1, sequence=12, batch=4, steps=8)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return train(SMALL)


@pytest.mark.parametrize(("schedule", "steps"), [("unfused", 8), ("decomposed", 8), ("fused", 2)])
def test_losses_equal_one_process(pool: RankPool, reference: list[float], schedule: str, steps: int) -> None:
    settings = Training(**{**vars(SMALL), "steps": steps})
    curves = pool.run(sharded, settings, 2, schedule, timeout=400)
    assert all(curve == curves[0] for curve in curves)
    # Sums in another order change the last bits of a float32; eight steps of Adam do not make more of it than this.
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(reference[:steps]), rtol=2e-6, atol=0)


def test_it_learns_in_float8(pool: RankPool) -> None:
    """Every loss within 2 % of the one in float32, and of torchao's linears' in one process."""
    for recipe in NAMES:
        settings = replace(SMALL, steps=20 if recipe == "rowwise" else 5)
        expected = torch.tensor(train(settings))
        (curve, *_) = pool.run(sharded, replace(settings, float8=recipe), 2, "decomposed", timeout=400)
        losses = torch.tensor(curve)
        assert losses[-1] < losses[0] - 0.5 or recipe != "rowwise"
        assert bool(((losses - expected).abs() <= 0.02 * expected).all()), recipe
        if recipe == "rowwise":
            with mock.patch.object(
                training, "TrainedDecoder", lambda *given: by_torchao(TrainedDecoder(*given), "rowwise", "blocks")
            ):
                theirs = torch.tensor(train(settings))
            assert bool(((losses - theirs).abs() <= 0.02 * theirs).all())
            assert not torch.equal(theirs, expected)
        assert not torch.equal(losses, expected)


def test_it_learns(reference: list[float]) -> None:
    assert reference[-1] < reference[0] - 0.2


def test_another_seed_is_another_run(reference: list[float]) -> None:
    torch.manual_seed(1)
    first = next(TrainedDecoder(SMALL).parameters()).detach().clone()
    assert not torch.equal(first, next(TrainedDecoder(SMALL).parameters()))
    assert train(Training(**{**vars(SMALL), "steps": 1, "seed": 1}))[0] != reference[0]
