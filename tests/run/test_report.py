"""The HTML page about a routine."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import stagedtensor as st
from stagedtensor.report import layers


def test_the_page_is_self_contained_and_names_what_the_routine_does(tmp_path: Path) -> None:
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", batch=[4], output=[8])
        y = st.placeholder("y", batch=[4], prec=st.i32)
        with st.master_weights("bf16"):
            w, b = st.param("weight"), st.param("bias", output=[3], init=0.0)
        loss = st.cross_entropy(w @ x + b, y)
        routine = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1, momentum=0.9)), name="step")
        path = st.report(routine, tmp_path / "step.html")
        text = path.read_text(encoding="utf-8")
    for expected in ("routine step", "weight", "bf16", "f32", "flops", "arena", "GFLOP/s", "void step("):
        assert expected in text
    assert "<script" not in text
    assert "http" not in text
    for kernel in routine.kernels:
        assert kernel.name in text
    drawings = [part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(drawings) == 3
    for drawing in drawings:
        ElementTree.fromstring("<svg" + drawing)
    depth = layers(routine.kernels)
    assert depth[0] == 0
    assert max(depth) >= 3


def test_anything_but_a_routine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"report takes a routine from ctx\.compile, not int"):
        st.report(3, tmp_path / "no.html")  # type: ignore[arg-type]
