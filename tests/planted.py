# ruff: noqa: E501
"""Planted faults: plant each in a copy of the package and run the tests that must find it.

    python -P tests/planted.py [WORD] [--jobs 2] [--out FILE]

WORD chooses the faults whose name contains it. A line of FAULTS is the name, the file, the text that is replaced (it
stands there once), the text in its place, and the arguments of pytest. `protocol.mutants` has the faults of the
protocol that only an exploration of all orders finds.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
SECONDS = 300

# fmt: off
FAULTS: tuple[tuple[str, str, str, str, str], ...] = (
    # Kernels, in Triton's interpreter.
    ("kernel: gelu_tanh's cubic term", "kernels/epilogue.py", "0.044715 * z * z * z)))", "0.04715 * z * z * z)))", "test_options.py"),
    ("kernel: a bias for rows is added for columns", "kernels/epilogue.py", "if epilogue.PER_ROW:", "if not epilogue.PER_ROW:", "test_options.py"),
    ("kernel: residual subtracted", "kernels/epilogue.py", "acc += tl.load(added,", "acc -= tl.load(added,", "test_options.py"),
    ("kernel: gate without its activation", "kernels/epilogue.py", "acc = activated(gate, epilogue.ACTIVATION) * acc\n            mask", "acc = gate * acc\n            mask", "test_options.py"),
    ("kernel: one column past K", "kernels/contraction.py", "mask=offs_k[None, :] < a.k_len - k * BLOCK_K", "mask=offs_k[None, :] <= a.k_len - k * BLOCK_K", "test_ops.py"),
    ("kernel: the last leaf ends early", "kernels/contraction.py", " * leaf + K % tiles.LEAVES * leaf // tiles.LEAVES", " * leaf", "test_tree_order.py"),
    ("kernel: a subtree is rounded before it is sent", "kernels/matmul_scatter.py", "        return acc\n    elif ctx.scales is None", "        return acc.to(ctx.a.ptr[0].dtype.element_ty).to(tl.float32)\n    elif ctx.scales is None", "test_tree_order.py"),
    ("kernel: chunks of the contraction from the own rows", "kernels/gather_matmul.py", "packed, src * ctx.M + tile.row, k_begin", "packed, ctx.link.rank * ctx.M + tile.row, k_begin", "test_ops.py"),
    ("kernel: float8 rows without their scales", "kernels/gather_matmul.py", "acc = acc * _scales_of(ctx, tile.chunk, tile, _row(ctx, tile))[:, None]", "acc = acc", "test_float8.py"),
    ("kernel: float8 scales of the first rows", "kernels/matmul_scatter.py", "pick(ctx.scales.a, i, ctx.b.COUNT) + tile.begin + tile.row", "pick(ctx.scales.a, i, ctx.b.COUNT) + tile.row", "test_float8.py"),
    ("kernel: parts are added from the own rank on", "kernels/reduce.py", "acc += _part_of(link, base, own, src, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE)\n    return acc\n\n\n@triton.jit\ndef tree", "acc += _part_of(\n            link, base, own, (src + link.rank) % link.group.WORLD_SIZE, at_m, at_n, mask, region_rows, pitch,\n            OWN_IN_PLACE,\n        )\n    return acc\n\n\n@triton.jit\ndef tree", "test_determinism.py"),
    ("kernel: own part by the wrong stride", "kernels/reduce.py", "at_m * own.stride_m + at_n * own.stride_n", "at_m * own.stride_n + at_n * own.stride_m", "test_ops.py"),
    ("kernel: a ring's own chunk at the top", "kernels/ring.py", "out_row = tl.load(ring.table + link.rank) if GATHER else 0", "out_row = 0", "test_ops.py"),
    ("kernel: a ring sums in the wire dtype twice", "kernels/ring.py", "total += block.to(tl.float32)", "total += block.to(tl.float32) + block.to(tl.float32)", "test_ops.py"),
    ("kernel: the switch's rows at the top", "kernels/push.py", "places = (dst_row + row + offs_r) * pitch + col", "places = (row + offs_r) * pitch + col", "test_any_order.py"),
    ("kernel: collected from another region", "kernels/push.py", "base + (region_row + at_m) * pitch + at_n", "base + at_m * pitch + at_n", "test_ops.py"),
    ("kernel: block scales of the first chunk", "kernels/contraction.py", "first = a.k_begin // 32", "first = 0", "test_float8.py"),
    ("kernel: block scale 255 is a number", "kernels/scales.py", "power = tl.where(scale == 255, 0x7FC00000, bits)", "power = tl.where(scale == 256, 0x7FC00000, bits)", "test_float8.py -k nan_scale"),
    ("kernel: a split contraction loses a part", "kernels/matmul_all_reduce.py", "for part in range(1, SPLITS):", "for part in range(2, SPLITS):", "test_any_order.py -k one_launch"),
    ("kernel: missing data is passed on as it is", "kernels/signal.py", "return tl.where(ok != 0, x, tl.full((), float(\"nan\"), tl.float32).to(x.dtype))", "return x", "test_ops_local.py"),
    # Protocol and workspaces.
    ("protocol: kernels never disagree", "kernels/signal.py", "(theirs != link.fingerprint.to(tl.int64))", "(theirs != theirs)", "test_meaning.py"),
    ("protocol: a kernel reports the rank before", "kernels/signal.py", "tl.atomic_xchg(host + REPORT, src + 1,", "tl.atomic_xchg(host + REPORT, (src + 1) % link.group.WORLD_SIZE + 1,", "test_ops_local.py"),
    ("protocol: relaxed signal", "kernels/signal.py", "tl.atomic_xchg(signal, link.epoch, sem=\"release\"", "tl.atomic_xchg(signal, link.epoch, sem=\"relaxed\"", "test_protocol.py -k every_order_of_every"),
    ("protocol: host waits for the epoch before", "workspaces/steps.py", "if raised(load_acquire(address), self.epoch):", "if raised(load_acquire(address), self.epoch - 1):", "test_protocol.py -k every_order_of_every"),
    ("protocol: epochs do not wrap", "workspaces/words.py", "return (a - b + 2**31) % 2**32 - 2**31", "return a - b", "test_protocol.py -k waits_accept"),
    ("protocol: hosts never disagree", "workspaces/steps.py", "return theirs != self._ws.meanings.now.fingerprint", "return False", "test_meaning.py"),
    ("protocol: the entry stands after a timeout", "workspaces/steps.py", "ws, before = self._ws, wrapping_difference(self.epoch, 1)", "ws, before = self._ws, self.epoch", "test_faults.py"),
    ("failures: the rank waited for is blamed", "workspaces/failures.py", "return chain[-1]", "return chain[1]", "test_missing.py"),
    ("failures: a stopped rank's wait is followed", "workspaces/failures.py", "return None if raised(seen, expected) else source", "return source", "test_missing.py"),
    ("agreement: two values are one", "workspaces/agreement.py", "is not None}) > 1:", "is not None}) > 2:", "test_meaning.py"),
    ("agreement: no dtype", "workspaces/agreement.py", "        \"dtype\": task.dtype,\n", "", "test_meaning.py"),
    ("agreement: backward is forward", "workspaces/agreement.py", "\"backward\" if backward else \"forward\"", "\"forward\"", "test_meaning.py"),
    ("workspace: a failure is forgotten", "workspaces/workspace.py", "        if self.failure is not None:\n            raise self.failure\n        self._op", "        self._op", "test_workspace.py test_interruptions.py"),
    ("workspace: words are not looked at", "workspaces/workspace.py", "if words[_GIVEN_UP] or int(words[_EPOCH])", "if False and int(words[_EPOCH])", "test_mappings.py"),
    ("workspace: grows only if both are too small", "workspaces/workspace.py", "if half_bytes <= self.half_bytes and slots <= self.slots:", "if half_bytes <= self.half_bytes or slots <= self.slots:", "test_growth.py test_ops.py"),
    ("workspace: signals start at 0", "workspaces/workspace.py", ": -agreement.TEXT_BYTES // 4] = epoch", ": -agreement.TEXT_BYTES // 4] = 0", "test_ops_local.py"),
    ("workspace: an interrupted op may be repeated", "workspaces/workspace.py", "        if self._progress != _SENT:\n            self._progress = _NO_OP", "        if True:\n            self._progress = _NO_OP", "test_interruptions.py"),
    ("streams: no edge between branches", "workspaces/streams.py", "stream.wait_event(capture.ended)", "pass", "test_streams.py"),
    ("streams: a replay waits for nothing", "workspaces/streams.py", "            driver().add_wait(stream.cuda_stream, self._done.cuda_event)\n", "", "test_streams.py"),
    ("streams: nothing waits for a replay", "workspaces/streams.py", "stream != self._stream or self._captures:", "stream != self._stream:", "test_streams.py"),
    ("streams: a replay ends with its first op", "workspaces/streams.py", "driver().add_edges(graph, new, capture.record)", "pass", "test_streams.py"),
    ("memory: other users may read it", "memory/posix.py", "os.fchmod(file.number, 0o600)", "os.fchmod(file.number, 0o644)", "test_security.py"),
    ("bound: two threads in one group", "calls/bound.py", "if (holder := taken.setdefault(key, mine)) is not mine:", "if (holder := taken.setdefault(key, mine)) is None:", "test_threads.py"),
    ("groups: a forked child uses its parent's", "groups.py", "and dist.group.WORLD is inherited:", "and dist.group.WORLD is None:", "test_interruptions.py"),
    ("clock: a stopped process times out", "workspaces/clock.py", "            passed = _GAP_SECONDS\n", "            pass\n", "test_clock.py"),
    ("timeouts: a group's own is not used", "workspaces/timeouts.py", "_seconds_of.get(group, _seconds)", "_seconds", "test_workspace.py test_two_groups.py test_clock.py"),
    # Planner and notation.
    ("notation: partial axes as they came", "sharding/notation.py", "tuple(sorted(partial))", "tuple(partial)", "test_notation.py"),
    ("notation: partial over any axis", "sharding/notation.py", "if axis not in contraction:", "if False:", "test_notation.py"),
    ("planner: half an all-reduce's bytes", "sharding/routes.py", "elements = 2 * (n - 1)", "elements = (n - 1)", "test_plan.py test_bytes.py"),
    ("planner: the major axis is gathered", "sharding/routes.py", "Step(\"all_gather\", name, dim.axes[-1], dim.name)", "Step(\"all_gather\", name, dim.axes[0], dim.name)", "test_plan.py test_plan_simulated.py"),
    ("planner: half the FLOPs", "sharding/routes.py", "return 2 * prod(", "return prod(", "test_plan.py test_explain.py"),
    ("planner: the operand whose gather is fused moves first", "sharding/routes.py", "operands = b + a if fused in a else a + b", "operands = a + b if fused in a else b + a", "test_plan.py test_plan_simulated.py"),
    ("planner: all steps on dy are shared", "sharding/plan.py", "same.index(False) if False in same else len(same)", "len(same)", "test_plan.py test_sharded.py"),
    ("planner: w is saved for dw", "sharding/plan.py", "(\"x\",) * dw + (\"w\",) * dx", "(\"x\",) * dx + (\"w\",) * dw", "test_plan.py test_explain.py"),
    ("shards: one row too many", "shards.py", "base + 1 if rank < extra", "base + 1 if rank <= extra", "test_shards.py"),
    ("shards: torch.chunk's last pieces", "shards.py", "max(0, min(piece, length - rank * piece))", "min(piece, length - rank * piece)", "test_shards.py test_parallel.py"),
    ("program: a slice of the ranks behind", "calls/program.py", "x.dims.index(step.dim), sum(sizes[:place])", "x.dims.index(step.dim), sum(sizes[place + 1 :])", "test_sharded.py"),
    ("program: a bias's gradient of the own rows alone", "calls/program.py", "        for _, axis in split:\n                db = self.plain", "        for _, axis in ():\n                db = self.plain", "test_options.py"),
    ("program: the gradient of w is kept of the first weight", "calls/program.py", "dws = dict(zip(wanted, of_w, strict=True))", "dws = dict(zip(wanted, [of_w[0]] * len(of_w), strict=True))", "test_options.py"),
    # Autograd.
    ("autograd: an unused result has a gradient of ones", "calls/autograd.py", "like.new_zeros(*like.shape[:-1]", "like.new_ones(*like.shape[:-1]", "test_options.py"),
    ("autograd: gradients of unused weights", "calls/autograd.py", "        grads[call.parameters[2 * i]] = grads[call.parameters[2 * i + 1]] = None\n", "        pass\n", "test_options.py"),
    ("autograd: saves for the wrong gradient", "calls/autograd.py", "        if ctx.needs[name]:\n            saved[\"x\"]", "        if needs[0]:\n            saved[\"x\"]", "test_options.py"),
    ("autograd: a second derivative through an all-reduce", "calls/operators.py", "as_it_is(grad, ctx.group_name, ctx.schedule) if torch.is_grad_enabled() else grad", "grad", "test_transforms.py"),
    ("autograd: the gradient of up without the activation", "activations.py", "dy * _of(function, gate)]", "dy * gate]", "test_options.py"),
    ("autograd: activations by torch's tail", "activations.py", "x.numel() % _AT_ONCE == 0 and x.is_contiguous()", "x.is_contiguous()", "test_tree_order.py -k activated"),
    ("autograd: a changed weight goes unnoticed", "calls/parameters.py", "if changes._version != version:", "if False:", "test_layer_parameters.py"),
    ("autograd: autocast is ignored", "calls/arguments.py", "torch.is_autocast_enabled(x.device.type)", "False", "test_compile.py -k autocast"),
    ("norm: eps is left out", "norms.py", ".add_(eps)", "", "test_options.py"),
    ("norm: no mean", "norms.py", "scale.square_().div_(y.shape[1])", "scale.square_()", "test_options.py"),
    # float8.
    ("float8: powers of two one too high", "float8.py", "(bits & 0x7FFFFF) > int(", "(bits & 0x7FFFFF) >= int(", "test_float8_compiled.py -k powers_of_two"),
    ("float8: zeros have the smallest scale", "float8.py", "scale = torch.where(most == 0, 1.0, scale).float()", "scale = scale.float()", "test_scaled.py"),
    ("float8: an infinity makes the scale", "float8.py", "magnitudes = torch.where(x.isfinite(), x.abs(), 0.0)", "magnitudes = x.abs()", "test_scaled.py"),
    ("float8: the last block has no scale", "scaled.py", "self.scale.narrow(dim, start // BLOCK, -(-length // BLOCK))", "self.scale.narrow(dim, start // BLOCK, length // BLOCK)", "test_scaled.py"),
    ("float8: rows are cast anew without their scales", "scaled.py", "wide = widened(x.data) * x.row_scales()[:, None]", "wide = widened(x.data)", "test_float8_layers.py"),
    ("float8: gradients in e4m3", "scaled.py", "dy, w = Cast(formats.e5m2,", "dy, w = Cast(formats.e4m3,", "test_float8_layers.py"),
    ("float8: the smallest magnitude of all ranks", "calls/program.py", "tensors[everyone.name].amax(0", "tensors[everyone.name].amin(0", "test_float8_layers.py"),
    ("float8: b's scales are left out", "schedules/local.py", "wide.mul_(b.t().row_scales())", "wide", "test_float8.py"),
    ("float8: another layout of cuBLAS's scales", "schedules/local.py", "permute(0, 3, 2, 1, 4)", "permute(0, 3, 1, 2, 4)", "test_scaled.py"),
    ("float8: fused on any capability", "float8.py", "< (8, 9):", "< (7, 9):", "test_dispatch.py test_float8.py"),
    # Schedules.
    ("unfused: padding is kept", "schedules/unfused.py", "        if self._even:\n            return gathered\n", "        if True:\n            return gathered\n", "test_ops.py"),
    ("unfused: a whole bias on every part", "schedules/unfused.py", "epilogue.columns(slice(self._begins[rank], self._begins[rank + 1]))", "epilogue", "test_ops.py"),
    ("decomposed: sums in 16 bits", "schedules/decomposed.py", "total = terms[0].to(torch.float32)", "total = terms[0].clone()", "test_ops.py test_determinism.py"),
    ("decomposed: an epilogue is added twice", "schedules/decomposed.py", "    epilogue.add_to(total)\n", "    epilogue.add_to(total)\n    epilogue.add_to(total)\n", "test_options.py"),
    ("local: no residual on one rank", "schedules/local.py", "epilogue.finish(summed(terms, addend), addend)", "epilogue.with_norm(summed(terms, addend))", "test_options.py test_ops_local.py"),
    # Layers and styles.
    ("autograd: a norm's gradients in one allocation", "calls/autograd.py", "map(torch.clone, sums)", "sums.unbind()", "test_layer_parameters.py -k memory"),
    ("autograd: compiled autograd traces an op", "calls/autograd.py", "_gradients_outside if torch.compiler.is_compiling() else _eager_gradients", "_eager_gradients", "test_compiled_autograd.py -k changed"),
    ("parameters: a multi-tensor change goes unnoticed", "calls/parameters.py", "    on_multi_tensor_changes(count)\n", "    pass\n", "test_layer_parameters.py -k changed_before"),
    ("styles: a group overlooks other memory", "styles/grouped.py", "if not is_wrapped(mine):", "if False:", "test_fused_group.py -k changes_between"),
    ("styles: a group shares computed weights", "styles/grouped.py", "if linear.computes(\"weight\", \"bias\") or (not is_compiling", "if (not is_compiling", "test_computed_parameters.py"),
    ("layers: gate and up exchanged", "layers.py", "weight = weight.unbind()", "weight = weight.flip(0).unbind()", "test_layers.py"),
    ("layers: new sequence sizes for the first linear alone", "layers.py", "wide.sequence_sizes = self.down_proj.sequence_sizes = arguments", "wide.sequence_sizes = arguments", "test_layers.py"),
    ("layers: every rank has a bias of its own", "layers.py", "parameters.same_as(0, own, self._lies[name].mesh, self.group)", "pass", "test_layer_parameters.py -k first_ranks"),
    ("styles: a row-parallel input as it comes", "styles/linears.py", "to.receive(input, wanted=Shard(-1))", "to.receive(input)", "test_parallel.py"),
    ("styles: the index behind the last row", "styles/embeddings.py", "outside | (rows >= size)", "outside | (rows > size)", "test_embeddings.py"),
    ("styles: the padding row of the whole", "styles/embeddings.py", "else padding - begin", "else padding", "test_embeddings.py"),
    ("styles: a norm's gradients are not added up", "styles/norms.py", "\"whole\" if placement.is_replicate() else \"part\"", "\"whole\"", "test_norms.py"),
    ("styles: packed parts in the other order", "styles/grouped.py", "whole = torch.cat(parts)", "whole = torch.cat(parts[::-1])", "test_loading.py test_decoders.py"),
    ("checkpoint: DTensor's other sizes", "shards.py", "piece = -(-length // world_size)\n", "piece = max(1, length // world_size)\n", "test_shards.py test_layer_state.py"),
    # Dispatch, tuning and the cost model.
    ("dispatch: copies in a capture", "schedules/__init__.py", "(self.in_graphs or not capturing)", "True", "test_dispatch.py"),
    ("bound: a stale call is run", "calls/bound.py", "        if self.version != generation.version:\n            return True\n", "", "test_calls.py test_workspace.py test_dispatch.py"),
    ("dispatch: fused in float64", "choose/dispatch.py", "    if dtype not in FUSED_DTYPES:\n        names", "    if False:\n        names", "test_dispatch.py test_bad_input.py"),
    ("calls: one call for two dtypes", "calls/call.py", "key += each.shape, each.dtype, each.device, each.layout", "key += each.shape, each.device, each.layout", "test_calls.py test_functional.py"),
    ("calls: other rows with the sizes of the first", "calls/call.py", "splits = {**splits, self._rows[at]: sizes}", "splits = {**splits}", "test_rows.py"),
    ("calls: rows of a residual are not checked", "calls/call.py", "if residual is not None and [*residual.shape[:-1]] != [*made]:", "if False:", "test_rows.py"),
    ("calls: views of other rows stay", "schedules/decomposed.py", "            self._ws.views.pop(key, None)", "            pass", "test_rows.py"),
    ("agreement: numbers of rows are not compared", "workspaces/agreement.py", "*task.sizes, *task.moved, *[length", "*[length", "test_meaning.py test_rows.py"),
    ("calls: True passes for 1", "calls/call.py", "[problem, id(group), values, kinds, *tensors]", "[problem, id(group), values, (), *tensors]", "test_bad_input.py test_calls.py"),
    ("tuning: another machine's table", "choose/tuning.py", "        if table.machine.get(name) != here[name]\n", "        if False\n", "test_tuning.py"),
    ("tuning: the slowest is chosen", "choose/tuning.py", "    best = min(times, key=lambda name: times[name])\n    where", "    best = max(times, key=lambda name: times[name])\n    where", "test_tuning.py test_dispatch.py"),
    ("tuning: noise counts", "choose/tuning.py", "if least <= 1}", "if least <= 0}", "test_tuning.py"),
    ("cost: schedules beyond a domain", "cost/model.py", "elif work.num_ranks <= machine.domain_size:", "else:", "test_cost.py"),
    ("cost: an all-reduce sends once", "cost/overlap.py", "2 * steps if work.kind == \"all_reduce\" else steps", "steps", "test_cost.py test_cost_published.py"),
    # The benchmark's gate.
    ("gate: NaN passes", "bench/oracle.py", "bad = int((~(error <= allowed)).sum())", "bad = int((error > allowed).sum())", "test_bench_gate.py"),
    ("gate: a hundred times the error", "bench/oracle.py", "self._norms.append((K * row_norms, col_norms))", "self._norms.append((100 * K * row_norms, col_norms))", "test_bench_gate.py"),
    ("gate: a wrong result is timed", "bench/sweep.py", "if job.timed and not (verdicts[name].error or verdicts[name].missing)]", "if job.timed and not verdicts[name].missing]", "test_bench_gate.py"),
    ("gate: NaN passes the tests' check", "reference.py", "wrong = ~(error <= allowed)", "wrong = error > allowed", "test_reference.py"),
    ("gate: partial products are not rounded", "reference.py", "allowed += (eps_out + len(sizes) * eps_sum) * partial.abs()", "allowed += (eps_out + len(sizes) * eps_sum) * 1e4", "test_reference.py"),
    ("regress: a slowdown is a speed-up", "bench/regress.py", "median(after) / median(earlier)", "median(earlier) / median(after)", "test_regress.py"),
    ("regress: twice the limit", "bench/regress.py", "self.by > self.limit", "self.by > 2 * self.limit", "test_regress.py"),
    ("compare: half an interval", "bench/intervals.py", "* math.sqrt(found.variance)", "* math.sqrt(found.variance) / 2", "test_bench_compare.py"),
    ("timing: the fastest rank's time", "bench/timing.py", "op=dist.ReduceOp.MAX, group=group)", "op=dist.ReduceOp.MIN, group=group)", "test_bench_timing.py"),
)
# fmt: on


def copied(folder: Path) -> Path:
    """Copy the package into `folder`, its linked sub-packages too, and compile the copy."""
    package = folder / "fusedtp"
    shutil.copytree(ROOT / "fusedtp", package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(package, quiet=2)
    return package


def find(package: Path, fault: tuple[str, str, str, str, str]) -> str:
    """Plant a fault in the copy and return whether its tests find it, and the test that does."""
    name, file, old, new, tests = fault
    path, began = package / file, time.monotonic()
    text, times = path.read_text(), path.stat()
    assert text.count(old) == 1, f"{name}: the text stands {text.count(old)} times in {file}"
    words = [f"tests/{word}" if word.endswith(".py") else word for word in tests.split()]
    command = [
        sys.executable,
        *["-P", "-m", "pytest", "-x", "-q", "--benchmark-disable", "-p", "no:cacheprovider"],
        *words,
    ]
    env = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    path.write_text(text.replace(old, new))
    try:
        ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
        by = next((line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        found, said = ("missed", "found", "missed: no test ran")[min(ran.returncode, 2)], by[:120].partition(" - ")[0]
    except subprocess.TimeoutExpired:
        found, said = "missed", f"not in {SECONDS} s"
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{found} {name} | {said or tests} | {time.monotonic() - began:.0f} s"


def main() -> None:
    """Plant the chosen faults, some at a time, and exit with 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines, packages = [], SimpleQueue[Path]()

    def planted(fault: tuple[str, str, str, str, str]) -> str:
        package = packages.get()
        try:
            return find(package, fault)
        finally:
            packages.put(package)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as threads:
        for number in range(asked.jobs):
            packages.put(copied(Path(folder) / str(number)))
        for line in threads.map(planted, [fault for fault in FAULTS if asked.word in fault[0]]):
            print(line, flush=True)
            lines.append(line)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n")
    sys.exit(any(line.startswith("missed") for line in lines))


if __name__ == "__main__":
    main()
