"""Model first names letter by letter: a bigram table, then a multi-layer perceptron on three letters (Bengio 2003).

The figure is the perceptron's validation loss in nats per letter, on the US census's list (the package ``names``).
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution

import numpy as np

import stagedtensor as st
from stagedtensor import nn

BATCH, CONTEXT, LETTERS = 128, 3, 27


def census() -> list[str]:
    """Return first names in lower case, each once, in a fixed order."""
    try:
        package = distribution("names")  # an import would find this file
    except PackageNotFoundError:
        raise SystemExit('this example needs a list of names: pip install "stagedtensor[examples]"') from None
    files = [package.locate_file(f"names/dist.{part}.first") for part in ("female", "male")]
    return sorted({line.split()[0].lower() for file in files for line in file.read_text().splitlines()})


def examples(names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the letters before each letter, and the letter; 0 stands for the edge of a name."""
    padded = [[0] * CONTEXT + [ord(letter) - ord("a") + 1 for letter in name] + [0] for name in names]
    windows = np.array([ids[at : at + CONTEXT + 1] for ids in padded for at in range(len(ids) - CONTEXT)], np.int32)
    return windows[:, :-1], windows[:, -1]


@st.block
def bigram() -> nn.Layer:
    """Scores of the next letter given one."""
    table = nn.embedding(LETTERS, LETTERS)
    return lambda ids: table(st.einsum("..b.., c | => ..b.. |", st.narrow(ids, CONTEXT - 1, axis=("batch", -1))))


@st.block
def perceptron(width: int, hidden: int) -> nn.Layer:
    """Scores of the next letter given three."""
    table, net = nn.embedding(LETTERS, width), nn.mlp([hidden, LETTERS], activation=st.tanh)
    return lambda ids: net(st.einsum("..b.., c | d => ..b.. | c, d", table(ids)))


def train(name: str, network: nn.Layer, steps: int, seed: int, device: str) -> float:
    """Train one model, print names that it makes up, return its validation loss."""
    names = np.random.default_rng(0).permutation(census()).tolist()
    (train_x, train_y), (valid_x, valid_y) = examples(names[500:]), examples(names[:500])
    with st.Context(device) as ctx:
        n = st.dynamic("n", max=len(valid_y))
        x = st.placeholder("x", batch=[n, CONTEXT], prec=st.i32)
        y = st.placeholder("y", batch=[n], prec=st.i32)
        logits = network(x)
        loss = st.cross_entropy(logits, y)
        rate, set_rate = st.scheduled_learning_rate(st.LrSchedule("cosine", 0.01, steps, warmup_steps=steps // 20))
        update = st.sequence(st.grad_update(loss), st.adamw_update(loss, rate))
        step, evaluate = ctx.compile(update, name=f"{name}_step"), ctx.compile([loss, logits], name=name)
        ctx.init_params(loss, seed=seed)
        rng = np.random.default_rng(seed)
        for at in range(steps):
            batch = rng.integers(0, len(train_y), size=BATCH)
            set_rate(ctx, at)
            ctx.set_values(x, train_x[batch])
            ctx.set_values(y, train_y[batch])
            ctx.run(step)
        ctx.set_values(x, valid_x)
        ctx.set_values(y, valid_y)
        ctx.run(evaluate)
        total = float(ctx.get_values(loss))
        ids = np.zeros((len(valid_y), CONTEXT), np.int32)
        for _ in range(12):  # the greatest of logits plus Gumbel noise is a draw from their softmax
            ctx.set_values(x, ids[:, -CONTEXT:])
            ctx.run(evaluate)
            scores = ctx.get_values(logits)
            ids = np.column_stack([ids, (scores + rng.gumbel(size=scores.shape)).argmax(axis=1).astype(np.int32)])
        made = ["".join(" abcdefghijklmnopqrstuvwxyz"[i] for i in row[CONTEXT:]).split(" ")[0] for row in ids[:8]]
        print(f"{name}: validation loss {total:.4f}; {', '.join(made)}")
        return total


def main() -> None:
    """Train both models and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, value in (("steps", 8000), ("seed", 0), ("device", "auto")):
        parser.add_argument(f"--{option}", type=type(value), default=value)
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    args = parser.parse_args()
    settings = min(args.steps, 300) if args.quick else args.steps, args.seed, args.device
    table, loss = train("bigram", bigram(), *settings), train("perceptron", perceptron(12, 128), *settings)
    print(f"the perceptron gains {table - loss:.4f}\nresult: validation_loss {loss:.4f}")


if __name__ == "__main__":
    main()
