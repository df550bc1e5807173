"""The published policy losses as data: which surrogate, which defaults, which options.

`KINDS` says what `policy_loss(kind=...)` stands for; what a caller leaves out is what the cited paper states.
An option that a kind does not list is refused for it, never ignored.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError

AGGREGATES: Final = (
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
)
KLS: Final = ("k1", "abs", "k2", "k3", "low_var", "k1+", "abs+", "k3+", "low_var+")
REQUIRED: Final = "required"  # an option without a default: the caller must give it


@dataclass(frozen=True)
class GammaGate:
    """Shape of VESPO's weight exp(l + k log w - l w), by the sign of the advantage (arXiv 2602.10693)."""

    k_pos: float = 2.0  # A >= 0
    lambda_pos: float = 3.0  # A >= 0
    k_neg: float = 3.0  # A < 0
    lambda_neg: float = 2.0  # A < 0

    def __post_init__(self) -> None:
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            checks.number(f"gamma.{name}", getattr(self, name), above=0.0)


@dataclass(frozen=True)
class Correction:
    """Importance weight w for the gap between the engine that sampled and the policy that trains.

    With delta = old_logprob - rollout_logprob (the current log-probability, detached, where old_logprob is None):
    level "token" weighs a token by e^delta, "sequence" by e^(sum delta), "geometric" by e^(mean delta).
    mode "truncate" clamps the weight into [low, high] (TIS); "mask" gives 0 outside (IcePop, MIS, sequence mask).
    The exponent is limited to +-20. The weight carries no gradient and multiplies the policy term only; masked-out
    tokens stay in every denominator (`Rejection` takes them out).
    """

    level: str = "token"
    mode: str = "truncate"
    low: float | None = None
    high: float | None = 2.0
    normalize: bool = False  # divide by the mean weight of the batch, over tokens (token) or sequences (other levels)

    def __post_init__(self) -> None:
        checks.choice("correction.level", self.level, ("token", "sequence", "geometric"))
        checks.choice("correction.mode", self.mode, ("truncate", "mask"))
        checks.flags(**{"correction.normalize": self.normalize})
        _bounds("correction", self.low, self.high, required=self.mode == "mask")


@dataclass(frozen=True)
class Rejection:
    """Take tokens or whole sequences out of the loss mask where training and rollout disagree too much.

    Per token, k1 is delta, k2 is delta^2 / 2, k3 is e^delta - 1 - delta (delta as in `Correction`, limited to +-20).
    level "token" judges each token; "sequence" the sum over a sequence, "geometric" its mean; "any" rejects a
    sequence that holds one bad token (veto). k1 is judged as a ratio: kept where low <= e^(aggregate) <= high;
    k2 and k3 are kept where the aggregate is <= high.
    What is rejected counts nowhere: not in the loss, not in its KL and entropy terms, not in local denominators.
    """

    statistic: str = "k1"  # k1, k2 or k3
    level: str = "token"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        checks.choice("rejection.statistic", self.statistic, ("k1", "k2", "k3"))
        checks.choice("rejection.level", self.level, ("token", "sequence", "geometric", "any"))
        _bounds("rejection", self.low, self.high, required=True)
        if self.statistic != "k1" and self.low is not None:
            raise ArgumentError(
                "rejection.low", self.low, f"has no meaning for {self.statistic}, which is >= 0", "Leave it None."
            )


def _bounds(name: str, low: float | None, high: float | None, *, required: bool) -> None:
    for end, bound in (("low", low), ("high", high)):
        if bound is not None:
            checks.number(f"{name}.{end}", bound, above=0.0)
    if required and low is None and high is None:
        raise ArgumentError(f"{name}.high", None, "without a bound nothing is left out", "Give low, high or both.")
    if low is not None and high is not None and low > high:
        raise ArgumentError(f"{name}.low", low, f"must be <= high = {high}", "Swap the two.")


@dataclass(frozen=True)
class Kind:
    """One published loss."""

    surrogate: str  # clip | cispo | sapo | gmpo | vespo | reinforce | dppo_tv | dppo_kl | dro
    aggregate: str
    source: str
    levels: tuple[str, ...] = ("token",)  # the first is the default
    own_gradient: bool = False  # the sequence ratio's gradient goes to each token alone (GSPO-token)
    options: Mapping[str, Any] = field(default_factory=dict)  # what it takes -> default (None: off)


def _clipped(low: float, high: float) -> Mapping[str, Any]:
    return MappingProxyType({"clip": (low, high), "dual_clip": None, "log_ratio_limit": 20.0})


_BOTH: Final = ("token", "sequence")
_SEQUENCE: Final = ("sequence",)
_DPPO: Final = MappingProxyType({"clip": REQUIRED, "ratio_cap": 20.0, "log_ratio_limit": 20.0})

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "ppo": Kind("clip", "token_mean", "arXiv 1707.06347, eq. 7", _BOTH, options=_clipped(0.2, 0.2)),
        "grpo": Kind("clip", "seq_mean_token_mean", "arXiv 2402.03300, eq. 3", _BOTH, options=_clipped(0.2, 0.2)),
        "dr_grpo": Kind("clip", "seq_mean_token_sum_norm", "arXiv 2503.20783", _BOTH, options=_clipped(0.2, 0.2)),
        "dapo": Kind("clip", "token_mean", "arXiv 2503.14476, clip-higher", _BOTH, options=_clipped(0.2, 0.28)),
        "gspo": Kind("clip", "seq_mean_token_mean", "arXiv 2507.18071", _SEQUENCE, options=_clipped(3e-4, 4e-4)),
        "gspo_token": Kind(
            "clip",
            "seq_mean_token_mean",
            "arXiv 2507.18071, section 4.3",
            _SEQUENCE,
            own_gradient=True,
            options=_clipped(3e-4, 4e-4),
        ),
        "luspo": Kind("clip", "seq_mean_token_sum", "arXiv 2602.05261", _SEQUENCE, options=_clipped(3e-4, 4e-4)),
        # The paper keeps no lower bound; 1 + 4.0 is the upper bound 5.0 of ScaleRL (arXiv 2510.13786).
        "cispo": Kind(
            "cispo",
            "token_mean",
            "arXiv 2506.13585",
            _BOTH,
            options=MappingProxyType({"clip": (1.0, 4.0), "log_ratio_limit": 20.0}),
        ),
        "sapo": Kind(
            "sapo",
            "seq_mean_token_mean",
            "arXiv 2511.20347",
            _BOTH,
            options=MappingProxyType({"tau": (1.0, 1.05), "log_ratio_limit": 20.0}),
        ),
        "gmpo": Kind(
            "gmpo",
            "seq_mean_token_mean",
            "arXiv 2507.20673",
            _SEQUENCE,
            options=MappingProxyType({"clip": (0.4, 0.4), "log_ratio_limit": 20.0}),
        ),
        "vespo": Kind(
            "vespo",
            "token_mean",
            "arXiv 2602.10693",
            _SEQUENCE,
            options=MappingProxyType({"gamma": GammaGate(), "log_ratio_limit": 20.0}),
        ),
        "reinforce": Kind("reinforce", "seq_mean_token_sum", "Williams 1992"),
        "dppo_tv": Kind("dppo_tv", "token_mean", "arXiv 2602.04879, binary TV", options=_DPPO),
        "dppo_kl": Kind("dppo_kl", "token_mean", "arXiv 2602.04879, binary KL", options=_DPPO),
        "dro": Kind("dro", "token_mean", "arXiv 2405.19107", options=MappingProxyType({"dro_beta": REQUIRED})),
    }
)

_GATE: Final = GammaGate()


@dataclass(frozen=True)
class LossConfig:
    """The options of a call with the kind's defaults filled in: what every implementation works from."""

    surrogate: str
    level: str
    own_gradient: bool
    clip: tuple[float, float] = (math.inf, math.inf)
    dual_clip: float | None = None
    log_ratio_limit: float = math.inf
    tau: tuple[float, float] = (1.0, 1.0)
    gamma: GammaGate = _GATE
    ratio_cap: float = math.inf
    dro_beta: float = 0.0
    aggregate: str = "token_mean"
    horizon: float | None = None
    count_empty: bool = False
    kl: str | None = None  # None: no reference policy
    kl_clamp: tuple[float, float] = (20.0, 10.0)
    kl_importance: bool = False
    entropy_aggregate: str | None = None  # None: with the weights of the policy term
    correction: Correction | None = None
    rejection: Rejection | None = None

    @property
    def per_sequence(self) -> str | None:
        """The option that needs to know where sequences begin and end, if any does."""
        if self.level == "sequence":
            return "level"
        for name, way in (("aggregate", self.aggregate), ("entropy_aggregate", self.entropy_aggregate)):
            if way is not None and way.startswith("seq_"):
                return name
        for name in ("correction", "rejection"):
            part = getattr(self, name)
            if part is not None and part.level != "token":
                return f"{name}.level"
        return None
