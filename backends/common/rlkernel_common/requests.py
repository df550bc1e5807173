"""What each row of a sampling call asked for: parameters decoded to one entry per row, and the edits of its logits.

Parameters are rounded to the type of the edits (fp32, or float64 for float64 logits), so that a Python number and a
tensor of it mean the same. A value without meaning marks its row as bad; nothing here looks at a value on the host.

Legend: N rows · V vocabulary · n columns of a block · R state slots · H history entries · nnz ragged entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_core.spec.sampling import LogitBias, Penalties, SamplingParams, TokenLists


class Requests(NamedTuple):
    """Decoded parameters; every tensor is [N]."""

    temperature: Tensor  # 1 on greedy and bad rows
    greedy: Tensor  # bool
    top_k: Tensor | None  # int64
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor  # int64
    step: Tensor  # int64
    repetition: Tensor | None
    frequency: Tensor | None
    presence: Tensor | None
    history: Penalties | None  # its tensors have one row per row of the call
    bad: Tensor  # bool: a parameter has no meaning
    padding: Tensor | None  # bool: the row stands for nothing


class Edited(NamedTuple):
    """A block of logits after the edits."""

    x: Tensor  # [N, n] never NaN
    nan: Tensor  # [N] bool: the logits held NaN
    bad: Tensor  # [N] bool: the edits made NaN


def decode(call: SamplingParams, N: int, device: torch.device, dtype: torch.dtype, slot: Tensor | None) -> Requests:
    """One entry per row of every parameter of a call, gathered by slot where there are slots.

    Args:
        call: of any sampling operator.
        N: rows.
        device: of the logits.
        dtype: of the edits.
        slot: [N] integer, the entry of each row; None where parameters have one entry or one per row.
    """
    rows = _Rows(N, device, None if slot is None else slot.long())
    asked = call.penalties or Penalties()
    T = rows.each(call.temperature, dtype)
    repetition, frequency, presence = (
        rows.maybe(value, dtype) for value in (asked.repetition, asked.frequency, asked.presence)
    )
    bad = ~((T >= 0) & T.isfinite())
    if repetition is not None:
        bad = bad | ~((repetition > 0) & repetition.isfinite())
    for value in (frequency, presence):
        bad = bad if value is None else bad | ~value.isfinite()
    for tensor in (call.temperature, call.top_k, call.top_p, call.min_p, call.seed, call.step, *vars(asked).values()):
        bad = bad | rows.foreign(tensor)
    history = Penalties(
        prompt_bits=rows.table(asked.prompt_bits),
        output_ids=rows.table(asked.output_ids),
        output_counts=rows.table(asked.output_counts),
    )
    greedy = (T == 0) & ~bad
    return Requests(
        torch.where(greedy | bad, 1.0, T),
        greedy,
        rows.maybe(call.top_k, torch.int64),
        rows.maybe(call.top_p, dtype),
        rows.maybe(call.min_p, dtype),
        rows.each(call.seed, torch.int64),
        rows.each(call.step, torch.int64),
        repetition,
        frequency,
        presence,
        None if call.penalties is None else history,
        bad,
        None if rows.slot is None else rows.slot < 0,
    )


class _Rows(NamedTuple):
    """Where the rows of a call find their parameters."""

    N: int
    device: torch.device
    slot: Tensor | None

    def each(self, value: float | Tensor, dtype: torch.dtype) -> Tensor:
        """[N] values of a number, a single entry, or one entry per row or slot."""
        if isinstance(value, Tensor):
            return self.by_row(value.to(dtype).reshape(-1))
        if dtype == torch.int64:  # an unsigned 64-bit number keeps its bits
            value = value - 2**64 if value >= 2**63 else value
            return torch.full((self.N,), value, dtype=dtype, device=self.device)
        return torch.full((self.N,), value, dtype=torch.float64, device=self.device).to(dtype)

    def maybe(self, value: float | Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The same for a parameter that may be off."""
        return None if value is None else self.each(value, dtype)

    def by_row(self, x: Tensor) -> Tensor:
        """One entry per row of a tensor with one per row or slot; a single entry is everybody's."""
        if x.shape[0] == 1:
            return x.expand(self.N, *x.shape[1:])
        return x if self.slot is None else x[self.slot.clamp(0, x.shape[0] - 1)]

    def table(self, x: Tensor | None) -> Tensor | None:
        """The same for a table that may be missing."""
        return None if x is None else self.by_row(x)

    def foreign(self, x: object) -> Tensor:
        """[N] bool: the slot is none of this parameter's."""
        if self.slot is None or not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] == 1:
            return torch.zeros(self.N, dtype=torch.bool, device=self.device)
        return self.slot >= x.shape[0]


def edit(
    logits: Tensor,
    low: int,
    requests: Requests,
    *,
    bias: LogitBias | None,
    allowed: Tensor | None,
    banned: TokenLists | None,
) -> Edited:
    """Steps 1 to 5 of the contract on the columns [low, low + n); every operation rounds to the type of `logits`.

    Args:
        logits: [N, n] fp32 or float64; not written to.
        low: token id of the first column.
        requests: parameters per row.
        bias: values to add.
        allowed: [N, words] bitmask.
        banned: ids to forbid.
    """
    N, n = logits.shape
    room = max(N, 1), n + 1  # entries of no row and of no column have a place too
    nan = logits.isnan()
    x = torch.where(nan, -torch.inf, logits)
    ids = torch.arange(low, low + n, device=x.device)
    if allowed is not None:
        x = torch.where(_bit(allowed, ids), x, -torch.inf)
    if banned is not None:
        hit = torch.zeros(room, dtype=torch.bool, device=x.device)
        row, column = _places(banned.ids, banned.offsets, low, n)
        hit.view(-1).index_fill_(0, row * (n + 1) + column, value=True)  # `hit[...] = True` would copy from the host
        x = torch.where(hit[:N, :n], -torch.inf, x)
    if bias is not None:
        # Summed in float64 and rounded once: a few fp32 values add up exactly there, in whatever order.
        total = torch.zeros(room, dtype=torch.float64, device=x.device)
        total.index_put_(_places(bias.ids, bias.offsets, low, n), bias.values.double(), accumulate=True)
        extra = total[:N, :n].to(x.dtype)
        x = torch.where((x == -torch.inf) | (extra == -torch.inf), -torch.inf, x + extra)
    if requests.history is not None:
        x = _penalized(x, ids, requests, requests.history)
    dead = requests.bad if requests.padding is None else requests.bad | requests.padding
    broken = x.isnan()
    x = torch.where(broken | dead[:, None], -torch.inf, x)
    return Edited(x, nan.any(1), broken.any(1))


def _penalized(x: Tensor, ids: Tensor, requests: Requests, history: Penalties) -> Tensor:
    N, n = x.shape
    count = torch.zeros(N, n + 1, dtype=torch.int64, device=x.device)
    if history.output_ids is not None:
        place = history.output_ids.long() - ids[:1]
        place = torch.where((place >= 0) & (place < n), place, n)
        times = torch.ones_like(place) if history.output_counts is None else history.output_counts.long()
        count.scatter_add_(1, place, times.clamp(min=0))
    count = count[:, :n]
    if requests.repetition is not None:
        seen = count > 0
        if history.prompt_bits is not None:
            seen = seen | _bit(history.prompt_bits, ids)
        r = requests.repetition[:, None]
        x = torch.where(seen, torch.where(x > 0, x / r, x * r), x)
    if requests.frequency is not None:
        x = x - requests.frequency[:, None] * count.to(x.dtype)
    if requests.presence is not None:
        x = torch.where(count > 0, x - requests.presence[:, None], x)
    return x


def _bit(words: Tensor, ids: Tensor) -> Tensor:
    """[N, n] bool: bit id % 32 of word id // 32 of each row."""
    return (words[:, ids >> 5] >> (ids & 31)) & 1 != 0


def _places(ids: Tensor, offsets: Tensor, low: int, n: int) -> tuple[Tensor, Tensor]:
    """(row, column) of every ragged entry; those that do not matter here go to the spare column n."""
    N = offsets.shape[0] - 1
    entry = torch.arange(ids.shape[0], device=ids.device)
    row = torch.searchsorted(offsets.long().contiguous(), entry, right=True) - 1
    column = ids.long() - low
    inside = (row >= 0) & (row < N) & (column >= 0) & (column < n)
    return row.clamp(0, max(N - 1, 0)), torch.where(inside, column, n)
