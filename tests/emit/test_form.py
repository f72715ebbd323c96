"""Procs of one form print alike but for names, and whatever changes the text changes the form."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import stagedtensor as st
from stagedtensor.codegen.emit.c import cells_in_common, emit_module, used_buffers
from stagedtensor.codegen.emit.form import form_of
from stagedtensor.codegen.emit.share import Shared
from stagedtensor.codegen.layout import ROW_MAJOR, Layout, Reorder
from stagedtensor.codegen.loop_ir import (
    Apply,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Expr,
    For,
    Let,
    Load,
    LoopKind,
    Origin,
    Proc,
    Store,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.passes.plan_memory import plan_memory
from stagedtensor.codegen.pipeline import generate
from stagedtensor.numerics import Numerics
from stagedtensor.precision import bf16, f32, i64
from stagedtensor.program import solve_program
from stagedtensor.runtime import linking
from stagedtensor.runtime.target import target


def proc(
    *,
    names: str = "xyi",
    shape: tuple[int, ...] = (4, 8),
    layout: Layout = ROW_MAJOR,
    extent: int = 4,
    kind: LoopKind = "serial",
    op: str = "add",
    number: float = 2.0,
    same: bool = False,
    change: Callable[[Expr], Expr] = lambda value: value,
) -> Proc:
    """``y[i, 0] = x[i, 0] op number`` for every i."""
    x = Buffer(names[0], f32, shape, layout=layout)
    y = x if same else Buffer(names[1], f32, shape)
    i, value = Symbol(names[2], i64), Symbol("value", f32)
    cell = (Var(i), index(0))
    body = (
        Let(value, Apply(op, (Load(x, cell), Const(number, f32)), f32)),
        Store(y, cell, change(Var(value))),
    )
    loop = For(BlockIterator(i, index(extent), extent), body, kind)
    return Proc(names, tuple(dict.fromkeys((x, y))), (loop,))


def form(given: Proc) -> object:
    return form_of(given, {}, {})


def test_names_and_descriptions_do_not_count() -> None:
    other = replace(proc(names="abj"), origins=(Origin("a + 2", "model.py:3"),), path="elementwise")
    assert form(other) == form(proc())


@pytest.mark.parametrize(
    "other",
    [
        proc(shape=(4, 16)),
        proc(layout=Layout((Reorder((1, 0)),))),
        proc(extent=3),
        proc(kind="parallel"),
        proc(op="sub"),
        proc(number=3.0),
        proc(number=-2.0),
        proc(same=True),
        proc(change=lambda value: Cast(Cast(value, bf16), f32)),
        proc(change=lambda value: Apply("add", (value, value), f32)),
    ],
)
def test_everything_else_counts(other: Proc) -> None:
    assert form(other) != form(proc())


def test_zeros_of_both_signs_differ() -> None:
    assert form(proc(number=0.0)) != form(proc(number=-0.0))
    assert form(proc(number=float("nan"))) == form(proc(number=float("nan")))


def test_buffers_in_the_same_cells_count() -> None:
    given = proc()
    x, y = given.params
    assert form_of(given, {x: x, y: x}, {}) != form_of(given, {x: x, y: y}, {})


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_kernels_of_one_form_print_alike(precision: str) -> None:
    """Layers of a network: what one form would spare the printer is what it would print, but for names."""
    with st.Session():
        x = st.placeholder("x", batch=[8], output=[32])
        labels = st.placeholder("labels", batch=[8], prec=st.i32)
        h = x
        with st.stage("body", prec=precision):
            for at in range(3):
                normed = st.layer_norm(h)
                h = h + st.relu(st.param(f"w{at}", output=[32]) @ normed + st.param(f"b{at}", init=0.0))
        loss = st.cross_entropy(st.param("out", output=[4]) @ h, labels)
        step = st.sequence(st.grad_update(loss), st.sgd_update(loss, st.host_scalar("rate", 0.05), momentum=0.9))
        program = linking.for_codegen(solve_program(step, "step"), frozenset())
    module = generate(program, target("x86-64-v3"), Numerics())
    plan = plan_memory(module)
    forms = [form_of(kernel, cells_in_common(plan, kernel, used_buffers(kernel)), {}) for kernel in module.kernels]
    assert len(set(forms)) < len(forms), "layers have kernels of one form"
    firsts: dict[object, str | None] = {}
    shared = Shared()
    for place, (kernel, found) in enumerate(zip(module.kernels, forms, strict=True)):
        (printed,) = emit_module(
            replace(module, kernels=(kernel,)), target("x86-64-v3"), prelude=False, plan=plan
        ).kernels
        name = f"kernel_{place}"
        text = printed.text.replace(f" {printed.name}(", f" {name}(")
        words = set(re.findall(r"[A-Za-z_]\w*", text))
        first = shared.find(text, name, {word for word in words - _C if not word.startswith("st_")}) or name
        assert firsts.setdefault(found, first) == first


_C = {"const", "float", "for", "if", "int", "int32_t", "int64_t", "restrict", "uint16_t", "static", "void", "else"}
