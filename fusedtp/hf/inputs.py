"""Compare what ranks must share: models and options once, and the inputs of a split model again and again.

Other tokens on each rank would train a split model wrong without an error. A hash of them travels by an all-gather of
four numbers. Only if hashes differ does each rank tell the others the hash of each argument.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import collectives, groups
from ..calls.parameters import PLAIN
from ..errors import PeerTimeout, RanksDisagree, ranks_in
from ..torch_private import is_in_torch_dispatch_mode, is_tracing, transforms_active
from ..workspaces import agreement, timeouts

_FIRST, _EVERY = 2, 64
# Time for the other ranks to read a difference.
_READ_SECONDS = 5.0
# Elements of hidden states that are hashed; tokens are hashed whole.
_SAMPLE = 1 << 16
_ONE_BATCH = (
    ". Every rank of the mesh takes the same batch, as if it were one process: let ranks of a data-parallel dim load "
    "different ones (docs/guide/models.md)"
)


def compare_given(group: ProcessGroup, mine: Mapping[str, str], op: str, advice: str = "") -> None:
    """Compare the ranks' values; if they differ, raise RanksDisagree on every rank, with the first difference.

    - `mine`: this rank's values by name.
    - `op`: begins the error; the ranks' calls for one op are counted.
    - `advice`: ends the error.

    Raises PeerTimeout with the first rank that has left nothing in the group's store, for instance because it is still
    loading, within the group's timeout or the time that `set_timeout` allows.
    """
    if group.size() == 1 or groups.is_fake(group):
        return
    store, rank, seconds = timeouts.GroupStore(group), group.rank(), timeouts.of(group)
    deadline, members = time.monotonic() + seconds, tuple(dist.get_process_group_ranks(group))
    # The store counts the calls, as it may outlive the group.
    call = store.add(f"fusedtp/{op}/calls/{rank}", 1)
    keys = [f"fusedtp/{op}/{call}/{peer}" for peer in range(group.size())]
    store.set(keys[rank], json.dumps(mine))
    everyone: list[dict[str, str]] = []
    try:
        for key in keys:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            everyone.append(json.loads(store.get(key)))
    except timeouts.StoreSilent:
        raise
    except BaseException as error:
        # A later rank must not go on alone.
        store.delete_key(keys[rank])
        if not isinstance(error, RuntimeError):
            raise
        absent = f"it has not called {op}, or has given up; where it loads for longer, fusedtp.set_timeout allows"
        raise PeerTimeout(op, rank, len(everyone), seconds, f"{absent} more", members=members) from error
    if text := agreement.difference(op, everyone):
        # A rank may end with this error, and its store with it: let the others read first.
        store.set(f"{keys[rank]}/read", "")
        with suppress(RuntimeError):
            store.wait([f"{key}/read" for key in keys], timedelta(seconds=min(seconds, _READ_SECONDS)))
        raise RanksDisagree(f"{text}{ranks_in(members)}{advice}", op, rank, tuple(everyone))
    # A peer that has written this record has read all of the previous one.
    store.delete_key(f"fusedtp/{op}/{call - 1}/{rank}")


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
        arguments = {**{f"argument {i}": each for i, each in enumerate(args)}, **kwargs}
        tensors = {name: each for name, each in arguments.items() if type(each) in PLAIN and not each.is_meta}
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
        mine = {
            f"the values of {name}": f"{list(each.shape)} with hash {_hash(each)}" for name, each in compared.items()
        }
        digest = blake2b(json.dumps(mine).encode(), digest_size=8).digest()
        # float32 has 16 bits exactly.
        words = [int.from_bytes(digest[i : i + 2], "little") for i in range(0, 8, 2)]
        row = torch.tensor([words], dtype=torch.float32, device=self.mesh.device_type)
        rows = collectives.all_gather(row, group=self.mesh, schedule=self.schedule)
        if rows.unique(dim=0).shape[0] > 1:
            compare_given(self.mesh.get_group(), mine, kind, _ONE_BATCH)


def _hash(x: Tensor) -> str:
    flat = x.detach().reshape(-1)
    if x.is_floating_point():
        flat = flat[:: max(1, flat.numel() // _SAMPLE)].double()
    return blake2b(flat.cpu().numpy().tobytes(), digest_size=8).hexdigest()
