"""Losses over large logits: what the row's maximum has in common with every class must not cost digits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

from .running import Array, both_devices, program

LOGITS = np.array([[1e4, 1e4, -1e4], [1.0, 2.0, 3.0], [1e5, 1e5 + 1, 1e5 + 2], [-3e7, -3e7, -3e7]], np.float32)


def log_probabilities(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@both_devices
def test_log_softmax_of_large_logits(device: str) -> None:
    with program(device) as p:
        x = p.input(LOGITS, batch=1, requires_grad=True)
        y = st.log_softmax(x)
        weights = np.array([1.0, 0.0, 0.0], np.float32)
        (slope,) = p.gradients(st.sum(y * weights), x)
        (found,) = p.run(y)
    expected = log_probabilities(LOGITS)
    np.testing.assert_allclose(found, expected, rtol=3e-7)
    np.testing.assert_allclose(slope, weights - np.exp(expected), atol=1e-6)


@both_devices
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_cross_entropy_of_large_logits(device: str, soft: bool, smoothing: float) -> None:
    labels = np.array([0, 2, 1, 2])
    chances = np.eye(3)[labels] if not soft else np.array([[0.5, 0.5, 0], [0.25, 0.25, 0.25], [1, 0, 0], [0, 0.5, 0.5]])
    with program(device) as p:
        x = p.input(LOGITS, batch=1, requires_grad=True)
        target = p.input(chances, st.f32, batch=1) if soft else p.input(labels, st.i32, batch=1)
        loss = st.sum(st.cross_entropy(x, target, label_smoothing=smoothing))
        (slope,) = p.gradients(loss, x)
        (found,) = p.run(loss)
    logs = log_probabilities(LOGITS)
    mixed = (1 - smoothing) * chances + smoothing * chances.sum(axis=-1, keepdims=True) ** 0 / 3
    np.testing.assert_allclose(found, -(mixed * logs).sum() / 4, rtol=1e-6)
    expected = (mixed.sum(axis=-1, keepdims=True) * np.exp(logs) - mixed) / 4
    np.testing.assert_allclose(slope, expected, atol=1e-6)


def test_chances_that_do_not_sum_to_one_weigh_their_row() -> None:
    with program() as p:
        x = p.input([[0.0, 0.0]], batch=1)
        (found,) = p.run(st.cross_entropy(x, p.input([[0.25, 0.25]], batch=1)))
    assert found == pytest.approx(0.5 * math.log(2.0), rel=1e-6)


@both_devices
def test_labels_that_are_computed(device: str) -> None:
    """Chances that another network computes are floats though nobody gave them a precision; ids that are computed are
    ids.
    """
    logits, teacher = (
        np.array([[0.5, -1.0, 2.0], [0.0, 1.0, 3.0]], np.float32),
        np.array([[1.0, 3.0, 2.0], [4.0, 0.0, 1.0]]),
    )
    chances = np.exp(log_probabilities(teacher))
    with program(device) as p:
        x, y = p.input(logits, batch=1), p.input(teacher.astype(np.float32), batch=1)
        soft = st.cross_entropy(x, st.softmax(y), reduction="none")
        hard = st.cross_entropy(x, st.argmax(y), reduction="none")
        shifted = st.cross_entropy(x, st.argmax(y) + 1, reduction="none")
        found = p.run(soft, hard, shifted)
    logs = log_probabilities(logits)
    np.testing.assert_allclose(found[0], -(chances * logs).sum(-1), rtol=1e-6)
    np.testing.assert_allclose(found[1], -logs[[0, 1], [1, 0]], rtol=1e-6)
    np.testing.assert_allclose(found[2], -logs[[0, 1], [2, 1]], rtol=1e-6)


@both_devices
@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 1), ()])
def test_a_mask_broadcasts_and_cells_without_weight_do_not_count(device: str, shape: tuple[int, ...]) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    labels = np.array([[0, 1, 2], [3, 0, -1]])
    mask = (np.arange(6).reshape(2, 3) % 4 != 1)[: shape[0] if len(shape) == 2 else 1, : shape[-1] if shape else 1]
    mask = mask.reshape(shape)
    with program(device) as p:
        x, y = p.input(logits, batch=2, requires_grad=True), p.input(labels, st.i32, batch=2)
        m = p.input(mask.astype(np.float32), batch=len(shape))
        loss = st.cross_entropy(x, y, mask=m, ignore_index=-1)
        (slope,) = p.gradients(loss, x)
        (found,) = p.run(loss)
    counted = np.broadcast_to(mask, (2, 3)) & (labels != -1)
    logs = log_probabilities(logits)
    cells = -np.take_along_axis(logs, labels.clip(0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, cells[counted].mean(), rtol=1e-6)
    expected = (np.exp(logs) - np.eye(4)[labels.clip(0)]) * counted[..., None] / counted.sum()
    np.testing.assert_allclose(slope, expected, atol=1e-6)


@both_devices
@pytest.mark.parametrize("prec", [st.u8, st.u16, st.u32, st.u64, st.i8, st.i16, st.i32, st.i64], ids=str)
def test_labels_and_ids_of_any_integer_type_stay_inside(device: str, prec: st.Prec) -> None:
    """The ends of the type are out of range: the upper half of u64 is no negative number, and no memory of others is
    read.
    """
    ends = np.iinfo(prec.numpy_dtype)
    labels = np.array([ends.min, 0, 1, 2, ends.max], prec.numpy_dtype)
    clamped = np.array([0, 0, 1, 2, 2])
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    with program(device) as p:
        x, y = p.input(np.tile(LOGITS[1], (5, 1)), batch=1), p.input(labels, prec, batch=1)
        rows = p.input(table.T, requires_grad=True)
        read = st.gather(st.einsum("d, n => | d -> n", rows), y)
        (slope,) = p.gradients(st.sum(read), rows)
        costs, found, hot = p.run(st.cross_entropy(x, y, reduction="none"), read, st.one_hot(y, 3))
    np.testing.assert_allclose(costs, -log_probabilities(LOGITS[1:2])[0, clamped], rtol=1e-6)
    np.testing.assert_array_equal(found, table[clamped])
    np.testing.assert_array_equal(slope, np.tile(np.bincount(clamped), (2, 1)))
    np.testing.assert_array_equal(hot, (labels[:, None] == np.arange(3)).astype(np.float32))


@both_devices
def test_joining_many_tensors_takes_no_cubic_time(device: str) -> None:
    """Each of the 150 parts is one statement; none looks at the blocks of the others."""
    parts: list[Any] = [np.full(2, number, np.float32) for number in range(150)]
    with program(device) as p:
        inputs = [p.input(part, requires_grad=True) for part in parts]
        joined = st.concat(inputs)
        scale = np.arange(300, dtype=np.float32)
        slopes = p.gradients(st.sum(joined * scale), *inputs)
        (found,) = p.run(joined)
    np.testing.assert_array_equal(found, np.concatenate(parts))
    np.testing.assert_array_equal(np.concatenate(slopes), scale)
