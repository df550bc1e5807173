"""advantage@1: how much better than expected an action was, for every kind of estimator that post-training uses.

Kinds over tokens are one affine suffix scan over the valid positions, y_t = a_t y_{t+1} + b_t, "next" meaning the
next valid position (masked positions are the identity map and cost nothing):

    gae      a = gamma lam (1 - done), b = gamma (1 - lam) v + gamma lam r, Y_t = y_{t+1}, Y_end = gamma v_boot
             R_t = r_t + (1 - done_t) Y_t,  A_t = R_t - v_t
    returns  a = gamma (1 - done), b = r, R_t = y_t
    vtrace   a = gamma (1 - done) c_t, b = p_t (r_t + gamma v' - v_t), vs_t = v_t + y_t,
             A_t = p_t (r_t + gamma vs' - v_t),  p = min(ratio_clip, ratio), c = lam min(trace_clip, ratio)
    retrace  a = gamma c_t (1 - done), b = gamma (v_t + c_t (r_t - q_t)), R_t as in gae, A_t = R_t - v_t

Kinds over groups work on one reward x per sequence; n, mean and std are those of the valid members of its group.
The definition of each kind stands in `advantage_kinds.KINDS`, the maths of all of them in docs/ops/advantage.md.

Legend: B sequences · T time · N packed tokens · K rewards · G group size. A token-level tensor is [B, T], or [N] with
`cu_seqlens`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core.spec.advantage_checks import check
from rlkernel_core.spec.advantage_clauses import CLAUSES, FEATURES, TOLERANCES, needed
from rlkernel_core.spec.form import OpCall, OpSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class AdvantageStats:
    """What was computed on the way; device tensors all, so that reading them is the caller's synchronization."""

    # [B] bool: a reward, value or ratio (after its clip) was not finite, or the reward outside valid_range.
    invalid: Tensor
    group_count: Tensor | None = None  # [B] int64: valid members of the sequence's group
    group_mean: Tensor | None = None  # [B], 0 where the group has no valid member; [B, K] for gdpo, as all group_*
    group_std: Tensor | None = None  # [B], with `ddof`; 0 where the group has too few members
    constant: Tensor | None = None  # [B] bool ([B, K] for gdpo): all valid members of the group have the same reward
    count: Tensor | None = None  # [] with whitening: how many tokens or sequences the moments are of
    mean: Tensor | None = None  # [] with whitening
    var: Tensor | None = None  # [] with whitening
    rstd: Tensor | None = None  # [] with whitening: the factor; whiten="defer" leaves (A - mean) * rstd to the loss


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages, fp32 (float64 where any floating input is); nothing here requires grad."""

    advantages: Tensor  # [B] or token-level, see `output`
    returns: (
        Tensor | None
    )  # [B, T] or [N]: token-level targets of the value function, never whitened; None for kinds over groups
    stats: AdvantageStats | None = None  # what was computed on the way; None if not claimed


@dataclass(slots=True, eq=False)
class AdvantageCall(OpCall[AdvantageResult]):
    """Advantages of `rewards`. They are constants of the loss: inputs that require grad are detached.

    Token-level stands for [B, T], a padded layout, or [N] with `cu_seqlens`, a packed one.

    Args:
        rewards: token-level, or one per sequence [B] ([B, K] for gdpo); any real dtype. Kinds over tokens put a
            reward per sequence on its last valid token; kinds over groups sum token-level rewards over valid tokens.
        kind: a name of `advantage_kinds.KINDS`.
        group: groups of the sequences: a size (B a multiple, members adjacent) or ids [B], integers in any order.
        mask: token-level bool, True where a token counts; the others may hold anything. Not with `lengths`.
        lengths: [B] integer, valid tokens of each row of a padded layout.
        cu_seqlens: [B + 1] integer; sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1] of a packed layout;
            tokens outside all sequences are masked.
        values: token-level V(s_t).
        gamma: discount in [0, 1].
        lam: lambda in [0, 1]; a tensor [B] is per sequence, a token-level one per token with Sutton's index: the
            lambda of the next state weighs its return against its value; c_t has that of its own state. (N == B:
            counts as per token.)
        lam_value: as lam, another lambda for `returns` (decoupled GAE).
        length_adaptive: alpha > 0: the policy's lambda is 1 - 1 / max(alpha L, 1) for L valid tokens (or turns).
        bootstrap: [B] value of the state after the last valid token; 0 where not given.
        dones: token-level bool, an episode ends there.
        done_index: "after": the episode ends after step t; "before": before it (the flag travels with the observation).
        turns: token-level integer; adjacent valid tokens with one id are one time step: their rewards add up, the
            value is that of the first, and all of them get its advantage.
        ratio: token-level pi / mu.
        ratio_clip: rho-bar of V-trace; None: no clip.
        trace_clip: c-bar of V-trace and Retrace; None: no clip.
        q_values: token-level Q(s_t, a_t), with `values` the mean of Q under pi; `values` where not given.
        baseline: [B], subtracted.
        in_stats: [B] bool: sequences that count in the statistics of their group and of the whitening.
        in_loss: [B] bool: sequences that get an advantage; the others get 0.
        valid_range: (low, high): a reward outside is invalid, as one that is not finite is.
        weights: [B] >= 0, multiplies the final advantage of a sequence (0 selects 0).
        reward_weights: [K] of gdpo; ones where not given.
        step_rewards: [B] return of the step (gigpo: a row is a step of an episode, `rewards` are the episode's).
        anchor: [B] integer id of the state that the step was taken in.
        step_weight: weight of the step's advantage.
        logprob: token-level log-probability of the token (otb).
        sum_pi_squared: token-level sum of pi squared over the vocabulary (otb).
        leave_one_out: mean and std over the other members instead of all members.
        scale: divide by the std of the group, of the whole batch, or not; "auto" as the kind says.
        ddof: delta degrees of freedom of the std.
        eps: see eps_mode.
        eps_mode: the factor is std_add 1/(std + eps), var_add 1/sqrt(var + eps), var_clamp 1/sqrt(max(var, eps)),
            threshold 1/std if std > eps else 0.
        min_std: std <= min_std counts as low.
        low_std: what a low std gives: "zero", or "center": x - mean, undivided.
        singleton: fewer than two members: "zero", "raw" (mean 0, std 1), "error" (synchronizes), or "any": no group is
            as small, or what the implementation gives is as good.
        constant: "zero": statistics are shifted by the first member, a constant group gives exactly 0; "peer": they
            are not, and the rounding noise of the mean is amplified as in the peers.
        invalid: what an invalid sequence gets: "zero", or its "raw" reward where that is finite.
        masked_time: "skip": masked tokens take no time; "step": they are steps without reward and value; "reset":
            nothing is carried over them.
        masked_out: "zero", or "carry": a masked position holds the advantage of the next valid one; in `returns` that
            and its own value, or without values the return of the next valid one.
        whiten: "global": over all valid tokens (or sequences) of all ranks; "defer": only the moments, see
            `AdvantageStats.rstd`; "none"; "auto" as the kind says.
        whiten_level: count tokens or sequences; "auto": tokens where a layout is given.
        whiten_ddof: ddof of the whitening.
        whiten_eps: eps of the whitening.
        whiten_eps_mode: where it goes, as in eps_mode.
        process_group: ranks whose whitening moments, batch std and reward counts are merged: one all_gather, merged
            in rank order, ranks without tokens included. Groups must not span ranks.
        reward_level: "token" or "sequence", where "auto" cannot tell (packed, N == B).
        output: "sequence" [B], "token" (masked positions 0), or "auto": per sequence for kinds over groups (and
            remax of rewards per sequence), per token for kinds over tokens.

    Raises:
        ArgumentError: a wrong shape, dtype, number or choice; an argument that the kind needs or does not take.
    """

    rewards: Tensor
    _: KW_ONLY
    kind: str
    group: int | Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    values: Tensor | None = None
    gamma: float = 1.0
    lam: float | Tensor = 1.0
    lam_value: float | Tensor | None = None
    length_adaptive: float | None = None
    bootstrap: Tensor | None = None
    dones: Tensor | None = None
    done_index: str = "after"
    turns: Tensor | None = None
    ratio: Tensor | None = None
    ratio_clip: float | None = 1.0
    trace_clip: float | None = 1.0
    q_values: Tensor | None = None
    baseline: Tensor | None = None
    in_stats: Tensor | None = None
    in_loss: Tensor | None = None
    valid_range: tuple[float, float] | None = None
    weights: Tensor | None = None
    reward_weights: Tensor | None = None
    step_rewards: Tensor | None = None
    anchor: Tensor | None = None
    step_weight: float = 1.0
    logprob: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    leave_one_out: bool = False
    scale: str = "auto"
    ddof: int = 1
    eps: float = 1e-6
    eps_mode: str = "std_add"
    min_std: float = 0.0
    low_std: str = "zero"
    singleton: str = "zero"
    constant: str = "zero"
    invalid: str = "zero"
    masked_time: str = "skip"
    masked_out: str = "zero"
    whiten: str = "auto"
    whiten_level: str = "auto"
    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    whiten_eps_mode: str = "var_add"
    process_group: ProcessGroup | None = None
    reward_level: str = "auto"
    output: str = "auto"


SPEC = OpSpec(
    name="advantage",
    record=AdvantageCall,
    summary="advantages of every kind: scans over tokens, statistics over groups, whitening",
    primary="rewards",
    one_of=("kind",),
    optional=("stats",),
    check=check,
    needed=needed,
    features=FEATURES,
    clauses=CLAUSES,
    tolerances=TOLERANCES,
)
