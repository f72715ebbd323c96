"""Optimizers: SGD with momentum and AdamW, written as statement strings.

Arithmetic is f32 (f64 for f64 parameters). An update may unscale its gradients, scale them again (clipping) and pass a
gate that selects the old value where it is closed: nothing is multiplied by the gate, so an overflow cannot leak
through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .errors import GradientError, PrecisionError
from .language.computation import computation
from .node import Node, Role
from .precision import Prec, f32, f64, i32
from .precision_solver import solve_precisions
from .program import Comp, comment, forward_of, sequence
from .settings import is_number
from .source import user_source
from .statements import Stage
from .tensor import Tensor, no_gradient, tensor_of
from .terminals import cell, host_scalar, state
from .train import chosen_params

Loss: TypeAlias = Tensor | Sequence[Tensor]

Updater: TypeAlias = Callable[..., Comp]
"""A function with :func:`sgd_update`'s calling form: ``update(loss, learning_rate, *, grad_unscale, grad_scale,
update_gate, params, **its own options)``."""


# -- state --------------------------------------------------------------------------------------------------------


def state_precs(params: Sequence[Tensor]) -> dict[Tensor, Prec]:
    """Return the precision of each parameter's state: f64 for a parameter that is f64 as things stand, else f32."""
    nodes = [p.node for p in params]
    try:
        solution = solve_precisions(nodes)
    except PrecisionError:  # told with all its places when the step is compiled
        return {p: f64 if p.node.default_prec is f64 else f32 for p in params}
    return {p: f64 if solution.prec(p.node) is f64 else f32 for p in params}


def state_of(p: Tensor, kind: str, prec: Prec | None = None) -> Tensor:
    """Return the state ``kind`` of a parameter, made at ``prec``; two optimizers of one kind share it."""
    known = p.node.states
    if kind not in known:
        known[kind] = state(p, kind, prec or state_precs([p])[p]).node
    return tensor_of(known[kind])


def states_of(p: Tensor) -> dict[str, Tensor]:
    """Return all state a parameter has, by kind."""
    return {kind: tensor_of(node) for kind, node in p.node.states.items()}


# -- arguments ----------------------------------------------------------------------------------------------------


def learning_rate_scalar(value: Tensor | float) -> Tensor:
    """Return the learning rate as a host scalar (numbers become one)."""
    if isinstance(value, Tensor):
        return value
    if not is_number(value):
        raise TypeError(f"learning_rate is a number or a host scalar, not {value!r}")
    return host_scalar("learning_rate", float(value))


def _unit_interval(name: str, value: Any) -> float:
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    return float(value)


def _decay(value: Any) -> float:
    if not is_number(value) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"weight_decay must be finite and at least 0, got {value!r}")
    return float(value)


# -- the gradient as the update reads it --------------------------------------------------------------------------


class _Gradient:
    """The text and names by which an update reads p's gradient: unscaled, then rescaled."""

    def __init__(self, p: Tensor, unscale: Tensor | None, rescale: Tensor | None, in_place: bool) -> None:
        if not isinstance(p, Tensor) or p.node.role is not Role.PARAM:
            what = f"{p.node.role.value} {p.label!r}" if isinstance(p, Tensor) else type(p).__name__
            raise TypeError(f"an optimizer updates a parameter, not {what} ({user_source().quoted()})")
        gradient = p.grad
        if gradient is None:
            raise GradientError(
                f"parameter {p.label!r} has no gradient: it is not trainable\n  {p.node.source.quoted()}\n"
                f"  {user_source().quoted()}\n  declare it with trainable=True, or leave it out of the update"
            )
        self.parts: list[Comp] = []
        self.names: dict[str, Any] = {"g": gradient}
        self.text = "g"
        if unscale is not None:
            with no_gradient():
                true = (gradient * unscale).named(f"{p.label}_unscaled")
            self.parts.append(forward_of([true], stage=Stage.UPDATE, until={gradient.node, unscale.node}))
            if in_place:
                # a narrow buffer keeps the scaled value; every update reads the product either way
                write = computation("g =: true", g=gradient, true=true)
                self.parts.append(Comp(tuple(replace(item, unless_narrow=True) for item, _ in write.statements())))
            self.names, self.text = {"true": true}, "true"
        if rescale is not None:
            self.names["rescale"] = rescale
            self.text = f"where(rescale == 0, 0, {self.text} *. rescale)"


def _gated(target: str, new: str, gate: Tensor | None) -> str:
    return f"{target} =: where(gate, {new}, {target})" if gate is not None else f"{target} =: {new}"


# -- SGD ----------------------------------------------------------------------------------------------------------


def sgd_one(
    p: Tensor,
    learning_rate: Tensor | float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    grad_unscale: Tensor | None = None,
    grad_scale: Tensor | None = None,
    update_gate: Tensor | None = None,
    unscale_in_place: bool = True,
) -> Comp:
    """SGD of one parameter; see :func:`sgd_update`."""
    mu, decay = _unit_interval("momentum", momentum), _decay(weight_decay)
    if nesterov and mu == 0.0:
        raise ValueError("nesterov=True needs momentum > 0")
    rate = learning_rate_scalar(learning_rate)
    gradient = _Gradient(p, grad_unscale, grad_scale, unscale_in_place)
    names: dict[str, Any] = {**gradient.names, "p": p, "lr": rate}
    if update_gate is not None:
        names["gate"] = update_gate
    step = gradient.text
    if decay:
        step, names["decay"] = f"({step} + decay *. p)", decay
    lines = []
    if mu:
        names |= {"m": state_of(p, "momentum"), "mu": mu}
        lines.append(_gated("m", f"mu *. m + {step}", update_gate))
        step = f"({step} + mu *. m)" if nesterov else "m"
    lines.append(_gated("p", f"p - lr *. {step}", update_gate))
    body = [computation(line, **_used(line, names)) for line in lines]
    return replace(comment(f"sgd {p.label}", sequence(*gradient.parts, *body)), name="sgd_update")


def _used(line: str, names: dict[str, Any]) -> dict[str, Any]:
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in line).split())
    return {name: value for name, value in names.items() if name in words}


def sgd_update(
    loss: Loss,
    learning_rate: Tensor | float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    grad_unscale: Tensor | None = None,
    grad_scale: Tensor | None = None,
    update_gate: Tensor | None = None,
    unscale_in_place: bool = True,
    params: Sequence[Tensor] | None = None,
) -> Comp:
    """Stochastic gradient descent, per trained parameter, each line its own rounding at f32 (f64 for f64).

    g = grad * grad_unscale (stored back in place by default); e = g * grad_scale (0 selects 0); d = e + weight_decay *
    p; m' = momentum * m + d; u = d + momentum * m' with ``nesterov``, else m' (d without momentum); p' = p -
    learning_rate * u; p and m keep their bits where ``update_gate`` is 0. Raises ValueError for settings out of range.
    """
    rate = learning_rate_scalar(learning_rate)
    chosen = chosen_params(loss, params, "sgd_update")
    if _unit_interval("momentum", momentum):
        for p, prec in state_precs(chosen).items():
            state_of(p, "momentum", prec)
    parts = [
        sgd_one(
            p,
            rate,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            grad_unscale=grad_unscale,
            grad_scale=grad_scale,
            update_gate=update_gate,
            unscale_in_place=unscale_in_place,
        )
        for p in chosen
    ]
    return replace(comment("sgd", sequence(*parts)), name="sgd_update")


# -- AdamW --------------------------------------------------------------------------------------------------------


def step_counters(params: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Group parameters by the i32 count of their AdamW steps.

    What is updated together for the first time shares one count, which belongs to the first parameter.
    """
    fresh = [p for p in params if "adamw_step" not in p.node.states]
    if fresh:
        count = state(fresh[0], "adamw_step", i32, one_cell=True)
        for p in fresh:
            p.node.states["adamw_step"] = count.node
    groups: dict[Node, list[Tensor]] = {}
    for p in params:
        groups.setdefault(p.node.states["adamw_step"], []).append(p)
    return [(tensor_of(node), members) for node, members in groups.items()]


def adamw_update(
    loss: Loss,
    learning_rate: Tensor | float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_unscale: Tensor | None = None,
    grad_scale: Tensor | None = None,
    update_gate: Tensor | None = None,
    unscale_in_place: bool = True,
    params: Sequence[Tensor] | None = None,
) -> Comp:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), per trained parameter.

    t' = t + 1 (i32, one per update); bc_i = 1 - beta_i^t' in f64; m' = m + (1 - beta1)(e - m); v' = v + (1 - beta2)(e e
    - v); q = p - (lr * weight_decay) p; p' = q - lr ((m' / bc1) / (sqrt(v' / bc2) + eps)). p, m, v and t pass the gate.
    Raises ValueError for settings out of range.
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas is a pair, got {betas!r}")
    beta1, beta2 = (_unit_interval("betas", beta) for beta in betas)
    if not is_number(eps) or not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, got {eps!r}")
    decay, rate = _decay(weight_decay), learning_rate_scalar(learning_rate)
    chosen = chosen_params(loss, params, "adamw_update")
    gate = {} if update_gate is None else {"gate": update_gate}
    precs = state_precs(chosen)
    parts = []
    for count, members in step_counters(chosen):
        corrections, computed = _bias_corrections(count, (beta1, beta2), {precs[p] for p in members})
        parts += [*computed, computation(_gated("t", "t + 1", update_gate), t=count, **gate)]
        for p in members:
            gradient = _Gradient(p, grad_unscale, grad_scale, unscale_in_place)
            bc1, bc2 = corrections[precs[p]]
            names: dict[str, Any] = {
                **gradient.names,
                **gate,
                "p": p,
                "lr": rate,
                "m": state_of(p, "adam_m", precs[p]),
                "v": state_of(p, "adam_v", precs[p]),
                "bc1": bc1,
                "bc2": bc2,
                "c1": 1.0 - beta1,
                "c2": 1.0 - beta2,
                "eps": float(eps),
                "decay": decay,
            }
            e = gradient.text
            kept = "(p - (lr *. decay) *. p)" if decay else "p"
            lines = [
                _gated("m", f"m + c1 *. ({e} - m)", update_gate),
                _gated("v", f"v + c2 *. ({e} *. {e} - v)", update_gate),
                _gated("p", f"{kept} - lr *. ((m /. bc1) /. (sqrt(v /. bc2) + eps))", update_gate),
            ]
            body = [computation(line, **_used(line, names)) for line in lines]
            parts.append(comment(f"adamw {p.label}", sequence(*gradient.parts, *body)))
    return replace(comment("adamw", sequence(*parts)), name="adamw_update")


def _bias_corrections(
    count: Tensor, betas: tuple[float, float], precs: set[Prec]
) -> tuple[dict[Prec, list[Tensor]], list[Comp]]:
    """Return 1 - beta^(t + 1) for both betas at each precision, computed in f64 and rounded."""
    exact = [cell(f"bias_correction{at}_f64", f64) for at in (1, 2)]
    made = [
        computation("bc =: 1 - beta **. (t + 1)", bc=bc, beta=beta, t=count)
        for bc, beta in zip(exact, betas, strict=True)
    ]
    rounded = {f64: exact}
    if f32 in precs:
        rounded[f32] = [cell(f"bias_correction{at}") for at in (1, 2)]
        made += [computation("bc =: exact", bc=bc, exact=wide) for bc, wide in zip(rounded[f32], exact, strict=True)]
    return rounded, made


UPDATERS: dict[str, Callable[..., Comp]] = {"sgd": sgd_update, "adamw": adamw_update}
"""The optimizers by name."""
