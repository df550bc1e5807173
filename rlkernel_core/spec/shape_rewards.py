"""shape_rewards@1: what happens to rewards between the verifier and the advantage.

Per sequence, in this order (each step only where asked for):

    clip       x = min(max(x, low), high)
    normalize  x = (x - mean) / (std + eps), moments of this batch ("batch") or of all batches so far ("running")
    overlong   x += min(0, -(L - (max_length - buffer)) / buffer * factor), at least -factor if capped

per token, with d = logprob - ref_logprob clamped to +-kl_input_clamp, and the estimate clamped to +-kl_clamp:

    k1 d · abs |d| · k2 d^2 / 2 · k3 exp(-d) - 1 + d      r_t = [t is last] x - kl_coef * kl_t

Sources: KL in the reward arXiv:1909.08593, estimators by J. Schulman, "Approximating KL divergence" (2020); overlong
arXiv:2503.14476 equation 13. Legend: B sequences · T time · N packed tokens. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.advantage_checks import token_shape
from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, Clause, Feature, OpCall, OpSpec, Tolerance

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

KL = ("none", "k1", "abs", "k2", "k3")


@dataclass(frozen=True)
class RunningMoments:
    """State of a running normalization: pass what the last call returned, None at the first."""

    count: Tensor  # []
    mean: Tensor  # []
    m2: Tensor  # [] sum of squared deviations


@dataclass(frozen=True)
class ShapedRewards:
    """What shape_rewards returns, fp32 (float64 for float64 inputs); nothing here requires grad."""

    rewards: Tensor  # [B], or token-level with a KL term, token-level rewards, or output="token"
    kl: Tensor | None = None  # [B] nats: sum of the KL estimates over the valid tokens, before kl_coef
    penalty: Tensor | None = None  # [B] the overlong term
    running: RunningMoments | None = None  # new state with normalize="running"; the one passed in is not written to


@dataclass(slots=True, eq=False)
class ShapeRewardsCall(OpCall[ShapedRewards]):
    """Clip, normalize and penalize rewards. The result is a constant: inputs are detached.

    Token-level stands for [B, T], a padded layout, or [N] with `cu_seqlens`, a packed one.

    Args:
        rewards: [B] per sequence, or token-level (then only the KL term applies); any real dtype. A reward that is
            not finite is in no moment and stays what it is, so that `advantage` sees an invalid sequence.
        mask: token-level bool. Not with `lengths`.
        lengths: [B] integer: response lengths.
        cu_seqlens: [B + 1] integer bounds of packed sequences.
        clip: (low, high).
        normalize: "none", "batch" or "running".
        running: state of "running".
        center: subtract the mean; False divides only.
        ddof: of the std, with `eps` added to it.
        eps: see `ddof`.
        max_length: with `overlong_buffer`, the length at which the penalty is `overlong_factor`.
        overlong_buffer: tokens before `max_length` over which it grows, linearly, from 0.
        overlong_factor: >= 0.
        overlong_cap: never below -overlong_factor; False keeps growing beyond max_length.
        kl: estimator of KL(policy | reference), in nats, in the reward.
        kl_coef: beta.
        logprob: token-level log-probability under the policy that sampled.
        ref_logprob: token-level log-probability under the reference.
        kl_input_clamp: bound of |d|; verl's k3: 20.
        kl_clamp: bound of the estimate; verl's k3 and OpenRLHF's all: 10.
        process_group: ranks whose moments are merged.
        output: "auto", or "token" to put rewards per sequence on the last valid token.

    Raises:
        ArgumentError: wrong sizes, dtypes, numbers or choices; what has no effect.
    """

    rewards: Tensor
    _: KW_ONLY
    mask: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    clip: tuple[float, float] | None = None
    normalize: str = "none"
    running: RunningMoments | None = None
    center: bool = True
    ddof: int = 1
    eps: float = 1e-8
    max_length: int | None = None
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    overlong_cap: bool = True
    kl: str = "none"
    kl_coef: float = 0.0
    logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    kl_input_clamp: float | None = None
    kl_clamp: float | None = None
    process_group: ProcessGroup | None = None
    output: str = "auto"


def check(call: ShapeRewardsCall) -> None:
    """Checks shared by all implementations; reads no value off the device."""
    checks.choice("normalize", call.normalize, ("none", "batch", "running"))
    checks.choice("kl", call.kl, KL)
    checks.choice("output", call.output, ("auto", "token"))
    rewards = checks.tensor("rewards", call.rewards, ndim=(1, 2), kind="real")
    checks.exclusive(lengths=call.lengths, cu_seqlens=call.cu_seqlens)
    checks.exclusive(lengths=call.lengths, mask=call.mask)
    checks.flags(center=call.center, overlong_cap=call.overlong_cap)
    checks.number("kl_coef", call.kl_coef)
    _goes_together(call)
    for name in ("eps", "overlong_factor"):
        checks.number(name, getattr(call, name), at_least=0.0)
    for name in ("kl_input_clamp", "kl_clamp"):
        if getattr(call, name) is not None:
            checks.number(name, getattr(call, name), above=0.0)
    checks.integer("ddof", call.ddof, at_least=0)
    checks.process_group("process_group", call.process_group)
    if call.clip is not None:
        checks.interval("clip", call.clip)
    if call.running is not None:
        _check_running(call.running, rewards)
    sequences, _ = sizes(call)
    if call.lengths is not None:
        checks.shape("lengths", checks.tensor("lengths", call.lengths, kind="integer"), (sequences,), "[B]")
    for name, x in call.as_dict().items():
        if checks.is_tensor(x):
            checks.same_device(name, x, rewards, "rewards")


def _check_running(state: Any, rewards: Tensor) -> None:
    checks.instance("running", state, RunningMoments)
    for name in ("count", "mean", "m2"):
        x = checks.tensor(f"running.{name}", getattr(state, name), ndim=0, kind="real")
        checks.same_device(f"running.{name}", x, rewards, "rewards")


def sizes(call: ShapeRewardsCall) -> tuple[int, tuple[int, ...] | None]:
    """Number of sequences, and the token-level shape where there is one."""
    rewards = call.rewards
    tokens, of = token_shape(call, {"mask": "bool", "logprob": "floating", "ref_logprob": "floating"})
    packed = call.cu_seqlens is not None
    sequences = rewards.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    if rewards.dim() == 2 or (packed and rewards.shape[0] != sequences):
        if tokens is not None and rewards.dim() == 1 and tuple(rewards.shape) != tokens:
            want = f"must be {list(tokens)}, as {of}, or [{sequences}], one per sequence of cu_seqlens"
            raise ArgumentError("rewards", checks.describe(rewards), want, "Align them.")
        if tokens is not None:
            checks.shape("rewards", rewards, tokens, of)
        tokens = tuple(rewards.shape)
        for name in ("clip", "max_length"):
            if getattr(call, name) is not None:
                raise ArgumentError(
                    name, getattr(call, name), "applies to one reward per sequence", "Pass rewards [B]."
                )
        if call.normalize != "none":
            raise ArgumentError("normalize", call.normalize, "applies to one reward per sequence", "Use `whiten`.")
    if tokens is None and (call.output == "token" or call.kl != "none"):
        raise ArgumentError("output", "no token-level tensor", "the number of tokens is not known", "Pass `mask`.")
    if not packed and tokens is not None and tokens[0] != sequences:
        raise ArgumentError("rewards", checks.describe(rewards), f"must have {tokens[0]} sequences", "Align the two.")
    if call.max_length is not None and call.lengths is None and not packed and call.mask is None:
        raise ArgumentError("lengths", None, "the length of the responses is not known", "Pass `lengths`.")
    return sequences, tokens


def _goes_together(call: Any) -> None:
    """Arguments that have an effect only together."""
    for name, other in (("max_length", "overlong_buffer"), ("overlong_buffer", "max_length")):
        if getattr(call, name) is not None and getattr(call, other) is None:
            raise ArgumentError(other, None, f"is needed with {name}", f"Pass {other}.")
    if call.max_length is not None:
        checks.integer("overlong_buffer", call.overlong_buffer, at_least=1)
        checks.integer("max_length", call.max_length, at_least=1)
    for name in ("logprob", "ref_logprob"):
        if (call.kl == "none") != (getattr(call, name) is None):
            problem = "is needed by the KL term" if getattr(call, name) is None else "has no effect with kl='none'"
            raise ArgumentError(
                name, checks.describe(getattr(call, name)), problem, f"Pass or drop {name}, or change kl."
            )
    if call.kl == "none" and call.kl_coef != 0.0:
        raise ArgumentError("kl_coef", call.kl_coef, "has no effect with kl='none'", "Pass kl='k1' or another.")
    if call.running is not None and call.normalize != "running":
        raise ArgumentError("running", "a state", "has no effect", "Pass normalize='running'.")


SPEC = OpSpec(
    name="shape_rewards",
    record=ShapeRewardsCall,
    summary="KL in the reward, overlong penalty, reward clip and normalization",
    primary="rewards",
    check=check,
    needed=lambda call: {"overlong": call.max_length is not None, "packed": call.cu_seqlens is not None},
    features=(
        DETERMINISTIC,
        CAPTURABLE,
        *(Feature(f"kl:{k}", f"the {k} estimator in the reward") for k in KL[1:]),
        Feature("normalize:batch", "moments of this batch"),
        Feature("normalize:running", "moments of all batches so far"),
        Feature("overlong", "penalty near the length limit"),
        Feature("clip", "rewards clipped"),
        Feature("packed", "cu_seqlens"),
        Feature("process_group", "moments merged across ranks"),
    ),
    clauses=(
        Clause("SR-01", "matches float64", "every step is within tolerance of its formula", "accuracy"),
        Clause("SR-02", "order", "clip, normalize, overlong, then KL", "law"),
        Clause("SR-03", "last valid token", "a reward per sequence stands on its last valid token", "law"),
        Clause("SR-04", "masked tokens", "NaN there changes nothing; the result there is 0", "law"),
        Clause("SR-05", "k3 near 0", "keeps relative precision for small d", "accuracy", "kl:k3"),
        Clause("SR-06", "running state", "two halves give what one batch gives", "law", "normalize:running"),
        Clause("SR-07", "overlong", "0 up to max_length - buffer, -factor at max_length", "law", "overlong"),
        Clause("SR-08", "not finite is not contagious", "NaN is in no moment and stays NaN", "law"),
        Clause("SR-09", "inputs untouched", "no argument, state included, is written to", "side_effect"),
        Clause("SR-10", "bad arguments", "wrong sizes, choices, and what has no effect raise ArgumentError", "refusal"),
        Clause("SR-11", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("SR-12", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause("SR-13", "ranks", "k ranks give what one gives; an empty rank takes part", "law", "process_group"),
    ),
    tolerances=(
        Tolerance("rewards", "float32", 1e-6, 1e-5, "one exp and a handful of roundings"),
        Tolerance("rewards", "bfloat16", 1e-6, 1e-5, "inputs are exact in fp32"),
        Tolerance("rewards", "float16", 1e-6, 1e-5, "inputs are exact in fp32"),
        Tolerance("rewards", "float64", 1e-12, 1e-12, "float64 throughout"),
    ),
)
