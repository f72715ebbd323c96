"""The precision solver: one precision a node, each with its reason.

In: nodes; their connected component, what was specified on it and its session's conditional updates are read. Out: a
:class:`PrecisionSolution`, which is thrown away unless ``settle`` freezes it after a successful compile. The solution
does not depend on construction or visit order, nor on the order of direct specifications; only conditional updates
are ordered. Constraints come from ``precision_rules``; values, shapes and statements are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from .errors import InternalError, PrecisionError
from .node import Node, Role, Settled, Specified
from .numerics import Numerics, compute_prec
from .op_table import OPS
from .precision import Prec, Requirement, bf16, bool_, f32, f64, i32, join, join_requirement, u4x32, u8
from .precision_reasons import Declined, Reason
from .precision_requests import Update, answer, conflict, yields
from .precision_rules import Demand, Derivation, Flow, Kernel, component, derive, is_top_down
from .precision_solution import PrecisionSolution
from .source import Source
from .statements import OpRecord, Slot

_DEFAULT_NUMERICS = Numerics()


@dataclass(frozen=True, eq=False)
class _Override:
    """A conditional request whose test held."""

    prec: Prec
    update: Update
    kind: str

    @property
    def note(self) -> str:
        if not self.update.is_policy:
            return f"only_if {self.update.name}"
        pinned = f" {self.kind}" if self.kind in ("keep_f32", "except_") else ""
        return f"{self.update.name}{pinned}"


@dataclass(frozen=True, eq=False)
class _Fault:
    """An error found while solving, with its place."""

    source: Source
    error: PrecisionError

    @property
    def key(self) -> tuple[str, int, str]:
        return self.source.file, self.source.line, str(self.error)


def solve_precisions(nodes: Iterable[Node], *, debug: bool = False) -> PrecisionSolution:
    """Solve the connected component of ``nodes``; nothing is settled on them. The last solution is kept while it holds.

    Raises PrecisionError where formats cannot be joined, an index or counter operand has the wrong kind, or a true
    condition contradicts a specification. With ``debug`` a second run must change nothing.
    """
    graph = component(nodes)
    updates = _updates(graph)
    ordered = sorted(graph, key=attrgetter("number"))
    known = ordered[0].answers if ordered else {}
    facts = (ordered, [*map(_said, ordered)], updates)
    if (last := known.get("precisions")) is not None and last[0] == facts and not debug:
        solution: PrecisionSolution = last[1]
        return solution
    derivations = {node: derive(node) for node in graph}
    overrides: dict[Node, _Override] = {}
    late: dict[Node, list[Declined]] = {}
    sweep = _Sweep(derivations, overrides)
    for update in updates:
        fresh = _hold(update, sweep.run(), late)
        if fresh:
            overrides = {**overrides, **fresh}
            sweep = _Sweep(derivations, overrides)
    reasons = sweep.run()
    faults = sweep.faults or _slot_faults(reasons)
    if faults:
        # Which one is reported must not depend on the order of visits.
        raise min(faults, key=lambda fault: fault.key).error
    if debug:
        sweep.check_fixpoint()
    declined = {node: (*sweep.declined.get(node, ()), *late.get(node, ())) for node in {**sweep.declined, **late}}
    saturated = frozenset(node for node, override in overrides.items() if override.update.saturate)
    solution = PrecisionSolution(reasons, declined, saturated)
    if all(update.is_policy for update in updates):  # what a user's condition says may depend on anything
        known["precisions"] = (facts, solution)
    return solution


_said: Callable[[Node], tuple[Specified | Settled | bool | None, ...]] = attrgetter("specified", "settled", "saturate")
"""What may be said of a node's precision after it was built."""


# -- conditional updates --------------------------------------------------------------------------------------------


def _updates(graph: Mapping[Node, None]) -> list[Update]:
    first: dict[object, int] = {}
    for node in graph:
        first[node.session] = min(node.number, first.get(node.session, node.number))
    sessions = sorted({node.session for node in graph}, key=lambda session: first[session])
    return [update for session in sessions for update in session.updates]


def _hold(update: Update, prior: Mapping[Node, Reason], declined: dict[Node, list[Declined]]) -> dict[Node, _Override]:
    """Test one update on the solution before it; return what holds."""
    held: dict[Node, _Override] = {}
    for node, request in update.targets.items():
        reason = prior.get(node)
        if reason is None:
            continue
        wanted = request.prec if request.prec is not None else _default(node, prior)[0]
        if update.condition is None:
            if not reason.prec.is_float or node.specified is not None:
                continue
            if reason.rule in ("R5", "R6"):
                if reason.prec is not wanted:
                    why = f"the node is {reason.state} at {reason.prec} already"
                    declined.setdefault(node, []).append(Declined(wanted, update.name, update.source, why))
                continue
        else:
            if not answer(update.condition, reason.prec, "specify", update.source):
                continue
            if reason.rule == "R6" or (reason.rule == "R4" and not yields(node)):
                if reason.prec is not wanted:
                    raise conflict(node, wanted, update.source)
                continue
            if reason.rule == "R5" and reason.note.startswith("only_if") and reason.prec is not wanted:
                raise PrecisionError(
                    f"{node.label}: two conditions hold that specify different precisions\n"
                    f"  {reason.prec} {reason.source.quoted()}\n  {wanted} {update.source.quoted()}\n"
                    "  specify one precision only, or make the conditions exclude each other"
                )
        held[node] = _Override(wanted, update, request.kind)
    return held


def _default(node: Node, reasons: Mapping[Node, Reason]) -> tuple[Prec, tuple[Reason, ...], str]:
    """The session default captured by the node; f64 for a gradient whose value is f64."""
    if node.value is not None and node.value in reasons and node.default_prec is not f64:
        value = reasons[node.value]
        if value.prec is f64:
            return f64, (value,), "its value is f64"
    return node.default_prec, (), ""


# -- one solution without conditions --------------------------------------------------------------------------------


class _Sweep:
    """Concludes every node on demand: unspecified top-down nodes feed nothing upward, so this ends."""

    def __init__(self, derivations: Mapping[Node, Derivation], overrides: Mapping[Node, _Override]) -> None:
        self._derivations = derivations
        self._overrides = overrides
        self.reasons: dict[Node, Reason] = {}
        self.declined: dict[Node, list[Declined]] = {}
        self.faults: list[_Fault] = []
        self._done = False

    def run(self) -> dict[Node, Reason]:
        """Conclude all nodes (once) and return the reasons."""
        if self._done:
            return self.reasons
        for start in self._derivations:
            stack = [start]
            waiting: set[Node] = set()
            while stack:
                node = stack[-1]
                if node in self.reasons:
                    stack.pop()
                    continue
                missing = [other for other in self._dependencies(node) if other not in self.reasons]
                if not missing:
                    self.reasons[node] = self._conclude(node)
                    stack.pop()
                elif node in waiting:
                    raise InternalError(f"the precision of {node.label} depends on itself")
                else:
                    waiting.add(node)
                    stack.extend(missing)
        for node in self._derivations:
            if node.settled is not None:
                self._decline_settled(node)
        self._done = True
        return self.reasons

    def check_fixpoint(self) -> None:
        """Conclude every node again from the final solution; nothing may change."""
        for node, reason in self.reasons.items():
            again = self._conclude(node)
            if again.prec is not reason.prec or again.rule != reason.rule:
                raise InternalError(f"precision solver: {reason} became {again} in a second run")

    # -- what a node waits for --

    def _override(self, node: Node) -> _Override | None:
        override = self._overrides.get(node)
        if override is None or (node.specified is not None and not (yields(node) and not override.update.is_policy)):
            return None
        return override

    def _fixed(self, node: Node) -> bool:
        return node.settled is not None or node.specified is not None or node in self._overrides

    def _contributes(self, operand: Node) -> bool:
        if not is_top_down(operand.shape_node):
            return True
        if operand.specified is not None or operand in self._overrides:
            return True
        settled = operand.settled
        return settled is not None and isinstance(settled.reason, Reason) and settled.reason.is_specified

    def _contributors(self, operands: Iterable[Node]) -> list[Node]:
        return [operand for operand in operands if self._contributes(operand)]

    def _dependencies(self, node: Node) -> list[Node]:
        if self._fixed(node):
            return []
        derivation = self._derivations[node]
        needed = self._contributors(derivation.operands)
        for demand in derivation.demands:
            needed.extend([demand.consumer] if demand.operands is None else self._contributors(demand.operands))
        needed.extend(self._borders(derivation))
        if derivation.follows is not None:
            needed.append(derivation.follows)
        if node.value is not None:
            needed.append(node.value)
        return needed

    @staticmethod
    def _borders(derivation: Derivation) -> list[Node]:
        composite = derivation.composite
        if derivation.flow is not Flow.INTERIOR or composite is None or composite.result is None:
            return []
        gradient = composite.result.gradient
        return [composite.result] if gradient is None else [composite.result, gradient]

    # -- conclusions --

    def _conclude(self, node: Node) -> Reason:
        if node.settled is not None:
            return _settled_reason(node, node.settled)
        override = self._override(node)
        if override is not None:
            return Reason(node, "R5", override.prec, override.update.source, note=override.note)
        if node.specified is not None:
            known = node.specified
            return Reason(node, "R4", known.prec, known.source, note="" if known.by == "user" else known.party)
        derivation = self._derivations[node]
        if derivation.flow is Flow.INTERIOR:
            interior = self._interior(node, derivation)
            if interior is not None:
                return interior
        if derivation.demands or derivation.is_index:
            reason, refused = self._from_consumers(node, derivation)
            if refused:
                self.declined[node] = refused
            return reason
        return self._from_operands(node, derivation)

    def _default_reason(self, node: Node, *, wide: bool = False) -> Reason:
        prec, because, extra = _default(node, self.reasons)
        return Reason(node, "R1", join(prec, f32) if wide else prec, node.source, because, extra=extra)

    def _from_operands(self, node: Node, derivation: Derivation) -> Reason:
        """R2: the join of all contributions at once."""
        if derivation.is_position:
            return Reason(node, "R2", i32, node.source, note="position")
        because = tuple(self.reasons[operand] for operand in self._contributors(derivation.operands))
        if not because:
            return self._default_reason(node, wide=derivation.wide)
        requirement = join_requirement(*(reason.prec for reason in because))
        if _misuses_counter_state(requirement, derivation):
            self.faults.append(_Fault(node.source, _counter_error(node, because, derivation)))
            return self._default_reason(node)
        prec, extra = requirement.realise(), ""
        if not prec.is_float and prec is not u4x32:
            default = node.default_prec
            if node.gradient is not None or node.is_gradient:
                prec, extra = (
                    join(prec, default),
                    f"joined with the session default {default}, as it carries a gradient",
                )
            elif derivation.float_only:
                prec, extra = (
                    join(prec, default),
                    f"joined with the session default {default}, as this is a float function",
                )
            elif derivation.widens_integers and (prec is bool_ or prec.bits < 32):
                prec, extra = i32, "sums and products of small integers"
            elif derivation.bool_to_byte and prec is bool_:
                prec, extra = u8, "arithmetic on bools"
            elif requirement.is_lossy:
                extra = "u64 with a signed integer: lossy"
        if derivation.wide and join(prec, f32) is not prec:
            prec, extra = join(prec, f32), "a loss is f32 or wider"
        return Reason(node, "R2", prec, node.source, because, extra=extra)

    def _from_consumers(self, node: Node, derivation: Derivation) -> tuple[Reason, list[Declined]]:
        """R3: the join of the consumers' demands, and the demands that were refused."""
        refused: list[Declined] = []
        carries = node.gradient is not None or node.is_gradient
        floats_only = carries or node.role is Role.SAMPLER
        accepted: list[tuple[Prec, tuple[Reason, ...]]] = []
        is_index = derivation.is_index and not floats_only
        for demand in derivation.demands:
            prec, causes = self._demanded(demand)
            if prec is None:
                continue
            if is_index and prec is not i32:
                refused.append(_refuse(prec, demand, "an index slot reads it as i32"))
            elif prec is u4x32:
                refused.append(_refuse(prec, demand, "counter state is never inferred"))
            elif floats_only and not prec.is_float:
                refused.append(_refuse(prec, demand, "it carries a gradient" if carries else "a sampler draws floats"))
            else:
                accepted.append((prec, causes))
        if is_index:
            return Reason(node, "R3", i32, node.source, note="index slot"), refused
        if not accepted:
            return self._default_reason(node), refused
        because = tuple(dict.fromkeys(cause for _, causes in accepted for cause in causes))
        requirement = join_requirement(*(prec for prec, _ in accepted))
        extra = "u64 with a signed integer: lossy" if requirement.is_lossy else ""
        return Reason(node, "R3", requirement.realise(), node.source, because, extra=extra), refused

    def _demanded(self, demand: Demand) -> tuple[Prec | None, tuple[Reason, ...]]:
        if demand.operands is None:
            reason = self.reasons[demand.consumer]
            return reason.prec, (reason,)
        because = tuple(self.reasons[operand] for operand in self._contributors(demand.operands))
        requirement = join_requirement(*(reason.prec for reason in because))
        # A join that cannot be realised is reported where the comparison itself is concluded.
        return (None, ()) if not because or requirement.conflict else (requirement.realise(), because)

    def _decline_settled(self, node: Node) -> None:
        derivation = self._derivations[node]
        settled = node.settled
        if settled is None or node.specified is not None or derivation.flow is not Flow.TOP_DOWN:
            return
        for demand in derivation.demands:
            prec, _ = self._demanded(demand)
            if prec is None:
                continue
            both = join_requirement(prec, settled.prec)
            if both.conflict or both.realise() is not settled.prec:
                refused = _refuse(prec, demand, f"routine {settled.routine!r} settled it")
                self.declined.setdefault(node, []).append(refused)

    def _interior(self, node: Node, derivation: Derivation) -> Reason | None:
        """Inside a composite: its compute precision, save integers of its own and what feeds a contraction.

        None where the composite's result is no float: then its interior obeys the ordinary rules.
        """
        composite = derivation.composite
        borders = tuple(self.reasons[border] for border in self._borders(derivation))
        if composite is None or not borders[0].prec.is_float:
            return None
        note = f"inside composite {composite.name}"
        if derivation.follows is not None:
            outer = self.reasons[derivation.follows]
            return Reason(node, "R2", outer.prec, node.source, (outer,), note=note)
        own = self._own_integer(node, derivation)
        if own is not None:
            return Reason(node, own.rule, own.prec, node.source, own.because, note=note, extra=own.extra)
        outside = borders[0].prec
        prec = compute_prec(join(*(border.prec for border in borders)), _DEFAULT_NUMERICS, "c")
        extra = ""
        if outside.is_narrow and (
            derivation.kernel is Kernel.OPERAND
            or (derivation.kernel is Kernel.GRADIENT and (outside is bf16 or borders[-1].prec is outside))
        ):
            prec, extra = outside, "read by a contraction"
        return Reason(node, "R2", prec, node.source, borders, note=note, extra=extra)

    def _own_integer(self, node: Node, derivation: Derivation) -> Reason | None:
        """Indices, positions and counts that a composite makes for itself stay integers."""
        # An argument that enters as data is computed with, so it is as wide as the rest (a mean of integers).
        if node.is_gradient or node.gradient is not None or derivation.kind == "enter":
            return None
        if derivation.demands or derivation.is_index:
            if node.role is not Role.LITERAL and not derivation.is_index:
                return None
            reason, _ = self._from_consumers(node, derivation)
        else:
            reason = self._from_operands(node, derivation)
        return None if reason.prec.is_float or reason.rule == "R1" else reason


def _refuse(prec: Prec, demand: Demand, why: str) -> Declined:
    return Declined(prec, demand.consumer.label, demand.consumer.source, why)


def _settled_reason(node: Node, settled: Settled) -> Reason:
    because: tuple[Reason, ...] = ()
    if isinstance(settled.reason, Reason):
        because = (settled.reason,)
    elif node.specified is not None:
        because = (Reason(node, "R4", node.specified.prec, node.specified.source),)
    return Reason(node, "R6", settled.prec, settled.source, because, note=f"by routine {settled.routine!r}")


# -- faults ---------------------------------------------------------------------------------------------------------


def _misuses_counter_state(requirement: Requirement, derivation: Derivation) -> bool:
    computes = derivation.kind == "cast" or (derivation.kind in OPS and derivation.kind != "identity")
    return requirement.conflict or (requirement.counter and computes)


def _counter_error(node: Node, because: tuple[Reason, ...], derivation: Derivation) -> PrecisionError:
    parties = sorted(f"  {cause.node.label}: {cause.prec} {cause.node.source.quoted()}" for cause in because)
    return PrecisionError(
        f"{node.label}: u4x32 is counter state, which {derivation.kind or 'this op'} cannot read or join\n"
        f"  {node.source.quoted()}\n" + "\n".join(parties) + "\n  only samplers and counter operations take it"
    )


def _slot_faults(reasons: Mapping[Node, Reason]) -> list[_Fault]:
    """Index slots take integers, sampler slots counter state, casts anything but counter state."""
    faults: list[_Fault] = []
    for node, reason in reasons.items():
        record = node.record
        for operand in record.operands if record is not None else ():
            prec = reasons[operand.node].prec
            if operand.slot is Slot.INDEX and not prec.is_integer:
                expected, advice = "an integer", "give it an integer precision (prec=i32), or cast(..., i32)"
            elif operand.slot is Slot.RNG and prec is not u4x32:
                expected, advice = "u4x32", "samplers read counter state only"
            elif record is not None and record.kind == "cast" and u4x32 in (prec, reason.prec):
                expected, advice = "a number", "counter state cannot be cast"
            else:
                continue
            assert record is not None
            faults.append(_Fault(record.source, _slot_error(record, operand.node, prec, expected, advice)))
    return faults


def _slot_error(record: OpRecord, operand: Node, prec: Prec, expected: str, advice: str) -> PrecisionError:
    return PrecisionError(
        f"{record.kind} {record.result.label}: expected {expected} in operand {operand.label}, got {prec}\n"
        f"  {record.source.quoted()}\n  {operand.label} was made {operand.source.quoted()}\n  {advice}"
    )
