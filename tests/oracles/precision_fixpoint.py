"""Precision inference by naive iteration on a plain description of a program: the oracle of the solver's tests.

It knows only the rules for open terminals, data, pointwise ops, comparisons, sums, casts and one-hot, and recomputes
every value and gradient from all others until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagedtensor.precision import Prec, bool_, f32, f64, i32, join, u8

TERMINALS = ("placeholder", "param", "literal")
COMPARISONS = ("lt", "eq")


@dataclass(frozen=True)
class Line:
    """One line of a program: a terminal or an op on earlier lines by name; ``prec`` is the format of data or a cast."""

    name: str
    kind: str
    operands: tuple[str, ...] = ()
    prec: Prec | None = None


def carries_gradient(program: Mapping[str, Line], name: str) -> bool:
    """Whether the line leads from a parameter by differentiable ops."""
    line = program[name]
    if line.kind == "param":
        return True
    if line.kind in COMPARISONS or line.kind == "one_hot" or (line.prec is not None and not line.prec.is_float):
        return False
    return any(carries_gradient(program, operand) for operand in _data(line))


def _data(line: Line) -> tuple[str, ...]:
    if line.kind == "one_hot":
        return ()
    return line.operands[1:] if line.kind == "where" else line.operands


def fixpoint(lines: list[Line], specified: Mapping[str, Prec]) -> dict[str, Prec]:
    """Return the precision of every value, and of every gradient under ``name.grad``."""
    program = {line.name: line for line in lines}
    given = {line.name: line.prec for line in lines if line.prec is not None} | dict(specified)
    graded = {name for name in program if carries_gradient(program, name)}
    solved = dict.fromkeys([*program, *(f"{name}.grad" for name in graded)], f32)

    def listens(name: str) -> bool:
        return program[name].kind in (*TERMINALS, "one_hot")

    def contributions(names: tuple[str, ...], suffix: str) -> list[Prec]:
        keys = [name for name in names if not suffix or name in graded]
        return [solved[f"{name}{suffix}"] for name in keys if not listens(name) or f"{name}{suffix}" in given]

    def value(name: str) -> Prec:
        line = program[name]
        if name in given:
            return given[name]
        if listens(name):
            index = any(reader.kind == "one_hot" and name in reader.operands for reader in lines)
            if index and name not in graded:
                return i32
            demands = []
            for reader in lines:
                if name not in _data(reader):
                    continue
                if reader.kind in COMPARISONS:
                    joined = contributions(_data(reader), "")
                    demands += [join(*joined)] if joined else []
                else:
                    demands.append(solved[reader.name])
            demands = [prec for prec in demands if prec.is_float or name not in graded]
            return join(*demands) if demands else f32
        joined = contributions(_data(line), "")
        if not joined:
            return f32
        prec = join(*joined)
        if prec.is_float:
            return prec
        if name in graded or line.kind in ("div", "exp"):
            return f32
        if line.kind == "sum" and (prec is bool_ or prec.bits < 32):
            return i32
        return u8 if prec is bool_ and line.kind in ("add", "mul", "neg") else prec

    def gradient(name: str) -> Prec:
        key = f"{name}.grad"
        if key in given:
            return given[key]
        if listens(name):
            precs = [solved[f"{r.name}.grad"] for r in lines if r.name in graded and name in _data(r)]
        else:
            precs = contributions(_data(program[name]), ".grad")
        if precs:
            return join(*precs)
        return f64 if solved[name] is f64 else f32

    while True:
        new = {name: value(name) for name in program} | {f"{name}.grad": gradient(name) for name in graded}
        if new == solved:
            return solved
        solved = new
