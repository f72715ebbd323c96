"""What someone meets in the first hour: printed objects, and the messages of natural mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.errors import ContextError, LanguageError, ShapeError

pytestmark = pytest.mark.usefixtures("session")


def test_computations_print_different_tensors_by_different_names() -> None:
    x = st.placeholder("x", batch=[4], output=[3])
    hidden = st.param("w1", output=[5]) @ x + st.param("b1", output=[5])
    text = repr(st.grad_update(st.sum(st.param("w2", output=[2]) @ hidden + st.param("b2", output=[2]))))
    assert "matmul_2 =:+ w2 * add" in text
    assert "add_2 =: matmul_2 + b2" in text
    assert "matmul.grad =+ add.grad" in text
    assert "matmul_2.grad =+ add_2.grad" in text


def test_parameters_of_ones_own_optimizer_are_drawn_with_the_computation() -> None:
    w = st.param("w", output=[3], init=1.0)
    loss = st.sum(w * w)
    state = st.param("w.squares", init=0.5, trainable=False)
    step = st.sequence(st.grad_update(loss), st.computation("v =: 0.5 *. v + g *. g; p =- v", p=w, v=state, g=w.grad))
    with st.Context("reference") as ctx:
        ctx.init_params(step)
        ctx.run(ctx.compile(step))
        assert ctx.get_values(w).tolist() == [1.0 - 4.25] * 3
    with st.Context("reference") as ctx:
        ctx.init_params(loss)
        with pytest.raises(ContextError, match="squares"):
            ctx.run(ctx.compile(step))


def test_blocks_say_what_to_do_with_a_tensor() -> None:
    x = st.placeholder("x", batch=[4], output=[3])
    for call in (lambda: nn.dense(x), lambda: nn.dense(10, x), lambda: nn.layer_norm(x), lambda: nn.mlp(x)):
        with pytest.raises(TypeError, match=r"given a tensor where its configuration stands(?s:.*)y = layer\(x\)"):
            call()
    with pytest.raises(TypeError, match=r"^dense\(\) got an unexpected keyword"):  # not about tensors
        nn.dense(10, units=3)


def test_two_layers_of_one_name_are_told_about_labels() -> None:
    x = st.placeholder("x", batch=[4], output=[3])
    y = nn.dense(2)(nn.dense(5)(x))
    with st.Context("reference") as ctx, pytest.raises(ContextError, match="label="):
        ctx.init_params(y)
    y = nn.dense(2)(nn.dense(5, label="first")(x))
    with st.Context("reference") as ctx:
        ctx.init_params(y)


def test_an_expression_that_nobody_asked_for_is_told_apart() -> None:
    x = st.placeholder("x", output=[3])
    wrong = x + st.placeholder("y", output=[4])
    with pytest.raises(ShapeError) as of_itself:
        assert wrong.shape
    with pytest.raises(ShapeError) as of_another:
        assert (x * 2.0).shape
    assert "note" not in str(of_itself.value)
    assert str(of_another.value).startswith(str(of_itself.value))
    assert "no part of what was asked for" in str(of_another.value)


def test_letters_that_look_like_names() -> None:
    for spec, expected in (("...|in; in->out => ...|out", True), ("...|i,j; i->o => ...|o", False)):
        x, w = st.placeholder("x", batch=[4], output=[3]), st.param("w", input=[3], output=[2])
        with pytest.raises(ShapeError, match="has 1 axis where") as found:
            assert st.einsum(spec, x, w).shape
        assert ("each letter is an axis: 'in' is i, n" in str(found.value)) is expected


def test_tensors_say_where_things_are() -> None:
    x = st.placeholder("x", output=[3])
    with pytest.raises(AttributeError, match=r"'x' has no attribute 'mean'(?s:.*)st\.sum\(t\)"):
        x.mean()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="get_values"):
        float(x)
    assert repr(st.softmax(x)) == "<tensor softmax: 3, f32, composite>"


def test_printed_objects() -> None:
    x = st.placeholder("x", output=[3])
    scaler = st.LossScaler(init_scale=8.0)
    assert repr(scaler) == "<loss scaler: scale 8, 0 good steps since it changed, 0 of 0 steps skipped>"
    waiting = st.language.parse('let f x = einsum "i=>"').f(x)
    assert repr(waiting) == "<einsum, which waits for more arguments after 1>"
    with pytest.raises(LanguageError, match="unexpected end of text"):
        st.language.parse("let f x = x +")
    with st.Context("cpu") as ctx:
        routine = ctx.compile(st.softmax(x), name="probabilities")
        assert repr(routine).startswith(f"<routine probabilities: {len(routine.kernels)} kernel")
        assert ("1 kernels" in repr(routine)) is False
        ctx.set_values(x, np.ones(3))
        report = str(ctx.memory_report())
        assert report.startswith("stored between runs: ")
        assert "while routine probabilities runs: an arena of " in report
        assert re.search(r"peak: [\d,]+ bytes", report)


def test_shape_errors_name_the_function_that_was_called() -> None:
    scores, labels = st.placeholder("scores", batch=[8]), st.placeholder("labels", batch=[8], prec=st.i32)
    with pytest.raises(
        ShapeError, match=r"^cross_entropy \(max\): the output row of 'scores' has 0 axes, at least 1 is"
    ):
        assert st.cross_entropy(scores, labels).shape
    with pytest.raises(TypeError, match=r"st\.concat\(\[a, b\]"):
        st.concat(scores, labels)  # type: ignore[arg-type]


def test_a_printed_routine_fits_the_terminal_and_is_one_line_a_kernel_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = st.placeholder("x", batch=[4], output=[3])
    loss = st.mean(nn.mlp([16, 2], label="a_network_with_a_long_name")(x) ** 2)
    with st.Context("reference") as ctx:
        routine = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1, momentum=0.9)), name="step")
        lines = str(routine).splitlines()
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "72")
        shown = str(routine).splitlines()
        routine.save(tmp_path)
    assert len(lines) == len(routine.kernels) + 2
    assert max(map(len, shown)) <= 72 < max(map(len, lines))
    for kernel, line in zip(routine.kernels, lines[2:], strict=True):
        assert line.startswith(kernel.name)
        assert line.endswith("; ".join(kernel.expressions))
        at = next(number for number, text in enumerate(shown) if text.startswith(kernel.name))
        assert kernel.path in " ".join(part.strip() for part in shown[at : at + 6])
    assert (tmp_path / "step.txt").read_text().splitlines() == lines


def test_a_list_of_tensors_is_told_about_concat() -> None:
    x = st.placeholder("x", batch=[4], output=[3])
    for call in (lambda: st.sum([x, x]), lambda: x + [x, 1.0], lambda: st.relu((x, x))):  # noqa: RUF005
        with pytest.raises(TypeError, match=r"(list|tuple) of tensors(?s:.*)st\.concat(?s:.*)test_first_mistakes"):
            call()


@pytest.mark.parametrize("count", [0, 5])
def test_an_extent_out_of_its_range_names_the_range(count: int) -> None:
    with st.Session(), st.Context("reference") as ctx:
        x = st.placeholder("x", batch=[st.dynamic("n", max=4)], output=[2])
        with pytest.raises(ContextError, match=r"(?s)has shape n<=4 \| -> 2.*\n  n may be 1 to 4 in a run$"):
            ctx.set_values(x, np.ones((count, 2)))


@pytest.mark.parametrize("device", ["cpu", "cuda-emulated", "reference"])
def test_what_no_memory_holds_is_named(device: str) -> None:
    x, size = st.placeholder("x", output=[3]), 1 << 60
    with st.Context(device) as ctx:
        ctx.run(_filled(ctx, ctx.compile(st.exp(x), name="small"), x))
        with pytest.raises(
            ContextError, match=rf"too little memory for placeholder 'y' \(.*shape \[{size}\].*4\.0 EiB"
        ) as caught:
            ctx.compile(st.sum(st.placeholder("y", output=[size])))
        assert re.search(r"holds:\n(.*\n)* +12 bytes  x  f32 3\n", str(caught.value))


def test_temporaries_that_no_memory_holds_are_named() -> None:
    size = 1 << 22
    left, right = st.placeholder("left", output=[size]), st.placeholder("right", output=[size])
    scores = st.einsum("i; j => i j", left, right)
    with st.Context("cpu") as ctx:
        with pytest.raises(ContextError, match="the temporaries of routine 'wide'") as caught:
            ctx.compile(st.sum(st.softmax(scores.named("scores"))), name="wide", fusion=False)
        assert re.search(r"largest of these:\n(.*\n)* +64.0 TiB  scores  f32", str(caught.value))
        assert re.search(r"holds:\n(.*\n)* +16.0 MiB  left  f32", str(caught.value))


def _filled(ctx: st.Context, routine: st.Routine, x: st.Tensor) -> st.Routine:
    ctx.set_values(x, np.ones(3))
    return routine
