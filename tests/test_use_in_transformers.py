"""transformers' own tensor parallelism over this package has the bits of its own styles, or its own refusal."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fusedtp
from fusedtp.bench.ranks import RankPool

from .causal_models import configurations, inputs, tiny
from .harness import LARGE, last_path, mesh_of, on_ranks
from .test_guide import world

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

# Families with every style that is served.
SERVED = ("LlamaConfig", "MixtralConfig", "DeepseekV3Config", "Qwen3Config", "Phi3Config", "CohereConfig")
_meshes: dict[str, Any] = {}


@contextlib.contextmanager
def ranks_of(group: ProcessGroup) -> Iterator[None]:
    """Make `group` all the ranks that transformers sees, with one mesh for all models of the group."""
    from transformers.distributed import mixin

    make = mixin.initialize_distributed_mesh

    def mesh(config: Any) -> Any:
        if group.group_name not in _meshes:
            _meshes[group.group_name] = make(config)
        return _meshes[group.group_name]

    with world(group), mock.patch.object(mixin, "initialize_distributed_mesh", mesh), warnings.catch_warnings():
        # torch's and transformers' own.
        warnings.simplefilter("ignore")
        yield


def saved(group: ProcessGroup, model: Any, folder: Path) -> Path:
    """Let one rank write the model, which all ranks have."""
    if group.rank() == 0:
        model.save_pretrained(folder)
    group.barrier().wait()
    return folder


def load(group: ProcessGroup, folder: Path) -> Any:
    """Load a checkpoint, split over the group's ranks by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=group.size())
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def full(x: Any) -> Tensor:
    if not isinstance(x, DTensor):
        return x  # type: ignore[no-any-return]
    (placement,) = x.placements
    if not hasattr(placement, "split_factor") or torch.__version__ >= "2.12":
        return x.full_tensor()  # type: ignore[no-any-return]
    # torch 2.11 does not gather parts that are packed.
    own, dim, group = x.to_local(), placement.dim, x.device_mesh.get_group()
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own.contiguous(), group=group)
    blocks = zip(*(each.chunk(placement.split_factor, dim) for each in every), strict=True)
    return torch.cat([part for block in blocks for part in block], dim)


def run(model: Any, times: int = 1) -> dict[str, Tensor]:
    """Return logits, the loss and every gradient of one step, which is accumulated `times`."""
    model.zero_grad()
    for _ in range(times):
        out = model(**inputs())
        full(out.loss).backward()
    grads = {name: each.grad for name, each in model.named_parameters()}
    found = {"logits": out.logits, "loss": out.loss, **grads}
    return {name: full(each).detach().clone() for name, each in found.items() if each is not None}


def ops_of(call: Callable[[], Any]) -> set[str]:
    """Return the ops of this package that a call runs."""
    from fusedtp.schedules.forms import Prepared

    ran, run = set(), Prepared.go

    def go(self: Prepared, operands: Any) -> list[Tensor]:
        ran.add(self.task.op.name)
        return run(self, operands)

    with mock.patch.object(Prepared, "go", go):
        call()
    return ran


def told(call: Callable[[], Any]) -> str:
    """Return the error of a call in words; "" if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", SERVED if LARGE else SERVED[:5:2])
@on_ranks(2)
def test_bits_of_transformers_own(group: ProcessGroup, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    dense = tiny(name)
    with ranks_of(group):
        folder = saved(group, dense, tmp_path / "model")
        theirs = load(group, folder)
        with fusedtp.use_in_transformers():
            ours = load(group, folder)
        expected, got = run(theirs), run(ours)
        assert expected.keys() == got.keys()
        for each in expected:
            assert torch.equal(got[each], expected[each]), each
        # Gradients are those of one process too, also if they are added up in several backwards.
        twice = run(ours, 2)
        for each, value in run(dense, 2).items():
            torch.testing.assert_close(twice[each], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {each}")
        how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        tokens = inputs()["input_ids"]
        assert torch.equal(ours.generate(tokens, **how), theirs.generate(tokens, **how))
        if torch.__version__ < "2.12" and any(hasattr(each, "split_factor") for p in ours.parameters()
                                              if isinstance(p, DTensor) for each in p.placements):  # fmt: skip
            # transformers gathers by full_tensor().
            assert told(lambda: ours.save_pretrained(tmp_path / "again")) == told(
                lambda: theirs.save_pretrained(tmp_path / "theirs")
            )
            return
        ours.save_pretrained(tmp_path / "again")
        group.barrier().wait()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
        for each, value in dense.state_dict().items():
            assert torch.equal(again[each], value), each


@on_ranks(4)
def test_lengths_that_do_not_divide(group: ProcessGroup, tmp_path: Path) -> None:
    """On four ranks: features and a vocabulary that do not divide; results are those of one process."""
    dense = tiny("LlamaConfig", vocab_size=62, intermediate_size=45, num_key_value_heads=4, attention_bias=True)
    with ranks_of(group):
        with fusedtp.use_in_transformers():
            ours = load(group, saved(group, dense, tmp_path / "model"))
        assert ops_of(lambda: run(ours)) == {"matmul_all_reduce", "all_reduce", "all_gather"}
        got = run(ours)
        for each, value in run(dense).items():
            torch.testing.assert_close(got[each], value, rtol=1e-4, atol=1e-5, msg=each)


@on_ranks(2)
def test_the_switch(group: ProcessGroup, tmp_path: Path) -> None:
    """Switches nest, and the last one's schedule counts when a model is loaded; without one all is as before."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    before = dict(ALL_PARALLEL_STYLES)
    with ranks_of(group):
        folder = saved(group, tiny("LlamaConfig"), tmp_path / "model")
        for _ in range(2):
            first = fusedtp.use_in_transformers("decomposed")
            assert ALL_PARALLEL_STYLES["colwise"] is not before["colwise"]
            assert ALL_PARALLEL_STYLES["sequence_parallel"] is before["sequence_parallel"]
            with fusedtp.use_in_transformers("unfused") as second:
                model = load(group, folder)
                first.undo()
                first.undo()
                other = load(group, folder)
            second.undo()
            assert dict(ALL_PARALLEL_STYLES) == before
            for each in (model, other):
                run(each)
                assert last_path().schedule == "unfused"
        was = last_path()
        run(load(group, folder))
        assert last_path() is was
    with pytest.raises(ValueError, match="schedule must be one of"):
        fusedtp.use_in_transformers("none")


@on_ranks(2)
def test_what_stays_transformers_own(group: ProcessGroup) -> None:
    """Subclasses, quantized linears and options of embeddings run transformers' forward; split tokens are gathered."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Offset(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward((input + 1) % 16)

    mesh, (x, tokens) = mesh_of(group), (torch.ones(2, 4, 16), torch.arange(8).view(2, 4))

    def made(kind: type[nn.Module], style: str, **options: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        whole, split = kind(16, 16, **options), kind(16, 16, **options)
        split.load_state_dict(whole.state_dict())
        for name in list(split._parameters):
            ALL_PARALLEL_STYLES[style].shard_param(split, name, mesh)
        dist_of = dict(split.named_parameters())
        for name, value in whole.named_parameters():
            dist_of[name].data.copy_(distribute_tensor(value.data, mesh, dist_of[name].placements))
        ALL_PARALLEL_STYLES[style].install_forward(split, mesh)
        return whole, split

    cases: list[tuple[Any, str, dict[str, Any], set[str]]] = [
        (nn.Linear, "colwise_gather_output", {}, {"all_gather"}),
        (Scaled, "colwise_gather_output", {}, set()),
        (nn.Linear, "rowwise_split_input", {}, {"matmul_all_reduce"}),
        (Scaled, "rowwise_split_input", {"bias": False}, set()),
        (nn.Embedding, "embedding_rowwise", {}, {"all_reduce"}),
        (nn.Embedding, "embedding_rowwise", {"padding_idx": 3}, {"all_reduce"}),
        (nn.Embedding, "embedding_rowwise", {"scale_grad_by_freq": True}, set()),
        (Offset, "embedding_rowwise", {}, set()),
        (nn.Embedding, "embedding_colwise", {}, set()),
    ]
    with fusedtp.use_in_transformers():
        for kind, style, options, ops in cases:
            whole, split = made(kind, style, **options)
            given = tokens if issubclass(kind, nn.Embedding) else x
            with torch.no_grad():
                assert ops_of(lambda split=split, given=given: split(given)) == ops, (kind, style, options)
                torch.testing.assert_close(split(given), whole(given), msg=str((kind, style)))
        whole, split = made(nn.Linear, "rowwise_split_input")
        split._hf_quantized_needs_local_tp = True
        with torch.no_grad():
            assert ops_of(lambda: split(x)) == set()
        # Tokens that a style before has split are gathered by the matmul.
        whole, split = made(nn.Linear, "colwise")
        own = DTensor.from_local(torch.randn(2, 2, 16), mesh, [Shard(1)])
        assert ops_of(lambda: split(own)) == {"all_gather_matmul"}
        expected = whole(own.full_tensor()).chunk(2, -1)[group.rank()]
        torch.testing.assert_close(split(own), expected)


CHANGES = {
    "a class": ("MlaKvAProjParallel", None, r"no MlaKvAProjParallel.install_forward\(self, module, mesh\)"),
    "a method": ("RowwiseParallel.install_forward", None, "no RowwiseParallel.install_forward"),
    "its parameters": (
        "MoeExpertsParallel.transform_output_post_forward", lambda self, module, output: output,
        r"no MoeExpertsParallel.transform_output_post_forward\(self, module, output, mesh\)",
    ),
    "a style": ("ALL_PARALLEL_STYLES._global_mapping", {}, r"no style 'colwise' of ColwiseParallel\(input_layouts"),
    "the registry": ("ALL_PARALLEL_STYLES", {}, "no ALL_PARALLEL_STYLES.register"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_another_transformers_is_refused(what: str) -> None:
    import transformers
    from transformers.distributed import tensor_parallel

    path, instead, said = CHANGES[what]
    holder, name = tensor_parallel, path
    if "." in path:
        first, _, name = path.partition(".")
        holder = getattr(tensor_parallel, first)
    before = dict(tensor_parallel.ALL_PARALLEL_STYLES)
    with mock.patch.object(holder, name, instead), pytest.raises(RuntimeError, match=said) as found:
        fusedtp.use_in_transformers()
    assert transformers.__version__ in str(found.value)
    assert dict(tensor_parallel.ALL_PARALLEL_STYLES) == before


def test_without_transformers() -> None:
    name = "transformers.distributed.tensor_parallel"
    with mock.patch.dict(sys.modules, {name: None}), pytest.raises(RuntimeError, match="needs transformers"):
        fusedtp.use_in_transformers()


# A spread of families; all of them with FUSEDTP_SOAK=large.
FAMILIES = ("Gemma2Config", "GptOssConfig", "Olmo2Config", "OPTConfig", "Qwen3MoeConfig", "ApertusConfig")
# Plans of transformers 5.24 whose results or gradients are not those of one process.
UNLIKE_ONE_PROCESS = (
    "Apertus1p5TextConfig", "ApertusConfig", "HrmTextConfig", "Inkling2LoopTextConfig", "Inkling2TextConfig",
)  # fmt: skip


def outcome(group: ProcessGroup, name: str, folder: Path) -> str:
    """Return how a family fares over this package: right, refused as by transformers itself, not built, or wrong.

    "as transformers" is what has the bits of transformers' own tensor parallelism, and is not that of one process.
    """
    from transformers import AutoModelForCausalLM

    from .causal_models import NotBuiltError

    try:
        dense = tiny(name)
    except NotBuiltError as error:
        return f"not built: {error}"
    expected: list[Any] = []
    got: list[Any] = []
    with ranks_of(group):
        saved(group, dense, folder)
        refusal = told(lambda: expected.append(run(load(group, folder))))
        with fusedtp.use_in_transformers():
            error = told(lambda: got.append(run(load(group, folder))))
        if error:
            alike = refusal.partition("\n")[0] == error.partition("\n")[0]
            return f"refused: {error}" if alike else f"wrong: {error}, transformers {refusal}"
        of_one = unlike(got[0], run(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    if of_one and expected and all(torch.equal(got[0][each], value) for each, value in expected[0].items()):
        return f"as transformers: {of_one}"
    of_theirs = unlike(got[0], expected[0]) if expected else ""
    return f"wrong: {of_one or of_theirs}" if of_one or of_theirs else "right"


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Return which value differs by more than rounding; "" if none does."""
    largest = max(float(value.norm()) for value in expected.values())
    for each, value in expected.items():
        # Gradients of queries and keys are small differences of large numbers.
        if each not in found or not float((found[each] - value).norm()) <= 1e-5 * largest + 1e-4 * float(value.norm()):
            return f"{each} differs"
    return ""


def names() -> list[str]:
    return list(configurations()) if LARGE and find_spec("transformers") else list(FAMILIES)


@pytest.mark.parametrize("name", names())
def test_every_family(pool: RankPool, name: str, tmp_path: Path) -> None:
    (found,) = {each.partition(":")[0] for each in pool.run(outcome, name, tmp_path, world_size=2)}
    assert found in (("as transformers",) if name in UNLIKE_ONE_PROCESS else ("right", "refused", "not built"))
