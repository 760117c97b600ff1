"""Log-probabilities of one text on several numbers of ranks, alone and in a batch: are they the same, to the bit?

The decoder of `train`, drawn from one seed, its tokens split by sequence and its linears by features over all ranks.
What lies between the linears works token by token, or sequence by sequence and head by head. The head is whole on every
rank, which has other tokens there for every number of ranks: so it is a linear of this rank alone, in the same order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

import fusedtp

from .ranks import RankPool
from .train import Decoder, Settings, text


def log_probabilities(group: ProcessGroup, settings: Settings, batch: int) -> Tensor:
    """Of the first sequence's next tokens [S], with `batch` sequences in all; the same on every rank."""
    mesh = init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("tensor", "alone"))
    tensor, alone = mesh.get_group("tensor"), mesh.get_group("alone")
    torch.manual_seed(settings.seed)
    model = Decoder(settings, tensor, "auto", alone=alone)
    ids = text(settings, 0)[:, :batch]
    inputs, targets = (each.tensor_split(group.size(), 0)[group.rank()] for each in (ids[:-1], ids[1:]))
    with torch.no_grad():
        logits = model(inputs)[:, :1]
        mine = logits.log_softmax(-1).gather(-1, targets[:, :1, None])[:, 0]
        return fusedtp.all_gather(mine, group=tensor, sizes=_sizes(settings.sequence, group.size()))[:, 0]


def _sizes(length: int, num_ranks: int) -> list[int]:
    return [len(part) for part in torch.arange(length).tensor_split(num_ranks)]


def compare(settings: Settings, world_sizes: tuple[int, ...] = (1, 2, 4)) -> list[tuple[int, int, bool, float]]:
    """(ranks, batch, the bits of one rank alone, largest difference to those), of 1 and of all sequences."""
    found: list[tuple[int, int, bool, float]] = []
    expected: Tensor | None = None
    for world_size in world_sizes:
        with RankPool(world_size, timeout=600, env={"TRITON_INTERPRET": "1"}) as pool:
            for batch in (1, settings.batch):
                got = pool.run(log_probabilities, settings, batch)[0]
                expected = got if expected is None else expected
                far = (got - expected).abs().max().item()
                found.append((world_size, batch, torch.equal(got, expected), far))
    return found


def of_order(order: str, *, seed: int = 0) -> list[tuple[int, int, bool, float]]:
    """`compare` of a small decoder with linears in this order."""
    return compare(replace(Settings(), order=order, seed=seed, vocabulary=32, hidden=32, intermediate=64, sequence=16))
