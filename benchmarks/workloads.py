"""The training workloads: sizes, starting parameters, batches, and the least work that a step can be.

A workload is data: every arm builds the network in its own language from the same parameters (by the names that
``stagedtensor.nn`` gives them) and trains on the same batches with SGD, momentum 0.9 and f32 masters. NumPy only.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[int, ...]]

PRECISIONS = ("f32", "bf16", "f16")
CELL_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
MOMENTUM = 0.9
LOSS_SCALE = 2.0**12
"""Where dynamic loss scaling starts: as large as every arm can start from without a skipped step."""
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale doubles."""
BATCHES = 16
CHECK_INTERVAL = 10
"""Steps between two looks of the host at the window of our gated f16 step."""


@dataclass(frozen=True)
class Mlp:
    """Dense layers with relu between them and cross-entropy behind."""

    name: str
    widths: tuple[int, ...]
    batch: int
    rate: float = 0.05

    @property
    def text(self) -> str:
        """The sizes in words."""
        return f"relu MLP {'-'.join(map(str, self.widths))}, batch {self.batch}"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a batch of inputs."""
        return (self.batch, self.widths[0])

    @property
    def classes(self) -> int:
        """The number of logits."""
        return self.widths[-1]

    def parameters(self) -> Shapes:
        """Return the shape of each parameter."""
        shapes: Shapes = {}
        for at, (inputs, outputs) in enumerate(pairwise(self.widths)):
            path = "mlp.dense" + (f"_{at}" if at else "")
            shapes |= {f"{path}.w": (outputs, inputs), f"{path}.b": (outputs,)}
        return shapes

    def products(self) -> list[int]:
        """Return the multiply-adds of each layer's forward product."""
        return [self.batch * inputs * outputs for inputs, outputs in pairwise(self.widths)]

    def activation_cells(self) -> int:
        """Return the cells that the forward pass leaves for the backward pass."""
        return self.batch * sum(self.widths[1:])


@dataclass(frozen=True)
class Convolutions:
    """Valid convolutions with relu, each followed by a 2 x 2 maximum pool, then dense layers with relu between."""

    name: str
    image: tuple[int, int, int]
    channels: tuple[int, ...]
    widths: tuple[int, ...]
    batch: int = 64
    kernel: int = 5
    rate: float = 0.02

    @property
    def text(self) -> str:
        """The sizes in words."""
        size = "x".join(map(str, self.image))
        convolutions = ", ".join(f"conv {self.kernel}x{self.kernel}x{out}, pool" for out in self.channels)
        return f"{size}: {convolutions}, dense {'-'.join(map(str, self.widths))}, batch {self.batch}"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a batch of images."""
        return (self.batch, *self.image)

    @property
    def classes(self) -> int:
        """The number of logits."""
        return self.widths[-1]

    def sides(self) -> list[tuple[int, int]]:
        """Return height and width behind each convolution, before its pool."""
        height, width, _ = self.image
        found = []
        for _ in self.channels:
            height, width = height - self.kernel + 1, width - self.kernel + 1
            found.append((height, width))
            height, width = height // 2, width // 2
        return found

    def flat(self) -> tuple[int, int, int]:
        """Return the shape of what the first dense layer reads."""
        height, width = self.sides()[-1]
        return height // 2, width // 2, self.channels[-1]

    def parameters(self) -> Shapes:
        """Return the shape of each parameter."""
        shapes: Shapes = {}
        for at, (inputs, outputs) in enumerate(pairwise((self.image[2], *self.channels))):
            shapes[f"conv{at}.conv2d.w"] = (outputs, self.kernel, self.kernel, inputs)
            shapes[f"conv{at}.conv2d.b"] = (outputs,)
        for at, (inputs, outputs) in enumerate(pairwise((math.prod(self.flat()), *self.widths))):
            shapes |= {f"dense{at}.dense.w": (outputs, inputs), f"dense{at}.dense.b": (outputs,)}
        return shapes

    def products(self) -> list[int]:
        """Return the multiply-adds of each layer's forward product."""
        found = [
            self.batch * height * width * self.kernel**2 * inputs * outputs
            for (height, width), (inputs, outputs) in zip(
                self.sides(), pairwise((self.image[2], *self.channels)), strict=True
            )
        ]
        dense = pairwise((math.prod(self.flat()), *self.widths))
        return found + [self.batch * inputs * outputs for inputs, outputs in dense]

    def activation_cells(self) -> int:
        """Return the cells that the forward pass leaves for the backward pass: pooled images and dense layers."""
        pooled = [
            height // 2 * (width // 2) * out for (height, width), out in zip(self.sides(), self.channels, strict=True)
        ]
        return self.batch * (sum(pooled) + sum(self.widths))


@dataclass(frozen=True)
class Gpt:
    """A decoder of norm-first blocks with causal attention and gelu (tanh form); its output layer is not tied."""

    name: str
    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int
    batch: int
    rate: float = 0.05

    @property
    def text(self) -> str:
        """The sizes in words."""
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, feed-forward {4 * self.width}, "
            f"{self.tokens} tokens, vocabulary {self.vocabulary}, batch {self.batch}"
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a batch of ids."""
        return (self.batch, self.tokens)

    @property
    def classes(self) -> int:
        """The number of logits."""
        return self.vocabulary

    def parameters(self) -> Shapes:
        """Return the shape of each parameter."""
        width, head = self.width, (self.heads, self.width // self.heads)
        shapes: Shapes = {
            "embedding.table": (self.vocabulary, width),
            "learned_positions.table": (self.tokens, width),
            "final_norm.layer_norm.gain": (width,),
            "final_norm.layer_norm.bias": (width,),
            "head.dense.w": (self.vocabulary, width),
            "head.dense.b": (self.vocabulary,),
        }
        for at in range(self.layers):
            block = f"layer{at}.encoder_block"
            for norm in ("attend_norm", "feed_norm"):
                shapes[f"{block}.{norm}.layer_norm.gain"] = shapes[f"{block}.{norm}.layer_norm.bias"] = (width,)
            for part in ("query", "key", "value"):
                shapes[f"{block}.multi_head_attention.{part}.dense.w"] = (*head, width)
                shapes[f"{block}.multi_head_attention.{part}.dense.b"] = head
            shapes[f"{block}.multi_head_attention.out.dense.w"] = (width, *head)
            shapes[f"{block}.multi_head_attention.out.dense.b"] = (width,)
            shapes[f"{block}.feed_forward.first.dense.w"] = (4 * width, width)
            shapes[f"{block}.feed_forward.first.dense.b"] = (4 * width,)
            shapes[f"{block}.feed_forward.second.dense.w"] = (width, 4 * width)
            shapes[f"{block}.feed_forward.second.dense.b"] = (width,)
        return shapes

    def products(self) -> list[int]:
        """Return the multiply-adds of each layer's forward products; attention counts the visible half alone."""
        rows, width = self.batch * self.tokens, self.width
        attention = rows * (self.tokens + 1) * width  # scores and mixing, half of the square each
        block = rows * 12 * width * width + attention
        # ids give no gradient, so every block has all three products; the leading 0 stands for the embedding
        return [0, *[block] * self.layers, rows * width * self.vocabulary]

    def activation_cells(self) -> int:
        """Return the cells that the forward pass leaves for the backward pass; scores are recomputed."""
        block = 12 * self.width  # two norms, q, k, v, mixed, and the feed-forward layer's inputs
        return self.batch * self.tokens * (self.layers * block + self.width + self.vocabulary)


Workload = Mlp | Convolutions | Gpt

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Mlp("mlp-small", (64, 128, 128, 10), 32),
        Mlp("mlp-mid", (784, 1024, 1024, 10), 128),
        Gpt("gpt-mini", 4, 128, 4, 64, 65, 16),
        Convolutions("conv", (28, 28, 1), (8, 16), (10,)),
        Mlp("mlp_wide", (256, 1024, 1024, 10), 256),
        Convolutions("lenet", (32, 32, 1), (6, 16), (120, 84, 10)),
        Convolutions("cifar_conv", (44, 44, 3), (32, 64), (128, 84, 10)),
        Gpt("gpt2_mini", 4, 256, 8, 128, 1024, 8),
    )
}


@dataclass(frozen=True)
class Start:
    """What every arm starts from: parameters by name, and batches of (inputs, targets)."""

    parameters: dict[str, Array]
    batches: list[tuple[Array, Array]] = field(repr=False)


def start(workload: Workload, seed: int = 0) -> Start:
    """Draw the starting parameters (f32) and the batches (f32 inputs or i32 ids, i32 targets)."""
    rng = np.random.default_rng([seed, zlib.crc32(workload.name.encode())])
    parameters = {name: _drawn(name, shape, rng) for name, shape in workload.parameters().items()}
    if isinstance(workload, Gpt):
        return Start(parameters, [_text(workload, rng) for _ in range(BATCHES)])
    shape = workload.input_shape
    centres = rng.normal(0, 0.5, (workload.classes, *shape[1:]))
    batches = []
    for _ in range(BATCHES):
        labels = rng.integers(0, workload.classes, shape[0])
        inputs = centres[labels] + rng.normal(0, 0.5, shape)
        batches.append((inputs.astype(np.float32), labels.astype(np.int32)))
    return Start(parameters, batches)


def joined_projections(workload: Workload, begin: Start) -> dict[str, Array]:
    """Return the starting parameters with query, key and value of a layer as one product (``qkv``), as other arms do."""
    found = dict(begin.parameters)
    if isinstance(workload, Gpt):
        for at in range(workload.layers):
            path = f"layer{at}.encoder_block.multi_head_attention"
            for kind in ("w", "b"):
                parts = [found.pop(f"{path}.{part}.dense.{kind}") for part in ("query", "key", "value")]
                rows = 3 * workload.width
                found[f"{path}.qkv.{kind}"] = np.stack(parts).reshape((rows, -1) if kind == "w" else rows)
            found[f"{path}.out.dense.w"] = found[f"{path}.out.dense.w"].reshape(workload.width, workload.width)
    return found


def _drawn(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    kind = name.rpartition(".")[2]
    if kind in ("b", "bias"):
        return np.zeros(shape, np.float32)
    if kind == "gain":
        return np.ones(shape, np.float32)
    if kind == "table":
        return rng.normal(0, 0.02, shape).astype(np.float32)
    inputs = math.prod(shape[-2:] if "attention.out" in name else shape[1:] if "conv2d" in name else shape[-1:])
    return rng.normal(0, 1 / math.sqrt(inputs), shape).astype(np.float32)


def _text(workload: Gpt, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return ids of a language in which every id has four likely successors, and the ids that follow."""
    ids = np.empty((workload.batch, workload.tokens + 1), np.int64)
    ids[:, 0] = rng.integers(0, workload.vocabulary, workload.batch)
    for at in range(workload.tokens):
        ids[:, at + 1] = (ids[:, at] * 7 + rng.integers(0, 4, workload.batch)) % workload.vocabulary
    return ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)


def flops(workload: Workload) -> float:
    """Return the floating-point operations of a step's products: forward, both gradients, none to the inputs."""
    first, *others = workload.products()
    return 4.0 * first + 6.0 * sum(others)


def least_bytes(workload: Workload, precision: str) -> float:
    """Return the bytes that a step cannot avoid.

    Masters and momentum are read and written once; activations are written once and read once in ``precision``.
    Gradients and twins could stay in the caches.
    """
    masters = sum(math.prod(shape) for shape in workload.parameters().values())
    return 16.0 * masters + 2.0 * CELL_BYTES[precision] * workload.activation_cells()
