"""Device code of the optimal token baseline: sums along each sequence, then over the members of a group by columns.

Sums along time are cut into chunks that start at multiples of SIZE from the start of a sequence, and members are added
in the order of the batch: so the bits of a group depend on nothing else in the batch, and are the same by size and by
ids.

Bytes a token: 12 and a mask in, 8 out, by the first kernel; 8 (again for each member, by ids) in, 4 out, by the second.

Legend: B sequences of T tokens · G group size.
"""

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sequences import is_finite, load_or_zero, sequence_bounds


@triton.jit
def _valid(t, start, count, mask, MASK: tl.constexpr):
    """Which of these tokens count."""
    valid = t < count
    if MASK:
        valid = valid & (tl.load(mask + start + t, mask=valid, other=0) != 0)
    return valid


@triton.jit(do_not_specialize=["sequences"])
def sequence_scans_kernel(
    rewards,  # [B, T] real, without OUTCOME
    outcome,  # [B] real, with OUTCOME: stands on the last token before `ends`
    logprob,  # [B, T] real
    squares,  # [B, T] real: sum of pi squared
    mask,  # [B, T] bytes, with MASK
    ends,  # [B] integer, with ENDS
    togo,  # [B, T] fp32, out: sum of the rewards from a token on
    norm,  # [B, T] fp32, out: sum of 1 - 2 pi + sum pi^2 up to a token; both 0 where a token does not count
    invalid,  # [B] bool, out: something is not finite
    T, sequences,
    OUTCOME: tl.constexpr, MASK: tl.constexpr, ENDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Both sums along one sequence. An invalid one holds anything; `token_baseline_kernel` puts it right."""
    row = tl.program_id(0).to(tl.int64)
    start, count, width = sequence_bounds(row, sequences, T, ends, ends, ENDS, False)
    i = tl.arange(0, SIZE)
    final = 0.0
    if OUTCOME:
        final = tl.load(outcome + row).to(tl.float32)
    bad = tl.zeros((SIZE,), tl.int32)
    state = 0.0
    c = width * 0
    while c < width:
        t = c + i
        valid = _valid(t, start, count, mask, MASK)
        p, q = load_or_zero(logprob + start + t, valid, True), load_or_zero(squares + start + t, valid, True)
        bad = bad | (valid & ((is_finite(p) & is_finite(q)) == 0)).to(tl.int32)
        score = tl.where(valid, 1.0 - 2.0 * tl.exp(p) + q, 0.0)
        tl.store(norm + start + t, tl.where(valid, state + tl.cumsum(score, 0), 0.0), mask=t < width)
        state += tl.sum(score, 0)
        c += SIZE
    state = 0.0
    while c > 0:
        c -= SIZE
        t = c + i
        valid = _valid(t, start, count, mask, MASK)
        r = (
            tl.where(valid & (t == count - 1), final, 0.0)
            if OUTCOME
            else load_or_zero(rewards + start + t, valid, True)
        )
        bad = bad | (valid & (is_finite(r) == 0)).to(tl.int32)
        tl.store(togo + start + t, tl.where(valid, state + tl.cumsum(r, 0, reverse=True), 0.0), mask=t < width)
        state += tl.sum(r, 0)
    tl.store(invalid + row, (tl.max(bad, 0) != 0) | (is_finite(final) == 0))


@triton.jit(do_not_specialize=["B", "G"])
def token_baseline_kernel(
    togo,  # [B, T] fp32, in, and 0 for invalid sequences out
    norm,  # [B, T] fp32
    invalid,  # [B] bool
    in_stats,  # [B] bool, with IN_STATS
    ids,  # [B] integer, with IDS
    mask,  # [B, T] bytes, with MASK
    ends,  # [B] integer, with ENDS
    out,  # [B, T] fp32, out
    members,  # [B] int64, out: of the group
    T, B, G, eps,
    IDS: tl.constexpr, IN_STATS: tl.constexpr, MASK: tl.constexpr, ENDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Advantages of SIZE columns: of the sequences of a group by size, or by ids of one sequence."""
    program = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    T = T + tl.zeros((), tl.int64)
    first, until, own, own_until = program * G, program * G + G, program * G, program * G + G
    if IDS:
        first, until, own, own_until = program * 0, program * 0 + B, program, program + 1
        name = tl.load(ids + program)
    total, weight = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    many = tl.zeros((), tl.int64)
    j = first
    while j < until:
        member = tl.load(invalid + j) == 0
        if IN_STATS:
            member = member & (tl.load(in_stats + j) != 0)
        if IDS:
            member = member & (tl.load(ids + j) == name)
        if member:
            w = tl.load(norm + j * T + t, mask=t < T, other=0)
            total += tl.load(togo + j * T + t, mask=t < T, other=0) * w
            weight += w
            many += 1
        j += 1
    weight += eps  # 0 where eps is, and no member has a score
    baseline = tl.where(many > 1, tl.div_rn(total, tl.where(weight == 0, 1.0, weight)), 0.0)
    while own < own_until:
        start, count, _width = sequence_bounds(own, B, T, ends, ends, ENDS, False)
        wrong = tl.load(invalid + own) != 0
        valid = _valid(t, start, tl.where(wrong, 0, count), mask, MASK)
        advantage = tl.load(togo + start + t, mask=valid, other=0) - baseline
        tl.store(out + start + t, tl.where(valid, advantage, 0.0), mask=t < T)
        if wrong:
            tl.store(togo + start + t, tl.zeros((SIZE,), tl.float32), mask=t < T)
        if tl.program_id(1) == 0:
            tl.store(members + own, many)
        own += 1
