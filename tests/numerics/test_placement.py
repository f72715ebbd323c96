"""Placement never shows: intermediates virtual, materialised, or as the compiler likes, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.node import Node, Placement, Role, ancestors

from .running import FUSED, REFERENCE, UNFUSED, Array, Program, Setting, assert_same_bits, run

Build = Callable[[], tuple[list[tuple[st.Tensor, Array]], list[st.Tensor], st.Comp | None]]


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def intermediates(roots: list[st.Tensor]) -> list[Node]:
    nodes = ancestors([root.node for root in roots])
    found = [node for node in nodes if node.role is Role.OP and node not in {root.node for root in roots}]
    return found + [node.gradient for node in found if node.gradient is not None]


def placed(build: Build, placement: str) -> Program:
    feeds, reads, comp = build()
    for node in intermediates(reads):
        node.placement = Placement(placement)
    return Program(feeds, reads, comp)


def elementwise(prec: str) -> Build:
    def build() -> tuple[list[tuple[st.Tensor, Array]], list[st.Tensor], st.Comp | None]:
        x, y = (st.placeholder(name, batch=[7], output=[33], prec=prec) for name in "xy")
        z = st.placeholder("z", output=[33], prec="f16")
        a = st.tanh(x * y) + z
        b = st.cast(a, "f8e5m2") * 3.0 - st.where(x > z, a, y)
        c = st.exp(-st.abs(b)) / (1.0 + a * a)
        reads = [st.maximum(c, b) * z, st.cast(st.relu(b + c), "f8e4m3", saturate=True), st.cast(c * 100.0, "i16")]
        return [(x, draw(1, 7, 33)), (y, draw(2, 7, 33)), (z, draw(3, 33))], reads, None

    return build


def layout(prec: str) -> Build:
    """Views, slices, concatenations and gathers between pointwise ops."""

    def build() -> tuple[list[tuple[st.Tensor, Array]], list[st.Tensor], st.Comp | None]:
        x = st.placeholder("x", batch=[6], output=[4, 8], prec=prec)
        ids = st.placeholder("ids", batch=[5], prec="i32")
        table = st.placeholder("table", input=[9], output=[11], prec=prec)
        a = st.reshape(x * 1.7, output=[8, 4]) + 0.3
        b = st.concat([st.transpose(a), x * x], axis=("output", 0))
        c = st.narrow(b, 1, 7, axis=("output", 0)) * 0.9
        rows = st.gather(table * table + 0.1, ids) - 1.0
        return (
            [(x, draw(1, 6, 4, 8)), (ids, np.array([10, 0, 3, 3, -4])), (table, draw(2, 11, 9))],
            [c[1:5], rows, c[2]],
            None,
        )

    return build


def gradients(prec: str) -> Build:
    def build() -> tuple[list[tuple[st.Tensor, Array]], list[st.Tensor], st.Comp | None]:
        x, y = (st.placeholder(name, batch=[7], output=[33], prec=prec, requires_grad=True) for name in "xy")
        a = st.tanh(x * y) + x
        b = st.exp(-st.abs(a)) * y
        loss = st.sum(b / (1.5 + a * a))
        if prec != "f32":
            st.PrecisionPolicy.uniform(prec).apply(loss)
        assert x.grad is not None
        assert y.grad is not None
        feeds = [(x, draw(1, 7, 33)), (y, draw(2, 7, 33))]
        return feeds, [x.grad, y.grad], st.grad_update(loss)

    return build


SETTINGS = [
    ("virtual", FUSED),
    ("materialized", FUSED),
    ("auto", FUSED),
    ("materialized", UNFUSED),
    ("auto", REFERENCE),
]


@pytest.mark.parametrize("make", [elementwise, layout, gradients], ids=lambda make: make.__name__)
@pytest.mark.parametrize("prec", ["f32", "bf16", pytest.param("f16", marks=pytest.mark.slow)])
def test_placement_does_not_show(make: Callable[[str], Build], prec: str) -> None:
    build = make(prec)
    first = run(lambda: placed(build, "auto"), UNFUSED)
    for placement, setting in SETTINGS:
        for at, (found, expected) in enumerate(zip(run(lambda: placed(build, placement), setting), first, strict=True)):
            assert_same_bits(found, expected, f"{prec} result {at}, {placement} on {setting}")


def test_virtual_reductions_are_recomputed_with_the_same_bits() -> None:
    """A row sum read by two consumers, and a softmax: recomputed or stored, one order of addition."""

    def build() -> tuple[list[tuple[st.Tensor, Array]], list[st.Tensor], st.Comp | None]:
        x = st.placeholder("x", batch=[9], output=[67], prec="bf16")
        total = st.sum(x * x, axis="output", keepdims=True)
        reads = [x / total, st.softmax(x * total), total * 2.0]
        return [(x, draw(5, 9, 67))], reads, None

    first = run(lambda: placed(build, "auto"), UNFUSED)
    for placement, setting in (("virtual", FUSED), ("materialized", FUSED), ("auto", FUSED), ("virtual", UNFUSED)):
        for at, (found, expected) in enumerate(zip(run(lambda: placed(build, placement), setting), first, strict=True)):
            assert_same_bits(found, expected, f"result {at}, {placement} on {setting}")


def test_kept_intermediates_change_nothing() -> None:
    build = elementwise("bf16")

    def program(keep: bool) -> Program:
        feeds, reads, _ = build()
        more = [node.tensor for node in intermediates(reads) if not node.is_gradient] if keep else []
        return Program(feeds, [*reads, *more])

    plain, kept = run(lambda: program(False)), run(lambda: program(True), Setting(threads=2))
    for at, (found, expected) in enumerate(zip(kept, plain, strict=False)):
        assert_same_bits(found, expected, f"result {at}")
    assert len(kept) > len(plain) + 8
