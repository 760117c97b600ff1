"""The sharding notation: accepted specs, their normal form, and the position in errors."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.errors import NotationError
from fusedtp.sharding.notation import Dim, Spec, Tensor, parse

from .harness import LARGE


def test_parts() -> None:
    spec = parse("[B, S_XY, K] @ [K_Z, N] -> [B, S, N]{U_Z}")
    assert spec.a == Tensor((Dim("B"), Dim("S", ("X", "Y")), Dim("K")))
    assert spec.b == Tensor((Dim("K", ("Z",)), Dim("N")))
    assert spec.c == Tensor((Dim("B"), Dim("S"), Dim("N")), partial=("Z",))
    assert (spec.batch, spec.m, spec.k, spec.n) == (("B",), "S", "K", "N")
    assert spec.mesh_axes == ("X", "Y", "Z")
    assert spec.dim_names == ("B", "S", "K", "N")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.a = spec.b  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("[M_X,K]@[K,N_X]->[M,N_X]", "[M_X, K] @ [K, N_X] -> [M, N_X]"),
        ("  [ M_X ,K]\n @ [K , N]\t-> [M_X,N]  ", "[M_X, K] @ [K, N] -> [M_X, N]"),
        ("[M_{X},K] @ [K,N_{X}] -> [M,N_{X}]", "[M_X, K] @ [K, N_X] -> [M, N_X]"),
        ("[M_{ dp , tp },K] @ [K,N] -> [M_{dp},N]", "[M_{dp,tp}, K] @ [K, N] -> [M_{dp}, N]"),
        ("[M_{X,tp},K] @ [K,N] -> [M,N]", "[M_{X,tp}, K] @ [K, N] -> [M, N]"),
        ("[M,K_YX] @ [K_YX,N] -> [M,N] { U_YX }", "[M, K_YX] @ [K_YX, N] -> [M, N]{U_XY}"),
        ("[M,K_{tp}] @ [K_{tp},N] -> [M,N]{U_{tp}}", "[M, K_{tp}] @ [K_{tp}, N] -> [M, N]{U_{tp}}"),
        ("[U, Seq2, D] @ [D, Heads_X] -> [U, Seq2, Heads_X]", "[U, Seq2, D] @ [D, Heads_X] -> [U, Seq2, Heads_X]"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert str(parse(text)) == normal
    assert parse(normal) == parse(text)


# A second string below the first marks the caret's position.
REFUSED = [
    ("", "^", "expected '['"),
    ("[M, K] @ [K, N]", "               ^", "expected '->'"),
    ("[M, K] [K, N] -> [M, N]", "       ^", "expected '@'"),
    ("[M, K] @ [K, N] -> [M, N] x", "                          ^", "ends after the result"),
    ("[m, K] @ [K, N] -> [m, N]", " ^", "capital letter"),
    ("[M; K] @ [K, N] -> [M, N]", "  ^", "expected ','"),
    ("[M_x, K] @ [K, N] -> [M, N]", "   ^", "{tp}"),
    ("[M_Xy, K] @ [K, N] -> [M, N]", "    ^", "braces"),
    ("[M_{}, K] @ [K, N] -> [M, N]", "    ^", "name of a mesh axis"),
    ("[M_{tp, K] @ [K, N] -> [M, N]", "         ^", "'}'"),
    ("[M_X, K_X] @ [K, N] -> [M, N]", "        ^", "already splits M"),
    ("[M_XX, K] @ [K, N] -> [M, N]", "    ^", "already splits M"),
    ("[M_X, K] @ [K, N_X] -> [M_X, N_X]", "                               ^", "axis X is used twice in one tensor"),
    ("[M, K_X] @ [K_X, N] -> [M_X, N]{U_X}", "                                  ^", "either split or partial"),
    ("[M, K_X] @ [K_X, N] -> [M, N]{U_XX}", "                                 ^", "used twice"),
    ("[M, K_X] @ [K_X, N] -> [M, N]{V_X}", "                              ^", "{U_X}"),
    ("[M, K_X] @ [K_X, N] -> [M, N]{U}", "                               ^", "expected '_'"),
    ("[M, K_X]{U_Y} @ [K_X, N] -> [M, N]", "        ^", "never partial"),
    ("[M, K] @ [K, N] -> [M, N]{U_X}", "                            ^", "nothing splits the contraction K over X"),
    ("[K] @ [K, N] -> [N]", "  ^", "at least two dims"),
    ("[M, K] @ [B, K, N] -> [M, N]", "          ^", "matrix"),
    ("[M, K] @ [K] -> [M]", "           ^", "matrix"),
    ("[M, K] @ [J, N] -> [M, N]", "          ^", "must start with K"),
    ("[M, K] @ [K, M] -> [M, N]", "             ^", "a name of their own"),
    ("[M, M] @ [M, N] -> [M, N]", "    ^", "twice"),
    ("[M, K] @ [K, N] -> [N, M]", "                    ^", "must be [M, N]"),
    ("[M, K] @ [K, N] -> [M]", "                     ^", "must be [M, N]"),
    ("[M, K] @ [K, N] -> [M, N, L]", "                          ^", "must be [M, N]"),
    ("[B, M, K] @ [K, N] -> [M, N]", "                       ^", "must be [B, M, N]"),
]


@pytest.mark.parametrize(("text", "caret", "what"), REFUSED, ids=[text or "empty" for text, _, _ in REFUSED])
def test_refused(text: str, caret: str, what: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse(text)
    message, shown, pointer = str(caught.value).split("\n")
    assert what in message
    assert (shown, pointer) == (f"    {text}", f"    {caret}")


def test_newlines_do_not_move_the_caret() -> None:
    with pytest.raises(NotationError) as caught:
        parse("[M, K] @\n[K, N] -> [M, Q]")
    _, shown, pointer = str(caught.value).split("\n")
    assert shown[pointer.index("^")] == "Q"


BRIEF = settings(max_examples=400 if LARGE else 50, deadline=None)
AXIS = st.one_of(st.sampled_from("WXYZ"), st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,4}", fullmatch=True))
NAME = st.from_regex(r"[A-Z][A-Za-z0-9]{0,3}", fullmatch=True)


@st.composite
def tensors(draw: st.DrawFn, names: list[str], may_be_partial: tuple[str, ...] = ()) -> Tensor:
    axes = draw(st.lists(AXIS, unique=True, max_size=4))
    cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=len(names) + 1, max_size=len(names) + 1)))
    dims = [Dim(name, tuple(axes[i:j])) for name, i, j in zip(names, cuts, cuts[1:], strict=False)]
    used = {axis for dim in dims for axis in dim.axes}
    free = sorted(set(may_be_partial) - used)
    return Tensor(tuple(dims), tuple(sorted(draw(st.sets(st.sampled_from(free)))) if free else ()))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    names = draw(st.lists(NAME, unique=True, min_size=3, max_size=5))
    *rows, k, n = names
    a = draw(tensors([*rows, k]))
    b = draw(tensors([k, n]))
    return Spec(a, b, draw(tensors([*rows, n], a.axes(k) + b.axes(k))))


@BRIEF
@given(specs())
def test_round_trip(spec: Spec) -> None:
    assert parse(str(spec)) == spec
    assert parse(str(spec).replace(" ", "")) == spec


@st.composite
def mutilated(draw: st.DrawFn) -> str:
    text = str(draw(specs()))
    at = draw(st.integers(0, len(text) - 1))
    return text[:at] + draw(st.sampled_from(["", "_", "X", "[", "]", "}", ","])) + text[at + 1 :]


@BRIEF
@given(st.one_of(mutilated(), st.text(alphabet="MKN_XYU{}[],@-> ab", max_size=40)))
def test_any_text_parses_or_points_into_itself(text: str) -> None:
    try:
        spec = parse(text)
    except NotationError as error:
        pointer = str(error).split("\n")[-1]
        assert 4 <= pointer.index("^") <= len(text) + 4
    else:
        assert parse(str(spec)) == spec
