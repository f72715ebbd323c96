"""Blocks: paths of parameters, stages, and what may be made when."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import stagedtensor as st
from stagedtensor.errors import LanguageError

pytestmark = pytest.mark.usefixtures("session")

Layer = Callable[[st.Tensor], st.Tensor]


@st.block
def dense(hid: int) -> Layer:
    w, b = st.param("w"), st.param("b", output=[hid], init=0.0)
    return lambda x: st.relu(w @ x + b)


def names(t: st.Tensor) -> list[str]:
    return [p.name for p in t.params]


def x() -> st.Tensor:
    return st.placeholder("x", batch=[2], output=[3])


def test_labels_and_block_names_make_the_path() -> None:
    @st.block
    def mlp(hid: int) -> Layer:
        first = dense(hid, label="first")
        second = dense(hid)
        third = dense(hid)
        w = st.param("w", output=[2])
        return lambda x: w @ third(second(first(x)))

    assert names(mlp(4)(x())) == [
        "mlp.first.dense.w",
        "mlp.first.dense.b",
        "mlp.dense.w",
        "mlp.dense.b",
        "mlp.dense_1.w",
        "mlp.dense_1.b",
        "mlp.w",
    ]


def test_names_do_not_depend_on_what_a_process_has_built() -> None:
    first, second = dense(4)(x()), dense(4)(x())
    assert names(first) == names(second) == ["dense.w", "dense.b"]
    assert names(dense(4, label="other")(x())) == ["other.dense.w", "other.dense.b"]


def test_a_label_that_repeats_is_numbered() -> None:
    @st.block
    def stack(depth: int) -> Layer:
        layers = [dense(4, label="layer") for _ in range(depth)]

        def apply(x: st.Tensor) -> st.Tensor:
            for layer in layers:
                x = layer(x)
            return x

        return apply

    found = names(stack(3)(x()))
    assert found[::2] == ["stack.layer.dense.w", "stack.layer_1.dense.w", "stack.layer_2.dense.w"]


def test_a_number_is_never_taken_twice() -> None:
    @st.block
    def outer() -> list[Layer]:
        return [dense(4, label="dense_1"), dense(4), dense(4)]

    layers = outer()
    found = [names(layer(x()))[0] for layer in layers]
    assert len(set(found)) == 3


def test_applying_twice_shares_and_calling_twice_does_not() -> None:
    layer = dense(4)
    assert [p.node for p in layer(x()).params] == [p.node for p in layer(x()).params]
    assert not {p.node for p in dense(4)(x()).params} & {p.node for p in layer(x()).params}


def test_parameters_outside_blocks_keep_their_names() -> None:
    dense(4)
    assert st.param("w", output=[1]).name == "w"


def test_the_path_ends_with_the_block_also_after_an_error() -> None:
    @st.block
    def broken() -> None:
        raise KeyError("anything")

    with pytest.raises(KeyError):
        broken()
    assert st.param("w", output=[1]).name == "w"


def test_a_parameter_made_at_application_is_an_error() -> None:
    @st.block
    def wrong() -> Layer:
        return lambda x: st.param("w", output=[4]) @ x

    model = wrong()
    with pytest.raises(LanguageError, match=r"parameter 'w' would be made anew at every application of 'wrong'"):
        model(x())


def test_a_block_called_at_application_is_an_error() -> None:
    @st.block
    def wrong() -> Layer:
        return lambda x: dense(4)(x)

    model = wrong()
    with pytest.raises(LanguageError, match=r"block 'dense' would be made anew.*of 'wrong'(?s:.*)test_blocks\.py"):
        model(x())


def test_a_second_name() -> None:
    @st.block(name="linear")
    def anything() -> st.Tensor:
        return st.param("w", output=[1])

    assert anything().name == "linear.w"
    assert repr(anything) == "<block linear>"


def test_streams_are_keyed_by_the_path() -> None:
    @st.block
    def pair() -> tuple[Layer, Layer]:
        return dense(4, label="first"), dense(4, label="second")

    first, second = pair()
    y = st.sum(first(x()) + second(x()))
    ctx = st.Context("reference")
    ctx.init_params(y, seed=0)
    a, b = (p for p in y.params if p.name.endswith(".w"))
    assert (ctx.get_values(a) != ctx.get_values(b)).any()


def test_one_computation_has_each_name_once() -> None:
    y = st.sum(dense(4)(x()) + dense(4)(x()))
    ctx = st.Context("reference")
    with pytest.raises(st.errors.ContextError, match=r"dense\.w"):
        ctx.init_params(y)


def test_threads_do_not_share_the_path() -> None:
    found = []

    @st.block
    def outer() -> None:
        thread = threading.Thread(target=lambda: found.append(st.param("w", output=[1]).name))
        thread.start()
        thread.join()

    outer()
    assert found == ["w"]


@pytest.mark.parametrize("label", ["", 3])
def test_a_label_is_a_non_empty_string(label: object) -> None:
    with pytest.raises(TypeError, match="label is a non-empty string"):
        dense(4, label=label)  # type: ignore[arg-type]


def test_twins_of_block_parameters() -> None:
    with st.master_weights("bf16"):
        layer = dense(4)
    assert names(layer(x())) == ["dense.w", "dense.b"]
