"""What goes wrong in models as text, and the place and the words of the error."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagedtensor as st
from stagedtensor.errors import GradientError, LanguageError, ShapeError, SpecError

pytestmark = pytest.mark.usefixtures("session")

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.st"


def x(*output: int, batch: int = 2) -> st.Tensor:
    return st.placeholder("x", batch=[batch], output=list(output or (3,)))


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        # of the text
        ("let f x = x *.5", "1:13", "write the zero before the point"),
        ("let f x = x +. 2.", "1:13", r"no dot: a \+ b"),
        ("let f x = x / y", "1:13", "x /. y is pointwise"),
        ("let f x = x ** 2.", "1:13", "powers have a dot"),
        ("let f x = w @ x", "1:13", r"a contraction is written a \* b"),
        ("let f x = x ++ y", "1:16", "expected a string"),
        ("let f x =\n  let y = 2\nlet g x = 3", "3:1", "ends with 'in'"),
        ("let f x = if x then 2", "1:22", "every if has an else"),
        ("let f x = 'a'", "1:11", "double quotes"),
        ("let f x = (x", "1:13", r"unexpected end of text(?s:.*)'\)'"),
        ("let f x = [1; 2", "1:16", r"'\]'"),
        ("let = 3", "1:5", "expected a name"),
        ("x = 3", "1:1", "expected 'let'"),
        ("let f x = (* a", "1:11", "this comment does not end"),
        ("let f x = x *) 2", "1:13", "no comment is open"),
        ("let a = 99999999999999999999", "1:9", "integer is too large"),
        ("let a = 1e999", "1:9", "too large for any precision"),
        ("let f x = g x =: 2", "1:15", "only a name or its gradient"),
        ("let f x = x := 2", "1:13", "an assignment is written '=:'"),
        ("let rec f x = x", "1:5", "not recursive"),
        ("let f x = fn y -> y", "1:16", r"fun x -> \.\.\."),
        ('let f = "a', "1:9", "unexpected"),
        ("let f x = a < b < c", "1:17", "unexpected '<'"),
        ("let f = 1\0", "1:10", "zero character"),
        # of what it says
        ("let dense ~hid () x = { w; o = [hid] } * x\nlet m ~hid () x = dens ~hid x", "2:19", "did you mean 'dense'"),
        ("let f x = rleu x", "1:11", r"unbound name 'rleu'(?s:.*)did you mean 'relu'"),
        ("let f x = f x", "1:11", "not recursive"),
        ("let f x = let g y = g y in g x", "1:21", "unbound name 'g'"),
        ("let f x = x\nlet f y = y", "2:5", r"'f' is defined twice(?s:.*)line 1"),
        ("let f x x = x", "1:9", "parameter of this function twice"),
        ("let f (x, x) = x", "1:11", "parameter of this function twice"),
        ("let f () () x = x", "1:10", "one stage"),
        ("let f = fun () -> 1", "1:13", "function without a name has no stage"),
        ("let f ~label () = 1", "1:7", "names a block"),
        ("let f ?(a = 1) = a", "1:7", "never complete"),
        ("let f x = { w } * x", "1:11", r"in no stage(?s:.*)let name \(\)"),
        ("let f () x = { w; q = 1 } * x", "1:19", r"no field 'q'(?s:.*)o, output, i, input, trainable"),
        ("let f () x = { w; o = [1]; output = [2] } * x", "1:28", "given twice"),
        ('let f x = stage f16 "" (x)', "1:11", "a stage without a name"),
        ('let f x = stage f16 "body" ~weights:wide (x)', "1:37", r"unknown weights 'wide'(?s:.*)narrow or master"),
        ("let f x = (x : f23)", "1:16", "did you mean"),
        ("let f ~m = m + _", "1:16", "_ binds nothing"),
    ],
)
def test_faults_point_into_the_text(text: str, place: str, words: str) -> None:
    with pytest.raises(LanguageError, match=words) as caught:
        st.language.parse(text, "models.st")
    message = str(caught.value).split("\n")
    assert message[0].startswith(f"models.st:{place}: ")
    line, column = map(int, place.split(":"))
    assert (caught.value.file, caught.value.line, caught.value.column) == ("models.st", line, column)
    assert message[1][2:] == text.split("\n")[line - 1]
    assert message[2] == "  " + " " * (column - 1) + "^"


DENSE = "let d ~hid () x = { w; o = [hid] } * x\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # blocks without their stage
        (
            "let m () x = d ~hid:3 x",
            r"m.st:2:23: the block 'd' is used without its stage(?s:.*)let layer = d ~hid \(\) in fun x",
        ),
        (
            "let m () x = d ~hid:3 () x",
            r"m.st:2:23: the block 'd' would make its parameters anew at every application of 'm'",
        ),
        ("let m () = fun x -> let l = d ~hid:3 () in l x", r"m.st:2:38: the block 'd' would make"),
        ("let m x = d ~hid:3 () x", r"m.st:2:20: the block 'd' would make"),
        ("let m () x = d () x", r"m.st:2:16: 'd' lacks ~hid"),
        ("let m () = let l = d () in fun x -> l x", r"m.st:2:22: 'd' lacks ~hid"),
        ("let m () = let l = d ~hidd:3 () in fun x -> l x", r"'d' has no argument ~hidd(?s:.*)did you mean 'hid'"),
        ("let m () = let l = d ~hid:3 ~hid:4 () in fun x -> l x", "~hid is given twice"),
        # parameters
        (
            "let m () x = { w; o = [2] } * x + { w }",
            r"m.st:2:35: the stage of 'm' has a parameter 'w' already \(line 2\)",
        ),
        ("let m () x = let n = 3 in { w; o = [n] } * x", "'n' is known only when the function is applied"),
        ("let m () x = { w = x } * x", "'x' is known only when the function is applied"),
        ("let m () x = { w = [| 1; 2 |] } * x", "no batch axis"),
        ("let m () x = { w : i32 } * x", "cannot be trained"),
        ("let m () x = { w; o = [~-2] } * x", "axis size"),
        # values
        ("let m () x = 2 * x", r"m.st:2:16: '\*' contracts two tensors(?s:.*)expected '\*\.'"),
        ("let m () x = x x 3", "a tensor is applied to a tensor"),
        ("let m () x = relu x x", "is applied to a tensor"),
        ("let m () x = if x > 0. then x else x", r"the condition is a tensor(?s:.*)where condition a b"),
        ("let m () x = if 1 then x else x", "the condition is a number"),
        ('let m () x = x + "a"', "does not apply|expected"),
        ("let m () x = (9223372036854775807 + 1) *. x", "too large"),
        ("let m () x = (2 **. 9999999999) *. x", "too large"),
        ("let m () x = (1. /. 0.) *. x", "division by zero"),
        ("let m () x = let (a, b) = (1, 2, 3) in x", "a tuple of 3 items does not fit a pattern of 2"),
        ("let m () x = let (a, b) = 1 in x", "a number does not fit"),
        ("let m () x = [1; [2; 3]] *. x", "different lengths|brackets"),
        ("let m () x = [1; (2, 3)] *. x", "different"),
        ('let m () x = ["a"] *. x', "an array holds a string"),
        ("let m () x = x.shape", "no field 'shape'"),
        ("let m () x = x; x", "a tensor stands between ';'"),
        ('let m () x = gelu ~approximate:"no" x', r"m.st:2:14: gelu: approximate is"),
        ("let m () x = relu ~slope:2. x", r"m.st:2:14: relu(?s:.*)slope"),
        ('let m () x = softmax ~axis:"outptu" x', "outptu"),
        ("let m () x = x =: 1.", r"m.st:2:14: statement: 'x' is data that the host feeds"),
        ("let m () x = let y = x + 1. in y =: relu (gelu y)", "this expression stands in an assignment"),
        ("let m () x = let y = x + 1. in y =: y + [1; 2]", "this expression stands in an assignment"),
    ],
)
def test_faults_that_building_finds(text: str, words: str) -> None:
    module = st.language.parse(DENSE + text, "m.st")

    def build() -> None:
        stage = module.m if "let m x" in text else module.m()
        stage(x())

    with pytest.raises(st.errors.StagedTensorError, match=words):
        build()


def test_errors_of_shapes_and_specs_name_the_line_of_the_text() -> None:
    module = st.language.parse('let f x =\n  x ++ "i;j=>i"\nlet g x =\n  x + [1; 2]\n', "m.st")
    with pytest.raises(SpecError, match=r"m\.st:2"):
        module.f(x())
    with pytest.raises(ShapeError, match=r"m\.st:4"):
        _ = st.sum(module.g(x())).shape


def test_a_missing_gradient() -> None:
    with pytest.raises(GradientError, match=r"m\.st:1"):
        st.language.parse("let f x = x.grad", "m.st").f(x())


def test_what_python_does_wrong() -> None:
    nets = st.language.load(EXAMPLE)
    with pytest.raises(LanguageError, match=r"'mlp' lacks ~out(?s:.*)test_language_faults\.py"):
        nets.mlp(hid=3)()
    with pytest.raises(LanguageError, match=r"'mlp' has no argument ~depth(?s:.*)test_language_faults\.py"):
        nets.mlp(hid=3, depth=4)
    with pytest.raises(LanguageError, match="configuration by label"):
        nets.mlp(64, 10)
    with pytest.raises(LanguageError, match="is given a value of type dict"):
        nets.mlp(hid={})
    with pytest.raises(AttributeError, match="did you mean 'mlp'"):
        _ = nets.mpl
    assert not hasattr(nets, "__len__")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relu -x", "'-' has the function 'relu'\n  let f x = relu -x\n                 ^\n  expected tensors or numbers\n"
                    "  an argument with a minus is written f ~-x"),
        ("x + none", "'+' has none"),
        ("x *. \"a\"", "'*.' has a string"),
        ("relu \"a\"", "a string stands where a tensor is needed"),
        ("relu relu", "the function 'relu' stands where a tensor is needed"),
        ("nn.dens 3", "'nn' has no 'dens'\n  let f x = nn.dens 3\n            ^\n  did you mean 'dense'?"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_named_at_its_place(text: str, message: str) -> None:
    with pytest.raises(LanguageError) as caught:
        st.language.parse(f"let f x = {text}", "f.st").f(x())
    assert str(caught.value).startswith("f.st:1:")
    assert message in str(caught.value)


def test_a_second_stage_is_refused() -> None:
    layer = st.language.parse("let dense ~n () x = { w; o = [n] } * x").dense(n=3)()
    with pytest.raises(
        LanguageError, match=r"'dense' is called with nothing, and has no \(\) left\n.*test_language_faults"
    ):
        layer()
