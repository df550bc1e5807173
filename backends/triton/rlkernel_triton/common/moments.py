"""Count, mean and sum of squared deviations of the tokens that count, and their whitening.

Shifted and two-pass within a chunk, chunks merged in a fixed order: a constant batch has deviations of exactly 0, a
large offset costs no precision, and a result does not depend on which program came first.

Legend: B sequences · C chunks · P partial moments, four numbers each: n, shift, moved mean, m2. A summary is seven:
these, then mean, variance, factor.
"""

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sequences import sequence_bounds

BLOCK = 4096
MERGED = 256  # partial moments that are merged at a time


@triton.jit
def _merge(n1, s1, d1, q1, n2, s2, d2, q2):
    """Moments of both together (Chan, Golub and LeVeque 1979); one without values changes nothing."""
    n = n1 + n2
    apart = (s2 - s1) + (d2 - d1)
    share = n2 / tl.maximum(n, 1.0)
    some = n1 > 0
    between = tl.where((n1 > 0) & (n2 > 0), apart * apart * n1 * share, 0.0)
    moved = tl.where(some, tl.where(n2 > 0, d1 + apart * share, d1), d2)
    return n, tl.where(some, s1, s2), moved, q1 + q2 + between


@triton.jit
def _variance(m2, count, ddof):
    """m2 / (count - ddof), 0 where there are too few values."""
    free = count - ddof
    return tl.where(free > 0, tl.div_rn(m2, tl.where(free > 0, free, 1.0)), 0.0)


@triton.jit
def _factor(var, eps, eps_mode):
    """What scales by a standard deviation, 0 where it would be infinite; std_add, var_add, var_clamp, threshold."""
    std = tl.sqrt_rn(var)
    below = tl.where(eps_mode == 0, std + eps, tl.where(eps_mode == 3, std, 0.0))
    below = tl.where(eps_mode == 1, tl.sqrt_rn(var + eps), below)
    below = tl.where(eps_mode == 2, tl.sqrt_rn(tl.maximum(var, eps)), below)
    usable = (below > 0) & ((eps_mode != 3) | (std > eps))
    return tl.where(usable, tl.div_rn(1.0, tl.where(usable, below, 1.0)), 0.0)


@triton.jit
def _merged(partial, P, SIZE: tl.constexpr):
    """All partial moments [P, 4], merged in an order that their number fixes."""
    i = tl.arange(0, SIZE)
    n = tl.zeros((SIZE,), tl.float32)
    s, d, q = n, n, n
    for c in range(0, P, SIZE):
        there = c + i < P
        at = partial + (c + i) * 4
        n2, s2 = tl.load(at, mask=there, other=0.0), tl.load(at + 1, mask=there, other=0.0)
        d2, q2 = tl.load(at + 2, mask=there, other=0.0), tl.load(at + 3, mask=there, other=0.0)
        n, s, d, q = _merge(n, s, d, q, n2, s2, d2, q2)
    return tl.reduce((n, s, d, q), 0, _merge)


@triton.jit
def _member(x, t, count, mask, start, MASK: tl.constexpr):
    inside = t < count
    if MASK:
        inside = inside & (tl.load(mask + start + t, mask=inside, other=0) != 0)
    return inside & (tl.abs(x) < float("inf"))


@triton.jit(do_not_specialize=["C", "sequences"])
def moments_kernel(
    x, mask, chosen, times, ends, bounds, out, T, C, sequences,
    MASK: tl.constexpr, CHOSEN: tl.constexpr, TIMES: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Moments of a chunk of a sequence, or, packed, of a whole sequence; what is not finite does not count.

    CHOSEN: "all" sequences; "these" of `chosen`; the "others".
    """
    program = tl.program_id(0).to(tl.int64)
    row = program if PACKED else program // C
    start, count, width = sequence_bounds(row, sequences, T, ends, bounds, ENDS, PACKED)
    c = 0 if PACKED else (program % C).to(tl.int32)
    to = tl.cdiv(width, SIZE) if PACKED else c + 1
    if CHOSEN == "these":
        count = tl.where(tl.load(chosen + row) != 0, count, 0)
    elif CHOSEN == "others":
        count = tl.where(tl.load(chosen + row) == 0, count, 0)
    n, s, d, q = 0.0, 0.0, 0.0, 0.0
    while c < to:
        t = c * SIZE + tl.arange(0, SIZE)
        value = tl.load(x + start + t, mask=t < count, other=0).to(tl.float32)
        member = _member(value, t, count, mask, start, MASK)
        weight = tl.where(member, 1.0, 0.0)
        if TIMES:
            weight = tl.where(member, tl.load(times + start + t, mask=member, other=0).to(tl.float32), 0.0)
            member = weight > 0
        total = tl.sum(weight, 0)
        first = tl.min(tl.where(member, t, 2147483647), 0)
        shift = tl.sum(tl.where(member & (t == first), value, 0.0), 0)
        away = tl.where(member, value - shift, 0.0)
        moved = tl.sum(weight * away, 0) / tl.maximum(total, 1.0)
        left = tl.where(member, away - moved, 0.0)
        n, s, d, q = _merge(n, s, d, q, total, shift, moved, tl.sum(weight * left * left, 0))
        c += 1
    tl.store(out + program * 4, n)
    tl.store(out + program * 4 + 1, s)
    tl.store(out + program * 4 + 2, d)
    tl.store(out + program * 4 + 3, q)


@triton.jit(do_not_specialize=["P"])
def merge_kernel(partial, out, P, SIZE: tl.constexpr):
    """All partial moments, merged in an order that their number fixes."""
    n, s, d, q = _merged(partial, P, SIZE)
    tl.store(out, n)
    tl.store(out + 1, s)
    tl.store(out + 2, d)
    tl.store(out + 3, q)


@triton.jit(do_not_specialize=["P", "ddof", "eps_mode"])
def summary_kernel(partial, out, P, ddof, eps, eps_mode, SIZE: tl.constexpr):
    """The same, then the mean, the variance and the factor of a whitening."""
    n, s, d, q = _merged(partial, P, SIZE)
    var = _variance(q, n, ddof)
    tl.store(out, n)
    tl.store(out + 1, s)
    tl.store(out + 2, d)
    tl.store(out + 3, q)
    tl.store(out + 4, s + d)
    tl.store(out + 5, var)
    tl.store(out + 6, tl.where(n > 0, _factor(var, eps, eps_mode), 0.0))


@triton.jit(do_not_specialize=["C", "sequences"])
def whiten_kernel(
    x, y, mask, chosen, weights, summary, ends, bounds, T, C, sequences,
    MASK: tl.constexpr, CHOSEN: tl.constexpr, WEIGHTS: tl.constexpr, WHITEN: tl.constexpr, BACK: tl.constexpr,
    CARRY: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write weight (x - mean) rstd where the token counts and its sequence is chosen, else 0.

    `summary` is what `summary_kernel` wrote, and `chosen` is as in `moments_kernel`. WHITEN off: weight x. BACK: the
    mean is added again. CARRY: tokens that do not count are transformed too.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program if PACKED else program // C
    start, count, width = sequence_bounds(row, sequences, T, ends, bounds, ENDS, PACKED)
    c = 0 if PACKED else (program % C).to(tl.int32)
    to = tl.cdiv(width, SIZE) if PACKED else c + 1
    shift, moved, factor, again, weight = 0.0, 0.0, 1.0, 0.0, 1.0
    if WHITEN:
        shift, moved, factor = tl.load(summary + 1), tl.load(summary + 2), tl.load(summary + 6)
    if BACK:
        again = tl.load(summary + 4)
    limit = width  # tokens of a sequence that may be other than 0
    if WEIGHTS:
        weight = tl.load(weights + row).to(tl.float32)
        limit = tl.where(weight != 0, limit, 0)
    if CHOSEN == "these":
        limit = tl.where(tl.load(chosen + row) != 0, limit, 0)
    elif CHOSEN == "others":
        limit = tl.where(tl.load(chosen + row) == 0, limit, 0)
    while c < to:
        t = c * SIZE + tl.arange(0, SIZE)
        value = tl.load(x + start + t, mask=t < width, other=0).to(tl.float32)
        member = _member(value, t, count, mask, start, MASK)
        if CARRY:
            masked = t >= count
            if MASK:
                masked = masked | (tl.load(mask + start + t, mask=t < count, other=0) == 0)
            member = member | masked
        result = ((value - shift) - moved) * factor + again
        tl.store(y + start + t, tl.where(member & (t < limit), result * weight, 0.0), mask=t < width)
        c += 1
