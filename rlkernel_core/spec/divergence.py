"""divergence@1: how far a student's next-token distribution is from a teacher's, for distillation.

    s = softmax(logits / temperature)                     the student
    t = softmax(teacher / teacher_temperature)            the teacher
    m = beta t + (1 - beta) s

    forward_kl   KL(t || s) = sum_j t_j log(t_j / s_j)
    reverse_kl   KL(s || t) = sum_j s_j log(s_j / t_j)
    jsd          beta KL(t || m) + (1 - beta) KL(s || m)
    tv           sum_j |s_j - t_j| / 2

The generalized JSD is that of GKD (arXiv:2306.13649, eq. 1) as TRL (`GKDTrainer.generalized_jsd_loss`) and Liger
(`LigerJSD`) have it, beta the weight of the teacher. Both take their beta = 0 for forward KL and 1 for reverse KL; here
these are kinds, and 0 < beta < 1.

Conventions: 0 log 0 = 0. Where s_j = 0 < t_j forward KL is +inf, where t_j = 0 < s_j reverse KL is. A KL sums
a log(a / b) - a + b, which is the same sum where a and b sum to 1, and no term of which is negative: rounding makes no
divergence negative, and one of two distributions that nearly agree keeps its digits.

A teacher may be a list of its K most likely ids with their log-probabilities, as engines return them. Both
distributions then are K + 1 masses: one per listed id, and one tail of all other ids.

    t_tail = max(1 - sum_k exp(teacher_k), 2^-23)         s_tail = sum of s_j over the ids that are not listed

2^-23 is the epsilon of fp32: a list that seems to hold all of the mass makes no reverse KL infinite. A list of all V
ids has no tail; any other has one, so forward KL is +inf for a student that excludes every id which is not listed.

    d divergence / d logits_j = (s_j w_j - s_j sum_k s_k w_k) / temperature,  w_j the derivative with respect to s_j:
    forward_kl -t_j / s_j · reverse_kl log(s_j / t_j) · jsd (1 - beta) log(s_j / m_j) · tv sign(s_j - t_j) / 2

Legend: N tokens (any leading shape) · V vocabulary · K listed ids. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    GRAD,
    Clause,
    Feature,
    OpCall,
    OpSpec,
    Tolerance,
)
from rlkernel_core.spec.logprob import check_temperature

if TYPE_CHECKING:
    from torch import Tensor

KINDS: Final = ("forward_kl", "reverse_kl", "jsd", "tv")
LEAST_TAIL: Final = 2.0**-23  # least mass of a teacher's tail: the epsilon of fp32
MOST_MASS: Final = 1.0625  # most mass of a teacher's list: 1, and what log-probabilities rounded to 16 bits may add


@dataclass(slots=True, eq=False)
class DivergenceCall(OpCall["Tensor"]):
    """Divergence of the student's distribution from the teacher's, a number per token.

    Args:
        logits: [..., V] of the student, bf16, fp16 or fp32 (float64 on backends that claim it); any strides.
        teacher: [..., V] logits of the teacher, or with `teacher_ids` [..., K] log-probabilities of these ids, at most
            0. Any floating dtype; no gradient.
        kind: "forward_kl", "reverse_kl", "jsd" or "tv".
        beta: weight of the teacher in jsd, between 0 and 1, 0.5 unless given; for jsd alone.
        temperature: of the student: float > 0, or a tensor broadcastable to [...] that requires no gradient.
        teacher_temperature: of the teacher's logits: float > 0, or a tensor broadcastable to [...]; None: the
            student's. Log-probabilities are taken as they are, so none goes with `teacher_ids`.
        teacher_ids: [..., K] integer, the ids that `teacher` lists, each at most once in a row, in any order. -1 is
            padding, whatever log-probability is beside it.
        mask: [...] bool, True where the row counts; False rows give 0 and gradient 0 whatever they hold.

    Returns:
        [...] fp32 (float64 for float64 logits), differentiable with respect to logits, once.

    A row without a divergence is NaN: NaN or +inf logits, all logits -inf, a temperature that is not positive and
    finite, a listed id that is neither -1 nor in [0, V), one that is listed twice, or log-probabilities whose mass is
    NaN or above 1.0625. The gradient of a row whose divergence is NaN or +inf is NaN. No other row is affected.

    Raises:
        ArgumentError: wrong rank, sizes, device or dtype, an unknown kind, a beta or a temperature out of range, a
            beta beside another kind, a teacher_temperature beside teacher_ids, or a teacher that requires a gradient.
    """

    logits: Tensor
    teacher: Tensor
    _: KW_ONLY
    kind: str = "forward_kl"
    beta: float | None = None
    temperature: float | Tensor = 1.0
    teacher_temperature: float | Tensor | None = None
    teacher_ids: Tensor | None = None
    mask: Tensor | None = None


def check(call: DivergenceCall) -> None:
    """Metadata checks shared by all implementations of divergence@1; reads no value off the device."""
    logits, teacher = call.logits, call.teacher
    checks.tensor("logits", logits, kind="floating")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ArgumentError("logits", checks.describe(logits), "needs a last dimension V >= 1", "Pass [..., V].")
    beside: Any = {"beside": logits, "where": "logits"}
    checks.tensor("teacher", teacher, kind="floating")
    if call.teacher_ids is None:
        checks.aligned("teacher", teacher, logits.shape, "logits", kind="floating", **beside)
    check_options(call, logits.shape[:-1], logits)


def check_options(call: Any, rows: Any, beside: Tensor) -> None:
    """The arguments that divergence and linear_divergence have in common; rows are the shape [...] of the tokens."""
    teacher, ids = call.teacher, call.teacher_ids
    where: Any = {"beside": beside, "where": "the rows"}
    constant("teacher", teacher)
    if ids is not None:
        checks.tensor("teacher_ids", ids, kind="integer")
        if ids.dim() != len(rows) + 1 or tuple(ids.shape[:-1]) != tuple(rows) or ids.shape[-1] < 1:
            problem = f"must be [..., K], K >= 1, for the rows {list(rows)}"
            raise ArgumentError("teacher_ids", checks.describe(ids), problem, "Pass one list of ids per row.")
        checks.same_device("teacher_ids", ids, beside, "the rows")
        checks.aligned("teacher", teacher, ids.shape, "teacher_ids", kind="floating", **where)
        if call.teacher_temperature is not None:
            raise ArgumentError(
                "teacher_temperature",
                checks.describe(call.teacher_temperature),
                "has no effect on log-probabilities, which are taken as they are",
                "Ask the teacher for log-probabilities at that temperature, and pass None.",
            )
    checks.choice("kind", call.kind, KINDS)
    if call.beta is not None:
        if call.kind != "jsd":
            raise ArgumentError("beta", call.beta, f"has no effect on kind={call.kind!r}", "Pass None, or kind='jsd'.")
        checks.number("beta", call.beta, above=0.0, remedy="Pass kind='forward_kl' for the limit of 0.")
        if call.beta >= 1:
            raise ArgumentError("beta", call.beta, "must be < 1", "Pass kind='reverse_kl' for the limit of 1.")
    check_temperature(call.temperature, rows, beside)
    if call.teacher_temperature is not None:
        try:
            check_temperature(call.teacher_temperature, rows, beside)
        except ArgumentError as error:
            remedy = error.remedy.replace("temperature.", "teacher_temperature.")
            raise type(error)("teacher_temperature", error.got, error.problem, remedy) from None
    checks.aligned("mask", call.mask, rows, "the rows", kind="bool", **where)


def constant(name: str, x: Tensor) -> None:
    """A tensor that has no gradient requires none."""
    if x.requires_grad:
        raise ArgumentError(name, checks.describe(x), "has no gradient, but requires one", f"Pass {name}.detach().")


def per_row_temperature(call: Any) -> dict[str, object]:
    """Whether a temperature of either side is a tensor."""
    return {"per_row_temperature": any(checks.is_tensor(x) for x in (call.temperature, call.teacher_temperature))}


FEATURES: Final = (
    GRAD,
    DETERMINISTIC,
    BATCH_INVARIANT,
    CAPTURABLE,
    Feature("kind:forward_kl", "KL(teacher || student)"),
    Feature("kind:reverse_kl", "KL(student || teacher)"),
    Feature("kind:jsd", "the generalized JSD, with its beta"),
    Feature("kind:tv", "the total variation distance"),
    Feature("per_row_temperature", "temperatures as tensors, one per row"),
    Feature("teacher_temperature", "a temperature of the teacher's own"),
    Feature("teacher_ids", "a teacher by its most likely ids, their log-probabilities and a tail"),
    Feature("mask", "masked rows give 0 and gradient 0, whatever they hold"),
)

SPEC = OpSpec(
    name="divergence",
    record=DivergenceCall,
    summary="KL, reverse KL, JSD or TV between student and teacher, by logits or by top-k ids with a tail",
    primary="logits",
    differentiable=("logits",),
    carrying=("",),
    one_of=("kind",),
    needed=per_row_temperature,
    check=check,
    sizes=lambda call: {"rows": call.logits.shape[:-1].numel(), "vocab": call.logits.shape[-1]},
    features=FEATURES,
    clauses=(
        Clause("DV-01", "matches float64", "every kind is within tolerance of the float64 definition", "accuracy"),
        Clause(
            "DV-02",
            "near 0",
            "no divergence is negative, equal logits give at most 1e-6, and where both sides nearly agree a KL "
            "or JSD has a relative error of at most 2 %",
            "accuracy",
        ),
        Clause("DV-03", "any vocabulary size", "V is no multiple of anything: every column counts once", "accuracy"),
        Clause("DV-04", "shift invariance", "a constant added to a row of either side changes nothing", "invariance"),
        Clause(
            "DV-05",
            "minus infinity",
            "a -inf logit has probability 0 and gradient 0: 0 log 0 = 0, and a KL is +inf only where it must be",
            "accuracy",
        ),
        Clause("DV-06", "temperature once", "temperature T on logits equals temperature 1 on logits / T", "law"),
        Clause(
            "DV-07",
            "temperature of the teacher",
            "each side has its own; None is the student's",
            "law",
            "teacher_temperature",
        ),
        Clause(
            "DV-08",
            "temperature per row",
            "a tensor of temperatures equals one call per row",
            "law",
            "per_row_temperature",
        ),
        Clause(
            "DV-09",
            "mask selects",
            "a masked row gives 0 and gradient 0 though either side holds NaN or ids out of range, and the upstream "
            "gradient is NaN",
            "law",
            "mask",
        ),
        Clause(
            "DV-10",
            "the kinds agree",
            "KL of swapped sides are each other's reverse; JSD of swapped sides and 1 - beta is the same and at most "
            "-beta log beta - (1 - beta) log(1 - beta); TV lies in [0, 1]",
            "law",
        ),
        Clause("DV-11", "gradient", "the gradient of the logits matches float64", "gradient", "grad"),
        Clause("DV-12", "gradient of a row sums to zero", "over the vocabulary", "gradient", "grad"),
        Clause(
            "DV-13",
            "gradients on and off agree",
            "the divergence with a gradient wanted and without one is the same bits",
            "invariance",
            "grad",
        ),
        Clause(
            "DV-14",
            "a list of all ids",
            "the log-probabilities of all V ids, in any order and beside padding, give what the logits give",
            "law",
            "teacher_ids",
        ),
        Clause(
            "DV-15",
            "the tail",
            "is one mass: how either side spreads it over the ids that are not listed changes nothing, and a list that "
            "holds all of the mass makes no KL infinite where the student excludes no id",
            "law",
            "teacher_ids",
        ),
        Clause(
            "DV-16",
            "wrong lists",
            "an id out of range, one listed twice or a mass above 1.0625 gives NaN in its own row",
            "refusal",
            "teacher_ids",
        ),
        Clause(
            "DV-17",
            "rows without a divergence",
            "NaN, +inf or all -inf logits of either side, or a temperature that is not positive and finite, give NaN "
            "in their own row and change no bit of another",
            "law",
        ),
        Clause("DV-18", "any layout", "strided views and padded rows give the bits of contiguous input", "invariance"),
        Clause("DV-19", "no rows", "N = 0 gives an empty result and an empty gradient", "accuracy"),
        Clause("DV-20", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("DV-21", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("DV-22", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("DV-23", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause(
            "DV-24",
            "bad arguments",
            "wrong sizes, dtypes and numbers, and arguments without effect, raise ArgumentError naming the argument",
            "refusal",
        ),
        Clause(
            "DV-25",
            "masked by a number",
            "one finite number far below the others, down to the least of the dtype, in neighboring ids, in every "
            "other one or in all but some of a row of either side, gives the divergence and the gradient of float64",
            "accuracy",
        ),
    ),
    tolerances=(
        Tolerance("divergence", "float32", 1e-5, 1e-5, "relative to sum_j a_j |log(a_j / b_j)|; of TV, to 1"),
        Tolerance("divergence", "bfloat16", 1e-5, 1e-5, "inputs are exact in fp32; the arithmetic is the fp32 one"),
        Tolerance("divergence", "float16", 1e-5, 1e-5, "inputs are exact in fp32; the arithmetic is the fp32 one"),
        Tolerance("divergence", "float64", 1e-13, 1e-12, "float64 throughout"),
        Tolerance(
            "grad", "float32", 4e-6, 1e-5, "relative to |g| / T times 1 + the largest |w_j|; an exponential each"
        ),
        Tolerance("grad", "bfloat16", 4e-6, 2**-8, "as fp32, and one rounding to a 7-bit mantissa"),
        Tolerance("grad", "float16", 4e-6, 2**-11, "as fp32, and one rounding to a 10-bit mantissa"),
        Tolerance("grad", "float64", 1e-13, 1e-12, "float64 throughout"),
    ),
)
