"""The same model in both surfaces gives the same generated source, byte by byte.

Places count as well: the text stands on one line, and the Python model is compiled under the text's name with all its
code on that line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

import stagedtensor as st

Model = Callable[[Any], st.Tensor]

TEXT = """
let dense ~hid () x = relu ({ w } * x + { b = 0.; o = [hid] })

let mlp ~hid ~out () =
  let first = dense ~hid () in
  let second = dense ~hid () in
  fun x -> { w3; o = [out] } * second (first x)

let normed ~eps () x =
  let (mean, centred) = (x ++ "...|c => ...|0", x - (1. /. 6.) *. (x ++ "...|c => ...|0")) in
  { gain = 1. } *. centred *. rsqrt ((centred *. centred) ++ "...|c => ...|0" + eps) + mean

let scores ~heads () x =
  let q = { wq = kaiming (); i = [6]; o = [heads; 2] } * x in
  let k = { wk : f32; i = [6]; o = [heads; 2] } * x in
  softmax (q +* "...|h,d; ...|h,d => ...|h" k) *. [1.; 2.; -3.] + (q @^ "...|h,d => ...|h")

let net () =
  let norm = normed ~eps:1e-5 () in
  let look = scores ~heads:3 () in
  let body = mlp ~hid:8 ~out:5 () in
  fun x -> body (look (norm x))

let descent ~lr ?(decay = 0.) p m =
  m =: 0.9 *. m + p.grad;
  p =- lr *. (m + decay *. p)
"""

PYTHON = """
@st.block
def dense(hid):
    w, b = st.param("w"), st.param("b", output=[hid], init=0.0)
    return lambda x: st.relu(w @ x + b)

@st.block
def mlp(hid, out):
    first = dense(hid, label="first")
    second = dense(hid, label="second")
    w3 = st.param("w3", output=[out])
    return lambda x: w3 @ second(first(x))

@st.block
def normed(eps):
    gain = st.param("gain", init=1.0)
    def apply(x):
        mean = st.einsum("...|c => ...|0", x)
        centred = x - (1.0 / 6.0) * st.einsum("...|c => ...|0", x)
        scale = st.rsqrt(st.einsum("...|c => ...|0", centred * centred) + eps)
        return gain * centred * scale + mean
    return apply

@st.block
def scores(heads):
    wq = st.param("wq", init=st.kaiming(), input=[6], output=[heads, 2])
    wk = st.param("wk", prec=st.f32, input=[6], output=[heads, 2])
    def apply(x):
        q = wq @ x
        k = wk @ x
        weights = st.softmax(st.einsum("...|h,d; ...|h,d => ...|h", q, k))
        return weights * [1.0, 2.0, -3.0] + st.einsum("...|h,d => ...|h", q, reduce="max")
    return apply

@st.block
def net():
    norm = normed(1e-5, label="norm")
    look = scores(3, label="look")
    body = mlp(8, 5, label="body")
    return lambda x: body(look(norm(x)))

def descent(p, m, lr, decay=0.0):
    return st.computation("m =: 0.9 *. m + p.grad; p =- lr *. (m + decay *. p)", p=p, m=m, lr=lr, decay=decay)
"""


def of_text() -> tuple[Callable[[], Model], Callable[..., st.Comp]]:
    module = st.language.parse(" ".join(TEXT.split("\n")), "models.st")
    return module.net, module.descent


def of_python() -> tuple[Callable[[], Model], Callable[..., st.Comp]]:
    tree = ast.parse(PYTHON)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno, node.end_lineno = 1, 1  # type: ignore[attr-defined]
            node.col_offset, node.end_col_offset = 0, 0  # type: ignore[attr-defined]
    scope: dict[str, Any] = {"st": st}
    exec(compile(tree, "models.st", "exec"), scope)
    return scope["net"], scope["descent"]


Surface = Callable[[], tuple[Callable[[], Model], Callable[..., st.Comp]]]


def training_step(surface: Surface, device: str, twins: str | None = None) -> tuple[str, list[str], list[str]]:
    """Return the source of one training step, the labels of its parameters and their solved shapes."""
    with st.Session():
        net, descent = surface()
        with st.master_weights(twins):
            model = net()
        x = st.placeholder("x", batch=[4], output=[6])
        y = st.placeholder("y", batch=[4], prec=st.i32)
        loss = st.cross_entropy(model(x), y)
        rate = st.host_scalar("rate", 0.1)
        updates = [descent(p, st.param(f"{p.name}.m", trainable=False, init=0.0), lr=rate) for p in loss.params]
        step = st.sequence(st.grad_update(loss), *updates)
        with st.Context(device) as ctx:
            routine = ctx.compile(step, name="step")
            source = routine.source if device == "cpu" else str(routine)
        return source, [p.name for p in loss.params], [f"{p.shape} {p.precision}" for p in loss.params]


@pytest.mark.parametrize("twins", [None, pytest.param("bf16", marks=pytest.mark.slow)])
def test_both_surfaces_give_the_same_source(twins: str | None) -> None:
    source, labels, shapes = training_step(of_text, "cpu", twins)
    assert (source, labels, shapes) == training_step(of_python, "cpu", twins)
    assert "models.st:1" in source
    assert labels == [
        "net.norm.normed.gain",
        "net.look.scores.wq",
        "net.look.scores.wk",
        "net.body.mlp.first.dense.w",
        "net.body.mlp.first.dense.b",
        "net.body.mlp.second.dense.w",
        "net.body.mlp.second.dense.b",
        "net.body.mlp.w3",
    ]


@pytest.mark.slow
def test_the_comparison_can_fail() -> None:
    def other() -> tuple[Callable[[], Model], Callable[..., st.Comp]]:
        module = st.language.parse(" ".join(TEXT.replace("0.9", "0.8").split("\n")), "models.st")
        return module.net, module.descent

    assert training_step(of_text, "cpu")[0] != training_step(other, "cpu")[0]
