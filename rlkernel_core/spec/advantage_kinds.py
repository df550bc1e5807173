"""What each kind of advantage is, which arguments it takes, and what its defaults stand for: one table.

An argument that a kind does not take is refused, so that nothing is silently without effect.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

# Arguments every kind takes.
_ALWAYS: Final = frozenset(
    {
        "rewards", "kind", "mask", "lengths", "cu_seqlens", "in_stats", "in_loss", "weights", "reward_level",
        "whiten", "whiten_level", "whiten_ddof", "whiten_eps", "whiten_eps_mode", "process_group", "output",
    }
)  # fmt: skip
_STEPS: Final = frozenset({"gamma", "bootstrap", "dones", "done_index", "masked_out"})
_GROUPED: Final = frozenset({"group", "valid_range", "singleton", "constant", "invalid"})
_SCALED: Final = frozenset({"scale", "ddof", "eps", "eps_mode", "min_std", "low_std"})


@dataclass(frozen=True)
class Kind:
    """One way to make advantages of rewards."""

    text: str  # what it computes, in one sentence
    source: str  # the paper or project it is from
    family: str  # "steps": a recursion over tokens; "group": one number per sequence; "table": group x time
    takes: frozenset[str]  # optional arguments it takes besides the common ones
    requires: tuple[str, ...] = ()
    scale: str = "none"  # what scale="auto" stands for
    whiten: str = "none"  # what whiten="auto" stands for
    uses: frozenset[str] = frozenset()  # filled in below: all arguments it takes


_TABLE: Final[dict[str, Kind]] = {
    "gae": Kind(
        "generalized advantage estimation with value targets",
        "arXiv:1506.02438; decoupled and length-adaptive lambda arXiv:2504.05118",
        "steps",
        _STEPS | {"values", "lam", "lam_value", "length_adaptive", "turns", "masked_time"},
        requires=("values",),
    ),
    "returns": Kind(
        "discounted reward to go, minus `values` and `baseline` where given",
        "Sutton and Barto, 2nd edition, section 13.4",
        "steps",
        _STEPS | {"values", "baseline", "turns", "masked_time"},
    ),
    "vtrace": Kind(
        "V-trace targets and the policy-gradient advantage rho (r + gamma vs' - v)",
        "arXiv:1802.01561",
        "steps",
        _STEPS | {"values", "lam", "ratio", "ratio_clip", "trace_clip"},
        requires=("values", "ratio"),
    ),
    "retrace": Kind(
        "Retrace(lambda) targets of Q, minus V",
        "arXiv:1606.02647",
        "steps",
        _STEPS | {"values", "q_values", "lam", "ratio", "trace_clip"},
        requires=("values", "ratio"),
    ),
    "reinforce_pp": Kind(
        "discounted reward to go, whitened over the whole batch",
        "arXiv:2501.03262",
        "steps",
        _STEPS | {"turns", "masked_time"},
        whiten="global",
    ),
    "remax": Kind(
        "undiscounted reward to go minus the reward of the greedy rollout",
        "arXiv:2310.10505",
        "steps",
        frozenset({"baseline"}),
        requires=("baseline",),
    ),
    "grpo": Kind(
        "(x - mean) / std within the group",
        "arXiv:2402.03300",
        "group",
        _GROUPED | _SCALED | {"leave_one_out"},
        scale="group",
    ),
    "dr_grpo": Kind("x - mean within the group", "arXiv:2503.20783", "group", _GROUPED | _SCALED | {"leave_one_out"}),
    "rloo": Kind("x - mean of the other members", "arXiv:2402.14740", "group", _GROUPED | _SCALED),
    "opo": Kind("x - length-weighted mean", "arXiv:2505.23585", "group", _GROUPED | _SCALED),
    "maxrl": Kind("(x - mean) / (mean + eps)", "arXiv:2602.02710", "group", _GROUPED | {"eps"}),
    "passk": Kind(
        "the best member gets best - second best, over std; the others 0",
        "arXiv:2503.19595",
        "group",
        _GROUPED | _SCALED,
        scale="group",
    ),
    "gpg": Kind("(x - mean) * sequences / sequences with a non-zero reward", "arXiv:2504.02546", "group", _GROUPED),
    "gdpo": Kind(
        "per reward (x - mean) / std, summed with weights, then whitened over the batch",
        "arXiv:2601.05242",
        "group",
        _GROUPED | _SCALED | {"reward_weights"},
        scale="group",
        whiten="global",
    ),
    "reinforce_pp_baseline": Kind(
        "x - mean within the group, whitened over the whole batch",
        "arXiv:2501.03262",
        "group",
        _GROUPED,
        whiten="global",
    ),
    "gigpo": Kind(
        "group advantage of the episode plus `step_weight` times that of the step among equal anchor states",
        "arXiv:2505.10978",
        "group",
        _GROUPED | _SCALED | {"step_rewards", "anchor", "step_weight"},
        requires=("step_rewards", "anchor"),
    ),
    "otb": Kind(
        "reward to go minus the variance-optimal baseline of the group at that time",
        "verl core_algos.compute_optimal_token_baseline_advantage at b178a3c",
        "table",
        frozenset({"group", "logprob", "sum_pi_squared", "eps"}),
        requires=("logprob", "sum_pi_squared"),
    ),
}

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        name: replace(k, requires=k.requires + (("group",) if "group" in k.takes else ()), uses=_ALWAYS | k.takes)
        for name, k in _TABLE.items()
    }
)

EPS_MODES: Final = ("std_add", "var_add", "var_clamp", "threshold")

# Values of every argument that is a choice.
CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kind": tuple(KINDS),
        "done_index": ("after", "before"),
        "scale": ("auto", "group", "batch", "none"),
        "eps_mode": EPS_MODES,
        "low_std": ("zero", "center"),
        "singleton": ("zero", "raw", "error", "any"),
        "constant": ("zero", "peer"),
        "invalid": ("zero", "raw"),
        "whiten": ("auto", "none", "global", "defer"),
        "whiten_level": ("auto", "token", "sequence"),
        "whiten_eps_mode": EPS_MODES,
        "masked_time": ("skip", "step", "reset"),
        "masked_out": ("zero", "carry"),
        "reward_level": ("auto", "token", "sequence"),
        "output": ("auto", "sequence", "token"),
    }
)
