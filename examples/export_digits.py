"""Export a mixed-precision digits network as StableHLO, and run it in another runtime.

Trains a network with an f16 body and writes its forward graph and its gradient. Where jaxlib is installed, the forward
module runs in its StableHLO interpreter, and the logits are compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import stagedtensor as st

BATCH, HIDDEN, CLASSES, FEATURES = 32, 64, 10, 64


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images with pixels in [0, 1], and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit('this example needs scikit-learn: pip install "stagedtensor[examples]"')
    images, labels = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32), labels.astype(np.int32)


def network(x: st.Tensor) -> st.Tensor:
    """Return logits; the middle of the network is an f16 region with f32 masters."""
    h = st.nn.dense(HIDDEN, activation=st.relu, label="first")(x)
    h = st.stage("body", prec="f16")(st.nn.dense(HIDDEN, activation=st.relu, label="middle"))(h)
    return st.nn.dense(CLASSES, label="last")(h).named("logits")


def interpreted(module: str, arguments: list[np.ndarray]) -> np.ndarray | None:
    """Run a module in the StableHLO interpreter that jaxlib brings; None where jaxlib is not installed."""
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import stablehlo
    except ImportError:
        return None
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    with ir.Context() as context, ir.Location.unknown():
        context.append_dialect_registry(registry)
        stablehlo.register_dialect(context)
        context.load_all_available_dialects()
        parsed = ir.Module.parse(module)
        parsed.operation.verify()
        results = stablehlo.eval_module(parsed, [ir.DenseElementsAttr.get(argument) for argument in arguments])
        return np.array(results[0])


def main() -> None:
    """Train, export, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="at most 50 steps")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the two modules")
    options = parser.parse_args()
    images, labels, steps = *digits(), min(options.steps, 50) if options.quick else options.steps
    x = st.placeholder("x", batch=[BATCH], output=[FEATURES], prec="f32")
    t = st.placeholder("labels", batch=[BATCH], prec="i32")
    logits = network(x)
    loss = st.cross_entropy(logits, t)
    gradients = st.grad_update(loss)
    forward_text, gradient_text = st.export.to_stablehlo(logits), st.export.to_stablehlo(gradients)
    for name, text in (("digits.mlir", forward_text), ("digits_step.mlir", gradient_text)):
        (options.out / name).write_text(text)
        print(f"{name}: {text.count('stablehlo.')} ops, {text.count('boundary:')} converts at region edges")
    with st.Context() as ctx:
        step = ctx.compile(st.sequence(gradients, st.sgd_update(loss, 0.3)), keep=[logits])
        ctx.init_params(loss)
        rng = np.random.default_rng(0)
        for at in range(steps):
            chosen = rng.integers(0, len(images), BATCH)
            ctx.set_values(x, images[chosen])
            ctx.set_values(t, labels[chosen])
            ctx.run(step)
            if at in (0, steps - 1):
                print(f"step {at}: loss {float(ctx.get_values(loss)):.3f}")
        forward = ctx.compile(logits)
        ctx.set_values(x, images[:BATCH])
        ctx.run(forward)
        ours = np.asarray(ctx.get_values(logits))
        weights = {param.label: ctx.get_values(param) for param in logits.params}
    order = st.export.signature(logits).arguments
    theirs = interpreted(
        forward_text, [images[:BATCH] if entry.name == "x" else weights[entry.name] for entry in order]
    )
    if theirs is None:
        print("jaxlib is not installed: the modules were written, not run elsewhere")
        return
    print(f"largest difference of a logit in the StableHLO interpreter: {float(np.abs(theirs - ours).max()):.2e}")


if __name__ == "__main__":
    main()
