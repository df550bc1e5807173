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
from torch import Tensor

from rlkernel_common.moments import Moments, across_ranks
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import Extent
from rlkernel_core.spec.advantage_kinds import EPS_MODES, KINDS
from rlkernel_core.spec.form import filled
from rlkernel_triton.advantage.batch_kernels import (
    batch_moments_kernel,
    broadcast_kernel,
    sequence_sums_kernel,
    whiten_groups_kernel,
)
from rlkernel_triton.advantage.group_kernels import group_kernel, hash_groups_kernel, table_sums_kernel
from rlkernel_triton.affine_suffix_scan.recursion import SequenceLayout
from rlkernel_triton.common.host import INTERPRETED, blank
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.moments import MERGED, merge_kernel
from rlkernel_triton.launchers import Launch, Launcher, Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Kinds that group_kernel makes; otb compares columns of time and is not one of them.
GROUP_KINDS: Final = frozenset(name for name, kind in KINDS.items() if "group" in kind.takes and name != "otb")
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
# Arguments that may be absent, and their places among what group_kernel reads after the rewards: at 1 are the ids, at 7
# the lengths.
_OPTIONAL: Final = (
    (0, "step_rewards"),
    (2, "anchor"),
    (3, "in_stats"),
    (4, "in_loss"),
    (5, "weights"),
    (6, "reward_weights"),
)


@dataclass(frozen=True)
class _Lengths:
    """Tokens of each sequence, as kernels read them."""

    form: str = "none"  # as LENGTHS of group_kernel
    tensor: Tensor | None = None
    limit: int = 1


_NO_LENGTHS: Final = _Lengths()


class Groups:
    """A kind of `GROUP_KINDS`, prepared: what a call of its shape asks for, and the launches.

    Args:
        call: checked, none of its tensors float64.
        extent: its sizes.
        plan: that of its shape.
    """

    def __init__(self, call: AdvantageCall, extent: Extent, plan: Plan) -> None:
        self._extent, self._plan, kind = extent, plan, call.kind
        self._kind, self._B, self._device = kind, extent.sequences, call.rewards.device
        scale = KINDS[kind].scale if call.scale == "auto" else call.scale
        whiten = KINDS[kind].whiten if call.whiten == "auto" else call.whiten
        # Whether something says which tokens each sequence has.
        described = not call.mask is call.lengths is call.cu_seqlens is None or extent.token_rewards
        by_token = whiten != "none" and described and call.whiten_level != "sequence"
        self._counted = described and (kind == "opo" or by_token)
        x = call.rewards
        self._K = x.shape[1] if x.dim() == 2 and not extent.token_rewards else 1
        self._size = 1 if call.group is None or isinstance(call.group, Tensor) else call.group
        self._ids = isinstance(call.group, Tensor)
        self._programs, self._form = _programs(kind, self._B, self._size, ids=self._ids)
        self._of_batch = scale == "batch" or kind == "gpg"
        self._whitens, self._applies = whiten != "none", whiten == "global"
        self._extremes = call.leave_one_out or kind == "passk"
        self._read: dict[str, Any] = {
            "B": self._B,
            "low": 0.0 if call.valid_range is None else float(call.valid_range[0]),
            "high": 0.0 if call.valid_range is None else float(call.valid_range[1]),
            "RANGE": call.valid_range is not None,
            "IN_STATS": call.in_stats is not None,
        }
        # All but batch moments and lengths, which the first call says.
        self._fixed: dict[str, Any] = {
            **self._read, **self._form, "G": self._size, "K": self._K, "ddof": call.ddof, "eps": float(call.eps),
            "eps_mode": EPS_MODES.index(call.eps_mode), "min_std": float(call.min_std),
            "center": int(call.low_std == "center"), "raw_alone": int(call.singleton == "raw"),
            "raw_invalid": int(call.invalid == "raw"), "peer": int(call.constant == "peer"),
            "step_weight": float(call.step_weight), "KIND": kind, "SCALE": scale, "OTHERS": call.leave_one_out,
            "IN_LOSS": call.in_loss is not None, "WEIGHTS": call.weights is not None,
            "REWARD_WEIGHTS": call.reward_weights is not None, "FIELDS": _fields(kind, extremes=self._extremes),
            "MOMENTS": {"none": "none", "global": "first", "defer": "defer"}[whiten], "TOKENS_COUNT": by_token,
            "SIZE": _WIDTH,
        }  # fmt: skip
        self._launch: Launch | None = None
        # In place of what is not there: of the type of the rewards as kernels read them, and of fp32.
        self._nothing = blank(torch.float32 if extent.token_rewards else x.dtype, self._device)
        self._no_floats = blank(torch.float32, self._device)
        self._optional = tuple((at, name) for at, name in _OPTIONAL if getattr(call, name) is not None)
        self._floats, self._flags = (_pieces(n, self._B, width) for n, width in ((3, 4), (2, 16)))

    def run(self, call: AdvantageCall) -> AdvantageResult:
        """fp32 advantages [B], or token-level where the call says so, and all statistics that the definition gives."""
        B, device, extent, plan = self._B, self._device, self._extent, self._plan
        rows, totals, sizes = None, None, _NO_LENGTHS
        if extent.tokens is not None:
            rows = SequenceLayout.of(extent.tokens, B, call.mask, call.lengths, call.cu_seqlens)
        if rows is not None or self._counted:
            totals, sizes = _sequence_sums(call, extent, rows, self._counted, plan)
        x = call.rewards.contiguous() if totals is None else totals
        adv, mean, std, invalid, constant, count = self._allocated()
        partial = of_batch = self._no_floats
        given = [self._nothing] * 8
        for at, name in self._optional:
            given[at] = getattr(call, name).contiguous()
        if self._ids:
            given[1] = call.group.contiguous()  # type: ignore[union-attr]  # a tensor, as in the first call
        if sizes.tensor is not None:
            given[7] = sizes.tensor.contiguous()
        steps, ids, _, members, _, _, _, _ = given
        if self._of_batch:
            of_batch = self._batch_moments(call, x, steps, members)
        if self._whitens:
            make = torch.empty if self._programs else torch.zeros
            partial = make((max(self._programs, 1), 4), dtype=torch.float32, device=device)
        table = owner = owner2 = self._no_floats
        if self._form["MODE"] == "table" and B:
            table, owner, owner2 = self._fill_table(call, x, steps, members, ids if self._ids else None, sizes)
        if self._programs:
            launch = self._launch
            if launch is None:
                launch = self._launch = plan.launcher.bind(
                    group_kernel, **self._fixed, P=of_batch.shape[1] if self._of_batch else 1, limit=sizes.limit,
                    LENGTHS=sizes.form,
                )  # fmt: skip
            launch(
                (self._programs, 1, 1), x, *given, of_batch, table, owner, owner2, adv, invalid, count, mean, std,
                constant, partial,
            )  # fmt: skip
        stats = self._whiten(call, adv, invalid, partial) if self._whitens else {}
        if extent.token_output and rows is not None:
            adv = _broadcast(adv, rows, plan)
        if self._K:
            stats |= {"group_count": count, "group_mean": mean, "group_std": std, "constant": constant}
        stats["invalid"] = invalid
        return filled(AdvantageResult, advantages=adv, returns=None, stats=filled(AdvantageStats, **stats))

    def _allocated(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Advantages [B], mean and std of the group, invalid [B], constant, count of the group; all not yet written.

        What is of a group is [B], or [B, K] of gdpo. One allocation for each width; each tensor is contiguous, and
        begins where a vector may.
        """
        B, device = self._B, self._device
        if self._kind == "gdpo":
            mean, std = torch.empty((2, B, self._K), dtype=torch.float32, device=device).unbind()
            return (
                torch.empty(B, dtype=torch.float32, device=device),
                mean,
                std,
                torch.empty(B, dtype=torch.bool, device=device),
                torch.empty((B, self._K), dtype=torch.bool, device=device),
                torch.empty((B, self._K), dtype=torch.int64, device=device),
            )
        room, sizes, step = self._floats
        adv, mean, std = _split(torch.empty(room, dtype=torch.float32, device=device), sizes)[::step]
        room, sizes, step = self._flags
        invalid, constant = _split(torch.empty(room, dtype=torch.bool, device=device), sizes)[::step]
        return adv, mean, std, invalid, constant, torch.empty(B, dtype=torch.int64, device=device)

    def _fill_table(
        self, call: AdvantageCall, x: Tensor, steps: Tensor, members: Tensor, ids: Tensor | None, sizes: _Lengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the table: one memset, then three launches for the groups, and three for the states of gigpo.

        Returns:
            table: [sets, fields, B] int64, statistics by atomics.
            owner: [B] int32, who stands for the group of each sequence.
            owner2: [B] int32, of steps in equal states.
        """
        kind, B, K, read, extremes, plan = self._kind, self._B, self._K, self._read, self._extremes, self._plan
        fields = _fields(kind, extremes=extremes)
        sets = 2 if kind == "gigpo" else K
        slots = triton.next_power_of_2(2 * B)
        passes = 2 if kind == "gigpo" else 1
        room = torch.zeros(sets * fields * B + passes * slots // 2, dtype=torch.int64, device=x.device)
        table = room[: sets * fields * B].view(sets, fields, B)
        claimed = room[sets * fields * B :].view(torch.int32).view(passes, slots)
        owners = torch.empty((passes, B), dtype=torch.int32, device=x.device)
        lengths = _given(sizes.tensor, x)
        grid = (triton.cdiv(B, ENTERED), 1, 1)
        for second in range(passes):
            fixed: dict[str, Any] = {
                **read, "limit": sizes.limit, "K": K, "SECOND": bool(second), "OPO": kind == "opo",
                "LENGTHS": sizes.form, "FIELDS": fields, "SIZE": ENTERED,
            }  # fmt: skip

            def enter(launcher: Launcher, fixed: dict[str, Any] = fixed) -> Launch:
                return launcher.bind(hash_groups_kernel, G=self._size, last=slots - 1, IDS=ids is not None, **fixed)

            def add(launcher: Launcher, fixed: dict[str, Any] = fixed) -> tuple[Launch, Launch]:
                first, squares = (
                    launcher.bind(
                        table_sums_kernel, peer=int(call.constant == "peer"), EXTREMES=extremes, SQUARE=square, **fixed
                    )
                    for square in (False, True)
                )
                return first, squares

            plan.get(f"enter {second}", enter)(
                grid, x, steps, _given(ids, x), _given(call.anchor, x), members, lengths, claimed[second],
                table[second:], owners[second],
            )  # fmt: skip
            for launch in plan.get(f"add {second}", add):
                launch(grid, x, steps, members, lengths, table[second:], owners[second])
        return table, owners[0], owners[-1]

    def _batch_moments(self, call: AdvantageCall, x: Tensor, steps: Tensor, members: Tensor) -> Tensor:
        """Moments [K or 2, P, 4] of the rewards of the batch (gpg: of which are not 0), merged over ranks."""
        kind, B, K, read, plan = self._kind, self._B, self._K, self._read, self._plan
        sets, programs = 2 if kind == "gigpo" else K, triton.cdiv(B, BLOCK)
        partial = torch.zeros((sets, max(programs, 1), 4), dtype=torch.float32, device=x.device)
        if B and sets:
            launch = plan.get(
                "batch", lambda launcher: launcher.bind(
                    batch_moments_kernel, **read, K=K, programs=programs, NONZERO=kind == "gpg", STEPS=kind == "gigpo",
                    SIZE=BLOCK,
                ),
            )  # fmt: skip
            launch((programs, sets, 1), x, steps, members, partial)
        if call.process_group is None:
            return partial
        each = [_of_all_ranks(part, call.process_group, plan) for part in partial.unbind()]
        return torch.stack(each) if sets else partial

    def _whiten(self, call: AdvantageCall, adv: Tensor, invalid: Tensor, partial: Tensor) -> dict[str, Tensor]:
        """Whiten `adv` where it is stored, if asked to; the statistics of the batch."""
        in_loss, weights, apply, plan = call.in_loss, call.weights, self._applies, self._plan
        if call.process_group is not None:
            partial = _of_all_ranks(partial, call.process_group, plan)
        scalars = torch.empty(4, dtype=torch.float32, device=adv.device)
        B = adv.shape[0]
        launch = plan.get(
            "whiten", lambda launcher: launcher.bind(
                whiten_groups_kernel, B=B, P=partial.shape[0], ddof=call.whiten_ddof, eps=float(call.whiten_eps),
                eps_mode=EPS_MODES.index(call.whiten_eps_mode), APPLY=apply, IN_LOSS=in_loss is not None,
                WEIGHTS=weights is not None, SIZE=BLOCK, MERGED=_WIDTH,
            ),
        )  # fmt: skip
        grid = (max(triton.cdiv(B, BLOCK), 1) if apply else 1, 1, 1)
        launch(grid, adv, invalid, _given(in_loss, adv), _given(weights, adv), partial, scalars)
        n, mean, var, rstd = scalars.unbind()
        return {"count": n, "mean": mean, "var": var, "rstd": rstd}


# Of the tensors that it gives none is a view of another, and it takes half the time of `unbind`.
_split: Final = torch.unsafe_split_with_sizes


def _pieces(count: int, B: int, multiple: int) -> tuple[int, tuple[int, ...], int]:
    """Room for so many tensors [B] that each begin at a multiple, the pieces it is split into, and which are tensors.

    With a step of 2 every other piece is a gap.
    """
    gap = -B % multiple
    return count * (B + gap), (B, gap) * count if gap else (B,) * count, 2 if gap else 1


_WIDTH: Final = 8 if INTERPRETED else 128  # partial moments that a program merges at a time


def _programs(kind: str, sequences: int, size: int, *, ids: bool) -> tuple[int, dict[str, Any]]:
    """How many programs of group_kernel, and the form of their tiles."""
    if not ids and kind != "gigpo":
        columns = min(CHUNK, triton.next_power_of_2(size))
        many = TILE // columns if size <= columns else 1
        programs = triton.cdiv(sequences // size, many) * triton.cdiv(size, columns)
        return programs, {"MODE": "size", "IDS": False, "R": many, "C": columns}
    form = {"IDS": ids, "C": COLUMNS}
    if (sequences if ids else size) <= PAIRS:
        return triton.cdiv(sequences, OWN), {"MODE": "pairs", "R": OWN, **form}
    return triton.cdiv(sequences, READ), {"MODE": "table", "R": READ, **form}


def _fields(kind: str, *, extremes: bool) -> int:
    """Fields of a set of the table."""
    return 9 if extremes else 7 if kind == "opo" else 5


def _sequence_sums(
    call: AdvantageCall, extent: Extent, rows: SequenceLayout | None, counted: bool, plan: Plan
) -> tuple[Tensor | None, _Lengths]:
    """Sums of token-level rewards [B], and tokens of each sequence where they are asked for."""
    rewards, token_rewards, sequences = call.rewards, extent.token_rewards, extent.sequences
    counts = None
    totals = None
    if rows is not None and (token_rewards or (counted and rows.mask is not None)):
        totals = torch.empty(sequences, dtype=torch.float32, device=rewards.device)
        counts = torch.empty(sequences, dtype=torch.int64, device=rewards.device)
        x = rewards.contiguous()
        if sequences:
            launch = plan.get(
                "totals", lambda launcher: launcher.bind(
                    sequence_sums_kernel, T=rows.width, sequences=sequences, SUM_UP=token_rewards,
                    MASK=rows.mask is not None, ENDS=rows.ends is not None, PACKED=rows.bounds is not None, SIZE=BLOCK,
                ),
            )  # fmt: skip
            described = [_given(t, x) for t in (rows.mask, rows.ends, rows.bounds)]
            launch((sequences, 1, 1), x, *described, totals, counts)
        totals = totals if token_rewards else None
    if not counted:
        return totals, _NO_LENGTHS
    if counts is not None:
        return totals, _Lengths("each", counts, (1 << 31) - 1)
    ends = call.lengths if rows is None else rows.ends
    if ends is not None:
        return totals, _Lengths("each", ends.contiguous(), (1 << 31) - 1 if rows is None else rows.width)
    bounds = call.cu_seqlens if rows is None else rows.bounds
    if bounds is None:
        raise RuntimeError("a layout without tokens")
    return totals, _Lengths("bounds", bounds.contiguous(), _UNBOUNDED if rows is None else rows.width)


def _of_all_ranks(partial: Tensor, process_group: ProcessGroup, plan: Plan) -> Tensor:  # [P, 4] -> [1, 4]
    """The moments of all ranks, the same bits on each."""
    mine, P = torch.empty(4, dtype=torch.float32, device=partial.device), partial.shape[0]
    size = 8 if INTERPRETED else MERGED
    launch = plan.get(f"merge {P}", lambda launcher: launcher.bind(merge_kernel, P=P, SIZE=size))
    launch((1, 1, 1), partial, mine)
    return torch.stack(across_ranks(Moments(*mine.unbind()), process_group))[None]


def _broadcast(adv: Tensor, rows: SequenceLayout, plan: Plan) -> Tensor:
    """[B] to the tokens that count."""
    out = torch.empty(rows.shape, dtype=torch.float32, device=adv.device)
    chunks = triton.cdiv(rows.width, BLOCK)
    programs = chunks if rows.bounds is not None else rows.sequences * chunks
    if programs:
        launch = plan.get(
            "spread", lambda launcher: launcher.bind(
                broadcast_kernel, T=rows.width, sequences=rows.sequences, chunks=chunks,
                steps=rows.sequences.bit_length(), MASK=rows.mask is not None, ENDS=rows.ends is not None,
                PACKED=rows.bounds is not None, SIZE=BLOCK,
            ),
        )  # fmt: skip
        launch(
            (programs, 1, 1),
            adv,
            out,
            _given(rows.mask, adv),
            _given(rows.ends, adv),
            _given(rows.bounds, adv),
        )
    return out


def _given(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x.contiguous()
