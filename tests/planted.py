# ruff: noqa: E501
"""Planted faults: plant each in a copy of the package and run the tests that must find it.

    python -P tests/planted.py [WORD] [--jobs 2]

WORD chooses the faults whose name contains it. A line of FAULTS is the name, the file, the text that is replaced (it
stands there once), the text in its place, and the tests that must find it, as arguments of pytest behind variables of
the environment. test_planted.py checks that every source file has a fault. `protocol.mutants` has the faults of the
protocol that only an exploration of all orders finds.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fusedtp"
SECONDS = 300
PYTEST = ("-x", "-q", "--benchmark-disable", "-p", "no:cacheprovider", "-p", "no:xdist")

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
    ("kernel: missing data is passed on as it is", "kernels/signal.py", "return tl.where(ok != 0, x, tl.cast(float(\"nan\"), tl.float32).to(x.dtype))", "return x", "test_ops_local.py"),
    ("kernel: the weight before the one of a tile", "kernels/blocks.py", "is_here = entry(firsts, middle) <= tile", "is_here = entry(firsts, middle) < tile", "test_options.py -k test_pinned[fused-2]"),
    ("kernel: columns of a weight are not whole tiles", "kernels/operands.py", "end += cdiv(ctx.b.N[i], ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N", "end += ctx.b.N[i]", "test_options.py -k test_pinned[fused-2]"),
    ("kernel: the last group of tiles is whole", "kernels/matmul.py", "group_m = min(num_tiles_m - first_m, GROUP_M)", "group_m = GROUP_M", "test_tile_order.py"),
    ("kernel: the switch stores to all ranks but the first", "kernels/multicast.py", "for dst in range(link.group.WORLD_SIZE):", "for dst in range(1, link.group.WORLD_SIZE):", "test_any_order.py"),
    ("kernel: a lone signal goes to the rank itself", "kernels/steps.py", "raise_signal(link, peer, slot)", "raise_signal(link, rank, slot)", "test_protocol.py -k one_step"),
    ("kernels: regions overlap", "kernels/layout.py", "row = -(-self.half_bytes // row_bytes)", "row = self.half_bytes // row_bytes", "test_launch.py -k regions"),
    ("kernels: tiles wider than the result", "kernels/choices.py", " or block_n >= max(2 * cols, 65):", ":", "test_tuned_kernels.py"),
    ("kernels: a core that refuses a launch has it", "kernels/cores.py", "stacklevel=3)\n        return None\n", "stacklevel=3)\n", "TRITON_INTERPRET=0 FUSEDTP_EMULATION=few test_emulated_cores.py -k not_served"),
    ("kernel: both halves of a tile at one place", "kernels/warp_specialised.py", "_store_half(desc, buffer, layer, row, col + HALF, hi)", "_store_half(desc, buffer, layer, row, col, hi)", "TRITON_INTERPRET=0 FUSEDTP_EMULATION=few test_emulated_cores.py -k test_matmul"),
    ("kernel: all pieces are pushed to one rank", "kernels/warp_specialised.py", "- FIRST - taken // pieces) %", "- FIRST) %", "TRITON_INTERPRET=0 FUSEDTP_EMULATION=few test_emulated_cores.py -k empty_shards"),
    ("kernel: float8 rows have the scales of the next", "kernels/warp_specialised.py", "ctx.scales.a[0] + row + i + offs,", "ctx.scales.a[0] + row + i + 1 + offs,", "TRITON_INTERPRET=0 FUSEDTP_EMULATION=few test_emulated_cores.py -k float8_e5m2"),
    ("kernels: a tile of the other core has any warps", "kernels/choices.py", "for each in tiles if each.block_m == 16 * each.num_warps]", "for each in tiles]", "test_tuned_kernels.py"),
    ("kernels: the slower shape of a tile", "kernels/configs.py", "\"few columns\" if narrow < wide * NARROW_RATE else \"many\"", "\"few columns\" if narrow > wide * NARROW_RATE else \"many\"", "test_cost.py"),
    ("kernels: rows that overlap have a descriptor", "kernels/descriptors.py", "if stride_c == 1 and stride_r >= cols and stride_r % per_unit == 0:", "if stride_c == 1 and stride_r % per_unit == 0:", "test_launch.py test_descriptors.py"),
    ("kernels: few warps for words by pointers", "kernels/launch.py", "min(config.block_k, config.loose_block_k), max(8, config.pointer_warps)", "min(config.block_k, config.loose_block_k), config.pointer_warps", "test_launch.py"),
    ("kernels: what loads for a capture starts", "kernels/loading.py", "before, _mode.only_loading = _mode.only_loading, True", "before, _mode.only_loading = _mode.only_loading, False", "test_loading.py -k capture"),
    ("kernels: a prepared launch for another alignment", "kernels/prepared.py", "key += x.dtype, x.shape, x.stride(), x.data_ptr() % 16", "key += x.dtype, x.shape, x.stride()", "TRITON_INTERPRET=0 FUSEDTP_EMULATION=few test_emulated_launch.py -k like_calls"),
    ("interpreter: halves are divided as halves", "kernels/interpreter.py", "((len(flags) > 3 or is_named) and left.is_floating()) or ", "", "test_interpreter.py"),
    ("interpreter: ties are rounded up", "kernels/interpreter.py", "(0x7FFF + ((bits >> 16) & 1))", "0x8000", "test_interpreter.py"),
    ("interpreter: the library adds up a product", "kernels/interpreter.py", "_in_order(wide[0], wide[1], acc.data)", "wide[0] @ wide[1] + acc.data", "test_tree_order.py -k any_processor"),
    ("kernels: the interpreter as Triton has it", "kernels/__init__.py", "        prepare()\n", "        pass\n", "test_interpreter.py"),
    # Protocol and workspaces.
    ("protocol: kernels never disagree", "kernels/signal.py", "(theirs != link.fingerprint.to(tl.int64))", "(theirs != theirs)", "test_meaning.py"),
    ("protocol: a kernel reports the rank before", "kernels/signal.py", "tl.atomic_xchg(host + REPORT, src + 1,", "tl.atomic_xchg(host + REPORT, (src + 1) % link.group.WORLD_SIZE + 1,", "test_ops_local.py"),
    ("protocol: relaxed signal", "kernels/signal.py", "tl.atomic_xchg(signal, link.epoch, sem=\"release\"", "tl.atomic_xchg(signal, link.epoch, sem=\"relaxed\"", "test_protocol.py -k every_order_of_every"),
    ("protocol: host waits for the epoch before", "workspaces/steps.py", "if raised(load_acquire(address), self.epoch):", "if raised(load_acquire(address), self.epoch - 1):", "test_protocol.py -k every_order_of_every"),
    ("protocol: epochs do not wrap", "workspaces/words.py", "return (a - b + 2**31) % 2**32 - 2**31", "return a - b", "test_protocol.py -k waits_accept"),
    ("protocol: hosts never disagree", "workspaces/steps.py", "return theirs != self._ws.meanings.now.fingerprint", "return False", "test_meaning.py"),
    ("failures: the rank waited for is blamed", "workspaces/failures.py", "return chain[-1]", "return chain[1]", "test_missing.py"),
    ("failures: a stopped rank's wait is followed", "workspaces/failures.py", "return None if raised(seen, expected) else source", "return source", "test_missing.py"),
    ("agreement: two values are one", "workspaces/agreement.py", "is not None}) > 1:", "is not None}) > 2:", "test_meaning.py"),
    ("agreement: no dtype", "workspaces/agreement.py", "        \"dtype\": task.dtype,\n", "", "test_meaning.py"),
    ("agreement: backward is forward", "workspaces/agreement.py", "\"backward\" if backward else \"forward\"", "\"forward\"", "test_meaning.py"),
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
    ("ops: an agreement of the rows before", "op.py", "name not in (\"agreed\", \"_hash\")", "name != \"_hash\"", "test_rows.py test_meaning.py"),
    ("epilogue: a bias is added twice", "epilogue.py", "if self.bias is not None and addend is None:", "if self.bias is not None:", "test_options.py -k right[decomposed-1]"),
    ("forms: memory is left before its gather", "schedules/forms.py", "last=pending is None, out", "last=True, out", "test_ops_local.py test_ops.py"),
    ("fused: rows at the top of the region", "schedules/fused.py", "(self.begins[on.rank] if dim == 0 else on.rank * other)", "(0 if dim == 0 else on.rank * other)", "test_options.py -k test_pinned[fused-2]"),
    ("fused: columns at the top of the region", "schedules/fused.py", "else on.rank * other)", "else other)", "test_producers.py -k each_producer"),
    ("producer: the own rows are sent to all", "schedules/producer.py", "first, count = (begins[dst], sizes[dst]) if scatter else (0, rows)", "first, count = (begins[ws.rank], sizes[dst]) if scatter else (0, rows)", "test_producers.py -k each_producer"),
    ("transport: another algorithm than asked for", "schedules/transport.py", "    if task.algorithm == ONE_SHOT:\n        return ONE_SHOT", "    if task.algorithm == ONE_SHOT:\n        return TWO_SHOT", "test_any_order.py test_ops.py"),
    ("verbs: a path says another place", "schedules/verbs.py", "where: str = \"after it\"", "where: str = \"by chunk\"", "test_options.py -k test_pinned[unfused-2]"),
    ("generation: prepared calls outlive a change", "workspaces/generation.py", "    version += 1\n", "    version += 0\n", "test_calls.py test_workspace.py"),
    ("locks: two threads in one group", "locks.py", "if (holder := taken.setdefault(key, mine)) is not mine:", "if (holder := taken.setdefault(key, mine)) is None:", "test_threads.py"),
    ("decisions: kept without a bound", "workspaces/decisions.py", "if len(made) >= _MAX_DECISIONS:", "if False:", "test_workspace.py"),
    ("registry: memory that was not made to its end", "workspaces/registry.py", "if key not in _workspaces or not _workspaces[key].made:", "if key not in _workspaces:", "test_growth.py -k first_op_that_was_interrupted_may"),
    ("rendezvous: an outcome of the making before", "workspaces/rendezvous.py", "return outcome if outcome is not None and outcome[0] == self._numbers else None", "return outcome", "test_growth.py test_mappings.py"),
    ("streams: a lane waits for all but one", "workspaces/stream_steps.py", "        for i in range(1, ws.world_size):\n            self.wait(", "        for i in range(2, ws.world_size):\n            self.wait(", "test_lanes.py test_protocol.py"),
    ("memory: epochs of the ranks are exchanged", "memory/__init__.py", "for rank, (size, epoch) in enumerate(asked))", "for rank, (epoch, size) in enumerate(asked))", "test_growth.py test_cuda_memory.py"),
    ("memory: every peer's arena is the own", "memory/cuda.py", "handle.get_buffer(peer, (num_bytes,), torch.uint8)", "handle.get_buffer(self.rank, (num_bytes,), torch.uint8)", "test_cuda_memory.py test_rendezvous.py"),
    ("lanes: an op overtakes those in flight", "lanes.py", "        lane.wait(op)\n", "        pass\n", "test_lanes.py"),
    ("errors: a rank waited for itself", "errors.py", "rank_in(members, rank), rank_in(members, peer)", "rank_in(members, rank), rank_in(members, rank)", "test_growth.py -k asks_once_more"),
    ("lanes: a thread that never began is waited for", "lanes.py", "self._thread is None or not self._thread.is_alive()", "self._thread is None", "test_lanes.py -k could_not_be_started"),
    ("clock: a look that raises ends the time", "workspaces/clock.py", "        except Exception:\n            # As on a broken", "        except OSError:\n            # As on a broken", "test_clock.py -k broken"),
    ("cuda memory: it holds its group", "memory/cuda.py", "= ref(group), gpu or", "= (lambda: group), gpu or", "test_cuda_memory.py -k memory_goes"),
    ("workspace: refused calls are kept", "workspaces/workspace.py", "raise self.failure.with_traceback(None)", "raise self.failure", "test_growth.py -k are_not_kept"),
    ("bench: what is asked for twice runs twice", "bench/jobs.py", "    return list(once.values())", "    return jobs", "test_bench_jobs.py -k twice"),
    ("errors: a global rank is the group's", "errors.py", "members[rank] != rank else", "members[rank] == -1 else", "test_interruptions.py -k global_ranks"),
    ("shards: a length in a graph is a constant", "shards.py", "one if type(one) is int else operator.index(one)", "operator.index(one)", "test_compile.py -k once_for_all"),
    ("parameters: the first call writes what a graph is guarded by", "calls/parameters.py", "{name: each._spec for name, each in own.items()}", "dict.fromkeys(own)", "test_compile.py -k once_for_all"),
    ("parameters: parts are cut in the mesh's order", "calls/parameters.py", "sorted(cuts, key=lambda cut: cut[:2])", "cuts", "test_layer_state.py -k two_axes"),
    ("local: threads share their terms", "schedules/local.py", "class LocalScatter(threading.local):", "class LocalScatter:", "test_threads.py -k needs_no_lock"),
    ("call: half of the rows are kept", "calls/call.py", "if again and recent and _calls.get(recent[-1][0]) is call:", "if False:", "test_rows.py -k as_many_are"),
    ("switch: the first undo turns all off", "switch.py", "            if not self._on:\n                self._give_back()", "            self._give_back()", "test_drop_in.py test_use_in_transformers.py"),
    ("trace: a span has no length", "trace.py", "spans.append(Span(self._kind, self._peer, self._begin_ns, _clock()))", "spans.append(Span(self._kind, self._peer, self._begin_ns, self._begin_ns))", "test_bench_timeline.py"),
    ("torch: a multi-tensor op is counted once", "torch_private.py", "            dispatcher._custom_op_handlers[op] = handler", "            pass", "test_layer_parameters.py"),
    # Planner and notation.
    ("notation: partial axes as they came", "sharding/notation.py", "tuple(sorted(partial))", "tuple(partial)", "test_notation.py"),
    ("notation: partial over any axis", "sharding/notation.py", "if axis not in contraction:", "if False:", "test_notation.py"),
    ("planner: half an all-reduce's bytes", "sharding/routes.py", "elements = 2 * (n - 1)", "elements = (n - 1)", "test_plan.py test_bytes.py"),
    ("planner: the major axis is gathered", "sharding/routes.py", "Step(\"all_gather\", name, dim.axes[-1], dim.name)", "Step(\"all_gather\", name, dim.axes[0], dim.name)", "test_plan.py test_plan_simulated.py"),
    ("planner: half the FLOPs", "sharding/routes.py", "return 2 * prod(", "return prod(", "test_plan.py test_explain.py"),
    ("planner: the operand whose gather is fused moves first", "sharding/routes.py", "operands = b + a if fused in a else a + b", "operands = a + b if fused in a else b + a", "test_plan.py test_plan_simulated.py"),
    ("planner: all steps on dy are shared", "sharding/plan.py", "same.index(False) if False in same else len(same)", "len(same)", "test_plan.py test_sharded.py"),
    ("shards: one row too many", "shards.py", "base + 1 if rank < extra", "base + 1 if rank <= extra", "test_shards.py"),
    ("shards: torch.chunk's last pieces", "shards.py", "max(0, min(piece, length - rank * piece))", "min(piece, length - rank * piece)", "test_shards.py test_parallel.py"),
    ("program: a slice of the ranks behind", "calls/program.py", "x.dims.index(step.dim), sum(sizes[:place])", "x.dims.index(step.dim), sum(sizes[place + 1 :])", "test_sharded.py"),
    ("program: a bias's gradient of the own rows alone", "calls/program.py", "        for _, axis in split:\n                db = self.plain", "        for _, axis in ():\n                db = self.plain", "test_options.py"),
    ("program: the gradient of w is kept of the first weight", "calls/program.py", "dws = dict(zip(wanted, of_w, strict=True))", "dws = dict(zip(wanted, [of_w[0]] * len(of_w), strict=True))", "test_options.py"),
    ("program: a joined gradient is not transposed", "calls/program.py", "transposed=then.transposed", "transposed=False", "test_options.py"),
    ("program: joined gradients share a shape", "calls/program.py", "[(i + len(one.made), shape) for", "[(i, shape) for", "test_options.py"),
    ("program: rows travel with scales of their columns", "calls/program.py", "if name == by_rows:", "if False:", "test_float8_layers.py"),
    ("planner: gradients without a shared dim are joined", "sharding/plan.py", "other.kind == \"all_gather\" and other.dim in second.contraction:", "other.kind == \"all_gather\":", "test_sharded.py"),
    # Functions.
    ("problems: every rank has the first one's rows", "calls/problems.py", "shape[dim] = sizes[group.rank()]", "shape[dim] = sizes[0]", "test_options.py -k test_pinned[unfused-2]"),
    ("functions: sizes are lost", "functional.py", "Options(schedule, \"auto\", producer, float8, order), (gather_dim, sizes)", "Options(schedule, \"auto\", producer, float8, order), (gather_dim, None)", "test_options.py -k test_pinned[unfused-2]"),
    ("collectives: another dim comes back", "collectives.py", ".movedim(0, dim)", ".transpose(0, dim)", "test_functional.py"),
    ("paths: the last requirement alone", "choose/paths.py", "    for each in _required:\n", "    for each in _required[-1:]:\n", "test_what_ran.py"),
    ("explain: the shards of the other side", "explain.py", "(before if step.kind == \"all_gather\" else after)", "(after if step.kind == \"all_gather\" else before)", "test_explain.py"),
    ("files: a write may be seen half done", "files.py", "        os.replace(temporary, path)\n", "        path.write_bytes(content)\n", "test_bench_store.py"),
    ("drop-in: the gradient of an average is a sum's", "drop_in.py", "    if ctx.reduce_op == \"avg\":\n", "    if False:\n", "test_drop_in.py"),
    ("fsdp: averages are sums", "fsdp.py", "        return 1 / world_size\n", "        return None\n", "test_fsdp.py"),
    ("package: a name is looked for elsewhere", "__init__.py", "if name in (\"check\", \"destroy\", \"set_timeout\"):", "if name in (\"destroy\", \"set_timeout\"):", "test_api.py"),
    ("cost: a link to oneself", "cost/hardware.py", "self.peer_gbps * (num_ranks - 1)", "self.peer_gbps * num_ranks", "test_cost.py test_cost_published.py"),
    ("cost: half an all-reduce is sent", "cost/work.py", "            share += length * ITEMSIZE[self.made]\n", "            pass\n", "test_bytes.py test_cost.py"),
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
    ("unfused: padding is kept", "schedules/unfused.py", "        if self._even:\n            return arrived\n", "        if True:\n            return arrived\n", "test_ops.py"),
    ("unfused: a whole bias on every part", "schedules/unfused.py", "epilogue.columns(slice(self._begins[rank], self._begins[rank + 1]))", "epilogue", "test_ops.py"),
    ("decomposed: sums in 16 bits", "schedules/decomposed.py", "total = first.to(torch.float32).add_(second)", "total = first + second", "test_ops.py test_determinism.py"),
    ("decomposed: an epilogue is added twice", "schedules/decomposed.py", "    epilogue.add_to(total)\n", "    epilogue.add_to(total)\n    epilogue.add_to(total)\n", "test_options.py"),
    ("local: no residual on one rank", "schedules/local.py", "epilogue.finish(summed(terms, addend, out=out), addend)", "epilogue.with_norm(summed(terms, addend, out=out))", "test_options.py test_ops_local.py"),
    # Layers and styles.
    ("autograd: a norm's gradients in one allocation", "calls/autograd.py", "map(torch.clone, sums)", "sums.unbind()", "test_layer_parameters.py -k memory"),
    ("autograd: compiled autograd traces an op", "calls/autograd.py", "_gradients_outside if torch.compiler.is_compiling() else _eager_gradients", "_eager_gradients", "test_compiled_autograd.py -k changed"),
    ("parameters: a multi-tensor change goes unnoticed", "calls/parameters.py", "    on_multi_tensor_changes(count)\n", "    pass\n", "test_layer_parameters.py -k changed_before"),
    ("styles: pieces that some ranks would need two of", "styles/grouped.py", "if num_ranks % count and count % num_ranks:", "if False:", "test_bad_modules.py -k pieces"),
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
    # Models of Hugging Face.
    ("decoders: every rank has all keys", "hf/decoders.py", "max(1, keys // self._ranks)))", "keys))", "test_decoders.py"),
    ("decoders: any packed linear is queries, keys and values", "hf/decoders.py", "self._of.kind not in QKV or sum(lengths)", "sum(lengths)", "test_decoders_refused.py"),
    ("decoders: the first layer alone is compared", "hf/stack.py", "for i, layer in enumerate(of.stack):", "for i, layer in enumerate([*of.stack][:1]):", "test_decoders_refused.py"),
    ("decoders: linears may be called from outside", "hf/tokens.py", "    module.is_running = False\n", "    pass\n", "test_decoders_refused.py test_lora.py"),
    ("decoders: three unlike inputs", "hf/inputs.py", "rows.unique(dim=0).shape[0] > 1:", "rows.unique(dim=0).shape[0] > 2:", "test_inputs.py"),
    ("meta: ties are lost", "hf/meta.py", "        for name in names[1:]:\n", "        for name in names[2:]:\n", "test_pretrained.py test_decoders.py"),
    ("lora: an adapter in a mixed batch without its scale", "hf/lora.py", " * layer.scaling[name]\n", "\n", "test_lora.py -k as_in_one_process"),
    ("checkpoint: every rank reads the first part", "hf/pretrained.py", "= offsets(sizes)[rank], offsets(sizes)[rank + 1]", "= 0, sizes[rank]", "test_pretrained.py"),
    ("trainer: optimizers go on from whole states", "hf/trainer.py", "return {**state, \"state\": {**state[\"state\"], **by_number}}", "return state", "test_trainer.py"),
    ("transformers: the gradient of the first rank's columns", "hf/in_transformers.py", "ctx.own = offsets(widths)[group.rank()], y.shape[-1]", "ctx.own = 0, y.shape[-1]", "test_use_in_transformers.py"),
    # Dispatch, tuning and the cost model.
    ("dispatch: copies in a capture", "schedules/__init__.py", "(self.in_graphs or not capturing)", "True", "test_dispatch.py"),
    ("bound: a stale call is run", "calls/bound.py", "        if self.version != generation.version:\n            return True\n", "", "test_calls.py test_workspace.py test_dispatch.py"),
    ("dispatch: fused in float64", "choose/dispatch.py", "    if dtype not in FUSED_DTYPES:\n        names", "    if False:\n        names", "test_dispatch.py test_bad_input.py"),
    ("calls: one call for two dtypes", "calls/call.py", "key += each.shape, each.dtype, each.device, each.layout", "key += each.shape, each.device, each.layout", "test_calls.py test_functional.py"),
    ("calls: other rows with the sizes of the first", "calls/call.py", "splits = {**splits, self._rows[at]: sizes}", "splits = {**splits}", "test_rows.py"),
    ("calls: rows of a residual are not checked", "calls/call.py", "if residual is not None and [*residual.shape[:-1]] != [*made]:", "if False:", "test_rows.py"),
    ("operators: a collective of other rows has the first one's", "calls/operators.py", "ready = first.at(task, ())", "ready = first", "test_rows.py -k collectives"),
    ("bound: verbs stay bound to other rows", "calls/bound.py", "elif self.on.task is not self.task:", "elif False:", "test_rows.py"),
    ("calls: views of other rows stay", "schedules/decomposed.py", "            self._ws.views.pop(key, None)", "            pass", "test_rows.py"),
    ("failures: entries and fingerprints are one read", "workspaces/failures.py", "before, header = self._header(self.rank), self._header(self.rank)", "before = header = self._header(self.rank)", "test_meaning.py -k words_are_read"),
    ("agreement: numbers of rows are not compared", "workspaces/agreement.py", "*task.sizes, *task.moved, *[length", "*[length", "test_meaning.py test_rows.py"),
    ("calls: True passes for 1", "calls/call.py", "[problem, id(group), values, kinds, *tensors]", "[problem, id(group), values, (), *tensors]", "test_bad_input.py test_calls.py"),
    ("tuning: another machine's table", "choose/tuning.py", "        if table.machine.get(name) != here[name]\n", "        if False\n", "test_tuning.py"),
    ("tuning: the slowest is chosen", "choose/tuning.py", "    best = min(times, key=lambda name: times[name])\n    where", "    best = max(times, key=lambda name: times[name])\n    where", "test_tuning.py test_dispatch.py"),
    ("tuning: noise counts", "choose/tuning.py", "if least <= 1}", "if least <= 0}", "test_tuning.py"),
    ("cost: schedules beyond a domain", "cost/model.py", "elif work.num_ranks <= machine.domain_size:", "else:", "test_cost.py"),
    ("cost: an all-reduce sends once", "cost/overlap.py", "2 * steps if work.kind == \"all_reduce\" else steps", "steps", "test_cost.py test_cost_published.py"),
    # The benchmark's gate.
    ("gate: NaN passes", "reference.py", "bad = int((~(error <= allowed)).sum())", "bad = int((error > allowed).sum())", "test_bench_gate.py"),
    ("gate: a hundred times the error", "reference.py", "self._norms.append((K * row_norms, col_norms))", "self._norms.append((100 * K * row_norms, col_norms))", "test_bench_gate.py"),
    ("gate: a wrong result is timed", "bench/sweep.py", "if job.timed and not (verdicts[name].error or verdicts[name].missing)]", "if job.timed and not verdicts[name].missing]", "test_bench_gate.py -k wrong_provider"),
    ("gate: NaN passes the tests' check", "reference.py", "wrong = ~(error <= allowed)", "wrong = error > allowed", "test_reference.py"),
    ("gate: partial products are not rounded", "reference.py", "allowed += (eps_out + len(sizes) * eps_sum) * partial.abs()", "allowed += (eps_out + len(sizes) * eps_sum) * 1e4", "test_reference.py"),
    ("regress: a slowdown is a speed-up", "bench/regress.py", "median(after) / median(earlier)", "median(earlier) / median(after)", "test_regress.py"),
    ("regress: twice the limit", "bench/regress.py", "self.by > self.limit", "self.by > 2 * self.limit", "test_regress.py"),
    ("compare: half an interval", "bench/intervals.py", "* math.sqrt(found.variance)", "* math.sqrt(found.variance) / 2", "test_bench_compare.py"),
    ("timing: the fastest rank's time", "bench/timing.py", "op=dist.ReduceOp.MAX, group=group)", "op=dist.ReduceOp.MIN, group=group)", "test_bench_timing.py"),
    # The benchmark and its commands.
    ("commands: a list of sizes ends early", "bench/arguments.py", "while last and 0 < 2 * found[-1] <= int(last):", "while last and 0 < 2 * found[-1] < int(last):", "test_bad_files.py -k doubles"),
    ("commands: a failed check is a success", "bench/cli.py", "if num_failed := sum(row.failed for row in rows):", "if num_failed := 0:", "test_bench_cli.py test_bench_gate.py"),
    ("commands: a plan of the default", "hf/plan.py", "decoder_plan(model, world_size, sequence_parallel=sequence_parallel)", "decoder_plan(model, world_size)", "test_cli_plan.py"),
    ("commands: columns and rows exchanged", "bench/cli_predict.py", "op, M=M, N=N, K=K, world_size=num_ranks", "op, M=N, N=M, K=K, world_size=num_ranks", "test_bench_cli.py test_cost.py"),
    ("commands: before and after exchanged", "bench/cli_report.py", "arguments.rows(before), arguments.rows(after)", "arguments.rows(after), arguments.rows(before)", "test_bench_compare.py test_bench_cli.py"),
    ("commands: the slowest counts as fastest", "bench/cli_tune.py", "fastest = min(sample.ms, key=lambda name: sample.ms[name])", "fastest = max(sample.ms, key=lambda name: sample.ms[name])", "test_tuning.py"),
    ("commands: tables obey control characters", "bench/output.py", "return self.put(visible(text))", "return self.put(text)", "test_output.py"),
    ("compare: slower is faster", "bench/compare.py", "\"slower\" if self.interval.low > 1 else \"faster\"", "\"faster\" if self.interval.low > 1 else \"slower\"", "test_bench_compare.py"),
    ("digest: a timed file is left out", "bench/digest.py", "\"collectives.py\", \"epilogue.py\", ", "\"collectives.py\", ", "test_digest.py"),
    ("doctor: another compiler than Triton's", "doctor.py", "shutil.which(\"gcc\") or shutil.which(\"clang\")", "shutil.which(\"clang\") or shutil.which(\"gcc\")", "test_doctor.py"),
    ("figures: parts of a time are more than it", "bench/figures.py", "min(total_ms - matmul, comm_ms)", "comm_ms", "test_bench_report.py"),
    ("ranks: a killed rank ended well", "bench/ranks.py", "or -signal.SIGKILL)", "or 0)", "test_ranks.py -k forked_from_one"),
    ("frames: a speed-up is a slowdown", "bench/frames.py", "found = ratio(other, own)", "found = ratio(own, other)", "test_bench_report.py"),
    ("gpu: a failure costs the others of its case", "bench/sweep.py", "if count >= self.alike]", "if count >= 1]", "test_bench_gpu.py -k alike"),
    ("gpu: what a sanitizer finds is not run", "bench/checks.py", "not in (0, FOUND)", "!= 0", "test_bench_gpu.py -k sanitizer"),
    ("gpu: a flag is not waited for", "kernels/latency.py", "count += wait(link, rank, slot + PAIR)", "count += 0", "test_bench_gpu.py -k flags"),
    ("gpu: a dry run has the sizes of a run", "bench/gpu.py", "name: min(getattr(job.case, name), most)", "name: getattr(job.case, name)", "test_bench_gpu.py -k listed"),
    ("tuning: schedules are compared with the slowest", "bench/tune.py", "    fastest = min(timings.values()", "    fastest = max(timings.values()", "test_tuning.py"),
    ("gpu: parts of the first rank", "bench/checks.py", "cut = whole.own(\"y\", y), whole.own(\"x\", dx), whole.own(\"w\", dw)", "cut = y, whole.own(\"x\", dx), whole.own(\"w\", dw)", "test_bench_gpu.py -k check_of_ranks"),
    ("gpu: a result is checked with another weight", "bench/gpu_kernels.py", "normal(dtype, N, K, seed=2 * seed + 1).t()\n        self.product = cache(lambda: ExactProduct(self.a, self.b, (K,)))", "normal(dtype, N, K, seed=2 * seed + 1).t()\n        self.product = cache(lambda: ExactProduct(self.a, -self.b, (K,)))", "test_bench_gpu.py"),
    ("jobs: kernels are timed where ranks share a GPU", "bench/jobs.py", "compiled = 0 < world_size <= num_gpus", "compiled = num_gpus > 0", "test_bench_jobs.py"),
    ("cases: both passes have two matmuls", "bench/cases.py", "{\"forward\": 1, \"backward\": 2, \"both\": 3}", "{\"forward\": 1, \"backward\": 2, \"both\": 2}", "test_bench_jobs.py"),
    ("layers: one wrong element passes", "bench/layers.py", "max(norm, (error.max() / scale).item() / SPIKE) / allowed", "norm / allowed", "test_bench_layers.py"),
    ("layers: the inputs do not change", "bench/layers.py", "self._at = 1 - self._at", "self._at = 0", "test_bench_layers.py"),
    ("suites: uneven lengths are split", "bench/suites.py", "if any(size[place] % world_size for place in split):", "if False:", "test_bench_layers.py"),
    ("jobs: a GPU is estimated as a core", "bench/jobs.py", "    if not gpu:\n", "    if True:\n", "test_bench_jobs.py"),
    ("overhead: quartiles exchanged", "bench/overhead.py", '"q1_us": round(quarters[0], 1)', '"q1_us": round(quarters[2], 1)', "test_bench_layers.py -k overhead"),
    ("machine: another model of processor", "machine.py", "model {about.get('model', '?')})", "model {about['cpu family']})", "test_bench_cli.py -k processor"),
    ("gate: operands of the first rank", "bench/operands.py", "shard = reference.chunk(whole, dim, self.rank, self._sizes(name, dim))", "shard = reference.chunk(whole, dim, 0, self._sizes(name, dim))", "test_bench_gate.py"),
    ("gate: a product of one factor", "bench/problem.py", "alone = self._matmul if variant == \"matmul\" else self._collective", "alone = self._matmul", "test_bench_gate.py"),
    ("gate: sequential gathers nothing", "bench/operands.py", "        if ctx.reduce is ctx.scatter:\n            dy = ctx.gather(dy)", "        if ctx.reduce is None:\n            dy = ctx.gather(dy)", "test_bench_gate.py"),
    ("preset: one half alone is filled", "schedules/preset.py", "begin = self._begin + parity * self.half_bytes + row", "begin = self._begin + row", "test_bench_gpu.py"),
    ("providers: the last of a name is taken", "bench/providers.py", "if point.name in providers or point.name in _RESERVED:", "if point.name in _RESERVED:", "test_provider_plugins.py"),
    ("peers: async TP that is not fused is timed", "bench/peers.py", "    if absent:\n", "    if False:\n", "test_bench_jobs.py"),
    ("peers: DTensor's other dim", "bench/peers.py", "[Shard(0 if gathers else 1)], run_check", "[Shard(1 if gathers else 0)], run_check", "test_bench_gate.py"),
    ("peers: uneven sizes run", "bench/peers.py", "    if not case.even:\n", "    if False:\n", "test_providers.py"),
    ("peers: an older NCCL runs", "bench/peers.py", "    if version < NEEDS:\n", "    if False:\n", "test_providers.py"),
    ("peers: the other contraction", "bench/peers.py", "contraction = case.N if case.kind == \"gather\" else case.K", "contraction = case.K if case.kind == \"gather\" else case.N", "test_providers.py"),
    ("peers: lengths of the whole", "bench/peers.py", "(case.K, case.N // n) if case.kind == \"gather\"", "(case.K, case.N) if case.kind == \"gather\"", "test_providers.py"),
    ("ranks: every pool starts a server", "bench/ranks.py", "next((each for each in _kept if each.serves(env)), None)", "None", "test_ranks.py -k share_what_is_kept"),
    ("ranks: a wait status is no exit status", "bench/rank_main.py", "str(os.waitstatus_to_exitcode(status))", "str(status)", "test_ranks.py -k dying"),
    ("ranks: the signal of another", "bench/ranks.py", "if code < 0 else f\"exited with status {code}\"", "if code < -9 else f\"exited with status {code}\"", "test_ranks.py"),
    ("ratios: under is over", "bench/ratios.py", "median(mine / its for mine", "median(its / mine for mine", "test_tracked.py test_regress.py"),
    ("report: predictions in microseconds", "bench/report.py", "model.times[row.variant] / 1e3", "model.times[row.variant]", "test_bench_report.py"),
    ("store: rows of other cases are lost", "bench/store.py", "for row in before if (row.machine, row.case) not in measured]", "for row in before if (row.machine, row.case) in measured]", "test_bench_store.py"),
    ("tables: noise is not marked", "bench/tables.py", "f\"{'~' * bool(is_noise)}{ratio:.2f}x\"", "f\"{ratio:.2f}x\"", "test_bench_report.py test_bench_jobs.py"),
    ("theme: an axis without ticks", "bench/theme.py", "if sum(vmin <= value <= vmax for value in values) >= 4:", "if True:", "test_bench_report.py"),
    ("timeline: parts of all ranks", "bench/timeline.py", "if mark.rank == last.rank and mark.kind != \"call\":", "if mark.kind != \"call\":", "test_bench_timeline.py"),
    ("train: gradients of one part of the tokens", "bench/train.py", "        grad = fusedtp.all_reduce(grad, group=tensor, schedule=schedule)\n", "", "test_train.py"),
    ("tune: rates of a call in place of its growth", "cost/hardware.py", "\"collective_gbps\": (n - 1) / n * more / grown[\"unfused\"] / 1e3", "\"collective_gbps\": n / (n - 1) * more / grown[\"unfused\"] / 1e3", "test_tuning.py"),
    ("tune: a tile that is refused is measured", "bench/tune_kernels.py", "            if error := self._checked(choice):\n", "            if error := \"\":\n", "test_tuned_kernels.py"),
)
# fmt: on


def copied(folder: Path) -> Path:
    """Copy the package into `folder`, its linked sub-packages too, and compile the copy."""
    package = folder / "fusedtp"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(package, quiet=2)
    return package


class Planted:
    """A fault planted in a copy of the package, while its tests run in a fork of this process."""

    def __init__(self, package: Path, fault: tuple[str, str, str, str, str]) -> None:
        self.name, file, old, new, self.tests = fault
        self.package, self._path, self._began = package, package / file, time.monotonic()
        self._text, self._times = self._path.read_text(), self._path.stat()
        assert self._text.count(old) == 1, f"{self.name}: the text stands {self._text.count(old)} times in {file}"
        self._path.write_text(self._text.replace(old, new))
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        if (child := os.fork()) == 0:
            self._test()
        self._child = child

    def _test(self) -> None:
        status: int = 4
        try:
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(self._out.fileno(), descriptor)
            words = [*PYTEST, *(f"tests/{word}" if ".py" in word else word for word in self.tests.split())]
            given = dict(words.pop(at).split("=", 1) for at in range(len(words) - 1, -1, -1) if "=" in words[at])
            os.environ |= {"PYTHONPATH": str(self.package.parent), **given}
            if self._path.parent.name not in ("hf", "styles"):
                # Importing transformers takes most of a rank's start, and few of the tests need it.
                os.environ["FUSEDTP_PRELOAD"] = ""
            if given:
                # Such tests need another interpreter: Triton's own functions were made for its interpreter here.
                os.execv(sys.executable, [sys.executable, "-P", "-m", "pytest", *words])
            sys.path.insert(0, str(self.package.parent))
            status = pytest.main(words)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def ended(self) -> str:
        """Return whether the tests have found the fault, and the test that has; "" while they run."""
        done, found = os.waitpid(self._child, os.WNOHANG)
        seconds = time.monotonic() - self._began
        if not done and seconds < SECONDS:
            return ""
        if not done:
            os.killpg(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        self._out.seek(0)
        said = self._out.read()
        self._path.write_text(self._text)
        os.utime(self._path, ns=(self._times.st_atime_ns, self._times.st_mtime_ns))
        by = next((line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), "").partition(" - ")[0]
        status = os.waitstatus_to_exitcode(found) if done else None
        # Any other status says that no test ran.
        how = {0: "missed", 1: "found", None: "missed in time"}.get(status, f"missed, {said[-300:]!r}")
        return f"{how}: {self.name} | {by[:120] or self.tests} | {seconds:.0f} s"


def main() -> None:
    """Plant the chosen faults, some at a time, and exit with 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for module in ("torch.distributed.tensor", "triton"):
        importlib.import_module(module)
    left, running, missed = [fault for fault in FAULTS if asked.word in fault[0]], list[Planted](), False
    with tempfile.TemporaryDirectory() as folder:
        free = [copied(Path(folder) / str(number)) for number in range(asked.jobs)]
        while left or running:
            while left and free:
                running.append(Planted(free.pop(), left.pop(0)))
            time.sleep(0.1)
            for each in running[:]:
                if line := each.ended():
                    print(line, flush=True)
                    missed = missed or not line.startswith("found")
                    running.remove(each)
                    free.append(each.package)
    sys.exit(missed)


if __name__ == "__main__":
    main()
