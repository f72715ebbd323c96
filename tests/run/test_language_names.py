"""Names of parameters that are words of C, operators of nothing, or alike once sanitised: the source still compiles."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st

NAMES = ["int", "double", "main", "exp", "restrict", "inline", "NULL", "errno", "i0", "acc", "x", "v0", "é", "_1"]


def test_parameters_named_like_anything_compile() -> None:
    terms = " + ".join(f"{{ {name} = {at + 1}. }}" for at, name in enumerate(NAMES))
    text = f"let for () x = x *. ({terms})\nlet a_b () x = x *. {{ c = 2. }}\nlet a () = {{ b_c = 3. }}\n"
    net = "let static () = let for = for () in let a_b = a_b () in let a = a () in fun x -> for (a_b x) *. a"
    with st.Session(), st.Context("cpu") as ctx:
        model = st.language.parse(text + net, "while.st").static()
        x = st.placeholder("x", output=[2], prec=st.f32)
        y = st.sum(model(x))
        step = ctx.compile(st.sequence(st.grad_update(y)), name="switch")
        ctx.init_params(y)
        ctx.set_values(x, np.array([1.0, 2.0], np.float32))
        ctx.run(step)
        expected = 3.0 * sum(range(1, len(NAMES) + 1)) * 2.0 * 3.0
        assert ctx.get_values(y) == pytest.approx(expected)
        assert [p.name for p in y.params][:2] == ["static.for.for.int", "static.for.for.double"]


def test_two_models_in_one_computation_need_labels() -> None:
    text = "let d () x = { w; o = [2] } * x"
    with st.Session(), st.Context("reference") as ctx:
        nets = st.language.parse(text, "nets.st")
        x = st.placeholder("x", output=[2])
        y = nets.d()(nets.d()(x))
        with pytest.raises(st.errors.ContextError, match=r"d\.w(?s:.*)nets\.st:1"):
            ctx.init_params(y)
        y = nets.d(label="first")(nets.d(label="second")(x))
        ctx.init_params(y)
        assert {p.name for p in y.params} == {"first.d.w", "second.d.w"}
