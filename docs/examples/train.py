"""Train a small decoder on the bytes of a text: FSDP2 over one axis of a mesh, tensor parallelism over the other.

On 4 CPU ranks, 2 x 2, in a minute or two; then go on from its checkpoint on 2 ranks:

    torchrun --nproc-per-node 4 train.py --dp 2 --tp 2 --steps 40 --save-every 20 --out run
    torchrun --nproc-per-node 2 train.py --tp 2 --steps 60 --out run --resume

On 8 GPUs of one machine, and on two such machines, one command each:

    torchrun --nproc-per-node 8 train.py --dp 1 --tp 8 --bf16 --hidden 4096 --layers 32 --batch 16 --length 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        train.py --dp 2 --tp 8 --bf16 --hidden 4096 --layers 32 --batch 32 --length 4096

Ranks of one tensor-parallel group are neighbours, on one machine. **The commands for GPUs have not been run.**

A step's batch depends on the step and the seed alone, so the same numbers come out on any mesh, and after `--resume`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Block, Config, loss_of, split
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent, help="a file, or a folder of .py files")
    parser.add_argument("--dp", type=int, default=1, help="ranks that split the batch")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split the model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=5, help="steps until then")
    parser.add_argument("--decay", type=int, default=100, help="the step at which the rate ends at a tenth")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of a gradient")
    parser.add_argument("--bf16", action="store_true", help="parameters and activations in bfloat16, sums in float32")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=0, help="0: at the end only")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint; none is saved without")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-tflops", type=float, help="of a device; by default a matmul is timed")
    given = parser.parse_args()
    if given.resume and given.out is None:
        parser.error("--resume needs --out")
    if given.dp * given.tp != (ranks := int(os.environ.get("WORLD_SIZE", "1"))):
        parser.error(f"--dp {given.dp} times --tp {given.tp} must be the number of ranks, {ranks}")
    if given.hidden % (2 * given.heads):
        parser.error(f"--hidden {given.hidden} must be an even number of features for each of {given.heads} heads")
    if given.batch % given.dp:
        parser.error(f"--batch {given.batch} must divide by --dp {given.dp}")
    return given


def data_of(path: Path, length: int) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and the last tenth, to evaluate on."""
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    text = b"".join(each.read_bytes() for each in files)
    if len(text) <= 10 * (length + 1):
        raise SystemExit(f"{path} has {len(text)} bytes, and a tenth of them must be longer than --length {length}")
    everything = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    at = len(everything) * 9 // 10
    return everything[:at], everything[at:]


def batch_of(data: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Return `count` sequences of `length` + 1 tokens from random places."""
    begins = torch.randint(len(data) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[begin : begin + length + 1] for begin in begins.tolist()])


def made(given: argparse.Namespace, mesh: DeviceMesh) -> GPT:
    """Return the model, split over both axes."""
    torch.manual_seed(given.seed)
    width = given.hidden * 11 // 4 // 32 * 32
    model = GPT(Config(256, given.hidden, width, given.layers, given.heads)).to(mesh.device_type)
    split(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mp_policy": policy} if given.bf16 else {}
    for block in model.blocks:
        assert isinstance(block, Block)
        fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


def rate_at(step: int, given: argparse.Namespace) -> float:
    """Return the learning rate's share of the highest: a warm-up, then a cosine down to a tenth."""
    if step < given.warmup:
        return (step + 1) / given.warmup
    progress = min(1.0, (step - given.warmup) / max(1, given.decay - given.warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def evaluated(model: nn.Module, data: Tensor, given: argparse.Namespace, mesh: DeviceMesh) -> float:
    """Return the mean loss of four batches that no step has seen."""
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, mine(batch_of(data, given.batch, given.length, i), mesh)) for i in range(4)]
    model.train()
    return averaged(torch.stack(losses).mean(), mesh)


def mine(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this data rank's sequences. All tensor ranks take the same ones."""
    return batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")].to(mesh.device_type)


def averaged(loss: Tensor, mesh: DeviceMesh) -> float:
    """Return the mean over data ranks."""
    total = loss.detach().double()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return total.item() / mesh["dp"].size()


def state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return what a checkpoint has."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": torch.tensor(step)}


def peak_of(device: str, dtype: torch.dtype) -> float:
    """Return the rate of a large matmul on this device, in FLOPs a second."""
    length = 8192 if device == "cuda" else 1024
    a = torch.randn(length, length, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds.append(time.perf_counter() - begin)
    return 2 * length**3 / min(seconds)


def main() -> None:
    """Train."""
    given = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (given.dp, given.tp), mesh_dim_names=("dp", "tp"))
    first = dist.get_rank() == 0
    train, held_out = data_of(given.text, given.length)
    model = made(given, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0.1)
    begin = 0
    if given.resume:
        loaded = state(model, optimizer, 0)
        dcp.load(loaded, checkpoint_id=given.out)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )  # fmt: skip
        begin = int(loaded["step"])
    numel = sum(each.numel() for each in model.parameters())
    attention = 12 * given.layers * given.hidden * given.length
    flops = (6 * numel + attention) * given.batch * given.length
    asked, dtype = given.peak_tflops, torch.bfloat16 if given.bf16 else torch.float32
    peak = dist.get_world_size() * (asked * 1e12 if asked else peak_of(device, dtype))
    if first:
        of = "as given" if asked else "of a matmul, timed now"
        print(
            f"{numel / 1e6:.2f} M parameters, {given.dp} x {given.tp} ranks, from step {begin}; MFU is the share of "
            f"{peak / 1e12:.2f} TFLOPS, {of}", flush=True,
        )  # fmt: skip
    for step in range(begin, given.steps):
        started = time.perf_counter()
        for options in optimizer.param_groups:
            options["lr"] = given.rate * rate_at(step, given)
        batch = batch_of(train, given.batch, given.length, given.seed + 1_000 + step)
        loss = averaged(loss_of(model, mine(batch, mesh)), mesh)
        norm = nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        if first:
            rate = given.batch * given.length / seconds
            print(
                f"step {step + 1:5d}  loss {loss:.6f}  norm {float(full(norm)):.4f}  {rate:8.0f} tokens/s  "
                f"MFU {flops / seconds / peak:.1%}", flush=True,
            )  # fmt: skip
        else:
            full(norm)
        if (step + 1) % given.evaluate_every == 0 or step + 1 == given.steps:
            held = evaluated(model, held_out, given, mesh)
            if first:
                print(f"step {step + 1:5d}  held out {held:.6f}", flush=True)
        due = given.save_every and (step + 1) % given.save_every == 0
        if given.out is not None and (due or step + 1 == given.steps):
            dcp.save(state(model, optimizer, step + 1), checkpoint_id=given.out)
    dist.destroy_process_group()


def full(norm: Tensor) -> Tensor:
    """Return a norm that may be a DTensor as a plain tensor. Collective."""
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    assert isinstance(whole, Tensor)
    return whole


if __name__ == "__main__":
    main()
