"""Audit: every N-th call of a plan is compared with the reference, which runs on the same record beside it.

    [rlkernel]
    audit = 100

Results are compared, not gradients: the reference runs under torch.no_grad. Integers, bools and quantized weights must
be equal. A float may be off by twice its tolerance in the operator's spec, since both sides may be off by it; where
that is relative to a sum which is not at hand, the scale is the largest |expected|, and at least 1. Of draws a few rows
may hold other tokens, see `_draws`. So an audit is a smoke alarm, and the conformance suite is the proof.

Not audited: operators that make something which lives on, calls that write into `out`, calls with a process group (all
of its ranks would have to run the reference too), calls while a CUDA graph is captured or torch.compile traces, weights
packed into another layout than the reference's, and what the reference itself serves.

Imports torch when a plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final, final

from rlkernel import announce, policy, selftest
from rlkernel.discover import PackageVersions, brief, guarded, load_target
from rlkernel.resolve import Facts, resolve
from rlkernel_core import checks
from rlkernel_core.decision import PLAIN_TORCH, Call, OpPolicy
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.form import OpSpec
from rlkernel_core.spec.sampling import Status
from rlkernel_core.tree import flatten

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel.plans import Choice

SIDES: Final = 2  # both may be off by the tolerance
_DRAWN: Final = "token"  # results with this field are draws
# Fields of draws that say where a filter cut or how tokens rank: two right samplers may differ at every border.
_BORDERLINE: Final = frozenset(
    {"accepted", "kept_count", "kept_ids", "rank", "threshold", "threshold_id", "top_ids", "top_logprobs"}
)
_OF_ONE_SIDE: Final = Status.FALLBACK | Status.KEPT_OVERFLOW  # bits of `status` that say how a row was done, or follow
# Rows of a draw that may hold another token: one, and one in so many more. The two best noised scores are closer than
# 1e-3 about once in a thousand rows, and their tolerance is far below that.
_ROWS_PER_TIE: Final = 1000
_RELATIVE: Final = ("relative", "times")  # words in the source of a tolerance that is relative to a sum or a largest
_LOGITS: Final = "logits"  # where the logits have a tolerance of their own, all that follows from them has it too
_UNDER_WAY: Final[ContextVar[bool]] = ContextVar("rlkernel_audit", default=False)


@final
@dataclass(slots=True)
class Audited:
    """What the audits of one kind of call have found."""

    calls: int = 0  # compared
    differing: int = 0  # of these
    failed: int = 0  # not compared, because the reference raised or refused
    worst: float = 0.0  # the largest difference so far, over what is allowed; inf where nothing is

    def __add__(self, other: Audited) -> Audited:
        calls, differing = self.calls + other.calls, self.differing + other.differing
        return Audited(calls, differing, self.failed + other.failed, max(self.worst, other.worst))

    def __str__(self) -> str:
        failed = f", {self.failed} not compared" if self.failed else ""
        worst = f"{self.worst:.3g} times the tolerance at most" if self.calls else "nothing compared"
        return f"{self.calls} calls compared{failed}, {self.differing} differ, {worst}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form; `worst` is None where it is infinite."""
        worst = self.worst if math.isfinite(self.worst) else None
        return {"calls": self.calls, "differing": self.differing, "failed": self.failed, "worst": worst}

    @staticmethod
    def of(found: Mapping[str, Any]) -> Audited:
        """The inverse of `as_dict`."""
        worst = math.inf if found["worst"] is None else float(found["worst"])
        return Audited(int(found["calls"]), int(found["differing"]), int(found["failed"]), worst)


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that differs beyond tolerance."""

    output: str  # "logprob", "stats.ratio_mean"; "result" where the operator returns one tensor
    ratio: float  # over what is allowed; inf where nothing is
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """What comparing one call found."""

    differences: tuple[Difference, ...] = ()
    worst: float = 0.0  # the largest ratio of all outputs, those within tolerance included
    error: str = ""  # why the call could not be compared


def audited(run: Callable[[Any], Any], choice: Choice, spec: OpSpec[Any, Any], call: Any) -> Callable[[Any], Any]:
    """`run` with its first and then every N-th call compared; `run` itself where nothing can be.

    Args:
        run: takes a call record.
        choice: its decision holds N; what is found is counted here.
        spec: the operator.
        call: the record of the shape that the plan is for.
    """
    import torch

    decision = choice.decision
    every, dtype = decision.policy.audit, decision.call.dtype
    if decision.backend == PLAIN_TORCH or selftest.running() or not _comparable(spec, call):
        return run
    tally = choice.audit = choice.audit or Audited()
    definition = _reference(decision.call)
    if isinstance(definition, Reason):
        tally.failed += 1
        announce.audited(decision, Report(error=str(definition)))
        return run
    capturing: Callable[[], bool] = lambda: False  # noqa: E731
    if torch.cuda.is_available():
        capturing = torch.cuda.is_current_stream_capturing
    turns = count()

    def compared(call: Any, result: Any) -> Report | None:
        with torch.no_grad():
            return compare(spec, dtype, result, definition(detached(call)))

    def with_audit(call: Any) -> Any:
        result = run(call)
        if next(turns) % every or _UNDER_WAY.get() or torch.compiler.is_compiling() or capturing():
            return result
        under_way = _UNDER_WAY.set(True)  # observers may call operators
        try:
            report, error = guarded(lambda: compared(call, result))
            if error is not None:
                report = Report(error=brief(error))
            if report is not None:
                _count(tally, report)
                if report.differences or report.error:
                    announce.audited(decision, report)
        finally:
            _UNDER_WAY.reset(under_way)
        return result

    return with_audit


def _count(tally: Audited, report: Report) -> None:
    tally.failed += bool(report.error)
    tally.calls += not report.error
    tally.differing += bool(report.differences)
    tally.worst = max(tally.worst, report.worst)


def _comparable(spec: OpSpec[Any, Any], call: Any) -> bool:
    """Whether calls of this shape may run twice: nothing lives on, nothing is written to, no other rank takes part."""
    if not spec.planned or getattr(call, "out", None) is not None:
        return False
    return not any(hasattr(leaf, "group_name") for leaf in flatten(call)[0])


def _reference(call: Call) -> Callable[[Any], Any] | Reason:
    """The reference's implementation as a function of the record, or why it takes no such call."""
    installed = policy.installed()
    found = resolve(installed, Facts(PackageVersions()), replace(call, grad=False), OpPolicy((PLAIN_TORCH,)))
    if found.target is None:
        return next(r.reason for r in found.rejected if r.backend == PLAIN_TORCH)
    run = load_target(found.target)
    manifest = installed[PLAIN_TORCH].manifest
    impls = manifest.of(call.op) if manifest is not None else ()
    if isinstance(run, Reason) or not any(i.prepared for i in impls if i.target == found.target):
        return run
    prepare = run
    return lambda call: prepare(call)(call)


def detached(call: Any) -> Any:
    """The record with its tensors cut off from autograd; itself where none requires a gradient."""
    changes = {}
    for name, value in call.as_dict().items():
        leaves, structure = flatten(value)
        if any(getattr(leaf, "requires_grad", False) for leaf in leaves):
            changes[name] = structure.build([x.detach() if checks.is_tensor(x) else x for x in leaves])
    return type(call)(**{**call.as_dict(), **changes}) if changes else call


def compare(spec: OpSpec[Any, Any], dtype: str | None, actual: Any, expected: Any) -> Report | None:
    """Hold a result against the reference's, output by output.

    Args:
        spec: the operator; its tolerances count.
        dtype: of the primary tensor, which picks their rows.
        actual: what the implementation returned.
        expected: what the reference returned for the same record.

    Returns:
        The report; None where the two are packed in different layouts.
    """
    if isinstance(actual, QuantTensor) and isinstance(expected, QuantTensor) and actual.layout != expected.layout:
        return None
    (got, form), (want, wanted) = flatten(actual), flatten(expected)
    if form != wanted:
        return Report(
            (Difference("result", math.inf, f"it has the form {form.names()}, not {wanted.names()}"),), math.inf
        )
    exact = isinstance(expected, QuantTensor)
    names = [name or "result" for name in wanted.names()]
    pairs = dict(zip(names, zip(got, want, strict=True), strict=True))
    odd = [d for name, (a, e) in pairs.items() if (d := _other_form(name, a, e)) is not None]
    if odd:
        return Report(tuple(odd), math.inf)
    tensors = {name: (a, e) for name, (a, e) in pairs.items() if checks.is_tensor(e)}
    found = _draws(spec, dtype, tensors) if _DRAWN in tensors else []
    if not found:
        found = [_output(spec, dtype, name, a, e, exact=exact) for name, (a, e) in tensors.items()]
    worst = max((d.ratio for d in found), default=0.0)
    return Report(tuple(d for d in found if d.ratio > 1), worst)


def _other_form(output: str, actual: Any, expected: Any) -> Difference | None:
    """Why two leaves cannot be compared element by element; of values that are no tensors, that they differ."""
    if not checks.is_tensor(expected) or not checks.is_tensor(actual):
        same = type(actual) is type(expected) and actual == expected
        text = f"it is {checks.describe(actual)}, not {checks.describe(expected)}"
        return None if same else Difference(output, math.inf, text)
    if actual.shape == expected.shape and actual.dtype == expected.dtype:
        return None
    text = f"it is {checks.describe(actual)}, not {checks.describe(expected)}"
    return Difference(output, math.inf, text)


def _draws(spec: OpSpec[Any, Any], dtype: str | None, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> list[Difference]:
    """Outputs of a draw: tokens by the number of rows that differ, the rest where the token is the same.

    Two right samplers may draw different tokens where the two best noised scores are within the spec's "score"
    tolerance, or where a filter's border is within "top_p" or "min_p". What says where a filter cut is not compared.
    """
    got, want = pairs[_DRAWN]
    agree = got == want
    rows, others = agree.numel(), int((~agree).sum())
    near = ", ".join(
        sorted({f"{t.output} {t.atol:g}" for t in spec.tolerances if t.output in {"score", "top_p", "min_p"}})
    )
    text = f"{others} of {rows} rows hold another token, where a few may that are within a tolerance ({near})"
    found = [Difference(_DRAWN, others / (1 + rows // _ROWS_PER_TIE), text)]
    for name, (a, e) in pairs.items():
        if name == "status":
            bits = ~int(_OF_ONE_SIDE)
            found.append(_equal(name, a & bits, e & bits))
        elif name != _DRAWN and name not in _BORDERLINE:
            found.append(_output(spec, dtype, name, a.where(agree, e) if a.shape == agree.shape else a, e))
    return found


def _output(
    spec: OpSpec[Any, Any], dtype: str | None, name: str, actual: Tensor, expected: Tensor, *, exact: bool = False
) -> Difference:
    """One tensor against the other."""
    if exact or not expected.is_floating_point():
        return _equal(name, actual, expected)
    rows = _tolerances(spec, name)
    same = [t for t in rows if t.dtype in {dtype, "any"}] or rows
    atol, rtol = max((t.atol for t in same), default=0.0), max((t.rtol for t in same), default=0.0)
    return _close(name, actual, expected, atol, rtol, relative=any(w in t.source for t in rows for w in _RELATIVE))


def _tolerances(spec: OpSpec[Any, Any], output: str) -> list[Any]:
    """The rows for an output: its own, those of what it is part of, else all but the gradients'."""
    forward = [t for t in spec.tolerances if not t.output.startswith("grad")]
    logits = [t for t in forward if t.output == _LOGITS]
    own = next((rows for part in output.split(".") if (rows := [t for t in forward if t.output == part])), forward)
    return [*own, *logits]


def _equal(name: str, actual: Tensor, expected: Tensor) -> Difference:
    """Equality of values; of floats, NaN is equal to NaN."""
    differ = actual != expected
    if expected.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
    n = int(differ.sum())
    return Difference(name, math.inf if n else 0.0, f"{n} of {expected.numel()} entries are not equal")


def _close(name: str, actual: Tensor, expected: Tensor, atol: float, rtol: float, *, relative: bool) -> Difference:
    """Distance over what is allowed; the pattern of NaN and infinities must be the same."""
    if expected.numel() == 0:
        return Difference(name, 0.0, "")
    a, e = actual.double(), expected.double()
    finite = a.isfinite() & e.isfinite()
    odd = int(((a != e) & ~finite & ~(a.isnan() & e.isnan())).sum())
    if odd:
        return Difference(name, math.inf, f"{odd} of {e.numel()} entries are NaN or infinite on one side alone")
    gap = (a - e).abs().where(finite, 0.0)
    size = e.abs().where(finite, 0.0)
    allowed = SIDES * ((atol + rtol) * size.max().clamp(min=1.0) if relative else atol + rtol * size)
    ratio = (gap / allowed).where(gap > 0, 0.0)
    worst = float(ratio.max())
    text = (
        f"off by up to {float(gap.max()):.3g}, {worst:.3g} times what is allowed (atol {atol:g}, rtol {rtol:g}, twice)"
    )
    return Difference(name, worst, text)
