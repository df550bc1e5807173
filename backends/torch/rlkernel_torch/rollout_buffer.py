"""Reference of rollout_buffer@1 in plain torch, on any device.

The host keeps who holds which slot and pages (`SlotAllocator`), the device the tokens; `append` touches those only.
Host methods are serialized by a lock. `append` takes none: it does not read what they change on the host.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError, BufferFullError
from rlkernel_core.spec.rollout_buffer import RolloutBufferCall
from rlkernel_core.spec.rollout_checks import (
    check_append,
    check_discard,
    check_path,
    check_reserve,
    check_rules,
    check_slots,
    check_status,
)
from rlkernel_core.spec.rollouts import (
    DEFAULT_FIELDS,
    VALID_STATUS,
    BufferStats,
    GroupRules,
    GroupState,
    RolloutBuffer,
    Slots,
)
from rlkernel_torch.rollout.batch import Batch, Staging
from rlkernel_torch.rollout.choose import choose, rows_of
from rlkernel_torch.rollout.files import read, write
from rlkernel_torch.rollout.pages import COUNTERS, Pages
from rlkernel_torch.rollout.slot_allocator import Rollout, SlotAllocator


class PagedRolloutBuffer:
    """See `rlkernel_core.spec.rollouts.RolloutBuffer`. Subclasses may name other parts."""

    allocator: ClassVar[type[SlotAllocator]] = SlotAllocator
    pages: ClassVar[type[Pages]] = Pages
    staging: ClassVar[type[Staging]] = Staging

    def __init__(self, shape: Mapping[str, Any], on_full: str, device: torch.device) -> None:
        self._shape, self._on_full, self._device = shape, on_full, device
        self._rewards, page = shape["rewards"], shape["page_tokens"]
        slots, pages, fields = shape["max_seqs"], shape["max_tokens"] // page, shape["fields"]
        self._max_seq_tokens = min(shape["max_seq_tokens"] or shape["max_tokens"], shape["max_tokens"])
        self._allocator = self.allocator(slots, pages, shape["max_groups"] or slots, page, shape["group_size"])
        self._pages = self.pages(fields, pages, page, slots, -(-self._max_seq_tokens // page), device)
        batch_tokens = min(shape["max_batch_tokens"] or shape["max_tokens"], shape["max_tokens"])
        self._staging = self.staging(fields, batch_tokens, 2 * slots, self._rewards, device)
        self._lock = threading.RLock()

    def reserve(self, limits: int | Sequence[int], groups: Sequence[int], *, version: int = 0) -> Slots:
        """Room for one sequence per entry of groups."""
        wanted, groups = check_reserve(limits, groups, version, self._max_seq_tokens)
        with self._lock:
            victims = self._allocator.victims(wanted, groups, drop_oldest=self._on_full == "drop_oldest")
            self._drop(victims, "oldest")
            made = self._allocator.reserve(wanted, groups, version)
            slots, stamps = [m.slot for m in made], [m.stamp for m in made]
            return self._pages.open(slots, stamps, wanted, [m.pages for m in made])

    def append(
        self,
        slots: Slots,
        values: Mapping[str, Tensor],
        *,
        cu_seqlens: Tensor | None = None,
        alive: Tensor | None = None,
    ) -> None:
        """Append tokens, on device only."""
        fields, device = self._shape["fields"], self._pages.stamp.device
        check_append(slots, values, fields, cu_seqlens=cu_seqlens, alive=alive, device=device)
        with torch.no_grad():
            self._pages.append(slots, values, cu_seqlens, alive)

    def finish(self, slots: Slots, reward: Any = None, *, status: str | Sequence[str] = "stop") -> None:
        """End sequences."""
        check_slots(slots, self._pages.stamp.device)
        each = check_status(status, slots.ids.shape[0])
        rewards = self._rewards_of(reward, len(each))
        with self._lock:
            ending = self._allocator.open_ones(slots.ids.tolist(), slots.stamps.tolist())
            lengths = self._pages.lengths([r.slot for r in ending])
            self._pages.close([r.slot for r in ending])
            for rollout, length, name, given in zip(ending, lengths, each, rewards, strict=True):
                rollout.open, rollout.length, rollout.status, rollout.rewards = False, length, name, given
                finite = reward is None or all(map(math.isfinite, given))
                rollout.valid = name in VALID_STATUS and finite
                self._allocator.trim(rollout)

    def groups(self, rules: GroupRules | None = None, *, version: int | None = None) -> tuple[GroupState, ...]:
        """Every group, oldest first."""
        check_rules(rules, version)
        with self._lock:
            newest = self._allocator.newest_version if version is None else version
            return tuple(self._allocator.state(g, rules or GroupRules(), newest) for g in self._allocator.groups)

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
    ) -> Batch | None:
        """A full batch of ready groups, or None."""
        if (groups is None) == (tokens is None):
            raise ArgumentError("groups, tokens", (groups, tokens), "exactly one says what is full", "Pass groups=8.")
        name = "groups" if tokens is None else "tokens"
        checks.integer(name, groups if tokens is None else tokens, at_least=1)
        checks.choice("order", order, ("fifo", "longest_first"))
        checks.choice("weighting", weighting, ("one", "group"))
        checks.integer("rows_multiple_of", rows_multiple_of, at_least=1, at_most=self._shape["max_seqs"])
        check_rules(rules, version)
        with self._lock:
            if self._staging.out:
                raise BufferFullError("The previous batch was not released. Call batch.release() first.")
            states = [g for g in self.groups(rules, version=version) if g.ready]
            chosen = choose(states, groups, tokens, order)
            if chosen is None:
                return None
            total = sum(g.tokens for g in chosen)
            if total > self._staging.capacity:
                room = f"max_batch_tokens={self._staging.capacity}"
                raise BufferFullError(f"A batch of {total} tokens does not fit {room}. Pop fewer groups.")
            members = [[m for m in self._allocator.members(g.id) if not m.open] for g in chosen]
            batch = self._staging.fill(self._pages, rows_of(members, weighting, rows_multiple_of, self._rewards))
            newest = self._allocator.newest_version if version is None else version
            self._popped([m for group in members for m in group], newest, total)
            return batch

    def discard(self, groups: Iterable[int], reason: str = "discarded") -> None:
        """Drop groups, open members included."""
        with self._lock:
            self._drop(check_discard(groups, reason, self._allocator.groups), reason)

    def prune(self, rules: GroupRules | None = None, *, version: int | None = None) -> Mapping[str, int]:
        """Drop groups that the rules reject for good."""
        with self._lock:
            gone: dict[str, int] = {}
            for state in self.groups(rules, version=version):
                if state.rejected:
                    self._drop([state.id], state.reason)
                    gone[state.reason] = gone.get(state.reason, 0) + 1
            return gone

    def tensors(self) -> Mapping[str, Tensor]:
        """What append reads and writes."""
        return self._pages.tensors()

    @contextmanager
    def assert_zero_growth(self) -> Iterator[None]:
        """AssertionError if storage moved or the device's allocated memory grew."""
        before, allocated = self._addresses(), self._allocated()
        yield
        moved = [n for n, at in self._addresses().items() if before.get(n) != at]
        if moved:
            raise AssertionError(f"storage moved: {', '.join(moved)}")
        grown = self._allocated() - allocated
        if grown > 0:
            raise AssertionError(f"the device holds {grown} bytes more than before the block")

    def save(self, path: str) -> None:
        """Write everything stored to a file; FileError where it cannot be written."""
        with self._lock:
            write(check_path(path), self._shape, self._allocator, self._pages)

    def load(self, path: str) -> None:
        """Take over what a buffer of the same shape saved, in place; a batch that is out becomes stale.

        FileError where the file is absent or damaged; ArgumentError where its buffer had another shape.
        """
        with self._lock:
            read(check_path(path), self._shape, self._allocator, self._pages)
            self._staging.generation += 1
            self._staging.out = False

    @property
    def stats(self) -> BufferStats:
        """Counters so far; synchronizes."""
        with self._lock:
            counts, allocator = dict(zip(COUNTERS, self._pages.counts.tolist(), strict=True)), self._allocator
            dropped = Counter(allocator.dropped)  # a caller's reason may have the name of a counter
            dropped.update({n: c for n, c in counts.items() if c and n != "appended"})
            return BufferStats(
                capacity=allocator.capacity,
                used=allocator.used,
                high_water=dict(allocator.high_water),
                appended=counts["appended"],
                popped=allocator.popped,
                stored=int(self._pages.length.sum()),
                dropped=dict(dropped),
                reserved_seqs=allocator.reserved_seqs,
                popped_seqs=allocator.popped_seqs,
                stored_seqs=len(allocator.sequences),
                dropped_seqs=dict(allocator.dropped_seqs),
                staleness=dict(allocator.staleness),
                nbytes=sum(x.nbytes for x in self._storage().values()),
            )

    def _rewards_of(self, reward: Any, count: int) -> list[tuple[float, ...]]:
        if reward is None:
            return [(math.nan,) * self._rewards] * count
        try:
            given = torch.as_tensor(reward, device="cpu")  # whatever the default is: the numbers are read here
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            problem, remedy = "must be numbers, as many for each slot", "Pass a list or tensor [B] or [B, K]."
            raise ArgumentTypeError("reward", checks.describe(reward), problem, remedy) from error
        given = checks.tensor("reward", given, kind="real").float()
        want = (count,) if self._rewards == 1 and given.dim() == 1 else (count, self._rewards)
        checks.shape("reward", given, want, "slots (and rewards)")
        return [tuple(row) for row in given.reshape(count, self._rewards).tolist()]

    def _popped(self, rollouts: Sequence[Rollout], newest: int, tokens: int) -> None:
        allocator = self._allocator
        allocator.popped += tokens
        allocator.popped_seqs += len(rollouts)
        allocator.staleness.update(newest - r.version for r in rollouts)
        self._pages.clear([r.slot for r in rollouts])
        allocator.free(rollouts)

    def _drop(self, groups: Sequence[int], reason: str) -> None:
        rollouts = [r for g in groups for r in self._allocator.members(g)]
        if not rollouts:
            return
        tokens = sum(self._pages.lengths([r.slot for r in rollouts]))
        self._allocator.dropped[reason] += tokens
        self._allocator.dropped_seqs[reason] += len(rollouts)
        self._pages.clear([r.slot for r in rollouts])
        self._allocator.free(rollouts)

    def _storage(self) -> dict[str, Tensor]:
        return {**self._pages.tensors(), **{f"batch.{n}": x for n, x in self._staging.tensors().items()}}

    def _addresses(self) -> dict[str, tuple[int, int]]:
        return {n: (x.data_ptr(), x.nbytes) for n, x in self._storage().items()}

    def _allocated(self) -> int:
        """Bytes allocated on the device, where it counts them."""
        count = getattr(torch.get_device_module(self._device), "memory_allocated", None)
        return int(count(self._device)) if count else 0


def rollout_buffer(call: RolloutBufferCall, kind: type[PagedRolloutBuffer] = PagedRolloutBuffer) -> RolloutBuffer:
    """See `rlkernel_core.spec.rollout_buffer.RolloutBufferCall`.

    Args:
        call: its record.
        kind: what is made; the conformance suite puts faulty subclasses in its place.
    """
    shape: dict[str, Any] = {
        "max_tokens": call.max_tokens,
        "max_seqs": call.max_seqs,
        "fields": DEFAULT_FIELDS if call.fields is None else call.fields,
        "rewards": call.rewards,
        "group_size": call.group_size,
        "max_groups": call.max_groups,
        "max_seq_tokens": call.max_seq_tokens,
        "max_batch_tokens": call.max_batch_tokens,
        "page_tokens": call.page_tokens,
    }
    place = torch.default_generator.device if call.device is None else torch.device(call.device)
    return kind(shape, call.on_full, place)
