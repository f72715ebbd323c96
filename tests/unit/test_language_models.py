"""Models as text: what they build, with which names and at which stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import LanguageError

pytestmark = pytest.mark.usefixtures("session")

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.st"


def x(*output: int, batch: int = 2) -> st.Tensor:
    return st.placeholder("x", batch=[batch], output=list(output or (3,)))


def names(t: st.Tensor) -> list[str]:
    return [p.name for p in t.params]


def value(text: str, **given: Any) -> Any:
    """Return what ``let f ~names = text`` gives for configuration."""
    labels = " ".join(f"~{name}" for name in given)
    module = st.language.parse(f"let f {labels} = {text}")
    return module.f(**given) if given else module.f


def cells(t: st.Tensor) -> Any:
    ctx = st.Context("reference")
    ctx.init_params(t)
    ctx.run(ctx.compile([t]))
    return np.asarray(ctx.get_values(t)).astype(np.float64)


# -- staging and names ------------------------------------------------------------------------------------------------


def test_the_example() -> None:
    nets = st.language.load(EXAMPLE)
    model = nets.mlp(hid=64, out=10)()
    logits = model(x(784, batch=32))
    assert str(logits.shape) == "32 | -> 10"
    assert names(logits) == [
        "mlp.first.dense.w",
        "mlp.first.dense.b",
        "mlp.second.dense.w",
        "mlp.second.dense.b",
        "mlp.w3",
    ]
    assert dir(nets) == ["dense", "mlp", "momentum"]
    assert repr(nets).startswith("<model text ")
    assert repr(nets.mlp).startswith("<block mlp of ")


def test_paths_without_labels() -> None:
    nets = st.language.parse(
        "let d ~n () x = { w; o = [n] } * x\n"
        "let net () = let layers = [d ~n:4 (); d ~n:5 ()] in let (a, b) = (d ~n:6 (), layers) in\n"
        "  fun x -> let (p, q) = b in a (q (p x))"
    )
    assert names(nets.net()(x())) == ["net.d.w", "net.d_1.w", "net.d_2.w"]


def test_labels_pass_through_let_and_if() -> None:
    nets = st.language.parse(
        "let d () x = { w; o = [4] } * x\n"
        "let net ~deep () = let a = if deep then (let n = 1 in d ()) else d () in let b = d in let c = b () in\n"
        "  fun x -> c (a x)"
    )
    assert names(nets.net(deep=True)()(x())) == ["net.a.d.w", "net.c.d.w"]


def test_labels_from_python() -> None:
    nets = st.language.load(EXAMPLE)
    for layer in (nets.dense(hid=4)(label="left"), nets.dense(hid=4, label="left")()):
        assert names(layer(x())) == ["left.dense.w", "left.dense.b"]
    with pytest.raises(LanguageError, match="no block, so it takes no label"):
        st.language.parse("let f x = x").f(x(), label="a")


def test_blocks_of_python_and_of_texts_nest() -> None:
    nets = st.language.load(EXAMPLE)

    @st.block
    def linear(n: int) -> Any:
        w = st.param("w", output=[n])
        return lambda x: w @ x

    @st.block
    def both() -> Any:
        first = nets.dense(hid=4)(label="first")
        second = linear(5)
        return lambda x: second(first(x))

    assert names(both()(x())) == ["both.first.dense.w", "both.first.dense.b", "both.linear.w"]
    outer = st.language.parse("let outer ~layer () = let inner = layer ~n:3 () in fun x -> inner x").outer
    assert names(outer(layer=linear)()(x())) == ["outer.inner.linear.w"]


def test_one_stage_shares_and_two_do_not() -> None:
    nets = st.language.load(EXAMPLE)
    layer = nets.dense(hid=3)()
    assert names(layer(layer(x()))) == ["dense.w", "dense.b"]
    other = nets.dense(hid=3)()
    assert not {p.node for p in layer(x()).params} & {p.node for p in other(x()).params}


def test_parameters_are_made_at_the_stage_in_order_of_the_text() -> None:
    made: list[str] = []
    text = (
        "let net () =\n  let direct = { a; o = [1] } in\n  let helper x = { b; o = [2] } * x in\n"
        "  fun x -> (fun y -> { c; o = [3] } * y) (helper x) + { d } + direct"
    )
    model = st.language.parse(text).net()
    made += names(model(x()))
    assert made == [f"net.{name}" for name in "abcd"]


def test_twins_of_text_parameters() -> None:
    layer_of = st.language.load(EXAMPLE).dense(hid=3)
    with st.master_weights("bf16"):
        layer = layer_of()
    y = layer(x())
    assert [str(p.precision) for p in y.params] == ["f32", "f32"]
    assert names(y) == ["dense.w", "dense.b"]


def test_configuration_is_given_in_parts_and_by_position() -> None:
    nets = st.language.parse("let d n ?(scale = 2.) ~out () x = scale *. ({ w; o = [n * out] } * x)")
    assert str(nets.d(4)(out=2)()(x()).shape) == "2 | -> 8"
    assert str(nets.d(4, out=3, scale=1.0)()(x()).shape) == "2 | -> 12"


def test_inline_parameters() -> None:
    nets = st.language.parse(
        "let b ~init () = ({ w : bf16 = kaiming (); i = [3]; o = [2; 2] }, { s = 0.; trainable = false },\n"
        "  { m = [(1, 2); (3, 4); (5, 6)] }, { v = [1; 2] }, { given = init })"
    )
    w, s, m, v, given = nets.b(init=np.arange(6.0).reshape(2, 3))()
    assert (str(w.shape), str(w.precision), w.grad is not None) == ("3 -> 2,2", "bf16", True)
    assert s.grad is None
    assert (str(m.shape), str(v.shape), str(given.shape)) == ("2 -> 3", "2", "3 -> 2")
    np.testing.assert_array_equal(cells(m * 1.0), [[1, 2], [3, 4], [5, 6]])


def test_places_are_those_of_the_text() -> None:
    layer = st.language.load(EXAMPLE).dense(hid=3)()
    y = layer(x())
    assert y.node.source.quoted().startswith("at mlp.st:4: let dense ~hid () x = relu")
    assert all(str(p.node.source) == "mlp.st:4" for p in y.params)


def test_the_branch_that_is_taken_decides_which_parameters_there_are() -> None:
    nets = st.language.parse("let d ~bias () x = if bias then { w; o = [2] } * x + { b } else { w; o = [3] } * x\n")
    assert names(nets.d(bias=True)()(x())) == ["d.w", "d.b"]
    assert names(nets.d(bias=False)()(x())) == ["d.w"]


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 - 4", 3),
        ("7 // 2 + 7 % 4", 6),
        ("1 /. 4", 0.25),
        ("2 **. 10", 1024),
        ("~-2 + -3", -5),
        ("(1, 2)", (1, 2)),
        ("[1; 2.5]", [1, 2.5]),
        ('if 1 < 2 && not (2 < 1) then "a" else "b"', "a"),
        ('"a" == "a" || 1 // 0 == 1', True),
        ('"a" != "b"', True),
        ("bf16 == f32", False),
        ("bf16 == bf16", True),
        ("none == none", True),
        ("let (a, (b, _)) = (1, (2, 3)) in a + b", 3),
        ("let f ~a ?(b = a + 1) c = a + b + c in f 1 ~a:2", 6),
        ("let f a b = a - b in (f 5) 3", 2),
        ("let twice f x = f (f x) in twice (fun x -> x * 3) 2", 18),
        ("let add ~a b = a + b in let five = add ~a:5 in five 1 + five 2", 13),
    ],
)
def test_configuration_values(text: str, expected: Any) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_arrays() -> None:
    def shape(text: str) -> str:
        return str(value(f"relu ({text})").shape)

    assert shape("[1; 2; 3] + 0") == "3"
    assert shape("[(1, 2, 3); (4, 5, 6)] + 0") == "3 -> 2"
    assert shape("[| [1; 2]; [3; 4]; [5; 6] |] + 0") == "3 | -> 2"
    assert shape("[| [(1, 2)]; [(3, 4)] |] *. 1.") == "2 | 2 -> 1"
    np.testing.assert_array_equal(cells(value("([1; 2], [3; 4]) *. 1.")), [[1, 3], [2, 4]])  # memory: output, input


def test_arrays_of_tensors() -> None:
    nets = st.language.parse(
        "let out a b = [a; b] *. 1.\nlet inp a b = (a, b) *. 1.\nlet bat a b = [| a; b; a |] *. 1."
    )
    a, b = st.constant([1.0, 2.0], prec=st.f32), st.constant([3.0, 4.0], prec=st.f32)
    assert [str(nets.out(a, b).shape), str(nets.inp(a, b).shape), str(nets.bat(a, b).shape)] == [
        "2,2",
        "2 -> 2",
        "3 | -> 2",
    ]
    np.testing.assert_array_equal(cells(nets.out(a, b)), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(cells(nets.inp(a, b)), [[1, 3], [2, 4]])


def test_python_gets_batch_arrays_as_tensors() -> None:
    """A list or tuple may be configuration and stays one; a batch array can only be an array."""
    nets = st.language.parse(
        "let pair x = ([| x; x |], 3)\nlet one = [| 1.; 2. |]\nlet several = [[| 1 |]; 2]\nlet plain = (1, 2)"
    )
    stacked, number = nets.pair(x())
    assert (str(stacked.shape), number, str(nets.one.shape)) == ("2,2 | -> 3", 3, "2 | ->")
    assert isinstance(nets.several, list)
    assert isinstance(nets.several[0], st.Tensor)
    assert nets.plain == (1, 2)


def test_operators_are_those_of_python() -> None:
    text = (
        "let f w x = (w * x, x *. 2., x /. 2., x **. 2., x // 2., x % 2., x - 1., 1. - x, -x, ~-x, x < 1., x == 1.,\n"
        '  x && x, x || x, not x, x ++ "...|a => ...|0", x @^ "...|a => ...|0", x +* "...|a; ...|a => ...|" x,\n'
        '  x @^+ "...|a; ...|b => ...|a" x, x @^* "...|a; ...|b => ...|a" x, x @| 1)'
    )
    w, v = st.param("w", output=[4]), x()
    kinds = [t.node.record.kind for t in st.language.parse(text).f(w, v)]
    assert kinds == [
        *("matmul", "mul", "div", "pow", "floordiv", "mod", "sub", "sub", "neg", "neg", "lt", "eq", "and", "or", "not"),
        *["einsum"] * 5,
        "slice",
    ]


def test_functions_by_name_with_labels() -> None:
    text = (
        'let f x = (softmax ~axis:"batch" x, sum x "output" ~keepdims:true, where (x > 0.) x 0., clamp x ~low:0. ~high:1.,\n'
        '  concat [x; x], cast x f16, gelu ~approximate:"tanh" x, reshape x ~output:[3; 1], one_hot (argmax x) 3,\n'
        '  maximum x [1.; 2.; 3.], einsum "...|a => a" x ~sizes:[("a", 3)])'
    )
    shapes = [str(t.shape) for t in st.language.parse(text).f(x())]
    assert shapes == [
        *("2 | -> 3", "2 | -> 1", "2 | -> 3", "2 | -> 3", "2 | -> 6", "2 | -> 3", "2 | -> 3", "2 | -> 3,1", "2 | -> 3"),
        *("2 | -> 3", "3"),
    ]


def test_every_function_of_the_facade_is_a_word() -> None:
    from stagedtensor.language.words import words

    here = ("stagedtensor.functions.", "stagedtensor.losses")
    public = [
        name
        for name, value in vars(st).items()
        if name in st.__all__ and (getattr(value, "__module__", None) or "").startswith(here)
    ]
    assert len(public) > 50
    assert [name for name in public if name not in words()] == []


def test_blocks_of_the_package() -> None:
    text = (
        "let net ~hid () =\n  let first = nn.dense hid () in\n  let norm = nn.layer_norm () in\n"
        "  let last = nn.dense 2 () in\n  fun x -> last (norm (first x))"
    )
    y = st.language.parse(text).net(hid=4)()(x())
    assert str(y.shape) == "2 | -> 2"
    assert str(y.node.source) == "<text>:5"
    assert {name.rpartition(".")[0] for name in names(y)} == {
        "net.first.dense",
        "net.norm.layer_norm",
        "net.last.dense",
    }
    with pytest.raises(LanguageError, match="the block 'dense' is used without its stage"):
        st.language.parse("let net () = fun x -> nn.dense 3 x").net()(x())
    with pytest.raises(LanguageError, match="did you mean 'dense'"):
        _ = st.language.parse("let d = nn.dens").d


def test_captured_sizes() -> None:
    text = 'let mean x = let (total, sizes) = einsum ~capture:["a"] "...|a => ...|" x in total *. (1. /. sizes.a)'
    y = st.language.parse(text).mean(st.constant([1.0, 2.0, 6.0], prec=st.f32))
    np.testing.assert_allclose(cells(y), 3.0, rtol=1e-6)


def test_precisions() -> None:
    f = st.language.parse("let f ~p x = (relu (x *. 2.) : p)\nlet g = (0.5 : f16)")
    assert str(f.f(x(), p=st.bf16).precision) == "bf16"
    assert str(f.g.precision) == "f16"
    with pytest.raises(LanguageError, match=r"'p' is a number(?s:.*)a precision such as bf16"):
        f.f(x(), p=3)


def test_functions_of_python_are_configuration() -> None:
    nets = st.language.parse("let d ~act () x = act ({ w; o = [2] } * x)")
    layer = nets.d(act=lambda t: st.tanh(t) * 2.0)()
    y = layer(x())
    assert y.node.record is not None
    assert y.node.record.kind == "mul"
    assert str(y.node.source).startswith("test_language_models.py")


def test_a_value_is_evaluated_once_when_it_is_used() -> None:
    module = st.language.parse("let bad = 1 // 0\nlet good = [1; 2]\nlet r = range 5")
    assert module.good == [1, 2]
    assert module.r is module.r
    with pytest.raises(LanguageError, match="division by zero"):
        _ = module.bad


# -- computations -----------------------------------------------------------------------------------------------------


def test_computations_are_those_of_strings() -> None:
    p, m = st.param("p", output=[3]), st.param("m", output=[3], trainable=False, init=0.0)
    rate = st.host_scalar("rate", 0.5)
    text = (
        "let step p m ~rate ~nesterov =\n"
        "  m =: 0.9 *. m + p.grad;\n"
        "  p =- rate *. (if nesterov then p.grad + 0.9 *. m else m) *. sqrt (where (m > 0.) 1. ~-2.) - (1. - 0.5)"
    )
    found = st.language.parse(text).step(p, m, rate=rate, nesterov=True)
    expected = st.computation(
        "m =: 0.9 *. m + p.grad; p =- rate *. (p.grad + 0.9 *. m) *. sqrt(where(m > 0., 1., ~-2.)) - (1. - 0.5)",
        p=p,
        m=m,
        rate=rate,
    )
    assert found.key() == expected.key()


def test_index_maps_and_functions_in_assignments() -> None:
    a, b, c = (st.param(name, output=[2, 2]) for name in "abc")
    text = 'let f a b c = c =:+ a *. b ~logic:"ij;jk=>ik"; c =@^ maximum(a, b) && a < b || not (a)'
    found = st.language.parse(text).f(a, b, c)
    expected = st.computation(
        'c =:+ a *. b ~logic:"ij;jk=>ik"; c =@^ or(and(maximum(a, b), a < b), not(a))', a=a, b=b, c=c
    )
    assert found.key() == expected.key()


def test_sequences_of_computations() -> None:
    text = 'let step ~rate loss p = grad_update loss; comment "descent" (p =- rate *. p.grad); forward loss'
    p = st.param("p", output=[3])
    loss = st.sum(p * p)
    comp = st.language.parse(text).step(loss, p, rate=0.5)
    ctx = st.Context("reference")
    ctx.set_values(p, np.array([1.0, 2.0, 3.0], np.float32))
    ctx.run(ctx.compile(comp))
    np.testing.assert_array_equal(ctx.get_values(p), [0.0, 0.0, 0.0])
    assert "# descent" in repr(comp)
