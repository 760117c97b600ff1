"""Train a small Llama-style decoder on synthetic text, on a data x tensor mesh and in one process.

Tokens are split over the data axis by batch, over the tensor axis by sequence; attention heads and the features of the
MLP are split over the tensor axis. The same decoder in plain torch, drawn from the same seed in one process, is the
reference: both must give the same losses, step by step, within what rounding does to them.

    embed [V, H] -> blocks: x + out(attend(qkv(norm(x)))), x + mlp(norm(x)) -> norm -> head [V, H]      x [S, B, H]

Parameters that are whole on every rank (embedding, norms, head) see only this rank's tokens, so their gradients are
added over both axes. Gradients of sharded weights are added over the data axis only.

`compare_bits` splits tokens by sequence over all ranks and compares log-probabilities of one text, alone and in a
batch, bit for bit between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fusedtp
from fusedtp.layers import ColumnParallelLinear, RowParallelLinear
from fusedtp.machine import describe
from fusedtp.op import RANK_ORDER, Order
from fusedtp.scaled import Float8

from . import theme
from .cases import BlockSizes
from .layers import DecoderBlock
from .ranks import RankPool
from .store import origin


@dataclass(frozen=True)
class Training:
    """Sizes of the decoder and of its training.

    `sequence` and `batch` are global. float8, order: of the parallel layers.
    """

    vocabulary: int = 64
    hidden: int = 64
    intermediate: int = 160
    heads: int = 4
    blocks: int = 2
    sequence: int = 32
    batch: int = 8
    steps: int = 50
    learning_rate: float = 3e-3
    seed: int = 0
    float8: Float8 | None = None
    order: Order = RANK_ORDER


def trained_block(settings: Training, tensor: ProcessGroup | None, schedule: str) -> DecoderBlock:
    """Return attention and MLP; made of plain layers if `tensor` is None."""
    heads, hidden = settings.heads, settings.hidden
    sizes = BlockSizes(hidden, settings.intermediate, heads, heads, hidden // heads, 1, True, "")
    if tensor is None:
        return DecoderBlock(sizes)
    options: dict[str, Any] = {
        "group": tensor, "schedule": schedule, "float8": settings.float8, "order": settings.order
    }  # fmt: skip
    column, row = (partial(linear, **options) for linear in (ColumnParallelLinear, RowParallelLinear))
    return DecoderBlock(sizes, column=column, row=row)


class TrainedDecoder(nn.Module):
    """Token ids [S, B] of this rank to logits [S, B, V].

    alone: a group of this rank alone, for a head with the reduction order of the layers.
    """

    def __init__(
        self, settings: Training, tensor: ProcessGroup | None = None, schedule: str = "auto",
        alone: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.alone, self.order = alone, settings.order
        self.embed = nn.Embedding(settings.vocabulary, settings.hidden)
        self.blocks = nn.ModuleList(trained_block(settings, tensor, schedule) for _ in range(settings.blocks))
        self.norm = nn.RMSNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.alone is not None:
            return fusedtp.linear_all_reduce(self.norm(x), self.head.weight, group=self.alone, order=self.order)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def whole_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are whole on every rank."""
        for name, parameter in self.named_parameters():
            if "norm" in name or name.startswith(("embed", "head")):
                yield parameter


def text(settings: Training, step: int) -> Tensor:
    """Return synthetic ids [S + 1, B]: each id follows from the previous one but for noise, so it can be learned."""
    random = torch.Generator().manual_seed(settings.seed * 100_003 + step)
    ids = torch.randint(settings.vocabulary, (settings.sequence + 1, settings.batch), generator=random)
    for place in range(1, settings.sequence + 1):
        follows = (5 * ids[place - 1] + 7) % settings.vocabulary
        noise = torch.rand(settings.batch, generator=random) < 0.1
        ids[place] = torch.where(noise, ids[place], follows)
    return ids


def train(
    settings: Training, data: ProcessGroup | None = None, tensor: ProcessGroup | None = None, schedule: str = "auto"
) -> list[float]:
    """Return the mean loss of every step over all tokens. Without groups it is plain torch in one process."""
    torch.manual_seed(settings.seed)
    model = TrainedDecoder(settings, tensor, schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, foreach=False)
    losses = []
    for step in range(settings.steps):
        ids = text(settings, step)
        inputs, targets = ids[:-1], ids[1:]
        if data is not None and tensor is not None:
            inputs, targets = (
                each.tensor_split(tensor.size(), 0)[tensor.rank()].tensor_split(data.size(), 1)[data.rank()]
                for each in (inputs, targets)
            )
        logits = model(inputs)
        # Every rank's term of the mean over all tokens: gradients are those of the sum over ranks.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ids[1:].numel())
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().view(1)
        if data is not None and tensor is not None:
            total = _add_gradients(model, total, data, tensor, schedule)
        optimizer.step()
        losses.append(total.item())
    return losses


def _add_gradients(
    model: TrainedDecoder, loss: Tensor, data: ProcessGroup, tensor: ProcessGroup, schedule: str
) -> Tensor:
    whole = {id(parameter) for parameter in model.whole_parameters()}
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        # The layers' parameters are DTensors over the tensor axis; over the data axis their parts are added in place.
        if id(parameter) not in whole:
            part = grad.to_local()  # type: ignore[attr-defined]
            part.copy_(fusedtp.all_reduce(part, group=data, schedule=schedule))
            continue
        grad = fusedtp.all_reduce(grad, group=tensor, schedule=schedule)
        parameter.grad = fusedtp.all_reduce(grad, group=data, schedule=schedule)
    return fusedtp.all_reduce(fusedtp.all_reduce(loss, group=tensor, schedule=schedule), group=data, schedule=schedule)


def sharded(group: ProcessGroup, settings: Training, data_size: int, schedule: str) -> list[float]:
    """Train as one rank of a data x tensor mesh over all ranks; return the losses, equal on every rank."""
    mesh = init_device_mesh("cpu", (data_size, group.size() // data_size), mesh_dim_names=("data", "tensor"))
    fusedtp.set_timeout(300)
    return train(settings, mesh.get_group("data"), mesh.get_group("tensor"), schedule)


def farthest(curves: dict[str, list[float]]) -> float:
    """Return the largest difference at any step between the loss of any run and of the first run."""
    first, *others = curves.values()
    return max(abs(loss - its) for losses in others for loss, its in zip(losses, first, strict=False))


def picture(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the losses of every run by step, and write how far the farthest is from the first run's."""
    reference, *others = curves
    with theme.style():
        drawn, ((left, right),) = theme.panels([1], 2, line=2.8, row=0.3, width_ratios=(2, 1))
        # The curves are the same: wide lines below narrow ones show all.
        for width, (name, losses) in zip((7.0, 4.5, 2.5, 1.0), curves.items(), strict=False):
            colour = theme.colour("line" if name == reference else name.rpartition(" ")[2])
            short = f", to step {len(losses)}: interpreted, slow" if len(losses) < len(curves[reference]) else ""
            left.plot(range(1, len(losses) + 1), losses, label=f"{name}{short}", color=colour, linewidth=width)
        left.set(xlabel="step", ylabel="loss", title="Training loss")
        left.xaxis.get_major_locator().set_params(integer=True)
        right.set_axis_off()
        middle = {"transform": right.transAxes, "ha": "center"}
        right.text(0.5, 0.5, f"{farthest(curves):.0e}".replace("e-0", "e-"), fontsize=26, va="bottom", **middle)
        words = f"largest difference of a loss\nfrom that of {reference}:\n{len(others)} runs, all their steps, float32"
        right.text(0.5, 0.45, words, color=theme.colour("muted"), va="top", **middle)
        theme.legend(drawn)
        theme.save(drawn, path)


def runs(settings: Training, fused_steps: int) -> dict[str, int]:
    """Return by name the steps of each run: in one process, then on a 2 x 2 mesh by each schedule.

    `fused`, whose kernels are interpreted on CPUs, trains for `fused_steps` only. It alone has another order.
    """
    found = {"one process": settings.steps, "2 x 2 mesh, unfused": settings.steps}
    found |= {"2 x 2 mesh, decomposed": settings.steps, "2 x 2 mesh, fused": fused_steps}
    return (
        found if settings.order == RANK_ORDER else {name: found[name] for name in ("one process", "2 x 2 mesh, fused")}
    )


def compare(
    settings: Training, fused_steps: int, out: Path, done: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Train each of `runs`, and leave train.csv and train.png in `out`; `done` is called after each."""
    torch.set_num_threads(1)
    curves: dict[str, list[float]] = {}
    with RankPool(4, timeout=1200, env={"TRITON_INTERPRET": "1"}) as pool:
        for name, steps in runs(settings, fused_steps).items():
            given, schedule = replace(settings, steps=steps), name.rpartition(" ")[2]
            curves[name] = train(given) if schedule == "process" else pool.run(sharded, given, 2, schedule)[0]
            done()
    rows = [(name, step, loss) for name, losses in curves.items() for step, loss in enumerate(losses, 1)]
    frame = pd.DataFrame(rows, columns=["run", "step", "loss"]).assign(**origin(describe()))
    frame.to_csv(out / "train.csv", index=False)
    picture(curves, out / "train.png")
    return curves


def log_probabilities(group: ProcessGroup, settings: Training, batch: int) -> Tensor:
    """Return log-probabilities [S] of the first sequence's next tokens in a batch; the same on every rank.

    Ops between the linears work token by token, or sequence by sequence and head by head. The head is whole on every
    rank, but a rank's tokens depend on the number of ranks. So the head is a linear of this rank alone, in the same
    reduction order.
    """
    mesh = init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("tensor", "alone"))
    tensor, alone = mesh.get_group("tensor"), mesh.get_group("alone")
    torch.manual_seed(settings.seed)
    model = TrainedDecoder(settings, tensor, "auto", alone=alone)
    ids = text(settings, 0)[:, :batch]
    inputs, targets = (each.tensor_split(group.size(), 0)[group.rank()] for each in (ids[:-1], ids[1:]))
    with torch.no_grad():
        logits = model(inputs)[:, :1]
        mine = logits.log_softmax(-1).gather(-1, targets[:, :1, None])[:, 0]
        sizes = [len(part) for part in torch.arange(settings.sequence).tensor_split(group.size())]
        return fusedtp.all_gather(mine, group=tensor, sizes=sizes)[:, 0]


def compare_bits(
    settings: Training, world_sizes: tuple[int, ...] = (1, 2, 4), done: Callable[[], object] = lambda: None
) -> list[tuple[int, int, bool, float]]:
    """Return (ranks, batch, equal to one rank bit for bit, largest difference) for 1 and for all sequences."""
    found: list[tuple[int, int, bool, float]] = []
    expected: Tensor | None = None
    for world_size in world_sizes:
        with RankPool(world_size, timeout=600, env={"TRITON_INTERPRET": "1"}) as pool:
            for batch in (1, settings.batch):
                got = pool.run(log_probabilities, settings, batch)[0]
                expected = got if expected is None else expected
                far = (got - expected).abs().max().item()
                found.append((world_size, batch, torch.equal(got, expected), far))
        done()
    return found


def of_order(order: str) -> Training:
    """Return settings of a small decoder with linears in this reduction order, for `compare_bits`."""
    return Training(order=order, vocabulary=32, hidden=32, intermediate=64, sequence=16)
