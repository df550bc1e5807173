"""Checks of advantage's arguments, shared by all implementations, and the sizes that they establish.

They look at metadata only and read no value off the device. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.advantage_kinds import CHOICES, KINDS
from rlkernel_core.spec.group_filter import check_group

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.spec.advantage import AdvantageCall

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


def _defaults(call: AdvantageCall) -> Mapping[str, Any]:
    return {f.name: f.default for f in fields(call)}


@dataclass(frozen=True)
class Extent:
    """The sizes of a call."""

    sequences: int  # B
    tokens: tuple[int, ...] | None  # (B, T) or (N,); None where no token-level tensor is given
    token_rewards: bool  # rewards are token-level
    token_output: bool  # so are the advantages


def extent_of(call: AdvantageCall) -> Extent:
    """The sizes of a call that has been checked."""
    return _extent(call, call.rewards)


def check(call: AdvantageCall) -> None:
    """Checks shared by all implementations; reads no value off the device."""
    for name, choices in CHOICES.items():
        checks.choice(name, getattr(call, name), choices)
    _numbers(call)
    _takes(call)
    rewards = checks.tensor("rewards", call.rewards, ndim=(1, 2), kind="real")
    checks.exclusive(lengths=call.lengths, cu_seqlens=call.cu_seqlens)
    checks.exclusive(lengths=call.lengths, mask=call.mask)
    extent = _extent(call, rewards)
    _sequence_tensors(call, extent)
    if call.group is not None:
        check_group(call.group, extent.sequences)
    for name in ("lam", "lam_value"):
        if checks.is_tensor(getattr(call, name)):
            _lam(name, getattr(call, name), extent, by_token=call.masked_time != "step")
    if call.turns is not None and call.masked_time != "skip":
        raise ArgumentError("masked_time", call.masked_time, "has no meaning with turns", "Pass 'skip'.")
    for name, x in call.as_dict().items():
        if checks.is_tensor(x):
            checks.same_device(name, x, rewards, "rewards")


def _takes(call: Any) -> None:
    """The kind has what it needs and nothing that it would ignore; the types of what is no tensor are known."""
    kind, defaults = KINDS[call.kind], _defaults(call)
    for name in kind.requires:
        if getattr(call, name) is None:
            raise ArgumentError(name, None, f"is needed by kind {call.kind!r}", f"Pass {name}.")
    for name, x in call.as_dict().items():
        given = x is not None if checks.is_tensor(x) or defaults[name] is None else x != defaults[name]
        if given and name not in kind.uses:
            raise ArgumentError(name, checks.describe(x), f"has no effect on kind {call.kind!r}", f"Drop {name}.")
    if call.length_adaptive is not None and (checks.is_tensor(call.lam) or call.lam != defaults["lam"]):
        raise ArgumentError("lam", checks.describe(call.lam), "is replaced by length_adaptive", "Pass one of the two.")


def _numbers(call: Any) -> None:
    checks.number("gamma", call.gamma, at_least=0.0, at_most=1.0)
    for name in ("lam", "lam_value"):
        if not (checks.is_tensor(getattr(call, name)) or (name == "lam_value" and getattr(call, name) is None)):
            checks.number(name, getattr(call, name), at_least=0.0, at_most=1.0)
    for name in _NOT_NEGATIVE:
        checks.number(name, getattr(call, name), at_least=0.0)
    for name in ("ratio_clip", "trace_clip", "length_adaptive"):
        if getattr(call, name) is not None:
            checks.number(name, getattr(call, name), above=0.0)
    checks.number("step_weight", call.step_weight)
    for name in ("ddof", "whiten_ddof"):
        checks.integer(name, getattr(call, name), at_least=0)
    if call.valid_range is not None:
        checks.interval("valid_range", call.valid_range)
    checks.flags(leave_one_out=call.leave_one_out)
    checks.process_group("process_group", call.process_group)


def _extent(call: Any, rewards: Tensor) -> Extent:
    """Number of sequences, shape of the tokens, level of the rewards and of the result."""
    packed = call.cu_seqlens is not None
    tokens, of = token_shape(call, _TOKENS)
    token_rewards = _token_rewards(call, rewards, tokens)
    if token_rewards:
        if rewards.dim() != (1 if packed else 2):
            want = "[N] with cu_seqlens" if packed else "[B, T]"
            raise ArgumentError("rewards", checks.describe(rewards), f"token-level means {want}", "Reshape it.")
        if tokens is not None:
            checks.shape("rewards", rewards, tokens, of)
        tokens = tuple(rewards.shape)
    elif rewards.dim() == 2 and call.kind != "gdpo":
        raise ArgumentError("rewards", checks.describe(rewards), "must be [B] per sequence", "Sum its columns.")
    sequences = call.cu_seqlens.shape[0] - 1 if packed else rewards.shape[0]
    if not token_rewards and rewards.shape[0] != sequences:
        raise ArgumentError(
            "rewards", checks.describe(rewards), f"must have one entry per sequence, {sequences}", "Align the two."
        )
    if not packed and tokens is not None and tokens[0] != sequences:
        raise ArgumentError(of, list(tokens), f"must have one row per sequence, {sequences}", "Align the two.")
    return Extent(sequences, tokens, token_rewards, _token_output(call, token_rewards=token_rewards, tokens=tokens))


def token_shape(call: Any, kinds: Mapping[str, str]) -> tuple[tuple[int, ...] | None, str]:
    """The shape that most of the token-level tensors have, and the first that has it; the odd one out is to blame."""
    packed = call.cu_seqlens is not None
    if packed:
        checks.tensor("cu_seqlens", call.cu_seqlens, ndim=1, kind="integer")
        if call.cu_seqlens.shape[0] < 1:
            raise ArgumentError("cu_seqlens", "an empty tensor", "needs B + 1 entries", "Pass [0] for no sequence.")
    given = {
        name: checks.tensor(name, getattr(call, name), ndim=1 if packed else 2, kind=kind)
        for name, kind in kinds.items()
        if getattr(call, name) is not None
    }
    if not given:
        return None, ""
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    rewards = call.rewards
    by_token = rewards.shape[0] != call.cu_seqlens.shape[0] - 1 if packed else getattr(call, "kind", None) != "gdpo"
    if by_token and rewards.dim() == (1 if packed else 2):
        shapes = {"rewards": tuple(rewards.shape), **shapes}
    # The most frequent shape, of as many the first; compared and not hashed, since sizes may be symbols.
    tokens = max(shapes.values(), key=lambda shape: sum(shape == other for other in shapes.values()))
    of = next(name for name, shape in shapes.items() if shape == tokens)
    for name, x in given.items():
        checks.shape(name, x, tokens, of)
    return tokens, of


def _token_rewards(call: Any, rewards: Tensor, tokens: tuple[int, ...] | None) -> bool:
    if call.kind == "gdpo":
        if call.reward_level == "token":
            raise ArgumentError("reward_level", "'token'", "gdpo takes [B, K] per sequence", "Sum over tokens first.")
        checks.tensor("rewards", rewards, ndim=2)
        return False
    if call.reward_level != "auto":
        return bool(call.reward_level == "token")
    if call.cu_seqlens is None or rewards.dim() == 2:
        return rewards.dim() == 2
    per_sequence = rewards.shape[0] == call.cu_seqlens.shape[0] - 1
    none = tokens is None or tokens == tuple(rewards.shape)
    if rewards.shape[0] == 0 and none and KINDS[call.kind].family == "steps":
        return True  # no rewards of no sequences, whichever way they are read
    if KINDS[call.kind].family == "group" or tokens is None:
        return not per_sequence
    if per_sequence and tokens == tuple(rewards.shape):
        raise ArgumentError(
            "rewards",
            checks.describe(rewards),
            "may be per token or per sequence: there are as many of both",
            "Pass reward_level='token' or 'sequence'.",
        )
    return not per_sequence


def _token_output(call: Any, *, token_rewards: bool, tokens: tuple[int, ...] | None) -> bool:
    kind, output = call.kind, call.output
    per_sequence = KINDS[kind].family == "group" or (kind == "remax" and not token_rewards)
    if not per_sequence and output == "sequence":
        raise ArgumentError("output", "'sequence'", f"kind {kind!r} differs from token to token", "Pass 'token'.")
    if kind == "otb" and call.cu_seqlens is not None:
        raise ArgumentError("cu_seqlens", "a packed layout", "otb compares columns of time", "Pass a padded layout.")
    wanted = output == "token" or not per_sequence
    if wanted and tokens is None:
        raise ArgumentError(
            "output", "no token-level tensor", "the number of tokens is not known", "Pass `mask` (or `values`)."
        )
    has_layout = any(getattr(call, n) is not None for n in ("mask", "lengths", "cu_seqlens")) or token_rewards
    if (kind == "opo" or call.whiten_level == "token") and not has_layout:
        raise ArgumentError("lengths", None, "the number of tokens per sequence is not known", "Pass `lengths`.")
    if call.whiten_level == "sequence" and not per_sequence:
        raise ArgumentError("whiten_level", "'sequence'", f"kind {kind!r} differs from token to token", "Pass 'token'.")
    return wanted


def _sequence_tensors(call: Any, extent: Extent) -> None:
    for name, kind in _SEQUENCES.items():
        if getattr(call, name) is not None:
            checks.tensor(name, getattr(call, name), ndim=1, kind=kind)
            checks.shape(name, getattr(call, name), (extent.sequences,), "the sequences [B]")
    if call.reward_weights is not None:
        checks.tensor("reward_weights", call.reward_weights, ndim=1, kind="real")
        checks.shape("reward_weights", call.reward_weights, call.rewards.shape[1:], "the rewards [K]")


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
