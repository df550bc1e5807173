"""What a rollout says of itself: what each request asked for, and what was drawn.

A record without drawn tokens is what a rollout was asked for: prompts, seeds, first steps, laws and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.sampling import FILTER_ORDERS, TIES

MOST: Final = 64 << 20  # bytes of a file: 5 million tokens with log-probability and kept mass
LAWS: Final = ("raw", "tempered", "processed")  # of log-probabilities that a rollout states
_ID: Final = 2**32 - 1
_KEY: Final = 2**64 - 1


@dataclass(frozen=True)
class Params:
    """What a request asked for: the law of its draws, as `sample` takes it, and where it ends.

    Edits of logits (penalties, bias, allowed and banned ids) are no part of it: such draws cannot be recorded.

    Raises:
        ArgumentError: a number without meaning.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    filter_order: str = "topk_topp"  # see `sample`
    tie: str = "lowest_id"  # see `sample`
    vocab_size: int | None = None  # ids from here on cannot be drawn; None: all of the logits' can
    stream: int = 0  # of the noise
    stop_ids: tuple[int, ...] = ()  # a sequence ends with the first of them
    max_new_tokens: int | None = None  # or after so many tokens; None with no stop ids: its end is not checked

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, at_least=0.0)
        checks.integer("top_k", self.top_k, at_least=0, at_most=_ID)
        checks.number("top_p", self.top_p, at_least=0.0, at_most=1.0)
        checks.number("min_p", self.min_p, at_least=0.0, at_most=1.0)
        checks.choice("filter_order", self.filter_order, FILTER_ORDERS)
        checks.choice("tie", self.tie, TIES)
        if self.vocab_size is not None:
            checks.integer("vocab_size", self.vocab_size, at_least=1, at_most=_ID)
        checks.integer("stream", self.stream, at_least=0, at_most=_ID)
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))  # a list has no hash
        for i in self.stop_ids:
            checks.integer("stop_ids", i, at_least=0, at_most=_ID)
        if self.max_new_tokens is not None:
            checks.integer("max_new_tokens", self.max_new_tokens, at_least=1, at_most=_ID)

    @property
    def filtered(self) -> bool:
        """Whether a filter may drop tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Rollout:
    """One sequence.

    Raises:
        ArgumentError: no prompt, an id or a key out of range, or parts of different lengths.
    """

    prompt: tuple[int, ...]  # token ids, at least one
    seed: int  # unsigned 64 bits
    step: int  # of the first draw, which the next ones count up from; integrations take the prompt's length
    params: Params = field(default_factory=Params)  # what was asked for
    ids: tuple[int, ...] = ()  # drawn, in order
    logprob: tuple[float, ...] | None = None  # nats, of each drawn token under the record's law; None: not stated
    log_kept_mass: tuple[float, ...] | None = None  # nats, of what the filters kept; None: not stated
    weights: tuple[tuple[str, int], ...] = ()  # version of the weights, and how many tokens it drew; in order

    def __post_init__(self) -> None:
        for name in ("prompt", "ids", "logprob", "log_kept_mass"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else tuple(given))  # a list has no hash
        if not self.prompt:
            raise ArgumentError("prompt", "no ids", "needs an id", "Begin with the model's first id, such as BOS.")
        for name, ids in (("prompt", self.prompt), ("ids", self.ids)):
            if ids and not (min(ids) >= 0 and max(ids) <= _ID):
                raise ArgumentError(name, f"ids {min(ids)} to {max(ids)}", "must be token ids", "Leave padding away.")
        checks.integer("seed", self.seed, at_least=0, at_most=_KEY, remedy="Pass an unsigned 64-bit number.")
        checks.integer("step", self.step, at_least=0, at_most=_KEY, remedy="Pass an unsigned 64-bit number.")
        for name in ("logprob", "log_kept_mass"):
            said: Sequence[float] | None = getattr(self, name)
            if said is not None and len(said) != len(self.ids):
                raise ArgumentError(
                    name, f"{len(said)} numbers", f"must be one for each of {len(self.ids)} ids", "Align."
                )
        if sum(n for _, n in self.weights) != len(self.ids) or any(n < 1 for _, n in self.weights):
            fix = 'Pass (("step 120", number of ids),).'
            raise ArgumentError("weights", self.weights, f"must be versions of {len(self.ids)} ids", fix)


@dataclass(frozen=True)
class Record:
    """Sequences of one rollout.

    Raises:
        ArgumentError: an unknown law, or log-probabilities or kept mass of some sequences alone.
    """

    rollouts: tuple[Rollout, ...]  # in the order in which they were asked for
    law: str = "processed"  # that log-probabilities are of: "raw", "tempered" or "processed"
    decisions: str = ""  # `rlkernel.decisions_hash()` of the process that drew: what ran there

    def __post_init__(self) -> None:
        checks.choice("law", self.law, LAWS)
        for name in ("logprob", "log_kept_mass"):
            if len({getattr(r, name) is None for r in self.rollouts if r.ids}) > 1:
                raise ArgumentError(name, "stated of some", "must be stated of all sequences or of none", "Align.")

    @property
    def tokens(self) -> int:
        """Drawn tokens of all sequences."""
        return sum(len(r.ids) for r in self.rollouts)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of weights that drew a token, in order of first use."""
        return tuple(dict.fromkeys(version for r in self.rollouts for version, _ in r.weights))

    def asked(self) -> Record:
        """What this was asked for: the same requests, and nothing drawn."""
        return Record(tuple(Rollout(r.prompt, r.seed, r.step, r.params) for r in self.rollouts))
