"""Kernels that differ in names alone share one function, and nothing else does."""

from __future__ import annotations

import re

import numpy as np

import stagedtensor as st
from stagedtensor.codegen.emit.share import Shared

FIRST = """\
// relu(a)  (model.py:3)
static void f(const float *restrict a, float *restrict y) {
    for (int64_t i = 0; i < 4; i++) {
        y[i] = a[i] - 2.0f * st_expf(a[i]);
    }
}
"""


def found(text: str, given: set[str]) -> str | None:
    shared = Shared()
    assert shared.find(FIRST, "f", {"a", "y", "i"}) is None
    assert shared.find(FIRST, "f", {"a", "y", "i"}) is None, "it is the first of its kind still"
    return shared.find(text, "g", given)


def test_names_comments_and_line_breaks_do_not_count() -> None:
    text = FIRST.replace("model.py:3", "model.py:9").replace(" f(", " g(").replace("i ", "j ")
    text = re.sub(r"\ba\b", "layer1_a", text).replace("[i]", "[j]").replace("i++", "j++")
    text = text.replace(" = layer1_a[j]", " =\n            layer1_a[j]")
    assert found(text, {"layer1_a", "y", "j"}) == "f"


def test_everything_else_counts() -> None:
    text, given = FIRST.replace(" f(", " g("), {"a", "y", "i"}
    assert found(text, given) == "f"
    for old, new in (
        ("2.0f", "3.0f"),
        ("st_expf", "st_logf"),
        ("i < 4", "i < 5"),
        ("y[i] = a[i]", "y[i] = y[i]"),
        ("const float", "float"),
        ("a[i] - 2.0f * st_expf(a[i])", "2.0f * st_expf(a[i]) - a[i]"),
    ):
        assert old in text
        assert found(text.replace(old, new), given) is None, new
    # a name that is not the function's own to give stands for itself
    assert found(text.replace("st_expf", "tile"), given) is None


def test_a_parameter_may_be_called_like_its_function() -> None:
    shared = Shared()
    text = "static void {}(const float *a, float *{}) {{ {}[0] = a[0]; }}\n"
    assert shared.find(text.format("y", "y", "y"), "y", {"a", "y"}) is None
    assert shared.find(text.format("y_2", "y", "y"), "y_2", {"a", "y"}) == "y"
    assert shared.find(text.format("z", "z", "a"), "z", {"a", "z"}) is None


def test_parameters_correspond_by_position() -> None:
    text = FIRST.replace(" f(", " g(").replace("y", "b").replace("*restrict a", "*restrict y").replace("a[i]", "y[i]")
    assert found(text, {"y", "b", "i"}) == "f"
    swapped = "static void {}(const float *{}, const float *{}, float *y) {{ y[0] = a[0] - b[0]; }}\n"
    shared = Shared()
    assert shared.find(swapped.format("f", "a", "b"), "f", {"a", "b", "y"}) is None
    assert shared.find(swapped.format("g", "b", "a"), "g", {"a", "b", "y"}) is None


def test_layers_of_a_network_share_their_functions() -> None:
    x = st.placeholder("x", batch=[8], output=[8])
    y = x
    for at in range(4):
        y = st.relu(st.param(f"w{at}", output=[8]) @ y + st.param(f"b{at}", output=[8]))
    rng = np.random.default_rng(0)
    with st.Context("cpu") as ctx, st.Context("reference") as reference:
        ctx.init_params(y)
        for p in y.params:
            ctx.set_values(p, rng.normal(size=p.shape.dims).astype(np.float32))
        reference.copy_from(ctx, y.params)
        cells = rng.normal(size=(8, 8)).astype(np.float32)
        results = []
        for device in (ctx, reference):
            device.set_values(x, cells)
            routine = device.compile(y, name="layers")
            device.run(routine)
            results.append(device.get_values(y))
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
        source = ctx.compile(y, name="layers").source
    functions = re.findall(r"^ST_KERNEL void (\w+)\(", source, re.M)
    entry = source[source.index("void layers(") :]
    called = [name for name in re.findall(r"\b(\w+)\(", entry) if name in functions]
    assert len(called) >= 4
    assert set(called) == set(functions)
    assert len(functions) < len(called)
    assert re.search(r"\);  // .*w3 @ .*test_share\.py", entry)
