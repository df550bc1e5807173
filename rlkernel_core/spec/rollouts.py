"""What a rollout buffer holds and hands out: fields, slots, group rules, batches, statistics.

Legend: B sequences in a call · T tokens · R rows of a batch (sequences, fillers included) · K rewards of a sequence.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

# How a sequence ended -> code in `batch.status`. Valid are "stop" and "length".
STATUS: Final[Mapping[str, int]] = {"filler": 0, "stop": 1, "length": 2, "abort": 3, "invalid": 4}
VALID_STATUS: Final = frozenset({"stop", "length"})


@dataclass(frozen=True)
class Field:
    """One value per token."""

    dtype: str  # "int32", "float32", "bfloat16", "uint8", ...
    shape: tuple[int, ...] = ()  # of one token's value
    default: float | None = None  # stored where an append does not give the field; None: it must


DEFAULT_FIELDS: Final[Mapping[str, Field]] = {
    "token": Field("int32"),
    "logprob": Field("float32"),
    "mask": Field("uint8", default=1),  # bit 0 trainable, bit 1 tool or observation, bit 2 end of a turn
}


@dataclass(frozen=True)
class Slots:
    """Places of sequences that are being written. The stamps tell them from later sequences in the same places."""

    ids: Tensor  # [B] int64
    stamps: Tensor  # [B] int64


@dataclass(frozen=True)
class GroupRules:
    """When a group of sequences (the samples of one prompt) may be used."""

    complete: bool = True  # all members are there and finished; False: finished members may go without the others
    min_valid: int = 1  # members with a valid status and finite rewards
    max_age: int | None = None  # newest policy version minus the oldest of its members
    distinct_rewards: bool = False  # not all valid members have the same rewards: a constant group teaches nothing


@dataclass(frozen=True)
class GroupState:
    """What stands between a group and its use."""

    id: int  # as given to `reserve`
    reason: str  # ready | open | incomplete | too few valid | too old | constant rewards
    rejected: bool  # not ready, and waiting will not help
    members: int  # sequences it has
    finished: int  # members that ended
    valid: int  # members with a valid status and finite rewards
    tokens: int  # of its finished members
    age: int  # newest policy version minus the oldest of its members

    @property
    def ready(self) -> bool:
        """Whether it may be popped."""
        return self.reason == "ready"


@dataclass(frozen=True)
class BufferStats:
    """Counters since construction; reading them synchronizes with the device once.

    Nothing is lost: `appended == popped + stored + sum(dropped.values())`, and the same for sequences.
    """

    capacity: Mapping[str, int]  # tokens, seqs, groups
    used: Mapping[str, int]  # the same, now; tokens are whole pages
    high_water: Mapping[str, int]  # the same, at most so far
    appended: int  # tokens given to append
    popped: int  # tokens
    stored: int  # tokens held now
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> tokens
    reserved_seqs: int = 0  # sequences given room
    popped_seqs: int = 0  # sequences popped
    stored_seqs: int = 0  # sequences held now
    dropped_seqs: Mapping[str, int] = field(default_factory=dict)  # reason -> sequences
    staleness: Mapping[int, int] = field(default_factory=dict)  # age in versions -> sequences popped
    nbytes: int = 0  # of storage on the device


@runtime_checkable
class RolloutBatch(Protocol):
    """Packed sequences in storage that the buffer owns; every attribute raises StaleBatchError after `release`."""

    def __getitem__(self, name: str) -> Tensor:
        """A field, packed: [T, ...]; sequence i is at cu_seqlens[i] : cu_seqlens[i + 1]."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        """Release."""
        ...

    @property
    def cu_seqlens(self) -> Tensor:
        """[R + 1] int64, starting with 0."""
        ...

    @property
    def group(self) -> Tensor:
        """[R] int64: 0, 1, ... in order of the batch; filler rows -1."""
        ...

    @property
    def group_ids(self) -> Tensor:
        """[R] int64: the ids given to `reserve`; filler rows -1."""
        ...

    @property
    def reward(self) -> Tensor:
        """[R] float32, or [R, K] with K > 1 rewards; not scored is NaN, filler rows 0."""
        ...

    @property
    def valid(self) -> Tensor:
        """[R] bool: status stop or length, and rewards finite if given."""
        ...

    @property
    def weight(self) -> Tensor:
        """[R] float32: 0 for invalid and filler rows, else 1 or as `weighting` says."""
        ...

    @property
    def status(self) -> Tensor:
        """[R] uint8: codes of `STATUS`."""
        ...

    @property
    def version(self) -> Tensor:
        """[R] int64: policy version given to `reserve`; filler rows -1."""
        ...

    def release(self) -> None:
        """Give the storage back. Once only."""
        ...


@runtime_checkable
class RolloutBuffer(Protocol):
    """Fixed storage for rollouts: reserve, append on device, finish, pop whole groups, release."""

    def reserve(self, limits: int | Sequence[int], groups: Sequence[int], *, version: int = 0) -> Slots:
        """Room for one sequence per entry of `groups`, each of at most `limits` tokens. All or nothing.

        `version` is that of the policy which draws them.

        Raises:
            BufferFullError: no room; with on_full="drop_oldest" only if dropping finished groups does not make it.
        """
        ...

    def append(
        self,
        slots: Slots,
        values: Mapping[str, Tensor],
        *,
        cu_seqlens: Tensor | None = None,
        alive: Tensor | None = None,
    ) -> None:
        """Append tokens, on device only: may be captured in a graph.

        Args:
            slots: distinct places, as reserved.
            values: field -> [B, ...], one token for each slot; with `cu_seqlens` [T, ...], packed.
            cu_seqlens: [B + 1] integer; slot i gets rows cu_seqlens[i] : cu_seqlens[i + 1]; rows beyond are ignored.
            alive: [B] bool; rows of a dead slot are ignored, whatever they hold.

        A token beyond a slot's limit, or for a slot that was finished or dropped, is counted as dropped.
        """
        ...

    def finish(self, slots: Slots, reward: Any = None, *, status: str | Sequence[str] = "stop") -> None:
        """End sequences; reads their lengths (synchronizes) and frees what they did not use.

        Args:
            slots: open ones.
            reward: [B] or [B, K] numbers; None stores NaN, and the status alone decides validity.
            status: stop | length | abort | invalid, for all or for each.
        """
        ...

    def groups(self, rules: GroupRules | None = None, *, version: int | None = None) -> tuple[GroupState, ...]:
        """Every group, oldest first, and whether it is ready by `rules`.

        `version` is the newest (default: the newest seen).
        """
        ...

    def pop(
        self,
        *,
        groups: int | None = None,
        tokens: int | None = None,
        rules: GroupRules | None = None,
        version: int | None = None,
        order: str = "fifo",
        weighting: str = "one",
        rows_multiple_of: int = 1,
    ) -> RolloutBatch | None:
        """A full batch of ready groups, or None and nothing changes.

        Args:
            groups: exactly so many groups.
            tokens: whole groups of at most so many tokens; full when the next group would not fit, or exactly.
            rules: which groups are ready.
            version: newest policy version.
            order: "fifo" or "longest_first".
            weighting: "one", or "group": each valid row weighs members / valid members of its group.
            rows_multiple_of: add empty rows of weight 0, so that data-parallel ranks get equal counts; at most
                `max_seqs`.

        Raises:
            BufferFullError: the previous batch was not released, or the batch is larger than its storage.
        """
        ...

    def discard(self, groups: Iterable[int], reason: str = "discarded") -> None:
        """Drop groups, open members included, and count them under `reason`."""
        ...

    def prune(self, rules: GroupRules | None = None, *, version: int | None = None) -> Mapping[str, int]:
        """Drop groups that the rules reject for good at the policy's newest `version`; reason -> groups."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What `append` reads and writes, by name: the static tensors of a graph that contains it.

        Fields are stored by pages, [pages, tokens of a page, ...]; counters are [slots].
        """
        ...

    def assert_zero_growth(self) -> AbstractContextManager[None]:
        """AssertionError at the end of the block if storage moved or the device's allocated memory grew."""
        ...

    def save(self, path: str) -> None:
        """Write everything stored to a file at `path`, whole or not at all; FileError where it cannot be written."""
        ...

    def load(self, path: str) -> None:
        """Take over what a buffer of the same shape saved at `path`, in place: addresses stay.

        FileError where the file is absent or damaged, and nothing has changed then; ArgumentError where its buffer had
        another shape.
        """
        ...

    @property
    def stats(self) -> BufferStats:
        """Counters so far."""
        ...
