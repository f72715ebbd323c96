"""Accesses since the last barrier: those to the same bytes are found, whatever else lies in the arena."""

from __future__ import annotations

import random

import pytest

from stagedtensor.codegen.emit.barriers import _Access, _conflict, _Pending
from stagedtensor.codegen.loop_ir import Buffer
from stagedtensor.precision import f32


def access(rng: random.Random, buffers: list[tuple[Buffer, int | None]]) -> _Access:
    buffer, start = rng.choice(buffers)
    owner = rng.choice([None, (16, 4, 1), (8, 4, 2)])
    return _Access(buffer, start, (start or 0) + buffer.nbytes, rng.random() < 0.3, rng.random() < 0.7, owner)


def touch(old: _Access, new: _Access) -> bool:
    if old.buffer is new.buffer:
        return True
    return old.start is not None and new.start is not None and old.start < new.end and new.start < old.end


@pytest.mark.parametrize("seed", range(20))
def test_conflicts_are_those_of_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    buffers: list[tuple[Buffer, int | None]] = []
    for place in range(30):
        buffer = Buffer(f"b{place}", f32, (rng.choice([0, 1, 16, 100, 1000]),))
        buffers.append((buffer, rng.choice([None, rng.randrange(0, 8000, 64)])))
    pending = _Pending()
    everything: list[_Access] = []
    conflicts: list[bool] = []
    for _ in range(200):
        new = access(rng, buffers)
        found = any(_conflict(old, new) for old in pending.touching(new))
        assert found == any(touch(old, new) and _conflict(old, new) for old in everything)
        conflicts.append(found)
        pending.add(new)
        everything.append(new)
    assert {True, False} == set(conflicts)
