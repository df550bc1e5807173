"""linear_policy_loss@1: a policy loss straight from hidden states and the output head.

It is policy_loss@1 on the log-probability and entropy of linear_logprob@1. Where a token's gradient depends on that
token's log-probability alone, it is made together with the loss: logits of a block of rows, their gradient, dX and dW,
three matmuls in all. Sequence-level ratios need every log-probability of a sequence first, hence a second pass over
the logits: one more matmul (two where dX and dW read them separately), or none where the logits are kept.

Legend: N tokens ([N] packed or [B, T] padded) · D hidden · V vocabulary.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.spec import linear_logprob as head
from rlkernel_core.spec import policy_checks
from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, Clause, Feature, OpCall, OpSpec, Tolerance
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.policy_kinds import LossConfig
from rlkernel_core.spec.policy_loss import LossFields, LossResult, loss_needed
from rlkernel_core.spec.policy_loss import features as loss_features

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlkernel_core.spec.qmatmul import LoRA


@dataclass(slots=True, eq=False)
class LinearPolicyLossCall(LossFields, OpCall[LossResult]):
    """Policy loss of one batch, differentiable in `hidden`, the head and `lora`; no tensor of [N, V] by default.

    What is not listed is as in linear_logprob where it is about the head, else as in policy_loss.

    Args:
        hidden: [N, D] packed or [B, T, D] padded, as in linear_logprob.
        weight: [V, D], the output head.
        ids: [N] or [B, T] integer, the tokens that were chosen: hidden[t] predicts ids[t].
        old_logprob: as ids, as in policy_loss: under the same temperature, softcap, scale and support.
        advantages: as in policy_loss.
        bias: [V], as in linear_logprob.
        lora: as in linear_logprob.
        temperature: as in linear_logprob.
        softcap: as in linear_logprob.
        logit_scale: as in linear_logprob.
        support: as in linear_logprob: the loss is then that of the law over the kept ids.
        mask: as in policy_loss; hidden and ids may hold anything where it is False.
        entropy: compute the entropy, nats: for the bonus, the statistics and the result.
        entropy_coef: as in policy_loss; needs entropy=True.
        max_workspace_bytes: most extra memory beyond result and gradients. It decides which of the ways to the same
            numbers is taken; below the minimum of all of them it is refused.
        group: the vocabulary is split over this process group, as in linear_logprob.
        partial_grad: as in linear_logprob.
        process_group: the batch is split over this process group, as in policy_loss. Both may be given: then every
            rank of `group` has the same tokens, and `process_group` holds one rank of each such group.

    Returns:
        LossResult with loss and stats as policy_loss gives them, and `logprob` (and `entropy`) per token, detached:
        old_logprob of the next pass over the same batch. An id out of range in an unmasked token makes the loss NaN.

    Raises:
        ArgumentError: as policy_loss and linear_logprob.
    """

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    old_logprob: Tensor | None
    advantages: Tensor
    _: KW_ONLY
    bias: Tensor | None = None
    lora: LoRA | None = None
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    support: Support | None = None
    entropy: bool = False
    max_workspace_bytes: int | None = None
    group: ProcessGroup | None = None
    partial_grad: bool = False


def configure(call: LinearPolicyLossCall) -> LossConfig:
    """The options of a call with the defaults of its kind."""
    return policy_checks.configure(call, entropy=call.entropy)


def check(call: LinearPolicyLossCall) -> None:
    """Checks shared by all implementations; reads no value off the device."""
    checks.tensor("weight", call.weight, ndim=2, kind="floating")  # none is quantized
    head.check(head.LinearLogprobCall.of(call))
    checks.shape("ids", call.ids, call.hidden.shape[:-1], "hidden without its last dimension")  # a token has one id
    policy_checks.check_tensors(call, configure(call), call.ids, name="ids")


# What the head brings along; the rest of linear_logprob's features belong to its own gradient.
_HEAD = (
    "per_row_temperature",
    "mixed_dtypes",
    "bias",
    "lora",
    "softcap",
    "logit_scale",
    "support",
    "max_workspace_bytes",
    "group",
    "partial_grad",
)


CLAUSES = (
    Clause(
        "LPL-01",
        "equals the plain operators",
        "loss, statistics and gradients are those of policy_loss on linear_logprob's results, within tolerance",
        "law",
    ),
    Clause("LPL-02", "gradient", "dX, dW and dbias match float64, scaled by any upstream gradient", "gradient", "grad"),
    Clause(
        "LPL-03",
        "memory constant in N",
        "for token-level losses peak memory beyond inputs, results and gradients grows by a few numbers per row only",
        "side_effect",
    ),
    Clause(
        "LPL-04",
        "the limit is kept",
        "peak extra memory stays below max_workspace_bytes, which changes no result beyond tolerance; below the "
        "minimum an ArgumentError names it",
        "refusal",
        "max_workspace_bytes",
    ),
    Clause(
        "LPL-05",
        "gradients accumulate in fp32",
        "the error of dX and dW does not grow with the number of row blocks or tiles",
        "gradient",
        "grad",
    ),
    Clause(
        "LPL-06",
        "frozen operands",
        "an operand that requires no gradient gets none, and the others' gradients do not change",
        "gradient",
        "grad",
    ),
    Clause(
        "LPL-07",
        "mask selects",
        "masked tokens may hold NaN in hidden and any ids: they add nothing to loss, dX or dW",
        "law",
        "mask",
    ),
    Clause(
        "LPL-08",
        "rows that weigh nothing",
        "a token with advantage 0, no KL and no entropy bonus adds exactly nothing to dW and has dX = 0",
        "law",
        "grad",
    ),
    Clause(
        "LPL-09",
        "on-policy by itself",
        "the returned log-probabilities, passed as old_logprob of a second call on the same weights, give a ratio of "
        "exactly 1",
        "invariance",
        "logprob",
    ),
    Clause("LPL-10", "sequence level", "sequence-level ratios see every token of a sequence", "law", "level:sequence"),
    Clause(
        "LPL-11",
        "the head's options",
        "bias, temperature, softcap, logit_scale and support mean what they mean in linear_logprob",
        "law",
        "softcap",
    ),
    Clause(
        "LPL-12",
        "shards equal the whole",
        "a vocabulary split over ranks gives the loss and gradients of one rank within tolerance",
        "law",
        "group",
    ),
    Clause("LPL-13", "out-of-range ids", "an unmasked id out of range makes the loss NaN, never a number", "refusal"),
    Clause("LPL-14", "no tokens", "N = 0 or all masked gives loss 0 and zero gradients", "gradient"),
    Clause(
        "LPL-15",
        "inputs untouched",
        "no argument is written to; global RNG, default dtype and device stay",
        "side_effect",
    ),
    Clause("LPL-16", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    Clause("LPL-17", "capture", CAPTURABLE.text, "capture", "capturable"),
    Clause("LPL-18", "bad arguments", "those of policy_loss and linear_logprob are refused by name", "refusal"),
    Clause(
        "LPL-19",
        "ranks are one batch",
        "a batch split over ranks, one without sequences, has on every rank the loss and statistics of the whole; the "
        "mean of the ranks' dW and dbias is that of the whole, and dX is ranks times the whole's rows",
        "law",
        "process_group",
    ),
    Clause(
        "LPL-20",
        "LoRA",
        "a low-rank addition to the head gives the loss and the gradients of the merged head; dA, dB and dX match "
        "float64 with the head frozen",
        "gradient",
        "lora",
    ),
    Clause(
        "LPL-22",
        "partial gradient",
        "with partial_grad the ranks' dX add up to the whole's; all else has the bits of the call without it",
        "gradient",
        "partial_grad",
    ),
)


def _sizes(call: LinearPolicyLossCall) -> dict[str, int]:
    return {"rows": call.ids.numel(), "vocab": call.weight.shape[0]}


SPEC = OpSpec(
    name="linear_policy_loss",
    record=LinearPolicyLossCall,
    summary="policy loss from hidden states and the output head, its gradient made with it",
    primary="hidden",
    one_of=("kind", "aggregate"),
    differentiable=("hidden", "weight", "bias", "lora"),
    carrying=("loss",),
    optional=("stats", "logprob"),
    check=check,
    sizes=_sizes,
    needed=lambda call: {**loss_needed(call), **head.needed(call)},
    features=(
        *loss_features,
        Feature("logprob", "the log-probability of every token is returned"),
        *(f for f in head.SPEC.features if f.name in _HEAD),
    ),
    clauses=CLAUSES,
    tolerances=(
        Tolerance("loss", "float32", 1e-5, 1e-4, "log p within 1e-5 times sum |omega A|"),
        Tolerance("loss", "bfloat16", 1e-4, 1e-4, "log p within 1e-4 from fp32-accumulated logits"),
        Tolerance("loss", "float64", 1e-12, 1e-10, "float64 throughout"),
        Tolerance("logprob", "float32", 1e-4, 1e-5, "as linear_logprob"),
        Tolerance("logprob", "bfloat16", 2e-4, 1e-5, "as linear_logprob"),
        Tolerance("logprob", "float64", 1e-10, 1e-10, "as linear_logprob"),
        Tolerance("stats", "float32", 1e-4, 2e-4, "log p within 1e-4, and e^d with it"),
        Tolerance("stats", "bfloat16", 2e-4, 4e-4, "log p within 2e-4, and e^d with it"),
        Tolerance("stats", "float64", 1e-10, 1e-10, "float64 throughout"),
        Tolerance("grad_hidden", "float32", 1e-6, 1.5e-3, "relative Frobenius error of fp32 matmuls, TF32 excluded"),
        # The tokens of a sequence share an advantage, their coefficients a neighborhood: at the lower end of a binade
        # bf16 errs by 2^-8 / sqrt(3) = 2.26e-3 of it, and by 1.63e-3 of the elements of the result, which are mixed.
        Tolerance("grad_hidden", "bfloat16", 1e-6, 2.8e-3, "relative Frobenius: bf16 dz 2.26e-3, its product 1.63e-3"),
        Tolerance("grad_hidden", "float16", 1e-6, 2.8e-3, "as bfloat16: what linear_logprob rounds is held to"),
        Tolerance("grad_hidden", "float64", 1e-12, 1e-10, "float64 throughout"),
        Tolerance("grad_weight", "float32", 1e-6, 1.5e-3, "as grad_hidden"),
        Tolerance("grad_weight", "bfloat16", 1e-6, 2.8e-3, "as grad_hidden, fp32 accumulation over blocks"),
        Tolerance("grad_weight", "float16", 1e-6, 2.8e-3, "as grad_hidden"),
        Tolerance("grad_weight", "float64", 1e-12, 1e-10, "float64 throughout"),
    ),
)
