"""Learn a finite state machine from its strings: the grammar of Reber (1967), by a small transformer.

The figure is the share of valid transitions in strings that the trained model makes up: above 90 %.
"""

from __future__ import annotations

import argparse

import numpy as np

import stagedtensor as st
from stagedtensor import nn

# state -> (symbol, next state); state 6 is the end
MACHINE = {
    0: (("T", 1), ("P", 2)),
    1: (("S", 1), ("X", 3)),
    2: (("T", 2), ("V", 4)),
    3: (("X", 2), ("S", 5)),
    4: (("P", 3), ("V", 5)),
    5: (("E", 6),),
}
SYMBOLS = "_BTPSXVE"
BATCH, TOKENS = 32, 24


def strings(rng: np.random.Generator) -> np.ndarray:
    """Return ids of random strings of the machine, between B and E, filled up with 0."""
    ids = np.zeros((BATCH, TOKENS + 1), np.int32)
    for row in ids:
        text, state = "B", 0
        while state != 6 and len(text) < TOKENS + 1:
            symbol, state = MACHINE[state][rng.integers(len(MACHINE[state]))]
            text += symbol
        row[: len(text)] = [SYMBOLS.index(symbol) for symbol in text]
    return ids


def valid_transitions(text: str) -> tuple[int, int]:
    """Return (valid, all) transitions of a string after B; it counts up to its first wrong one."""
    state, right = 0, 0
    for symbol in text:
        following = dict(MACHINE.get(state, ())).get(symbol)
        if following is None:
            return right, right + 1
        state, right = following, right + 1
        if state == 6:
            break
    return right, right


def main() -> None:
    """Train, make up strings, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()
    steps = min(args.steps, 100) if args.quick else args.steps
    with st.Context(args.device) as ctx:
        x = st.placeholder("x", batch=[BATCH, TOKENS], prec=st.i32)
        y = st.placeholder("y", batch=[BATCH, TOKENS], prec=st.i32)
        logits = nn.gpt(len(SYMBOLS), width=32, layers=1, heads=2, tokens=TOKENS)(x)
        # what fills a string up is no target
        loss = st.cross_entropy(logits, y, ignore_index=0)
        rate, set_rate = st.scheduled_learning_rate(st.LrSchedule("cosine", 0.01, steps, warmup_steps=10))
        step = ctx.compile(st.sequence(st.grad_update(loss), st.adamw_update(loss, rate)), name="fsm_step")
        chances = st.softmax(logits)
        predict = ctx.compile(chances, name="fsm_predict")
        ctx.init_params(loss, seed=args.seed)
        rng = np.random.default_rng(args.seed)
        for at in range(steps):
            ids = strings(rng)
            set_rate(ctx, at)
            ctx.set_values(x, ids[:, :-1])
            ctx.set_values(y, ids[:, 1:])
            ctx.run(step)
            if at % 50 == 0:
                print(f"step {at}: loss {ctx.get_values(loss):.4f}")
        made = np.zeros((BATCH, TOKENS), np.int32)
        made[:, 0] = SYMBOLS.index("B")
        for at in range(1, TOKENS):
            ctx.set_values(x, made)
            ctx.run(predict)
            rows = ctx.get_values(chances)[:, at - 1].astype(np.float64)
            made[:, at] = [rng.choice(len(SYMBOLS), p=row / row.sum()) for row in rows]
        texts = ["".join(SYMBOLS[i] for i in row[1:]) for row in made]
        right, total = np.sum([valid_transitions(text) for text in texts], axis=0)
        print(", ".join(text.split("E")[0] + "E" for text in texts[:6]))
        print(f"result: valid_transitions {right / total:.4f}")


if __name__ == "__main__":
    main()
