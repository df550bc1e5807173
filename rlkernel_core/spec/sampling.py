"""The nouns that sample, lm_head_sample and verify share: edits of the logits, the result, its status bits, the checks.

One law, stated once. With V the vocabulary, T the temperature and every step on the row it belongs to:

    1. x = logits in fp32; NaN counts as -inf and sets NAN           (raw law: softmax(x), before any edit)
    2. x = -inf where `allowed` says no, and at the `banned` ids
    3. x += bias                                                      (-inf stays -inf)
    4. x = x / r if x > 0 else x * r, for tokens seen in prompt or output          (repetition r)
    5. x = (x - frequency * count) - presence * (count > 0)           (count: occurrences in the output)
    6. order all tokens by (x descending, id ascending); y = (x - max x) / T       (tempered law: softmax(y))
    7. min-p: keep y >= ln(min_p); 8. top-k; 9. top-p on what is left, renormalized: keep a token iff the mass before
       it is below top_p. The first token of the order is always kept.
    10. draw from softmax(y) over the kept tokens                     (processed law)

Steps 1 to 5 round to fp32 after every operation written above (float64 for float64 logits), and parameters are rounded
to that type first, so that order, ties and top-k are the same on every backend. A row that holds +inf after step 5 is
uniform over its +inf tokens.

The draw is an argmax: token = argmax of y_j + g_j over the kept j, ties to the lowest id, with Gumbel noise
g = -ln(-ln(1 - u)), u = (w + 1/2) / 2^32, and w word `j mod 4` of Philox4x32-10 (Salmon et al., SC 2011) with
key = (seed low, seed high) and counter = (j div 4, step low, step high, stream). Streams: 0 the target's draw,
1 a draft's draw, 2 acceptance tests, 3 residual draws. Nothing about batch, row, launch or device enters.

Legend: N rows · V vocabulary · W stored columns, W >= V · R state slots · H history entries · nnz ragged entries.
Imports no torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.logprob import Support

if TYPE_CHECKING:
    from torch import Tensor

FILTER_ORDERS: Final = ("topk_topp", "joint", "topp_topk")
TIES: Final = ("lowest_id", "keep_all")
LAWS: Final = ("raw", "processed")
STREAMS: Final = {"target": 0, "draft": 1, "accept": 2, "residual": 3}


class Status(IntFlag):
    """Bits of `status`; 0 is an ordinary row."""

    # No token is left: token = invalid_token, logprob = log_kept_mass = -inf, raw_logprob and entropy NaN, rank and
    # kept ids -1, threshold inf; the best tokens of the raw law are returned as ever.
    EMPTY = 1
    NAN = 2  # the logits held NaN, counted as -inf
    POSINF = 4  # +inf after the edits: uniform over those tokens
    # A parameter or a bias has no meaning (T < 0, T not finite, repetition <= 0, NaN ...): results as for EMPTY; the
    # row then has neither EMPTY nor POSINF.
    PARAM = 8
    KEPT_OVERFLOW = 16  # more tokens kept than kept_capacity: kept_ids is cut, nothing else changes
    FALLBACK = 32  # information only: a slower path of the implementation ran


@dataclass(frozen=True)
class Penalties:
    """Penalties on tokens that occurred, as in CTRL (arXiv 1909.05858) and the OpenAI completions interface.

    The history is sparse: a dense [N, V] table of counts would triple the traffic of the operator.
    """

    repetition: float | Tensor | None = None  # [N], > 0; 1 is off
    frequency: float | Tensor | None = None  # [N]; 0 is off
    presence: float | Tensor | None = None  # [N]; 0 is off
    prompt_bits: Tensor | None = None  # [N, >= ceil(V / 32)] int32, bit id % 32 of word id // 32: id is in the prompt
    output_ids: Tensor | None = None  # [N, H] integer; ids outside [0, V) are padding; repeated ids add up
    output_counts: Tensor | None = None  # [N, H] integer occurrences; None: one per entry


@dataclass(frozen=True)
class LogitBias:
    """Values added to some logits, ragged: row i gets values[k] at ids[k] for offsets[i] <= k < offsets[i + 1].

    Repeated ids add up; ids outside [0, V) and entries beyond the last offset are ignored; a value of -inf bans.
    """

    ids: Tensor  # [nnz] integer
    values: Tensor  # [nnz] floating
    offsets: Tensor  # [N + 1] integer, offsets[0] == 0, non-decreasing


@dataclass(frozen=True)
class TokenLists:
    """A list of token ids per row, ragged: row i has ids[offsets[i]:offsets[i + 1]]; ids outside [0, V) are ignored."""

    ids: Tensor  # [nnz] integer
    offsets: Tensor  # [N + 1] integer, offsets[0] == 0, non-decreasing


@dataclass(frozen=True)
class SampleResult:
    """One token per row and what a trainer needs to know about how it was drawn.

    Ids are int64, because they index; counts are int32; the rest is fp32 (float64 for float64 logits).
    """

    token: Tensor  # [N] int64
    logprob: Tensor  # [N] under the law it was drawn from (processed); 0 on greedy rows
    log_kept_mass: Tensor  # [N] log of the kept tokens' mass under the tempered law; 0 where nothing was dropped
    kept_count: Tensor  # [N] int32
    status: Tensor  # [N] int32, bits of Status
    # Kept are {x > threshold} and {x == threshold, id <= threshold_id}; (-inf, -1) where nothing was dropped.
    threshold: Tensor  # [N], see threshold_id
    threshold_id: Tensor  # [N] int64: ids above it are dropped where x equals the threshold; -1: nothing was
    raw_logprob: Tensor | None = None  # [N] log softmax of the logits as given, at the token
    entropy: Tensor | None = None  # [N] nats, of the processed law: the mean of -logprob
    kept_ids: Tensor | None = None  # [N, kept_capacity] int64, best first, -1 behind the last
    top_ids: Tensor | None = None  # [N, n] int64, best first, -1 where there is no n-th token
    top_logprobs: Tensor | None = None  # [N, n], -inf there
    rank: Tensor | None = None  # [N] int32, place of the token in the law of the top n; 0 is best; -1 without a token

    def support(self) -> Support:
        """The kept ids as the ragged `Support` that logprob and linear_logprob take.

        Its size is N * kept_capacity whatever the rows hold (entries beyond the last offset are ignored), so this may
        run in a captured graph. Rows whose status says KEPT_OVERFLOW hold their best kept_capacity ids only.

        Raises:
            ArgumentError: the kept ids were not asked for.
        """
        if self.kept_ids is None:
            raise ArgumentError("kept_capacity", 0, "kept no ids", "Call with kept_capacity >= the largest kept_count.")
        N, C = self.kept_ids.shape
        count = self.kept_count.long().clamp(max=C)
        offsets = count.new_zeros(N + 1)
        offsets[1:] = count.cumsum(0)
        column = self.kept_ids.new_ones(C).cumsum(0) - 1
        # Entries behind a row's last id go to a spare place at the end.
        place = (offsets[:-1, None] + column).where(column < count[:, None], N * C)
        ids = self.kept_ids.new_zeros(N * C + 1).scatter(0, place.reshape(-1), self.kept_ids.reshape(-1))
        return Support(ids[: N * C], offsets)


@dataclass(slots=True, eq=False, kw_only=True)
class SamplingParams:
    """Arguments of every sampling operator: the law of a draw, its noise and the edits of its logits. See `sample`."""

    temperature: float | Tensor = 1.0
    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None
    seed: int | Tensor
    step: int | Tensor
    penalties: Penalties | None = None
    allowed: Tensor | None = None
    banned: TokenLists | None = None
    filter_order: str = "topk_topp"
    tie: str = "lowest_id"
    vocab_size: int | None = None
    raw_logprob: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class RequestParams(SamplingParams):
    """What sample and lm_head_sample take besides: state slots and what else a draw returns. See `sample`."""

    slot: Tensor | None = None
    top_n: int = 0
    top_n_from: str = "raw"
    rank: bool = False
    entropy: bool = False
    kept_capacity: int = 0
    invalid_token: int = 0
    stream: int = 0


def check_sampling_params(
    call: SamplingParams, like: Tensor, rows: int, width: int, *, slots: bool = False, of: str = "rows"
) -> None:
    """What every sampling operator asks of the parameters of its law and of its noise.

    `like` says where parameters live; a parameter holds one entry per row, or with `slots` one per state slot; `of`
    says what the rows are, for messages.
    """
    temperature, seed, step = call.temperature, call.seed, call.step
    check_parameter("temperature", temperature, like, rows, slots=slots, of=of)
    if not checks.is_tensor(temperature):
        checks.number("temperature", temperature, at_least=0.0, remedy="Pass 0 for greedy decoding or T > 0.")
    check_parameter("top_k", call.top_k, like, rows, kind="integer", slots=slots, of=of)
    check_parameter("top_p", call.top_p, like, rows, slots=slots, of=of)
    check_parameter("min_p", call.min_p, like, rows, slots=slots, of=of)
    for name, value in (("seed", seed), ("step", step)):
        if checks.is_tensor(value):
            check_parameter(name, value, like, rows, kind="integer", slots=slots, of=of)
        else:
            checks.integer(name, value, at_least=0, at_most=2**64 - 1, remedy="Pass an unsigned 64-bit number.")
    greedy = not checks.is_tensor(temperature) and temperature == 0
    if rows > 1 and not (slots or greedy or _per_row(seed, rows) or _per_row(step, rows)):
        raise ArgumentError(
            "seed",
            checks.describe(seed),
            f"gives all {rows} {of} the same noise, because noise depends on (seed, step, token id) alone",
            "Pass one seed per request, for example seed + torch.arange(N).",
        )
    checks.choice("filter_order", call.filter_order, FILTER_ORDERS)
    checks.choice("tie", call.tie, TIES)
    if call.vocab_size is not None:
        checks.integer("vocab_size", call.vocab_size, at_least=1, at_most=width)


def check_parameter(
    name: str,
    value: Any,
    like: Tensor,
    rows: int,
    *,
    kind: str = "floating",
    slots: bool = False,
    of: str = "rows",
) -> None:
    """None, a number, or a tensor with one entry, one per row, or (with slots) one per state slot."""
    if value is None:
        return
    if not checks.is_tensor(value):
        if kind == "integer":
            checks.integer(name, value)
        else:
            checks.number(name, value)
        return
    checks.tensor(name, value, ndim=(0, 1), kind=kind)
    checks.same_device(name, value, like, "the other tensors")
    check_no_gradient(name, value)
    if value.dim() and not slots and value.shape[0] not in (1, rows):
        raise ArgumentError(name, checks.describe(value), f"must hold one entry, or one per row: {rows} {of}", "Align.")


def check_edits(
    call: SamplingParams,
    like: Tensor,
    rows: int,
    vocab: int,
    *,
    bias: Any,
    bias_name: str = "bias",
    history_rows: int | None = None,
    slots: bool = False,
) -> None:
    """Types and sizes of what changes the logits before the filters; `history_rows`: rows of the penalties."""
    penalties, allowed, banned = call.penalties, call.allowed, call.banned
    words = -(-vocab // 32)
    if bias is not None:
        checks.instance(bias_name, bias, LogitBias)
        checks.tensor(f"{bias_name}.values", bias.values, ndim=1, kind="floating")
        check_no_gradient(f"{bias_name}.values", bias.values)
    if allowed is not None:
        _bits("allowed", allowed, like, rows, words)
    for name, lists, cls in ((bias_name, bias, LogitBias), ("banned", banned, TokenLists)):
        if lists is None:
            continue
        checks.instance(name, lists, cls)
        checks.tensor(f"{name}.ids", lists.ids, ndim=1, kind="integer")
        checks.tensor(f"{name}.offsets", lists.offsets, ndim=1, kind="integer")
        checks.shape(f"{name}.offsets", lists.offsets, (rows + 1,), "rows + 1")
        for field, x in vars(lists).items():
            checks.same_device(f"{name}.{field}", x, like, "the other tensors")
    if bias is not None:
        checks.shape(f"{bias_name}.values", bias.values, bias.ids.shape, f"{bias_name}.ids")
    if penalties is not None:
        _check_penalties(penalties, like, rows if history_rows is None else history_rows, words, slots=slots)


def _check_penalties(penalties: Any, like: Tensor, owners: int, words: int, *, slots: bool) -> None:
    checks.instance("penalties", penalties, Penalties)
    for name in ("repetition", "frequency", "presence"):
        check_parameter(f"penalties.{name}", getattr(penalties, name), like, owners, slots=slots)
    if penalties.repetition is not None and not checks.is_tensor(penalties.repetition):
        checks.number("penalties.repetition", penalties.repetition, above=0.0, remedy="Pass 1 for no penalty.")
    if penalties.prompt_bits is not None:
        _bits("penalties.prompt_bits", penalties.prompt_bits, like, None if slots else owners, words)
    if penalties.output_ids is not None:
        checks.tensor("penalties.output_ids", penalties.output_ids, ndim=2, kind="integer")
        checks.same_device("penalties.output_ids", penalties.output_ids, like, "the other tensors")
        if not slots and penalties.output_ids.shape[0] != owners:
            raise ArgumentError(
                "penalties.output_ids", checks.describe(penalties.output_ids), f"must hold {owners} rows", "Align them."
            )
    if penalties.output_counts is not None:
        if penalties.output_ids is None:
            raise ArgumentError("penalties.output_counts", "no output_ids", "counts nothing", "Pass both.")
        checks.tensor("penalties.output_counts", penalties.output_counts, ndim=2, kind="integer")
        checks.same_device("penalties.output_counts", penalties.output_counts, like, "the other tensors")
        checks.shape("penalties.output_counts", penalties.output_counts, penalties.output_ids.shape, "output_ids")


def check_no_gradient(name: str, x: Any) -> None:
    """A draw has no gradient: an input that asks for one is refused, not silently detached."""
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            name,
            checks.describe(x),
            "asks for a gradient, which a draw does not have",
            "Call under torch.no_grad() and differentiate logprob(...) of the drawn tokens.",
        )


def _per_row(value: Any, rows: int) -> bool:
    return bool(checks.is_tensor(value) and value.dim() == 1 and value.shape[0] == rows)


def _bits(name: str, x: Any, like: Tensor, rows: int | None, words: int) -> None:
    checks.tensor(name, x, ndim=2, kind="integer")
    checks.same_device(name, x, like, "the other tensors")
    if str(x.dtype) != "torch.int32":
        raise ArgumentTypeError(name, checks.describe(x), "must be int32 words of 32 bits", "Use .view(torch.int32).")
    if x.shape[1] < words or (rows is not None and x.shape[0] != rows):
        wanted = f"[{'R' if rows is None else rows}, >= {words}]"
        raise ArgumentError(name, checks.describe(x), f"must have shape {wanted}", "One bit per token id.")
