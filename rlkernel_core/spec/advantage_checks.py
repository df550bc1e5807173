"""Checks of advantage's arguments, shared by all implementations, and the sizes that they establish.

They look at metadata only and read no value off the device. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.advantage_kinds import CHOICES, KINDS
from rlkernel_core.spec.group_filter import check_group

if TYPE_CHECKING:
    from torch import Tensor

# Token-level tensors and the kind of their dtype.
_TOKENS: Final = {
    "mask": "bool", "values": "floating", "q_values": "floating", "ratio": "floating", "dones": "bool",
    "turns": "integer", "logprob": "floating", "sum_pi_squared": "floating",
}  # fmt: skip
# Tensors with one entry per sequence.
_SEQUENCES: Final = {
    "lengths": "integer", "bootstrap": "floating", "baseline": "real", "in_stats": "bool", "in_loss": "bool",
    "weights": "floating", "step_rewards": "real", "anchor": "integer",
}  # fmt: skip
_NOT_NEGATIVE: Final = ("eps", "min_std", "whiten_eps")


@cache
def _defaults() -> Mapping[str, Any]:
    from rlkernel_core.spec.advantage import advantage  # which needs `check`

    return {n: p.default for n, p in inspect.signature(advantage).parameters.items()}


@dataclass(frozen=True)
class Extent:
    """The sizes of a call."""

    sequences: int  # B
    tokens: tuple[int, ...] | None  # (B, T) or (N,); None where no token-level tensor is given
    token_rewards: bool  # rewards are token-level
    token_output: bool  # so are the advantages


def check(args: Mapping[str, Any]) -> Extent:
    """Check the bound arguments of one call (defaults applied) and return its sizes."""
    for name, choices in CHOICES.items():
        checks.choice(name, args[name], choices)
    _numbers(args)
    _takes(args)
    rewards = checks.tensor("rewards", args["rewards"], ndim=(1, 2), kind="real")
    checks.exclusive(lengths=args["lengths"], cu_seqlens=args["cu_seqlens"])
    checks.exclusive(lengths=args["lengths"], mask=args["mask"])
    extent = _extent(args, rewards)
    _sequence_tensors(args, extent)
    if args["group"] is not None:
        check_group(args["group"], extent.sequences)
    for name in ("lam", "lam_value"):
        if checks.is_tensor(args[name]):
            _lam(name, args[name], extent, by_token=args["masked_time"] != "step")
    if args["turns"] is not None and args["masked_time"] != "skip":
        raise ArgumentError("masked_time", args["masked_time"], "has no meaning with turns", "Pass 'skip'.")
    for name, x in args.items():
        if checks.is_tensor(x):
            checks.same_device(name, x, rewards, "rewards")
    return extent


def _takes(args: Mapping[str, Any]) -> None:
    """The kind has what it needs and nothing that it would ignore; the types of what is no tensor are known."""
    kind, defaults = KINDS[args["kind"]], _defaults()
    for name in kind.requires:
        if args[name] is None:
            raise ArgumentError(name, None, f"is needed by kind {args['kind']!r}", f"Pass {name}.")
    for name, x in args.items():
        given = x is not None if checks.is_tensor(x) or defaults[name] is None else x != defaults[name]
        if given and name not in kind.uses:
            raise ArgumentError(name, checks.describe(x), f"has no effect on kind {args['kind']!r}", f"Drop {name}.")
    if args["length_adaptive"] is not None and (checks.is_tensor(args["lam"]) or args["lam"] != defaults["lam"]):
        raise ArgumentError(
            "lam", checks.describe(args["lam"]), "is replaced by length_adaptive", "Pass one of the two."
        )


def _numbers(args: Mapping[str, Any]) -> None:
    checks.number("gamma", args["gamma"], at_least=0.0, at_most=1.0)
    for name in ("lam", "lam_value"):
        if not (checks.is_tensor(args[name]) or (name == "lam_value" and args[name] is None)):
            checks.number(name, args[name], at_least=0.0, at_most=1.0)
    for name in _NOT_NEGATIVE:
        checks.number(name, args[name], at_least=0.0)
    for name in ("ratio_clip", "trace_clip", "length_adaptive"):
        if args[name] is not None:
            checks.number(name, args[name], above=0.0)
    checks.number("step_weight", args["step_weight"])
    for name in ("ddof", "whiten_ddof"):
        checks.integer(name, args[name], at_least=0)
    if args["valid_range"] is not None:
        checks.interval("valid_range", args["valid_range"])
    checks.flags(leave_one_out=args["leave_one_out"])
    checks.process_group("process_group", args["process_group"])


def _extent(args: Mapping[str, Any], rewards: Tensor) -> Extent:
    """Number of sequences, shape of the tokens, level of the rewards and of the result."""
    packed = args["cu_seqlens"] is not None
    tokens, of = token_shape(args, _TOKENS)
    token_rewards = _token_rewards(args, rewards, tokens)
    if token_rewards:
        if rewards.dim() != (1 if packed else 2):
            want = "[N] with cu_seqlens" if packed else "[B, T]"
            raise ArgumentError("rewards", checks.describe(rewards), f"token-level means {want}", "Reshape it.")
        if tokens is not None:
            checks.shape("rewards", rewards, tokens, of)
        tokens = tuple(rewards.shape)
    elif rewards.dim() == 2 and args["kind"] != "gdpo":
        raise ArgumentError("rewards", checks.describe(rewards), "must be [B] per sequence", "Sum its columns.")
    sequences = args["cu_seqlens"].shape[0] - 1 if packed else rewards.shape[0]
    if not token_rewards and rewards.shape[0] != sequences:
        raise ArgumentError(
            "rewards", checks.describe(rewards), f"must have one entry per sequence, {sequences}", "Align the two."
        )
    if not packed and tokens is not None and tokens[0] != sequences:
        raise ArgumentError(of, list(tokens), f"must have one row per sequence, {sequences}", "Align the two.")
    return Extent(sequences, tokens, token_rewards, _token_output(args, token_rewards=token_rewards, tokens=tokens))


def token_shape(args: Mapping[str, Any], kinds: Mapping[str, str]) -> tuple[tuple[int, ...] | None, str]:
    """The shape that most of the token-level tensors have, and the first that has it; the odd one out is to blame."""
    packed = args["cu_seqlens"] is not None
    if packed:
        checks.tensor("cu_seqlens", args["cu_seqlens"], ndim=1, kind="integer")
        if args["cu_seqlens"].shape[0] < 1:
            raise ArgumentError("cu_seqlens", "an empty tensor", "needs B + 1 entries", "Pass [0] for no sequence.")
    given = {
        name: checks.tensor(name, args[name], ndim=1 if packed else 2, kind=kind)
        for name, kind in kinds.items()
        if args[name] is not None
    }
    if not given:
        return None, ""
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    rewards = args["rewards"]
    by_token = rewards.shape[0] != args["cu_seqlens"].shape[0] - 1 if packed else args.get("kind") != "gdpo"
    if by_token and rewards.dim() == (1 if packed else 2):
        shapes = {"rewards": tuple(rewards.shape), **shapes}
    tokens, _ = Counter(shapes.values()).most_common(1)[0]  # of as many: the first
    of = next(name for name, shape in shapes.items() if shape == tokens)
    for name, x in given.items():
        checks.shape(name, x, tokens, of)
    return tokens, of


def _token_rewards(args: Mapping[str, Any], rewards: Tensor, tokens: tuple[int, ...] | None) -> bool:
    if args["kind"] == "gdpo":
        if args["reward_level"] == "token":
            raise ArgumentError("reward_level", "'token'", "gdpo takes [B, K] per sequence", "Sum over tokens first.")
        checks.tensor("rewards", rewards, ndim=2)
        return False
    if args["reward_level"] != "auto":
        return bool(args["reward_level"] == "token")
    if args["cu_seqlens"] is None or rewards.dim() == 2:
        return rewards.dim() == 2
    per_sequence = rewards.shape[0] == args["cu_seqlens"].shape[0] - 1
    if rewards.shape[0] == 0 and KINDS[args["kind"]].family == "steps":
        return True  # no rewards of no sequences, whichever way they are read
    if KINDS[args["kind"]].family == "group" or tokens is None:
        return not per_sequence
    if per_sequence and tokens == tuple(rewards.shape):
        raise ArgumentError(
            "rewards",
            checks.describe(rewards),
            "may be per token or per sequence: there are as many of both",
            "Pass reward_level='token' or 'sequence'.",
        )
    return not per_sequence


def _token_output(args: Mapping[str, Any], *, token_rewards: bool, tokens: tuple[int, ...] | None) -> bool:
    kind, output = args["kind"], args["output"]
    per_sequence = KINDS[kind].family == "group" or (kind == "remax" and not token_rewards)
    if not per_sequence and output == "sequence":
        raise ArgumentError("output", "'sequence'", f"kind {kind!r} differs from token to token", "Pass 'token'.")
    if kind == "otb" and args["cu_seqlens"] is not None:
        raise ArgumentError("cu_seqlens", "a packed layout", "otb compares columns of time", "Pass a padded layout.")
    wanted = output == "token" or not per_sequence
    if wanted and tokens is None:
        raise ArgumentError(
            "output", "no token-level tensor", "the number of tokens is not known", "Pass `mask` (or `values`)."
        )
    has_layout = any(args[n] is not None for n in ("mask", "lengths", "cu_seqlens")) or token_rewards
    if (kind == "opo" or args["whiten_level"] == "token") and not has_layout:
        raise ArgumentError("lengths", None, "the number of tokens per sequence is not known", "Pass `lengths`.")
    if args["whiten_level"] == "sequence" and not per_sequence:
        raise ArgumentError("whiten_level", "'sequence'", f"kind {kind!r} differs from token to token", "Pass 'token'.")
    return wanted


def _sequence_tensors(args: Mapping[str, Any], extent: Extent) -> None:
    for name, kind in _SEQUENCES.items():
        if args[name] is not None:
            checks.tensor(name, args[name], ndim=1, kind=kind)
            checks.shape(name, args[name], (extent.sequences,), "the sequences [B]")
    if args["reward_weights"] is not None:
        checks.tensor("reward_weights", args["reward_weights"], ndim=1, kind="real")
        checks.shape("reward_weights", args["reward_weights"], args["rewards"].shape[1:], "the rewards [K]")


def _lam(name: str, lam: Any, extent: Extent, *, by_token: bool) -> None:
    checks.tensor(name, lam, kind="floating")
    shape = tuple(lam.shape)
    if shape == extent.tokens and not by_token:
        raise ArgumentError(
            name, checks.describe(lam), "cannot be per token where masked tokens are steps", "Pass [B]."
        )
    if shape not in ((extent.sequences,), extent.tokens):
        raise ArgumentError(
            name,
            checks.describe(lam),
            f"must be [B] = [{extent.sequences}] or token-level {extent.tokens}",
            "Align it.",
        )
