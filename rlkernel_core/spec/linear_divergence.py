"""linear_divergence@1: divergences from hidden states and output heads; no logits of all tokens are stored.

    logits  = hidden @ weight.T
    teacher = teacher @ teacher_weight.T            where the teacher gives hidden states and its head
    the divergence of the two, exactly as divergence@1 defines it

Logits stay in fp32: they are not rounded to the 16 bits of the operands. Tokens are processed in blocks. The backward
pass computes the logits of a block again, on both sides, or the forward pass keeps their gradient: three products for
the student (logits, d_hidden, d_weight) and one for the teacher, where the first takes two more.

    d_hidden = dz @ weight,  d_weight = dz.T @ hidden,  dz the gradient of the logits; both are summed in fp32

Legend: N tokens (any leading shape) · D, E hidden sizes of student and teacher · V vocabulary · K listed ids. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.divergence import FEATURES, check_options, constant, per_row_temperature
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    Clause,
    Feature,
    OpCall,
    OpSpec,
    Tolerance,
)

if TYPE_CHECKING:
    from torch import Tensor


BACKWARD: Final = ("recompute", "save")


@dataclass(slots=True, eq=False)
class LinearDivergenceCall(OpCall["Tensor"]):
    """Divergence of the distribution of `hidden @ weight.T` from the teacher's, a number per token.

    Args:
        hidden: [..., D] of the student, bf16, fp16 or fp32 (float64 on backends that claim it); any strides.
        weight: [V, D], the student's output head, of the dtype of hidden.
        teacher: with `teacher_weight` [..., E] hidden states; with `teacher_ids` [..., K] log-probabilities of these;
            with neither [..., V] logits. Any floating dtype; no gradient.
        teacher_weight: [V, E], the teacher's output head, of the dtype of teacher; no gradient.
        kind: as in divergence, and so are beta, temperature, teacher_temperature, teacher_ids and mask.
        backward: "recompute" computes logits again in the backward pass: extra memory that does not grow with N.
            "save" keeps the gradient of the logits, N x V numbers, of 16 bits where the operands are bf16: two
            products less. Both give the same divergences, and gradients within tolerance.

    Returns:
        [...] fp32 (float64 for float64 operands), differentiable with respect to hidden and weight, once; no work is
        done for a frozen operand. Extra memory does not grow with N but for a few numbers per row, and what "save"
        keeps.

    A row without a divergence is NaN, as in divergence; its d_hidden is NaN, and so is d_weight.

    Raises:
        ArgumentError: what divergence refuses; heads that do not fit hidden states or each other; teacher_weight
            beside teacher_ids.
    """

    hidden: Tensor
    weight: Tensor
    teacher: Tensor
    _: KW_ONLY
    teacher_weight: Tensor | None = None
    kind: str = "forward_kl"
    beta: float | None = None
    temperature: float | Tensor = 1.0
    teacher_temperature: float | Tensor | None = None
    teacher_ids: Tensor | None = None
    mask: Tensor | None = None
    backward: str = "recompute"


def check(call: LinearDivergenceCall) -> None:
    """Metadata checks shared by all implementations of linear_divergence@1; reads no value off the device."""
    hidden, weight, teacher, of_teacher = call.hidden, call.weight, call.teacher, call.teacher_weight
    checks.tensor("hidden", hidden, kind="floating")
    if hidden.dim() < 1 or hidden.shape[-1] < 1:
        raise ArgumentError("hidden", checks.describe(hidden), "needs a last dimension D >= 1", "Pass [..., D].")
    rows = hidden.shape[:-1]
    _head("weight", weight, "hidden", hidden)
    checks.tensor("teacher", teacher, kind="floating")
    checks.exclusive(teacher_weight=of_teacher, teacher_ids=call.teacher_ids)
    if of_teacher is not None:
        if teacher.dim() != len(rows) + 1 or tuple(teacher.shape[:-1]) != tuple(rows) or teacher.shape[-1] < 1:
            problem = f"must be [..., E], E >= 1, for the rows {list(rows)}"
            remedy = "Pass the teacher's hidden states of the same tokens."
            raise ArgumentError("teacher", checks.describe(teacher), problem, remedy)
        checks.same_device("teacher", teacher, hidden, "hidden")
        _head("teacher_weight", of_teacher, "teacher", teacher)
        constant("teacher_weight", of_teacher)
        if of_teacher.shape[0] != weight.shape[0]:
            raise ArgumentError(
                "teacher_weight", checks.describe(of_teacher), f"must have the {weight.shape[0]} ids of weight",
                "Cut or pad one of the heads to the vocabulary that both models share.",
            )  # fmt: skip
    elif call.teacher_ids is None:
        of = "hidden with the ids of weight"
        checks.aligned("teacher", teacher, (*rows, weight.shape[0]), of, kind="floating", beside=hidden, where="hidden")
    check_options(call, rows, hidden)
    checks.choice("backward", call.backward, BACKWARD)


def _head(name: str, weight: Any, of: str, hidden: Tensor) -> None:
    """A head [V, D] fits hidden states [..., D]."""
    checks.tensor(name, weight, ndim=2, kind="floating")
    D = hidden.shape[-1]
    if weight.shape[1] != D or weight.shape[0] < 1:
        remedy = f"Pass the output head of the model that gave {of}."
        raise ArgumentError(name, checks.describe(weight), f"must be [V, {D}], V >= 1, for {of}", remedy)
    checks.same_device(name, weight, hidden, of)
    if weight.dtype != hidden.dtype:
        raise ArgumentError(
            name,
            checks.describe(weight),
            f"must have the dtype of {of}, {hidden.dtype}",
            f"Cast it with .to({of}.dtype).",
        )


_SUMS: Final = "fp32 accumulation over D <= 4096, logits up to 30, relative to sum_j a_j |log(a_j / b_j)|; of TV, to 1"

SPEC = OpSpec(
    name="linear_divergence",
    record=LinearDivergenceCall,
    summary="divergence of student and teacher from hidden states and output heads; logits are never all stored",
    primary="hidden",
    differentiable=("hidden", "weight"),
    carrying=("",),
    one_of=("kind",),
    needed=per_row_temperature,
    check=check,
    sizes=lambda call: {"rows": call.hidden.shape[:-1].numel(), "vocab": call.weight.shape[0]},
    features=(
        *FEATURES,
        Feature("teacher_weight", "a teacher by its hidden states and its head"),
        Feature("backward:save", "the gradient of the logits is kept: two products less, N x V numbers"),
    ),
    clauses=(
        Clause(
            "LD-01",
            "matches float64",
            "every kind, from every form of teacher, is within tolerance of the float64 definition",
            "accuracy",
        ),
        Clause(
            "LD-02",
            "logits are not rounded",
            "with 16-bit operands a divergence is as accurate as fp32 logits make it",
            "accuracy",
        ),
        Clause("LD-03", "any vocabulary size", "every column counts once", "accuracy"),
        Clause(
            "LD-04",
            "memory constant in N",
            "peak memory beyond inputs, results and gradients does not grow with N, but for a few numbers per row",
            "side_effect",
        ),
        Clause(
            "LD-05",
            "the forms of a teacher agree",
            "hidden states and a head, their logits, and the log-probabilities of all ids give the same",
            "law",
            "teacher_weight",
        ),
        Clause(
            "LD-06",
            "temperatures",
            "of either side, one per row, are those of divergence",
            "law",
            "per_row_temperature",
        ),
        Clause(
            "LD-07",
            "mask selects",
            "a masked row gives 0 and d_hidden 0 though hidden and teacher hold NaN; d_weight gets nothing",
            "law",
            "mask",
        ),
        Clause("LD-08", "gradient", "d_hidden and d_weight match float64", "gradient", "grad"),
        Clause(
            "LD-09",
            "gradients accumulate in fp32",
            "the error of d_hidden and d_weight does not grow with rows and columns",
            "gradient",
            "grad",
        ),
        Clause(
            "LD-10",
            "frozen operands",
            "an operand that requires no gradient gets none, and the other's gradient does not change",
            "gradient",
            "grad",
        ),
        Clause(
            "LD-11",
            "gradients on and off agree",
            "the divergence with a gradient wanted and without one is the same bits",
            "invariance",
            "grad",
        ),
        Clause(
            "LD-12",
            "one bad row spoils one row",
            "NaN in a row of hidden or teacher, or logits of a side that are all -inf, make that row NaN and change no "
            "bit of another or of its d_hidden",
            "law",
        ),
        Clause(
            "LD-13",
            "any layout",
            "strided operands give what contiguous ones give, within tolerance; the same bits where batch_invariant is "
            "claimed",
            "invariance",
        ),
        Clause("LD-14", "no rows", "N = 0, or all rows masked, gives empty or zero results and gradients", "accuracy"),
        Clause("LD-15", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("LD-16", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("LD-17", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("LD-18", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause(
            "LD-19",
            "bad arguments",
            "heads that do not fit, and what divergence refuses, raise ArgumentError naming the argument",
            "refusal",
        ),
        Clause(
            "LD-20",
            "what is saved changes nothing",
            "save gives the bits of recompute's divergences; gradients match float64 whatever comes in",
            "gradient",
            "backward:save",
        ),
        Clause(
            "LD-21",
            "wrong lists",
            "an id out of range, one listed twice or a mass above 1.0625 gives NaN in its own row and d_hidden, and "
            "changes no bit of another",
            "refusal",
            "teacher_ids",
        ),
    ),
    tolerances=(
        Tolerance("divergence", "float32", 1e-4, 1e-5, _SUMS),
        Tolerance(
            "divergence", "bfloat16", 2e-4, 1e-5, "as fp32; tensor cores with fp32 accumulators, as linear_logprob"
        ),
        Tolerance("divergence", "float16", 2e-4, 1e-5, "as bfloat16"),
        Tolerance("divergence", "float64", 1e-10, 1e-10, "float64 throughout, D <= 4096"),
        Tolerance("grad_hidden", "float32", 0.0, 2e-5, "relative Frobenius norm; fp32 throughout"),
        Tolerance("grad_hidden", "bfloat16", 0.0, 2.5e-3, "relative Frobenius norm; bf16 dz and one rounding"),
        Tolerance("grad_hidden", "float16", 0.0, 2.5e-3, "as bfloat16"),
        Tolerance("grad_hidden", "float64", 0.0, 1e-10, "relative Frobenius norm; float64 throughout"),
        Tolerance("grad_weight", "float32", 0.0, 2e-5, "as grad_hidden"),
        Tolerance("grad_weight", "bfloat16", 0.0, 2.5e-3, "as grad_hidden"),
        Tolerance("grad_weight", "float16", 0.0, 2.5e-3, "as bfloat16"),
        Tolerance("grad_weight", "float64", 0.0, 1e-10, "as grad_hidden"),
    ),
)
