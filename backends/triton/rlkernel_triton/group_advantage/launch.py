"""Host code of `advantage` by group: which kernels run, over which tensors, with how many programs.

Rewards per sequence and groups by size are one launch of `group_kernel`; each of these adds launches:

    ids, B > PAIRS           a memset and three launches that fill a table by atomics (again for gigpo's states)
    token-level rewards      one that sums them; so a mask, where tokens per sequence are asked for
    scale="batch", gpg       one for the moments of the rewards
    whitening                one that merges the moments of the advantages and applies them
    output="token"           one that spreads the result
    process_group            a merge and one all_gather, for each of the two sets of moments

No launch depends on data, and nothing is read off the device. Imports torch and Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.advantage.moments import Moments, across_ranks
from rlkernel_core.spec.advantage import AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_kinds import EPS_MODES, KINDS
from rlkernel_triton.group_advantage.kernels import (
    batch_kernel,
    enter_kernel,
    group_kernel,
    spread_kernel,
    sum_kernel,
    totals_kernel,
    whiten_groups_kernel,
)
from rlkernel_triton.launch import INTERPRETED
from rlkernel_triton.launchers import Launch, Launcher, Plan, planned
from rlkernel_triton.moments_kernels import MERGED, merge_kernel
from rlkernel_triton.recursion import Rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Kinds that group_kernel makes; otb compares columns of time and is not one of them.
MADE: Final = frozenset(name for name, kind in KINDS.items() if "group" in kind.takes and name != "otb")
# The interpreter runs a program in numpy: small tiles there let a test's few rows take several of them.
TILE: Final = 32 if INTERPRETED else 512  # own elements of a program by size
READ: Final = 32 if INTERPRETED else 128  # own elements of a program that reads a table
CHUNK: Final = 16 if INTERPRETED else 512  # members of a group at a time
OWN: Final = 32 if INTERPRETED else 8  # own elements of a program of pairs
COLUMNS: Final = 16 if INTERPRETED else 128  # of which each is compared with this many sequences at a time
PAIRS: Final = 24 if INTERPRETED else 2048  # most sequences that are compared in pairs; above them a table is filled
BLOCK: Final = 32 if INTERPRETED else 1024  # elements of a program where there is no group
ENTERED: Final = 32 if INTERPRETED else 256  # sequences of a program that searches the hash table
_UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True)
class Numbers:
    """Options of a call that are numbers for the kernels."""

    ddof: int = 1
    eps: float = 1e-6
    eps_mode: str = "std_add"
    min_std: float = 0.0
    center: bool = False  # low_std="center"
    raw_alone: bool = False  # singleton="raw"
    raw_invalid: bool = False  # invalid="raw"
    peer: bool = False  # constant="peer"
    step_weight: float = 1.0


@dataclass(frozen=True)
class Whitening:
    """What is done over the batch afterwards."""

    apply: bool  # off: "defer"
    by_token: bool
    ddof: int
    eps: float
    eps_mode: str


@dataclass(frozen=True)
class _Lengths:
    """Tokens of each sequence, as kernels read them."""

    form: str = "none"  # as LENGTHS of group_kernel
    tensor: Tensor | None = None
    limit: int = 1


def by_group(
    rewards: Tensor,  # [B], [B, K] of gdpo, or token-level
    *,
    kind: str,
    group: int | Tensor,
    scale: str,
    numbers: Numbers,
    sequences: int,
    token_rewards: bool = False,
    rows: Rows | None = None,  # of the token-level tensors; None where none is given
    lengths: Tensor | None = None,  # [B], where there are no rows
    cu_seqlens: Tensor | None = None,  # [B + 1], where there are no rows
    described: bool = False,  # a mask, lengths or cu_seqlens is given
    leave_one_out: bool = False,
    valid_range: tuple[float, float] | None = None,
    in_stats: Tensor | None = None,
    in_loss: Tensor | None = None,
    weights: Tensor | None = None,
    reward_weights: Tensor | None = None,
    step_rewards: Tensor | None = None,
    anchor: Tensor | None = None,
    whitening: Whitening | None = None,
    process_group: ProcessGroup | None = None,
    token_output: bool = False,
    plan: Plan | None = None,
) -> AdvantageResult:
    """Advantages of a kind of `MADE`; arguments are checked and none is float64.

    Returns:
        fp32 advantages [B], or token-level where `token_output`, and all statistics that the definition gives.
    """
    counted = kind == "opo" or (whitening is not None and whitening.by_token)
    totals, sizes = _by_sequence(rewards, sequences, rows, lengths, cu_seqlens, counted, token_rewards, described, plan)
    x = rewards.contiguous() if totals is None else totals
    K = x.shape[1] if x.dim() == 2 else 1
    device, width = x.device, (K,) if kind == "gdpo" else ()
    adv = torch.empty(sequences, dtype=torch.float32, device=device)
    # One allocation for each width: [B] bytes, [B, K] floats and so on.
    invalid = torch.empty(sequences, dtype=torch.bool, device=device)
    count = torch.empty((sequences, *width), dtype=torch.int64, device=device)
    moments = torch.empty((2, sequences, *width), dtype=torch.float32, device=device)
    constant = torch.empty((sequences, *width), dtype=torch.bool, device=device)
    groups: dict[str, Any] = {
        "group_count": count, "group_mean": moments[0], "group_std": moments[1], "constant": constant,
    }  # fmt: skip
    ids = group.contiguous() if isinstance(group, Tensor) else None
    size = 1 if isinstance(group, Tensor) else group
    B, steps, members = sequences, _or(step_rewards, x), _or(in_stats, x)
    read: dict[str, Any] = {
        "B": B,
        "low": 0.0 if valid_range is None else float(valid_range[0]),
        "high": 0.0 if valid_range is None else float(valid_range[1]),
        "RANGE": valid_range is not None,
        "IN_STATS": in_stats is not None,
    }
    of_batch, parts = adv, 1
    if scale == "batch" or kind == "gpg":
        of_batch = _batch_moments(x, steps, members, read, K, kind, process_group, plan)
        parts = of_batch.shape[1]
    programs, chosen = _programs(kind, B, ids, size)
    partial = adv
    if whitening is not None:
        partial = torch.empty((max(programs, 1), 4), dtype=torch.float32, device=device)
        if not programs:
            partial.zero_()
    extremes = leave_one_out or kind == "passk"
    entered = _Table(adv, adv, adv)
    if chosen["MODE"] == "table" and B:
        entered = _entered(
            x, steps, members, read, kind, ids, size, anchor, sizes, K, plan, extremes=extremes, peer=numbers.peer
        )
    if programs:
        launch = planned(
            plan, f"group {chosen['MODE']}", device, lambda launcher: launcher.bind(
                group_kernel, **read, **chosen,
                G=size, K=K, P=parts, limit=sizes.limit, ddof=numbers.ddof, eps=float(numbers.eps),
                eps_mode=EPS_MODES.index(numbers.eps_mode), min_std=float(numbers.min_std),
                center=int(numbers.center), raw_alone=int(numbers.raw_alone), raw_invalid=int(numbers.raw_invalid),
                peer=int(numbers.peer), step_weight=float(numbers.step_weight),
                KIND=kind, SCALE=scale, OTHERS=leave_one_out, IN_LOSS=in_loss is not None,
                WEIGHTS=weights is not None, REWARD_WEIGHTS=reward_weights is not None, LENGTHS=sizes.form,
                FIELDS=_fields(kind, extremes=extremes),
                MOMENTS="none" if whitening is None else "first" if whitening.apply else "defer",
                TOKENS_COUNT=whitening is not None and whitening.by_token,
                SIZE=_WIDTH,
            ),
        )  # fmt: skip
        launch(
            (programs, 1, 1), x, steps, _or(ids, x), _or(anchor, x), members, _or(in_loss, x), _or(weights, x),
            _or(reward_weights, x), _or(sizes.tensor, x), of_batch, entered.table, entered.owner, entered.owner2, adv,
            invalid, count, moments[0], moments[1], constant, partial,
        )  # fmt: skip
    stats = {}
    if whitening is not None:
        stats = _whitened(adv, invalid, in_loss, weights, partial, whitening, process_group, plan)
    if token_output and rows is not None:
        adv = _spread(adv, rows, plan)
    return AdvantageResult(adv, None, AdvantageStats(invalid=invalid, **(groups if K else {}), **stats))


_WIDTH: Final = 8 if INTERPRETED else 128  # partial moments that a program merges at a time


@dataclass(frozen=True)
class _Table:
    """Statistics by atomics, and who stands for the group of each sequence."""

    table: Tensor  # [sets, fields, B] int64
    owner: Tensor  # [B] int32
    owner2: Tensor  # [B] int32, of steps in equal states


def _programs(kind: str, sequences: int, ids: Tensor | None, size: int) -> tuple[int, dict[str, Any]]:
    """How many programs of group_kernel, and the form of their tiles."""
    if ids is None and kind != "gigpo":
        columns = min(CHUNK, triton.next_power_of_2(size))
        many = TILE // columns if size <= columns else 1
        programs = triton.cdiv(sequences // size, many) * triton.cdiv(size, columns)
        return programs, {"MODE": "size", "IDS": False, "R": many, "C": columns}
    form = {"IDS": ids is not None, "C": COLUMNS}
    if (size if ids is None else sequences) <= PAIRS:
        return triton.cdiv(sequences, OWN), {"MODE": "pairs", "R": OWN, **form}
    return triton.cdiv(sequences, READ), {"MODE": "table", "R": READ, **form}


def _fields(kind: str, *, extremes: bool) -> int:
    """Fields of a set of the table."""
    return 9 if extremes else 7 if kind == "opo" else 5


def _entered(
    x: Tensor, steps: Tensor, members: Tensor, read: dict[str, Any], kind: str, ids: Tensor | None, size: int,
    anchor: Tensor | None, sizes: _Lengths, K: int, plan: Plan | None, *, extremes: bool, peer: bool,
) -> _Table:  # fmt: skip
    """Fill the table: one memset, then three launches for the groups, and three for the states of gigpo."""
    B, fields = read["B"], _fields(kind, extremes=extremes)
    sets = 2 if kind == "gigpo" else K
    slots = triton.next_power_of_2(2 * B)
    passes = 2 if kind == "gigpo" else 1
    room = torch.zeros(sets * fields * B + passes * slots // 2, dtype=torch.int64, device=x.device)
    table = room[: sets * fields * B].view(sets, fields, B)
    claimed = room[sets * fields * B :].view(torch.int32).view(passes, slots)
    owners = torch.empty((passes, B), dtype=torch.int32, device=x.device)
    lengths = _or(sizes.tensor, x)
    grid = (triton.cdiv(B, ENTERED), 1, 1)
    for second in range(passes):
        fixed: dict[str, Any] = {
            **read, "limit": sizes.limit, "K": K, "SECOND": bool(second), "OPO": kind == "opo",
            "LENGTHS": sizes.form, "FIELDS": fields, "SIZE": ENTERED,
        }  # fmt: skip

        def enter(launcher: Launcher, fixed: dict[str, Any] = fixed) -> Launch:
            return launcher.bind(enter_kernel, G=size, last=slots - 1, IDS=ids is not None, **fixed)

        def add(launcher: Launcher, fixed: dict[str, Any] = fixed) -> tuple[Launch, Launch]:
            first, squares = (
                launcher.bind(sum_kernel, peer=int(peer), EXTREMES=extremes, SQUARE=square, **fixed)
                for square in (False, True)
            )
            return first, squares

        planned(plan, f"enter {second}", x.device, enter)(
            grid, x, steps, _or(ids, x), _or(anchor, x), members, lengths, claimed[second], table[second:],
            owners[second],
        )  # fmt: skip
        for launch in planned(plan, f"add {second}", x.device, add):
            launch(grid, x, steps, members, lengths, table[second:], owners[second])
    return _Table(table, owners[0], owners[-1])


def _by_sequence(
    rewards: Tensor, sequences: int, rows: Rows | None, lengths: Tensor | None, cu_seqlens: Tensor | None,
    counted: bool, token_rewards: bool, described: bool, plan: Plan | None,
) -> tuple[Tensor | None, _Lengths]:  # fmt: skip
    """Sums of token-level rewards [B], and tokens of each sequence where they are asked for and known."""
    known = described or token_rewards
    counts = None
    totals = None
    if rows is not None and (token_rewards or (counted and rows.mask is not None)):
        totals = torch.empty(sequences, dtype=torch.float32, device=rewards.device)
        counts = torch.empty(sequences, dtype=torch.int64, device=rewards.device)
        x = rewards.contiguous()
        if sequences:
            launch = planned(
                plan, "totals", x.device, lambda launcher: launcher.bind(
                    totals_kernel, T=rows.width, sequences=sequences, SUM_UP=token_rewards,
                    MASK=rows.mask is not None, ENDS=rows.ends is not None, PACKED=rows.bounds is not None, SIZE=BLOCK,
                ),
            )  # fmt: skip
            mask, ends, bounds = (_or(t, x) for t in (rows.mask, rows.ends, rows.bounds))
            launch((sequences, 1, 1), x, mask, ends, bounds, totals, counts)
        totals = totals if token_rewards else None
    if not counted or not known:
        return totals, _Lengths()
    if counts is not None:
        return totals, _Lengths("each", counts, (1 << 31) - 1)
    ends = lengths if rows is None else rows.ends
    if ends is not None:
        return totals, _Lengths("each", ends.contiguous(), (1 << 31) - 1 if rows is None else rows.width)
    bounds = cu_seqlens if rows is None else rows.bounds
    if bounds is None:
        raise RuntimeError("a layout without tokens")
    return totals, _Lengths("bounds", bounds.contiguous(), _UNBOUNDED if rows is None else rows.width)


def _batch_moments(
    x: Tensor, steps: Tensor, members: Tensor, read: dict[str, Any], K: int, kind: str,
    process_group: ProcessGroup | None, plan: Plan | None,
) -> Tensor:  # fmt: skip
    """Moments [K or 2, P, 4] of the rewards of the batch (gpg: of which are not 0), merged over ranks."""
    B = read["B"]
    sets, programs = 2 if kind == "gigpo" else K, triton.cdiv(B, BLOCK)
    partial = torch.zeros((sets, max(programs, 1), 4), dtype=torch.float32, device=x.device)
    if B and sets:
        launch = planned(
            plan, "batch", x.device, lambda launcher: launcher.bind(
                batch_kernel, **read, K=K, programs=programs, NONZERO=kind == "gpg", STEPS=kind == "gigpo", SIZE=BLOCK
            ),
        )  # fmt: skip
        launch((programs, sets, 1), x, steps, members, partial)
    if process_group is None:
        return partial
    each = [_of_all_ranks(part, process_group, plan) for part in partial.unbind()]
    return torch.stack(each) if sets else partial


def _of_all_ranks(partial: Tensor, process_group: ProcessGroup, plan: Plan | None) -> Tensor:  # [P, 4] -> [1, 4]
    """The moments of all ranks, the same bits on each."""
    mine, P = torch.empty(4, dtype=torch.float32, device=partial.device), partial.shape[0]
    size = 8 if INTERPRETED else MERGED
    launch = planned(plan, f"merge {P}", mine.device, lambda launcher: launcher.bind(merge_kernel, P=P, SIZE=size))
    launch((1, 1, 1), partial, mine)
    return torch.stack(across_ranks(Moments(*mine.unbind()), process_group))[None]


def _whitened(
    adv: Tensor, invalid: Tensor, in_loss: Tensor | None, weights: Tensor | None, partial: Tensor,
    whitening: Whitening, process_group: ProcessGroup | None, plan: Plan | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Whiten `adv` where it is stored, if asked to; the statistics of the batch."""
    if process_group is not None:
        partial = _of_all_ranks(partial, process_group, plan)
    scalars = torch.empty(4, dtype=torch.float32, device=adv.device)
    B = adv.shape[0]
    launch = planned(
        plan, "whiten", adv.device, lambda launcher: launcher.bind(
            whiten_groups_kernel, B=B, P=partial.shape[0], ddof=whitening.ddof, eps=float(whitening.eps),
            eps_mode=EPS_MODES.index(whitening.eps_mode), APPLY=whitening.apply, IN_LOSS=in_loss is not None,
            WEIGHTS=weights is not None, SIZE=BLOCK, MERGED=_WIDTH,
        ),
    )  # fmt: skip
    grid = (max(triton.cdiv(B, BLOCK), 1) if whitening.apply else 1, 1, 1)
    launch(grid, adv, invalid, _or(in_loss, adv), _or(weights, adv), partial, scalars)
    n, mean, var, rstd = scalars.unbind()
    return {"count": n, "mean": mean, "var": var, "rstd": rstd}


def _spread(adv: Tensor, rows: Rows, plan: Plan | None) -> Tensor:
    """[B] to the tokens that count."""
    out = torch.empty(rows.shape, dtype=torch.float32, device=adv.device)
    chunks = triton.cdiv(rows.width, BLOCK)
    programs = chunks if rows.bounds is not None else rows.sequences * chunks
    if programs:
        launch = planned(
            plan, "spread", adv.device, lambda launcher: launcher.bind(
                spread_kernel, T=rows.width, sequences=rows.sequences, chunks=chunks,
                steps=rows.sequences.bit_length(), MASK=rows.mask is not None, ENDS=rows.ends is not None,
                PACKED=rows.bounds is not None, SIZE=BLOCK,
            ),
        )  # fmt: skip
        launch((programs, 1, 1), adv, out, _or(rows.mask, adv), _or(rows.ends, adv), _or(rows.bounds, adv))
    return out


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x.contiguous()
