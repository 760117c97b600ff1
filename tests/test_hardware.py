"""The GPU that a driver's name stands for, and the warning for unknown GPUs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fusedtp.cost.hardware import HARDWARE, Hardware, number_of, of_gpu
from fusedtp.kernels import signal
from fusedtp.workspaces.workspace import Workspace


def test_only_whole_words_name_a_gpu() -> None:
    named = {
        "NVIDIA A100-PCIE-40GB": "a100-pcie", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200",
        "AMD Instinct MI300X": "mi300x", "NVIDIA L40S": "l40s",
    }  # fmt: skip
    assert {name: of_gpu(name) for name in named} == {name: HARDWARE[key] for name, key in named.items()}
    for other in ("NVIDIA RTX A1000 Laptop GPU", "NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA A10", ""):
        assert of_gpu(other) is None


@pytest.mark.parametrize("machine", HARDWARE.values(), ids=lambda machine: machine.name)
def test_every_gpu_of_the_table_is_known_by_its_drivers_name(machine: Hardware) -> None:
    for name in (machine.gpu, f"NVIDIA {machine.gpu} 80GB", f"vendor-{machine.gpu.lower().replace(' ', '-')}-80gb"):
        assert of_gpu(name) is machine, f"{machine.name}: say in `gpu` which words of a driver's name it is known by"


def test_an_unknown_gpu_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks use the hardware of rank 0, whose number is in its arena; number 0 is an unknown GPU."""
    words = torch.zeros(signal.SIGNALS.value, dtype=torch.int32)

    def shared(rank0: str, own: str) -> Hardware:
        words[signal.HARDWARE.value] = number_of(of_gpu(rank0))
        arena = SimpleNamespace(tensors=[words.view(torch.uint8)])
        rank = SimpleNamespace(device=torch.device("cuda", 1), _arena=arena, _hardware_number=number_of(of_gpu(own)))
        rank._hardware_number_of = partial(Workspace._hardware_number_of, rank)  # type: ignore[arg-type]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: own)
        return Workspace._shared_hardware(rank)  # type: ignore[arg-type]

    assert shared("NVIDIA A100-SXM4-80GB", "NVIDIA L4") is HARDWARE["a100"]
    with pytest.warns(UserWarning, match=r"does not know 'NVIDIA L4'.* an H100's numbers") as said:
        assert shared("NVIDIA L4", "NVIDIA L4") is HARDWARE["h100"]
    assert len(said) == 1
    with pytest.warns(UserWarning, match="does not know rank 0's GPU"):
        assert shared("NVIDIA L4", "NVIDIA A100-SXM4-80GB") is HARDWARE["h100"]
    # Warnings are errors here: neither is repeated.
    assert shared("NVIDIA L4", "NVIDIA L4") is shared("NVIDIA L4", "NVIDIA H100") is HARDWARE["h100"]
