"""The data-flow analysis that finds decisions on which threads may differ, on programs of a few lines.
`test_kernels_offline` runs it on every compiled kernel, and on broken kernels with loops whose exit depends on each
thread's own load.
"""

from __future__ import annotations

import pytest

from .compiled.assembly import amdgcn, ptx
from .compiled.blocks import with_tails_made_one
from .compiled.uniform import AMDGCN, PTX, barriers_apart

# %p1: this is the first thread. A taken branch skips the text in between.
_BEGIN = """
mov.u32 %r1, %tid.x;
setp.eq.b32 %p1, %r1, 0;
mov.b32 %r4, 0;
{}
ret;
"""
_BRANCH = """
setp.ne.b32 %p2, {}, 0;
@%p2 bra $L__{label};
{}
$L__{label}:
{}
"""


def _decided_by(value: str) -> str:
    """Return a barrier for threads whose %r4 is 0, where some threads and then all have set it."""
    return _BRANCH.format("%r1", "mov.b32 %r4, 1;", value, label=2) + _BRANCH.format("%r4", "bar.sync 0;", "", label=3)


@pytest.mark.parametrize(
    ("body", "apart"),
    [
        pytest.param(_BRANCH.format("%r1", "bar.sync 0;", "", label=2), True, id="a barrier for some threads"),
        pytest.param(
            _BRANCH.format("%r1", "add.s32 %r4, %r1, 1;", "bar.sync 0;", label=2), False, id="one where all meet"
        ),
        pytest.param(_decided_by(""), True, id="a decision made of one"),
        pytest.param(_decided_by("mov.b32 %r4, 1;"), False, id="a decision made anew"),
    ],
)
def test_threads_that_may_part_before_a_barrier(body: str, apart: bool) -> None:
    assert bool(barriers_apart(ptx(_BEGIN.format(body)), PTX)) == apart


# The first arena's address in v[2:3].
_AMD_BEGIN = """
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\tglobal_load_dwordx2 v[2:3], v1, s[2:3]
{}
\ts_endpgm
"""
_AMD_BRANCH = """
\ts_mov_b64 s[8:9], {}
\ts_andn2_b64 vcc, exec, s[8:9]
\tv_readfirstlane_b32 s10, v0
\ts_cbranch_vccnz .LBB0_2
\ts_mov_b32 s10, 0
.LBB0_2:
\ts_cmp_lg_u32 s10, 0
\ts_cbranch_scc1 .LBB0_3
\ts_barrier
.LBB0_3:
"""
# v9 has in lane 0 a word that each wave has loaded, in lane 1 an argument; the branch depends on one of both.
_AMD_LANES = """
\tglobal_load_dword v4, v[2:3], off offset:8
\tv_readfirstlane_b32 s8, v4
\ts_load_dword s11, s[0:1], 0x8
\tv_writelane_b32 v9, s8, 0
\tv_writelane_b32 v9, s11, 1
{}
\ts_cmp_lg_u32 s10, 0
\ts_cbranch_scc1 .LBB0_3
\ts_barrier
.LBB0_3:
"""

# Lanes diverge, and the branch on a uniform argument exists twice.
_AMD_TAILS = """
\ts_load_dword s8, s[0:1], 0x8
\tv_cmp_eq_u32_e64 s[4:5], 0, v0
\ts_and_saveexec_b64 s[6:7], s[4:5]
\ts_cbranch_execnz .LBB0_5
\ts_or_b64 exec, exec, s[6:7]
\ts_cmp_lg_u32 s8, 0
\ts_cbranch_scc1 .LBB0_7
\ts_branch .LBB0_6
.LBB0_5:
\tv_mov_b32_e32 v5, 0
\ts_or_b64 exec, exec, s[6:7]
\ts_cmp_lg_u32 s8, 0
\ts_cbranch_scc1 .LBB0_7
.LBB0_6:
\ts_barrier
.LBB0_7:
"""

# Some waves alone come through the part in the middle, which uses s10 for something else; s10 decides behind it.
_AMD_ASIDE = """
\ts_load_dword s10, s[0:1], 0x8
\tv_cmp_eq_u32_e64 s[4:5], 0, v0
\ts_and_saveexec_b64 s[6:7], s[4:5]
\ts_cbranch_execz .LBB0_2
\t{}
\tv_readfirstlane_b32 s10, v0
\t{}
\ts_mov_b32 s10, s11
.LBB0_2:
\ts_or_b64 exec, exec, s[6:7]
\ts_cmp_lg_u32 s10, 0
\ts_cbranch_scc1 .LBB0_3
\ts_barrier
.LBB0_3:
"""


@pytest.mark.parametrize(
    ("body", "apart"),
    [
        pytest.param(_AMD_ASIDE.format("s_mov_b32 s11, s10", ""), False, id="a register put aside and back"),
        pytest.param(_AMD_ASIDE.format("", "s_mov_b32 s11, s10"), True, id="put aside too late"),
        pytest.param(_AMD_ASIDE.format("s_mov_b32 s11, s10", "v_readfirstlane_b32 s11, v0"), True,
            id="put aside where something else is then"),
        pytest.param(_AMD_TAILS, False, id="a tail that is there twice"),
        pytest.param(_AMD_TAILS.replace("s_cbranch_scc1 .LBB0_7\n.LBB0_6:",
            "s_cbranch_scc0 .LBB0_6\n\ts_branch .LBB0_7\n.LBB0_6:"), False, id="asked the other way round"),
        pytest.param(_AMD_TAILS.replace("s_cbranch_scc1 .LBB0_7\n.LBB0_6", "s_cbranch_scc0 .LBB0_7\n.LBB0_6"),
            True, id="that goes the other way"),
        pytest.param(_AMD_TAILS.replace("v5, 0\n\ts_or_b64 exec, exec, s[6:7]\n\ts_cmp_lg_u32 s8",
            "v5, 0\n\ts_or_b64 exec, exec, s[6:7]\n\ts_cmp_lg_u32 s9"), True, id="tails of two kinds"),
        pytest.param(_AMD_LANES.format("\tv_readlane_b32 s10, v9, 1"), False, id="by a lane that all have alike"),
        pytest.param(_AMD_LANES.format("\tv_readlane_b32 s10, v9, 0"), True, id="by the lane beside it"),
        pytest.param(_AMD_LANES.format("\tv_mov_b32_e32 v5, v9\n\tv_readfirstlane_b32 s10, v5"), True,
            id="by a copy of all lanes"),
        pytest.param(_AMD_LANES.format("\tv_mov_b32_e32 v9, v4\n\tv_readlane_b32 s10, v9, 1"), True,
            id="by a lane of what was written over them"),
        pytest.param(_AMD_BRANCH.format("-1"), False, id="a way that is never taken"),
        pytest.param(_AMD_BRANCH.format("0"), True, id="the way that is always taken"),
    ],
)  # fmt: skip
def test_waves_that_may_part_before_a_barrier(body: str, apart: bool) -> None:
    assert bool(barriers_apart(with_tails_made_one(amdgcn(_AMD_BEGIN.format(body), masked=True)), AMDGCN)) == apart
