"""rollout_buffer@1: storage for rollouts that never grows and never loses a token.

    reserve -> append ... append -> finish -> pop -> release

Tokens live in pages of `page_tokens`; a sequence holds the pages that its limit needs until it is finished, then those
that its length needs. `pop` gathers whole groups into one packed batch whose storage is made once, so that addresses
are the same for every batch. At any time, in tokens and in sequences:

    appended = popped + stored + dropped by reason

Memory: (max_tokens + max_batch_tokens) * bytes per token + 4 * max_seqs * ceil(max_seq_tokens / page_tokens) for the
page table. Types that appear in calls are in `rlkernel_core.spec.rollouts`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.form import CAPTURABLE, Clause, Feature, OpCall, OpSpec
from rlkernel_core.spec.rollouts import DEFAULT_FIELDS, Field, RolloutBuffer

ON_FULL = ("raise", "drop_oldest")


@dataclass(slots=True, eq=False)
class RolloutBufferCall(OpCall[RolloutBuffer]):
    """A buffer for rollouts with all of its storage made here.

    Args:
        max_tokens: capacity in tokens, a multiple of page_tokens.
        max_seqs: sequences held at once, open and finished.
        fields: name -> Field, one value per token; None: token int32, logprob float32, mask uint8 (1 if not given).
        rewards: K, rewards per sequence.
        group_size: members that make a group complete; None: a group is complete when none of its members is open.
        max_groups: groups held at once; None: max_seqs.
        max_seq_tokens: largest limit of one sequence; None: max_tokens.
        max_batch_tokens: storage of a popped batch; None: max_tokens.
        page_tokens: granularity of storage. On average half a page of each sequence is unused.
        on_full: when a reservation finds no room: "raise" BufferFullError, or "drop_oldest" finished groups (counted).
        device: where the storage lives; None: the CPU.

    Raises:
        ArgumentError: a size is not as described.
    """

    max_tokens: int
    max_seqs: int
    _: KW_ONLY
    fields: Mapping[str, Field] | None = None
    rewards: int = 1
    group_size: int | None = None
    max_groups: int | None = None
    max_seq_tokens: int | None = None
    max_batch_tokens: int | None = None
    page_tokens: int = 256
    on_full: str = "raise"
    device: Any = None


def check(call: RolloutBufferCall) -> None:
    """Checks shared by all implementations of rollout_buffer@1."""
    max_tokens, fields, page_tokens = call.max_tokens, call.fields, call.page_tokens
    checks.integer("page_tokens", page_tokens, at_least=1)
    checks.integer("max_tokens", max_tokens, at_least=1)
    if max_tokens % page_tokens:
        remedy = f"Pass {-(-max_tokens // page_tokens) * page_tokens}, or another page_tokens."
        raise ArgumentError("max_tokens", max_tokens, f"must be a multiple of page_tokens={page_tokens}", remedy)
    checks.integer("max_seqs", call.max_seqs, at_least=1)
    checks.integer("rewards", call.rewards, at_least=1)
    for name, value in (
        ("group_size", call.group_size),
        ("max_groups", call.max_groups),
        ("max_seq_tokens", call.max_seq_tokens),
        ("max_batch_tokens", call.max_batch_tokens),
    ):
        if value is not None:
            checks.integer(name, value, at_least=1)
    checks.choice("on_full", call.on_full, ON_FULL)
    checks.device("device", call.device)
    if not isinstance(fields, Mapping | None):
        raise ArgumentTypeError(
            "fields", checks.describe(fields), "must map names to Fields", "Pass {'token': Field('int32')}."
        )
    for name, entry in (DEFAULT_FIELDS if fields is None else fields).items():
        if not isinstance(entry, Field):
            raise ArgumentTypeError(
                f"fields[{name!r}]", checks.describe(entry), "must be a Field", "Pass Field('int32')."
            )
        _check_field(f"fields[{name!r}]", entry)


def _check_field(name: str, entry: Field) -> None:
    if not isinstance(entry.dtype, str):
        got = checks.describe(entry.dtype)
        raise ArgumentTypeError(f"{name}.dtype", got, "must be the name of a dtype", "Pass 'int32'.")
    if not isinstance(entry.shape, (tuple, list)):
        got = checks.describe(entry.shape)
        raise ArgumentTypeError(f"{name}.shape", got, "must be a tuple of sizes", "Pass () for one number per token.")
    for size in entry.shape:
        checks.integer(f"{name}.shape", size, at_least=0)
    if entry.default is not None:
        checks.real(f"{name}.default", entry.default)


SPEC = OpSpec(
    name="rollout_buffer",
    record=RolloutBufferCall,
    summary="fixed storage for rollouts: device-side append, atomic pop, explicit backpressure, nothing lost",
    where=lambda call: call.device,
    planned=False,
    check=check,
    one_of=("on_full",),
    features=(
        CAPTURABLE,
        Feature("fields", "per-token fields of the caller's choice"),
        Feature("group_size", "groups of a fixed size"),
        Feature("on_full:raise", "a full buffer refuses reservations"),
        Feature("on_full:drop_oldest", "a full buffer drops its oldest finished groups, and counts them"),
    ),
    clauses=(
        Clause("RB-01", "order", "a sequence comes out with its tokens in the order they were appended", "accuracy"),
        Clause(
            "RB-02", "nothing lost", "appended = popped + stored + dropped by reason, for tokens and sequences", "law"
        ),
        Clause("RB-03", "exact capacity", "max_tokens tokens and max_seqs sequences fit, and not one more", "law"),
        Clause("RB-04", "wrap-around", "storage is used again after release, any number of times", "law"),
        Clause("RB-05", "atomic", "a refused reserve, finish or pop changes nothing", "side_effect"),
        Clause("RB-06", "full batch or nothing", "pop gives what was asked for or None; leftovers stay", "law"),
        Clause("RB-07", "zero growth", "no storage is made after construction", "side_effect"),
        Clause(
            "RB-08", "append on device", "append reads nothing on the host: it can be captured", "capture", "capturable"
        ),
        Clause("RB-09", "dead rows", "a row that is not alive changes nothing, whatever it holds", "law"),
        Clause("RB-10", "limits", "tokens beyond a limit, or for a slot no longer open, are counted as dropped", "law"),
        Clause("RB-11", "use after release", "a released batch raises StaleBatchError at every attribute", "refusal"),
        Clause("RB-12", "refusal", "on_full='raise' raises BufferFullError", "refusal", "on_full:raise"),
        Clause(
            "RB-13",
            "eviction",
            "the oldest finished groups go first, never one with an open member, and are counted",
            "law",
            "on_full:drop_oldest",
        ),
        Clause(
            "RB-14", "group rules", "complete, min_valid, max_age and distinct_rewards each hold a group back", "law"
        ),
        Clause("RB-15", "padding by weight", "filler rows are empty, of weight 0 and group -1", "law"),
        Clause("RB-16", "invalid members", "aborted, invalid and NaN-rewarded members are kept, with weight 0", "law"),
        Clause("RB-17", "save and load", "a loaded buffer pops what the saved one would", "law"),
        Clause("RB-18", "bad arguments", "a wrong argument raises ArgumentError that names it", "refusal"),
    ),
)
