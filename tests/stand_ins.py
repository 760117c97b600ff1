"""What the providers call, as its projects declare it (the version is in each provider's docstring), computed on a CPU.

`wrong` ones mix shards up, or leave a term of a sum out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import _symmetric_memory


class StandIns:
    """The modules of one group. `events`: what was set up and given back, in order."""

    def __init__(self, group: Any, wrong: bool) -> None:
        self.group, self.wrong = group, wrong
        self.events: list[str] = []
        self.world: Any = None
        self.buffers: list[int] | None = None

    def gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * self.group.size(), x.shape[1])
        self.group._allgather_base(out, x.contiguous()).wait()
        return out.roll(x.shape[0], 0) if self.wrong else out

    def all_reduce(self, term: Tensor) -> Tensor:
        out = term.clone()
        self.group.allreduce([out]).wait()
        return out - term if self.wrong else out

    def scatter(self, term: Tensor) -> Tensor:
        return self.all_reduce(term).chunk(self.group.size())[self.group.rank()].clone()

    def kraken(self) -> dict[str, Any]:
        def all_gather_matmul(
            a_shared: Tensor, b: Tensor, a_out: Tensor | None = None, progress: Tensor | None = None, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            assert "symmetric" in self.events
            assert b.t().is_contiguous()
            assert a_shared.shape[0] % (128 * kwargs.get("group_size_m", 4)) == 0
            gathered = self.gather(a_shared)
            return gathered, gathered @ b

        def gemm_reduce_scatter(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
            assert kwargs["group"] is self.group
            return self.scatter(a @ b)

        def gemm_one_shot_all_reduce(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
            assert kwargs["group"] is self.group
            return self.all_reduce(a.float() @ b.float())

        return {"kraken.fused": SimpleNamespace(
            all_gather_matmul=all_gather_matmul, gemm_reduce_scatter=gemm_reduce_scatter,
            gemm_one_shot_all_reduce_fused=gemm_one_shot_all_reduce,
        )}  # fmt: skip

    def triton_distributed(self) -> dict[str, Any]:
        def init_nvshmem_by_torch_process_group(pg: Any) -> None:
            assert self.world is None, "TRITON_DIST_WORLD has already been initialized"
            self.world = pg

        def context(max_M: int, N: int, dtype: torch.dtype) -> SimpleNamespace:
            self.events.append("made")
            return SimpleNamespace(
                max_M=max_M, N=N, dtype=dtype, finalize=lambda: self.events.append("given back")
            )  # fmt: skip

        def create_ag_gemm_context(
            max_M: int, N: int, K: int, dtype: torch.dtype, rank: int, num_ranks: int, num_local_ranks: int = 8,
            ag_intranode_stream: Any = None, ag_internode_stream: Any = None,
        ) -> SimpleNamespace:  # fmt: skip
            assert N % num_ranks == 0
            assert num_local_ranks == num_ranks
            return context(max_M, N // num_ranks, dtype)

        def ag_gemm(A: Tensor, B: Tensor, ctx: Any, autotune: bool = True) -> Tensor:
            assert (B.shape[1], A.dtype) == (ctx.N, ctx.dtype)
            return self.gather(A) @ B

        def create_gemm_rs_context(
            max_M: int, N: int, rank: int, world_size: int, local_world_size: int, output_dtype: torch.dtype,
            rs_stream: Any, reduce_st: bool = False, tp_group: Any = None,
        ) -> SimpleNamespace:  # fmt: skip
            assert (rs_stream, tp_group) == ("stream of priority -1", None)
            return context(max_M, N, output_dtype)

        def gemm_rs(A: Tensor, B: Tensor, ctx: Any, autotune: bool = True) -> Tensor:
            assert (A.shape[0], B.shape[1]) == (ctx.max_M, ctx.N)
            assert B.stride(0) == 1
            return self.scatter(A @ B)

        utils = SimpleNamespace(
            is_shmem_initialized=lambda: self.world is not None, get_triton_dist_world=lambda: self.world,
            init_nvshmem_by_torch_process_group=init_nvshmem_by_torch_process_group,
        )  # fmt: skip
        kernels = SimpleNamespace(
            create_ag_gemm_context=create_ag_gemm_context, ag_gemm=ag_gemm,
            create_gemm_rs_context=create_gemm_rs_context, gemm_rs=gemm_rs,
        )  # fmt: skip
        return {"triton_dist.utils": utils, "triton_dist.kernels.nvidia": kernels}

    def flux(self) -> dict[str, Any]:
        stands = self

        class AGKernel:
            def __init__(
                self, tp_group: Any, nnodes: int, full_m: int, n_dim: int, k_dim: int, input_dtype: torch.dtype,
                output_dtype: torch.dtype | None = None, use_pdl: bool = False,
            ) -> None:  # fmt: skip
                assert stands.events == ["shared memory"]
                self.sizes = full_m, n_dim, k_dim

            def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                gathered = stands.gather(input)
                assert (*gathered.shape, weight.shape[0]) == (self.sizes[0], self.sizes[2], self.sizes[1])
                return gathered @ weight.t()

        class GemmRS:
            def __init__(
                self, tp_group: Any, nnodes: int, max_m: int, n_dim: int, input_dtype: torch.dtype,
                output_dtype: torch.dtype | None = None, transpose_weight: bool = False, fuse_reduction: bool = False,
                ring_reduction: bool = False,
            ) -> None:  # fmt: skip
                assert stands.events == ["shared memory"]
                self.sizes = max_m, n_dim

            def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                assert input.shape[0] <= self.sizes[0]
                assert weight.shape[0] == self.sizes[1]
                return stands.scatter(input @ weight.t())

        def init_flux_shm(pg: Any) -> None:
            self.events.append("shared memory")

        return {"flux": SimpleNamespace(AGKernel=AGKernel, GemmRS=GemmRS, init_flux_shm=init_flux_shm)}

    def te_userbuffers(self) -> dict[str, Any]:
        stands = self

        def initialize_ub(
            shape: list[int], tp_size: int, use_fp8: bool = False, quantization_modes: Any = None,
            dtype: torch.dtype = torch.bfloat16, ub_cfgs: Any = None, bootstrap_backend: str | None = None,
            with_cublasmp: bool = False,
        ) -> None:  # fmt: skip
            assert quantization_modes == ["none"]
            if self.buffers is not None:
                raise RuntimeError("UB communicators are already initialized.")
            self.buffers = shape
            self.events.append("made")

        def destroy_ub() -> None:
            self.buffers = None
            self.events.append("given back")

        class Linear(nn.Module):
            def __init__(
                self, in_features: int, out_features: int, sequence_parallel: bool = False,
                fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
                get_rng_state_tracker: Any = None, rng_tracker_name: Any = None, init_method: Any = None,
                bias: bool = True, return_bias: bool = False, params_dtype: Any = None,
                parallel_mode: str | None = None, parameters_split: Any = None, device: Any = "cuda",
                ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
                ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_name: str | None = None,
            ) -> None:  # fmt: skip
                super().__init__()
                assert (sequence_parallel, bias) == (True, False)
                self.gathers, n = parallel_mode == "column", tp_group.size()
                assert (ub_overlap_ag, ub_overlap_rs) == (self.gathers, not self.gathers)
                assert ub_name == ("fc1" if self.gathers else "fc2")
                shape = (out_features // n, in_features) if self.gathers else (out_features, in_features // n)
                self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))

            def forward(self, x: Tensor) -> Tensor:
                if self.gathers:
                    whole = stands.gather(x)
                    assert list(whole.shape) == stands.buffers
                    return whole @ self.weight.t()
                term = x @ self.weight.t()
                assert list(term.shape) == stands.buffers
                return stands.scatter(term)

        return {"transformer_engine.pytorch": SimpleNamespace(
            initialize_ub=initialize_ub, destroy_ub=destroy_ub, Linear=Linear,
            UserBufferQuantizationMode=SimpleNamespace(NONE="none"),
        )}  # fmt: skip

    def xformers(self) -> dict[str, Any]:
        def fused_allgather_and_linear(
            scattered_input: Tensor, weight: Tensor, *, group: Any, out: Tensor | None = None, timeout_s: int = 3600,
            scale_scattered_input: Tensor | None = None, scale_weight: Tensor | None = None, out_dtype: Any = None,
        ) -> Tensor:  # fmt: skip
            assert scattered_input.is_contiguous()
            return self.gather(scattered_input) @ weight.t()

        def fused_linear_and_reducescatter(
            gathered_input: Tensor, weight: Tensor, *, group: Any, out: Tensor | None = None, timeout_s: int = 3600,
            scale_gathered_input: Tensor | None = None, scale_weight: Tensor | None = None, out_dtype: Any = None,
        ) -> Tensor:  # fmt: skip
            assert gathered_input.is_contiguous()
            return self.scatter(gathered_input @ weight.t())

        return {"xformers.ops": SimpleNamespace(
            fused_allgather_and_linear=fused_allgather_and_linear,
            fused_linear_and_reducescatter=fused_linear_and_reducescatter,
        )}  # fmt: skip

    def flashinfer(self) -> dict[str, Any]:
        def all_gather_matmul(inp: Tensor, w: Tensor, group: Any, *, verbose: bool = False) -> Tensor:
            assert "symmetric" in self.events
            assert w.stride(1) == 1
            return self.gather(inp) @ w

        return {"flashinfer.comm": SimpleNamespace(all_gather_matmul=all_gather_matmul)}

    def nccl_windows(self) -> dict[str, Any]:
        return {}

    @contextlib.contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """The modules of a provider, and of torch what needs a GPU."""

        def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            self.events.append("symmetric")
            return torch.empty(size, dtype=dtype, device=device)

        @contextlib.contextmanager
        def use_mem_pool(pool: str) -> Iterator[None]:
            assert pool == "pool of ncclMemAlloc"
            self.events.append("allocates")
            yield

        with (
            mock.patch.object(_symmetric_memory, "empty", empty),
            mock.patch("torch.cuda.Stream", lambda priority: f"stream of priority {priority}"),
            mock.patch("torch.cuda.MemPool", lambda allocator: f"pool of {allocator}"),
            mock.patch("torch.cuda.use_mem_pool", use_mem_pool),
        ):
            # Not by patch.dict: it would take away what torch loads meanwhile.
            modules = getattr(self, name)()
            sys.modules.update(modules)
            try:
                yield
            finally:
                for each in modules:
                    del sys.modules[each]


class NcclGroup:
    """A group with NCCL's backend: what `nccl_windows` asks of one. Its collectives are those of `stands`."""

    def __init__(self, stands: StandIns) -> None:
        self._stands = stands

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands.group, name)

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        events = self._stands.events

        def register_mem_pool(pool: str, symm: bool = False) -> None:
            events.append(f"registers {pool}, symm {symm}")

        return SimpleNamespace(
            mem_allocator="ncclMemAlloc", register_mem_pool=register_mem_pool,
            deregister_mem_pool=lambda pool: events.append("given back"),
        )  # fmt: skip

    def _allgather_base(self, out: Tensor, x: Tensor) -> Any:
        out.copy_(self._stands.gather(x))
        return SimpleNamespace(wait=lambda: None)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> Any:
        out.copy_(self._stands.scatter(x))
        return SimpleNamespace(wait=lambda: None)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        tensors[0].copy_(self._stands.all_reduce(tensors[0]))
        return SimpleNamespace(wait=lambda: None)
