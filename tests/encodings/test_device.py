"""Encoded weights in graphs: decoding, products, embedding rows and input gradients on the devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.encodings import (
    INPUT_BLOCK_MAJOR,
    PACKED_ENCODINGS,
    Q4_0,
    Q4_K,
    Q5_0,
    Q6_K,
    Q8_0,
    Dense,
    Encoded,
    Encoding,
    TernaryPacked,
    pack,
)
from stagedtensor.errors import EncodingError
from stagedtensor.runtime.cuda import is_available
from tests.encodings.samples import sample

Array = np.ndarray[Any, Any]
DEVICES = ("cpu", "reference", "cuda-emulated")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not is_available(), reason="no GPU")]
ALL_DEVICES = (*DEVICES, pytest.param("cuda", marks=GPU))
ROWS, BATCH = 6, 4


def orders(value: Encoded) -> list[Encoded]:
    """The value in every order it has."""
    return [value] if value.encoding.whole else [value, value.prepack(INPUT_BLOCK_MAJOR)]


def same_bits(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


FEW = {"cpu": (Q4_K, Q5_0, TernaryPacked), "cuda-emulated": (Q4_K,)}
"""The encodings that stand for the others where compiling takes long."""


def cases() -> list[Any]:
    """Every encoding on every device; where compilers work, all but a few are slow, for each is a routine of its own."""
    slow = pytest.mark.slow
    return [
        pytest.param(
            encoding,
            device,
            marks=slow if encoding not in FEW.get(device, PACKED_ENCODINGS) else (),
            id=f"{encoding}-{device}",
        )
        for device in DEVICES
        for encoding in PACKED_ENCODINGS
    ] + [pytest.param(encoding, "cuda", marks=GPU, id=f"{encoding}-cuda") for encoding in PACKED_ENCODINGS]


@pytest.mark.parametrize(("encoding", "device"), cases())
def test_fused_uses_of_a_packed_weight(encoding: Encoding, device: str) -> None:
    value = sample(encoding, ROWS, 3)
    weight, width = value.numpy(), value.shape[-1]
    rng = np.random.default_rng(0)
    one, many = rng.normal(0, 1, width).astype(np.float32), rng.normal(0, 1, (BATCH, width)).astype(np.float32)
    scales = st.param("scales", output=[width], init=1.0)
    losses, wholes, gathered, picked, vectors, products = [], [], [], [], [], []
    for packed in orders(value):
        table = st.constant(packed)
        wholes.append(st.maximum(table, -np.inf))
        gathered.append(st.gather(packed, st.constant(np.array([3, 0, 5, 3], np.int32))))
        picked.append(st.index_select(packed, st.constant(np.array([1, 4], np.int32)), axis=0))
        vectors.append(table @ st.constant(one))
        products.append(st.matmul_nt(st.constant(many, batch=1) * scales, packed))
        losses.append(st.sum(products[-1] * products[-1]))
    loss = losses[0] if len(losses) == 1 else losses[0] + losses[1]
    ctx = st.Context(device)
    read = [*wholes, *gathered, *picked, *vectors]
    step = ctx.compile(st.sequence(st.forward(*read), st.grad_update(loss)), keep=[*read, *products])
    ctx.init_params(loss)
    step()
    exact = weight.astype(np.float64)
    for whole, rows, chosen, vector, product in zip(wholes, gathered, picked, vectors, products, strict=True):
        same_bits(ctx.get_values(whole), weight)
        same_bits(ctx.get_values(rows), weight[[3, 0, 5, 3]])
        same_bits(ctx.get_values(chosen), weight[[1, 4]])
        close(ctx.get_values(vector), exact @ one)
        close(ctx.get_values(product), many @ exact.T)
    assert scales.grad is not None
    close(ctx.get_values(scales.grad), len(losses) * (2 * (many @ exact.T) @ exact * many).sum(0))


@pytest.mark.parametrize(("encoding", "device"), cases())
def test_rows_of_one_block(encoding: Encoding, device: str) -> None:
    value = sample(encoding, 7, 1)
    weight, ids = value.numpy(), np.array([6, 0, 3, 6, 9, -2], np.int32)
    one = np.random.default_rng(0).normal(0, 1, value.shape[-1]).astype(np.float32)
    at = st.placeholder("at", batch=[6], prec=st.i32)
    gathered = [st.gather(packed, at) for packed in orders(value)]
    vectors = [packed @ st.constant(one) for packed in orders(value)]
    ctx = st.Context(device)
    ctx.set_values(at, ids)
    ctx.compile([*gathered, *vectors])()
    for rows, vector in zip(gathered, vectors, strict=True):
        same_bits(ctx.get_values(rows), weight[ids.clip(0, 6)])
        close(ctx.get_values(vector), weight.astype(np.float64) @ one)


@pytest.mark.parametrize(
    ("encoding", "device"),
    [
        *((item, "reference") for item in PACKED_ENCODINGS), (Q4_K, "cpu"), (Q4_K, "cuda-emulated"),
        pytest.param(Q4_K, "cuda", marks=GPU),
    ],
    ids=str,
)  # fmt: skip
def test_fused_no_buffer_holds_the_decoded_weight(encoding: Encoding, device: str) -> None:
    value = sample(encoding, 40, 24 if encoding.elements == 32 else 3)
    width, scales = value.shape[-1], st.param("scales", output=[768], init=1.0)
    many = st.constant(np.ones((BATCH, width), np.float32), batch=1)
    product = st.matmul_nt(many * scales, value)
    loss = st.sum(product * product) + st.sum(st.gather(value, st.constant(np.array([1, 2], np.int32))) * scales)
    ctx = st.Context(device)
    step = ctx.compile(st.grad_update(loss))
    report = ctx.memory_report()
    sizes = [line.nbytes for line in (*report.stored, *report.temporaries[step.name])]
    decoded = value.size * 4
    assert value.memory_bytes in sizes
    assert max(sizes) < decoded
    assert report.peak_bytes < decoded


def close(got: Array, want: Array) -> None:
    """Within 1e-5 of the greatest magnitude."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("encoding", [Q4_K, Q6_K, Q8_0, Q5_0], ids=str)
def test_fused_product_has_the_bits_of_decoding_first(encoding: Encoding) -> None:
    value = sample(encoding, 70, 3)
    x = st.constant(np.random.default_rng(1).normal(0, 1, value.shape[-1]).astype(np.float32))
    fused, decoded = st.constant(value) @ x, st.constant(value.repack_to(Dense(4))) @ x
    ctx = st.Context("cpu")
    ctx.compile([fused, decoded])()
    same_bits(ctx.get_values(fused), ctx.get_values(decoded))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_fused_rows_that_fill_no_lanes_and_single_rows(device: str) -> None:
    ctx = st.Context(device)
    rng = np.random.default_rng(2)
    for shape in ((3, 5), (1, 7), (9, 64)):
        codes = rng.integers(0, 3, -(-shape[0] * shape[1] // 4) * 4)
        data = bytes(int(a | b << 2 | c << 4 | d << 6) for a, b, c, d in codes.reshape(-1, 4))
        value = Encoded(shape, st.f32, TernaryPacked, data, scale=-0.5)
        x = rng.normal(0, 1, shape[1]).astype(np.float32)
        y = st.constant(value) @ st.constant(x)
        ctx.compile([y])()
        close(ctx.get_values(y), value.numpy().astype(np.float64) @ x)


def test_fused_kernels_read_bytes_and_say_so() -> None:
    routine = st.Context("cpu").compile(st.constant(sample(Q4_K, 5, 2)) @ st.placeholder("x", output=[512]))
    (kernel,) = routine.kernels
    assert "decodes blocks in 8 segments" in kernel.path
    assert "const uint8_t *restrict encoded_u8" in kernel.source
    assert "% 256" not in kernel.source


def test_reading_a_packed_constant_decodes_it() -> None:
    value = sample(Q4_0, 2, 3)
    ctx = st.Context("reference")
    same_bits(ctx.get_values(st.constant(value)), value.numpy())


def test_dense_values_are_constants_of_their_precision() -> None:
    halves = pack(np.arange(6.0, dtype=np.float16).reshape(2, 3), Dense(2))
    weight = st.constant(halves)
    assert str(weight.shape) == "3 -> 2"
    assert weight.precision is st.f16
    ctx = st.Context("reference")
    y = weight @ st.constant(np.array([1, 10, 100], np.float16))
    ctx.compile([y])()
    np.testing.assert_array_equal(ctx.get_values(y), [210, 543])
    assert str(st.constant(pack(np.ones(3, np.float32), Dense(4))).shape) == "3"


REFUSED: dict[str, Any] = {
    "gradient": lambda weight: weight.grad,
    "transpose": st.transpose,
    "permute": lambda weight: st.permute(weight, [0]),
    "reshape": lambda weight: st.reshape(weight, output=[3, 1]),
    "statement": lambda weight: st.computation("w =: 0", w=weight),
    "set_values": lambda weight: st.Context("reference").set_values(weight, np.zeros((3, 64))),
    "parameter": lambda weight: st.param("w", init=weight.node.encoded),
}


@pytest.mark.parametrize("case", REFUSED)
def test_frozen_packed_weights(case: str) -> None:
    weight = st.constant(sample(Q8_0, 3, 2))
    with pytest.raises(EncodingError, match=r"repack_to|never trained"):
        REFUSED[case](weight)


def test_rows_and_precision_of_an_encoded_constant_are_its_own() -> None:
    with pytest.raises(EncodingError, match="cannot be given"):
        st.constant(sample(Q8_0, 3, 2), prec=st.f16)


@pytest.mark.parametrize("device", ALL_DEVICES)
def test_fused_region_rounds_a_decoded_value_once_at_the_read(device: str) -> None:
    value = sample(Q4_K, 70, 2)
    narrow = st.constant(value.repack_to(Dense(2), prec=st.f16))
    x = st.constant(np.random.default_rng(3).normal(0, 1, value.shape[-1]).astype(np.float16))
    outside = st.constant(value)
    with st.stage("body", prec=st.f16):
        products = [value @ x, outside @ x, st.constant(value) @ x]
        wanted = narrow @ x
    ctx = st.Context(device)
    routine = ctx.compile([*products, wanted])
    routine()
    for product in products:
        assert product.precision is st.f16
        np.testing.assert_array_equal(ctx.get_values(product), ctx.get_values(wanted))
    assert not st.converts(products[1])
    assert all(line.nbytes < value.size for line in ctx.memory_report().temporaries[routine.name])
    assert sum(line.nbytes == value.nbytes for line in ctx.memory_report().stored) == 1
