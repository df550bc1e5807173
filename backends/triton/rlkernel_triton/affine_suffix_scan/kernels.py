"""One affine suffix scan, y_t = a_t y_{t+1} + b_t, and the recursions made of it: returns, GAE, V-trace, Retrace.

A chunk of 8 J tokens is a tile [J, 8]: its rows run right to left, its columns left to right. So every load is a whole
vector of ascending addresses, the 8 tokens of a row are composed in one thread, and only the J compositions are scanned
across threads, once, forward: no flip, and an eighth of the shuffles. A masked token is the identity map.

Chunks start at multiples of 8 J from the start of their sequence. So the bits of a sequence depend on nothing else in
the batch, not on its layout, and not on the schedule:

    ROWS    a program takes a sequence, its chunks from right to left
    PART    a program takes a chunk and writes its composition; `chain_kernel` runs over those of a sequence
    APPLY   a program takes a chunk and what `chain_kernel` found to its right

Legend: B sequences · T time (N tokens where packed) · J rows of a tile · C chunks of a sequence.
"""

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sequences import is_finite, load_or_zero, sequence_bounds

COLUMNS = 8  # tokens that one thread composes
CHAIN = 32  # compositions that `chain_kernel` fetches at a time


@triton.jit
def _compose(a1, b1, p1, q1, a2, b2, p2, q2):
    """Maps (a, b) up to a row and (p, q) up to the row before it: the right one is applied first."""
    return a1 * a2, b2 + a2 * b1, p2 * a1, q2 + p2 * b1


@triton.jit
def _split_columns(x, J: tl.constexpr):
    """The 8 columns of a tile [J, 8], each [J]."""
    even, odd = tl.split(tl.reshape(x, (J, 4, 2)))
    x04, x26 = tl.split(tl.reshape(even, (J, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (J, 2, 2)))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _join_columns(x0, x1, x2, x3, x4, x5, x6, x7, J: tl.constexpr):
    """The tile [J, 8] of 8 columns."""
    even = tl.reshape(tl.join(tl.join(x0, x4), tl.join(x2, x6)), (J, 4))
    odd = tl.reshape(tl.join(tl.join(x1, x5), tl.join(x3, x7)), (J, 4))
    return tl.reshape(tl.join(even, odd), (J, 8))


@triton.jit
def _compose_chunk(a, b, J: tl.constexpr):
    """Of a chunk of maps [J, 8]: the composition of all, and [J] of those right of each row."""
    a0, a1, a2, a3, a4, a5, a6, a7 = _split_columns(a, J)
    b0, b1, b2, b3, b4, b5, b6, b7 = _split_columns(b, J)
    A = a7 * a6 * a5 * a4 * a3 * a2 * a1 * a0
    B = b6 + a6 * b7
    B = b5 + a5 * B
    B = b4 + a4 * B
    B = b3 + a3 * B
    B = b2 + a2 * B
    B = b1 + a1 * B
    B = b0 + a0 * B
    one = tl.full((J,), 1.0, tl.float32)
    A, B, P, Q = tl.associative_scan((A, B, one, one * 0.0), 0, _compose)
    last = tl.arange(0, J) == J - 1
    return tl.sum(tl.where(last, A, 0.0)), tl.sum(tl.where(last, B, 0.0)), P, Q


@triton.jit
def _scan_chunk(a, b, state, J: tl.constexpr):
    """The y right of every token of a chunk [J, 8], and the y of its first token; `state` is the y right of it."""
    A, B, P, Q = _compose_chunk(a, b, J)
    _, a1, a2, a3, a4, a5, a6, a7 = _split_columns(a, J)
    _, b1, b2, b3, b4, b5, b6, b7 = _split_columns(b, J)
    y7 = Q + P * state
    y6 = b7 + a7 * y7
    y5 = b6 + a6 * y6
    y4 = b5 + a5 * y5
    y3 = b4 + a4 * y4
    y2 = b3 + a3 * y3
    y1 = b2 + a2 * y2
    y0 = b1 + a1 * y1
    return _join_columns(y0, y1, y2, y3, y4, y5, y6, y7, J), B + A * state


@triton.jit
def _chunk_tokens(c, start, count, mask, J: tl.constexpr, MASK: tl.constexpr):
    """A chunk's tokens within their sequence, which are inside of it, and which of those count."""
    j = tl.arange(0, J)[:, None]
    t = c * (J * 8) + (J - 1 - j) * 8 + tl.arange(0, 8)[None, :]
    inside = t < count
    valid = inside
    if MASK:
        valid = valid & (tl.load(mask + start + t, mask=inside, other=0) != 0)
    return t, inside, valid


@triton.jit
def _lambda_return_maps(lam, inside, row_lam, gamma, decay, blend, r, x, on, LAM: tl.constexpr):
    """The maps of a lambda-return with rewards r and values x, and lambda where it is per token."""
    if LAM == "number":
        return decay * on, blend * x + decay * r, on
    w = load_or_zero(lam, inside, True) if LAM == "token" else row_lam + on * 0.0
    return gamma * w * on, gamma * (1.0 - w) * x + gamma * w * r, w


@triton.jit
def _masked_maps(m, n, inside, valid, MASKED: tl.constexpr):
    """The maps of the tokens that count; a masked one is the identity, a step without reward, or a reset."""
    if MASKED == "step":
        m = tl.where(inside, m, 1.0)
    elif MASKED == "reset":
        m = tl.where(valid, m, tl.where(inside, 0.0, 1.0))
    else:
        m = tl.where(valid, m, 1.0)
    return m, tl.where(valid, n, 0.0)


@triton.jit(do_not_specialize=["C", "sequences"])  # one build for all numbers of sequences
def scan_kernel(
    b,  # token-level: b of the scan, else rewards, unless OUTCOME
    a,  # token-level, with A
    v,  # token-level values, with VALUES
    q,  # token-level values of the actions, with Q
    ratio,  # token-level, vtrace and retrace
    lam,  # [B] (LAM row) or token-level (LAM token)
    lam2,  # the same of the targets' lambda (LAM2)
    mask,  # token-level u8, with MASK
    stop,  # token-level u8, with STOP: 1 where an episode ends
    init,  # [B], with INIT: the value after the last token
    outcome,  # [B], with OUTCOME: rewards that stand on the last token before `ends`
    baseline,  # [B], with BASELINE
    ends,  # [B] integer, with ENDS: tokens from here on do not count
    bounds,  # [B + 1] integer, with PACKED
    adv,  # token-level fp32 out: y, or advantages
    ret,  # token-level fp32 out: targets, unless RULE scan
    first,  # [B] fp32 out, RULE scan: y of the first token
    invalid,  # [B] u8 out, unless RULE scan; in, with STAGE apply
    parts,  # [2 or 4, B, C] fp32: compositions of chunks, out of part
    chain,  # [1 or 2, B, C] fp32: the value after each chunk, for `apply`
    flags,  # [B, C] u8: something in a chunk is not finite, out of part
    T, C, sequences, a_number, gamma, decay, blend, decay2, blend2, ratio_clip, trace_clip,
    RULE: tl.constexpr, STAGE: tl.constexpr, J: tl.constexpr, A: tl.constexpr, VALUES: tl.constexpr,
    Q: tl.constexpr, LAM: tl.constexpr, LAM2: tl.constexpr, MASK: tl.constexpr, STOP: tl.constexpr,
    INIT: tl.constexpr, OUTCOME: tl.constexpr, BASELINE: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr,
    MASKED: tl.constexpr, EXCLUSIVE: tl.constexpr, CARRY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One recursion over one sequence (STAGE rows), or over one chunk of it (part, apply).

    RULE scan: b and a as given, y to `adv`; the others: b are rewards, advantages to `adv`, targets to `ret`, as
    rlkernel_core/spec/advantage.py defines them. A sequence with something that is not finite gets 0 and a flag.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program if STAGE == "rows" else program // C
    start, count, width = sequence_bounds(row, sequences, T, ends, bounds, ENDS, PACKED)
    state, state2 = 0.0, 0.0
    row_lam, row_lam2, final, base = 0.0, 0.0, 0.0, 0.0
    if LAM == "row":
        row_lam = tl.load(lam + row).to(tl.float32)
    if LAM2 == "row":
        row_lam2 = tl.load(lam2 + row).to(tl.float32)
    if OUTCOME:
        final = tl.load(outcome + row).to(tl.float32)
    if BASELINE:
        base = tl.load(baseline + row).to(tl.float32)
    if INIT:
        state = tl.load(init + row).to(tl.float32)
    odd = ((is_finite(state) & is_finite(final) & is_finite(base)) == 0) & (RULE != "scan")
    if RULE == "vtrace":  # two scans: of the next value, which ends with `init`, and of the excess, which ends with 0
        state2, state = state, 0.0
    elif (RULE == "gae") | (RULE == "retrace"):
        state = gamma * state
    if LAM2 != "none":
        state2 = state
    if STAGE == "rows":
        last = tl.cdiv(width, J * 8) - 1
        chunks = last + 1
    else:
        last = (program % C).to(tl.int32)
        chunks = 1
    if STAGE == "apply":
        state = tl.load(chain + program)
        if LAM2 != "none":
            state2 = tl.load(chain + sequences * C + program)
        if RULE != "scan":
            count = tl.where(tl.load(invalid + row) != 0, 0, count)
    bad = tl.zeros((J, 8), tl.int32)
    # Right to left; what does not depend on the state is fetched some chunks ahead.
    for k in tl.range(0, chunks, num_stages=STAGES):
        t, inside, valid = _chunk_tokens(last - k, start, count, mask, J, MASK)
        # Loads that do not wait for the mask: what a masked token holds is selected away below.
        r = tl.where(t == count - 1, final, 0.0) if OUTCOME else load_or_zero(b + start + t, inside, True)
        x = load_or_zero(v + start + t, inside, VALUES)
        on = tl.full((J, 8), 1.0, tl.float32)
        if STOP:
            on = 1.0 - load_or_zero(stop + start + t, inside, True)
            if MASKED == "step":  # the step of a masked token ends no episode, whatever is stored there
                on = tl.where(valid, on, 1.0)
        whole = is_finite(r) & is_finite(x)
        if RULE == "scan":
            m = load_or_zero(a + start + t, inside, True) if A else on * a_number
            n = r
        elif RULE == "returns":
            m = gamma * on
            n = r
        elif RULE == "gae":
            m, n, w = _lambda_return_maps(lam + start + t, inside, row_lam, gamma, decay, blend, r, x, on, LAM)
            whole = whole & is_finite(w)
        else:
            raw = load_or_zero(ratio + start + t, inside, True)
            trace = tl.where(raw > trace_clip, trace_clip, raw)
            rho = tl.where(raw > ratio_clip, ratio_clip, raw)
            whole = whole & is_finite(trace) & is_finite(rho)
            if LAM == "token":
                w = load_or_zero(lam + start + t, inside, True)
                whole = whole & is_finite(w)
                trace = trace * w
            else:
                trace = trace * (row_lam if LAM == "row" else decay)  # `decay` is lambda itself here
            m = gamma * trace * on
            if RULE == "retrace":
                action = load_or_zero(q + start + t, inside, True) if Q else x
                whole = whole & is_finite(action)
                n = gamma * (x + trace * (r - action))
            else:
                following, state2 = _scan_chunk(tl.where(valid, 0.0, 1.0), tl.where(valid, x, 0.0), state2, J)
                following = following * on
                n = rho * (r + gamma * following - x)
        m, n = _masked_maps(m, n, inside, valid, MASKED)
        if LAM2 != "none":
            m2, n2, w = _lambda_return_maps(lam2 + start + t, inside, row_lam2, gamma, decay2, blend2, r, x, on, LAM2)
            whole = whole & is_finite(w)
            m2, n2 = _masked_maps(m2, n2, inside, valid, MASKED)
        bad = bad | (valid & (whole == 0)).to(tl.int32)
        if STAGE == "part":
            A1, B1, _P1, _Q1 = _compose_chunk(m, n, J)
            tl.store(parts + program, A1)
            tl.store(parts + sequences * C + program, B1)
            if LAM2 != "none":
                A2, B2, _P2, _Q2 = _compose_chunk(m2, n2, J)
                tl.store(parts + 2 * sequences * C + program, A2)
                tl.store(parts + 3 * sequences * C + program, B2)
        else:
            y, state = _scan_chunk(m, n, state, J)
            here = t < width
            if RULE == "scan":
                out = y if EXCLUSIVE else n + m * y
                tl.store(adv + start + t, out if CARRY else tl.where(valid, out, 0.0), mask=here)
            else:
                if RULE == "returns":
                    target = n + m * y
                    result = target - x - base
                elif RULE == "vtrace":
                    target = x + (n + m * y)
                    result = rho * (r + gamma * (following + on * y) - x)
                else:
                    target = r + on * y
                    result = target - x
                if LAM2 != "none":
                    y2, state2 = _scan_chunk(m2, n2, state2, J)
                    target = r + on * y2
                tl.store(adv + start + t, tl.where(valid, result, 0.0), mask=here)
                tl.store(ret + start + t, tl.where(valid, target, 0.0), mask=here)
    if STAGE == "part":
        tl.store(flags + program, (tl.max(tl.max(bad, 1), 0) | odd.to(tl.int32)).to(tl.uint8))
    elif STAGE == "rows":
        if RULE == "scan":
            tl.store(first + row, state)
        else:
            wrong = tl.max(tl.max(bad, 1), 0) | odd.to(tl.int32)
            tl.store(invalid + row, wrong.to(tl.uint8))
            if wrong:
                c = tl.cdiv(width, J * 8) - 1
                while c >= 0:
                    t, inside, valid = _chunk_tokens(c, start, count, mask, J, False)
                    tl.store(adv + start + t, tl.zeros((J, 8), tl.float32), mask=t < width)
                    tl.store(ret + start + t, tl.zeros((J, 8), tl.float32), mask=t < width)
                    c -= 1


@triton.jit(do_not_specialize=["C", "sequences"])
def chain_kernel(
    parts,  # [2, or 4 with TWO, B, C] fp32
    chain,  # [1, or 2 with TWO, B, C] fp32 out
    flags,  # [B, C] u8
    init,  # [B], with INIT
    first,  # [B] fp32 out, with SCAN
    invalid,  # [B] u8 out, unless SCAN
    C, sequences,
    scale,  # of `init`
    INIT: tl.constexpr, TWO: tl.constexpr, SCAN: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """The value after every chunk of a sequence, and the y of its first token: the compositions in their order."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, U)
    state = 0.0
    if INIT:
        state = scale * tl.load(init + row).to(tl.float32)
    state2 = state
    bad = tl.zeros((U,), tl.int32)
    c = C
    while c > 0:
        y, y2 = tl.zeros((U,), tl.float32), tl.zeros((U,), tl.float32)
        for k in tl.static_range(U):
            # Chunks left of the first one are the identity.
            there = c - 1 - k >= 0
            at = row * C + c - 1 - k
            y = tl.where(i == k, state, y)
            state = tl.load(parts + sequences * C + at, mask=there, other=0.0) + state * tl.load(
                parts + at, mask=there, other=1.0
            )
            if TWO:
                y2 = tl.where(i == k, state2, y2)
                state2 = tl.load(parts + 3 * sequences * C + at, mask=there, other=0.0) + state2 * tl.load(
                    parts + 2 * sequences * C + at, mask=there, other=1.0
                )
        at, there = row * C + c - 1 - i, c - 1 - i >= 0
        tl.store(chain + at, y, mask=there)
        if TWO:
            tl.store(chain + sequences * C + at, y2, mask=there)
        bad = bad | tl.load(flags + at, mask=there, other=0).to(tl.int32)
        c -= U
    if SCAN:
        tl.store(first + row, state)
    else:
        tl.store(invalid + row, tl.max(bad, 0).to(tl.uint8))


@triton.jit
def last_token_kernel(
    mask,  # token-level u8
    bounds,  # [B + 1] integer, with PACKED
    ends,  # [B] int64 out
    T, sequences,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One past the last token of each sequence that the mask lets count: a search from the right."""
    row = tl.program_id(0).to(tl.int64)
    start, _count, width = sequence_bounds(row, sequences, T, ends, bounds, False, PACKED)
    i = tl.arange(0, BLOCK)
    c = tl.cdiv(width, BLOCK)
    found = c * 0
    while (c > 0) & (found == 0):
        c -= 1
        t = c * BLOCK + i
        m = tl.load(mask + start + t, mask=t < width, other=0) != 0
        found = tl.max(tl.where(m, t + 1, 0), 0)
    tl.store(ends + row, found)


@triton.jit
def zero_gaps_kernel(
    adv,  # [N] fp32 out
    ret,  # [N] fp32 out, with RETURNS
    bounds,  # [B + 1] integer
    T, sequences,
    RETURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """0 at the packed tokens of no sequence: before the first and behind the last."""
    n = T + tl.zeros((), tl.int64)
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    outside = (t < n) & ((t < tl.load(bounds)) | (t >= tl.load(bounds + sequences)))
    tl.store(adv + t, tl.zeros((BLOCK,), tl.float32), mask=outside)
    if RETURNS:
        tl.store(ret + t, tl.zeros((BLOCK,), tl.float32), mask=outside)
