"""Compare the inputs of a split model between ranks: other tokens on each rank would train it wrong without an error.

A hash of the tokens travels by an all-gather of four numbers, so every rank can raise the same error. The first calls
are compared, then every 64th.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import collectives
from ..calls.parameters import PLAIN
from ..errors import RanksDisagree
from ..torch_private import is_in_torch_dispatch_mode, is_tracing, transforms_active
from ..workspaces import agreement

_FIRST, _EVERY = 2, 64
# Elements of hidden states that are hashed; tokens are hashed whole.
_SAMPLE = 1 << 16


class CompareInputs:
    """Forward pre-hook of a model that every rank must call with the same tokens.

    Calls that a compiler traces, and those that a CUDA graph captures, are not compared.
    """

    def __init__(self, mesh: DeviceMesh, schedule: str) -> None:
        self.mesh, self.schedule, self.calls = mesh, schedule, 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RanksDisagree on every rank if the ranks' inputs differ."""
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        if self.calls > _FIRST and self.calls % _EVERY:
            return
        given = {**{f"argument {i}": each for i, each in enumerate(args)}, **kwargs}
        tensors = {name: each for name, each in given.items() if type(each) in PLAIN and not each.is_meta}
        tokens = {name: each for name, each in tensors.items() if not each.is_floating_point()}
        compared = tokens or dict(list(tensors.items())[:1])
        on_gpu = any(each.is_cuda for each in compared.values())
        if is_in_torch_dispatch_mode() or is_tracing() or transforms_active():
            return
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return
        self._compare(type(module).__name__, compared)

    @torch.no_grad()
    def _compare(self, kind: str, compared: dict[str, Tensor]) -> None:
        digest = blake2b(digest_size=8)
        for name, each in compared.items():
            flat = each.detach().reshape(-1)
            if each.is_floating_point():
                flat = flat[:: max(1, flat.numel() // _SAMPLE)].double()
            digest.update(f"{name} {tuple(each.shape)}".encode())
            digest.update(flat.cpu().numpy().tobytes())
        # float32 has 16 bits exactly.
        words = [int.from_bytes(digest.digest()[i : i + 2], "little") for i in range(0, 8, 2)]
        mine = torch.tensor([words], dtype=torch.float32, device=self.mesh.device_type)
        rows = collectives.all_gather(mine, group=self.mesh, schedule=self.schedule).tolist()
        hashes = ["".join(f"{int(word):04x}" for word in row) for row in rows]
        if len(set(hashes)) > 1:
            what = f"the values of {', '.join(compared) or 'its inputs'}"
            meant = tuple({what: f"hash {each}"} for each in hashes)
            raise RanksDisagree(
                f"{agreement.difference(kind, meant)}. Every rank of the mesh takes the same batch, as if it were one "
                "process: let ranks of a data-parallel dim load different ones (docs/guide/models.md)",
                kind, self.mesh.get_local_rank(), meant,
            )  # fmt: skip
