"""The loss of a batch: each tensor read once for token-level ratios, gradients written with it, statistics by parts.

A program takes a span of tokens, or, for ratios per sequence, a sequence: its mean log-ratio, then the gradient of that
ratio, which all its tokens share, then each token. It goes through them tile by tile and keeps a sum for every lane;
lanes are added once, at its end. Sums of programs are kept apart and added in a fixed order.

Bytes of a token: 4 for each tensor that is read (1 for a mask) and 4 for each gradient; a ratio per sequence reads its
row again, from the cache.

Legend: N tokens · B sequences · T padded length · P programs · K statistics.
"""

from rlkernel_triton.common.arithmetic import stored_as
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.policy_loss.terms import EXPONENT_LIMIT, LOG_FLOOR, clamp, expm1_minus_x, kl_estimate, surrogate

# Partial results of a program, by row of the table [K, P]; `total_kernel` says what becomes of each.
LOSS = tl.constexpr(0)
POLICY = tl.constexpr(1)
TOKENS = tl.constexpr(2)
RATIO = tl.constexpr(3)
LEAST = tl.constexpr(4)
MOST = tl.constexpr(5)
TOP = tl.constexpr(11)
SHARE = tl.constexpr(12)
SQUARES = tl.constexpr(13)
K = 20


@triton.jit
def times_scalar(number, at, HERE: tl.constexpr):
    """A number, times the one that lies on the device."""
    if HERE:
        number = number * tl.load(at).to(tl.float32)
    return number


@triton.jit
def over_count(number, at, HERE: tl.constexpr):
    """A number over the count that lies on the device; a count of 0 belongs to an empty sum."""
    if HERE:
        count = tl.load(at).to(tl.float32)
        number = number / tl.where(count > 0, count, 1.0)
    return number


@triton.jit
def load_or_zero(at, where, HERE: tl.constexpr):
    """fp32 numbers; zeros where the call has no such tensor, or beyond its tokens."""
    if HERE:
        return tl.load(at, mask=where, other=0).to(tl.float32)
    return tl.zeros(where.shape, tl.float32)


@triton.jit
def correction_weight(gap, at, correction, outside, valid, low, high, CORRECTION: tl.constexpr, DROP: tl.constexpr):
    """The off-policy weight of each token, and where it was out of bounds."""
    one = gap * 0.0 + 1.0
    if CORRECTION == "token":
        raw = tl.exp(clamp(gap, -EXPONENT_LIMIT, EXPONENT_LIMIT))
        out = (raw < low) | (raw > high)
        return tl.where(out, 0.0, raw) if DROP else clamp(raw, low, high), out & valid
    if CORRECTION == "given":
        return tl.load(correction + at, mask=valid, other=0.0), tl.load(outside + at, mask=valid, other=0) != 0
    return one, one < 0


@triton.jit
def gmpo_clip(d, A, low, high):
    """GMPO's clipped log-ratio, and where it is free: bounded on the side that helps the advantage's sign."""
    over, under = (A > 0) & (d > high), (A < 0) & (d < -low)
    clipped = tl.where(over, high, tl.where(under, -low, tl.where(A == 0, 0.0, d)))
    return clipped, ((over | under) == 0) & (A != 0)


@triton.jit(do_not_specialize=["P", "first", "first_program", "sequences"])  # one build for all numbers of blocks
def loss_kernel(
    # Tensors of the tokens, [B, T] or [N], read where their flag says so.
    logprob, entropy, old, advantages, ref, rollout,
    correction,  # fp32 weights of a correction computed before, and `outside` uint8
    outside,
    mask,  # uint8
    bounds,  # [B + 1] int, sequences of packed tokens
    index,  # [N] int64, the sequence of each packed token
    counts,  # [B] int64, tokens in the loss of each sequence
    # Scalars that lie on the device.
    denominator, entropy_denominator, kl_scale, entropy_scale,
    # Results.
    dlogprob,  # fp32 of the tokens, written where GRAD
    dentropy,  # fp32 of the tokens, written where BONUS
    partial,  # [K, P] fp32
    N, T, sequences, P,
    first,  # token at which this launch begins, and its first program among the P
    first_program,
    token_weight,  # of a token in the policy term, and in the entropy bonus
    entropy_weight,
    kl_coef, entropy_coef, limit, low_bound, high_bound, dual_bound, tau_pos, tau_neg, k_pos, k_neg, lam_pos, lam_neg,
    cap, beta, kl_input_clamp, kl_clamp, correction_low, correction_high,
    KIND: tl.constexpr,  # of the surrogate: "clip", "sapo", ...
    LEVEL: tl.constexpr,  # of its ratio: "token", "sequence"
    SHARED: tl.constexpr,  # all tokens of a sequence share the gradient of its ratio
    DUAL: tl.constexpr,
    OLD: tl.constexpr,
    KL: tl.constexpr,  # "none", "k1", "abs", "k2", "k3", "low_var"
    STRAIGHT_THROUGH: tl.constexpr,
    IMPORTANCE: tl.constexpr,  # by which ratio KL is weighed: "none", "own", "ratio"
    ENTROPY: tl.constexpr,
    BONUS: tl.constexpr,
    ROLLOUT: tl.constexpr,
    CORRECTION: tl.constexpr,  # "none", "token": made here of `rollout`, "given"
    DROP: tl.constexpr,  # tokens out of bounds weigh 0, else the bound
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    ADVANTAGE: tl.constexpr,  # one a "token" or a "row"
    PER_SEQUENCE: tl.constexpr,  # token_weight is over the tokens of the sequence
    ENTROPY_PER_SEQUENCE: tl.constexpr,
    HAS_DENOMINATOR: tl.constexpr,
    HAS_ENTROPY_DENOMINATOR: tl.constexpr,
    HAS_KL_SCALE: tl.constexpr,
    HAS_ENTROPY_SCALE: tl.constexpr,
    GRAD: tl.constexpr,
    LONG_ROWS: tl.constexpr,  # T >= SPAN
    BOUNDED_RATIOS: tl.constexpr,  # log-ratios stay within EXPONENT_LIMIT, and so do sums of squared ratios
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, gradients and partial statistics of SPAN tokens (LEVEL token), or of a sequence (LEVEL sequence)."""
    CAPPED: tl.constexpr = KIND == "dppo_tv" or KIND == "dppo_kl"
    program = tl.program_id(0).to(tl.int64)
    N = N + tl.zeros((), tl.int64)
    token_weight, entropy_weight = (
        over_count(token_weight, denominator, HAS_DENOMINATOR),
        over_count(entropy_weight, entropy_denominator, HAS_ENTROPY_DENOMINATOR),
    )
    kl_coef, entropy_coef = (
        times_scalar(kl_coef, kl_scale, HAS_KL_SCALE),
        times_scalar(entropy_coef, entropy_scale, HAS_ENTROPY_SCALE),
    )
    begin, end = tl.zeros((), tl.int64), N
    if PACKED:
        begin = tl.minimum(tl.maximum(tl.load(bounds).to(tl.int64), 0), N)
        end = tl.minimum(tl.maximum(tl.load(bounds + sequences).to(tl.int64), 0), N)
    if LEVEL == "token":
        start = first + program * SPAN
        width = tl.minimum(N - start, SPAN).to(tl.int32)
    elif PACKED:
        start = tl.minimum(tl.maximum(tl.load(bounds + program).to(tl.int64), 0), N)
        stop = tl.minimum(tl.maximum(tl.load(bounds + program + 1).to(tl.int64), 0), N)
        width = tl.maximum(stop - start, 0).to(tl.int32)
    else:
        start = program * T
        width = (T + tl.zeros((), tl.int64)).to(tl.int32)
    i = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    ROWS: tl.constexpr = LEVEL == "token" and (ADVANTAGE == "row" or PER_SEQUENCE or ENTROPY_PER_SEQUENCE)
    first_row, offset, edge = start, start, width
    if ROWS and not PACKED:  # one division in 64 bits a program, and none a token where at most one row ends in it
        first_row = start // T
        offset = start - first_row * T
        edge = tl.minimum(T - offset, SPAN).to(tl.int32)
    shared, shared_grad, shared_kl_grad, mean, count = 1.0, 0.0, 0.0, 0.0, 1.0
    if LEVEL == "sequence":
        n, total = zero, zero
        for c in range(tl.cdiv(width, BLOCK)):
            t = c * BLOCK + i
            valid = t < width
            if PACKED:
                valid = valid & (start + t >= begin) & (start + t < end)
            inside = valid
            if MASK:
                valid = valid & (tl.load(mask + start + t, mask=inside, other=0) != 0)
            logp = load_or_zero(logprob + start + t, inside, True)
            d = logp - (load_or_zero(old + start + t, inside, True) if OLD else logp)
            if KIND == "gmpo":
                A = load_or_zero(advantages + (start + t if ADVANTAGE == "token" else program + t * 0), inside, True)
                d, _free = gmpo_clip(clamp(d, -limit, limit), A, low_bound, high_bound)
            elif KIND == "vespo":
                d = clamp(d, -limit, limit)
                if CORRECTION != "none":
                    old_logp = logp if not OLD else load_or_zero(old + start + t, inside, True)
                    r = load_or_zero(rollout + start + t, inside, ROLLOUT)
                    gap = tl.where(valid & (r == r), old_logp - r, 0.0)
                    w, _out = correction_weight(
                        gap, start + t, correction, outside, valid, correction_low, correction_high, CORRECTION, DROP
                    )
                    d = d + clamp(tl.log(w), LOG_FLOOR, EXPONENT_LIMIT)
            n += tl.where(valid, 1.0, 0.0)
            total += tl.where(valid, d, 0.0)
        count = tl.maximum(tl.sum(n, 0), 1.0)
        total = tl.sum(total, 0)
        if KIND == "vespo":
            shared = tl.exp(clamp(total, LOG_FLOOR, EXPONENT_LIMIT))
        elif KIND == "gmpo":
            shared = tl.exp(total / count)
        else:
            mean = total / count
            shared = tl.exp(clamp(mean, -limit, limit))
    loss_sum, policy_sum, tokens, ratio_sum, share, squares = zero, zero, zero, zero, zero, zero
    lows, highs, duals, k1, k3, entropies, kls, gaps, missings, weights, outs = (
        zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero,
    )  # fmt: skip
    least, most, top = zero + float("inf"), zero + float("-inf"), zero
    shared_grads, shared_kl_grads = zero, zero
    # Where all tokens share the gradient of the ratio there are two passes: for that gradient, then for each token.
    for pass_ in tl.static_range(2 if LEVEL == "sequence" and SHARED else 1):
        for c in range(tl.cdiv(width, BLOCK)):
            t = c * BLOCK + i
            at = start + t
            valid = t < width
            if PACKED:
                valid = valid & (at >= begin) & (at < end)
            here = valid if LEVEL == "sequence" else t < width
            inside = valid  # loads do not wait for the mask: what a masked token holds is selected away below
            if MASK:
                valid = valid & (tl.load(mask + at, mask=inside, other=0) != 0)
            if LEVEL == "sequence":
                row = program + t.to(tl.int64) * 0
            elif not ROWS:
                row = at * 0
            elif PACKED:
                row = tl.load(index + at, mask=inside, other=0)
            elif LONG_ROWS:
                row = first_row + (t >= edge)
            else:
                row = first_row + (offset.to(tl.int32) + t) // (T + tl.zeros((), tl.int32))
            logp = load_or_zero(logprob + at, inside, True)
            old_logp = load_or_zero(old + at, inside, True) if OLD else logp
            A = load_or_zero(advantages + (at if ADVANTAGE == "token" else row), inside, True)
            d = logp - old_logp
            log_ratio = clamp(d, -limit, limit)
            gap, unknown = d * 0.0, d != d
            if ROLLOUT:
                r = load_or_zero(rollout + at, inside, True)
                unknown = r != r
                gap = tl.where(valid & (r == r), old_logp - r, 0.0)
            w, out = correction_weight(
                gap, at, correction, outside, valid, correction_low, correction_high, CORRECTION, DROP
            )
            own = tl.exp(log_ratio)
            if LEVEL == "token":
                rho, moves = own, tl.abs(d) <= limit
            else:
                rho, moves = tl.where(valid, shared, 1.0), tl.abs(tl.where(valid, mean, 0.0)) <= limit
                if KIND == "gmpo":
                    _clipped, free = gmpo_clip(log_ratio, A, low_bound, high_bound)
                    moves = free & (tl.abs(d) <= limit)
                elif KIND == "vespo":
                    moves = d != d
            value, d_ratio, d_logprob, low, high, dual = surrogate(
                logp, old_logp, log_ratio, rho, A, low_bound, high_bound, dual_bound, tau_pos, tau_neg, k_pos, k_neg,
                lam_pos, lam_neg, cap, beta, KIND, DUAL,
            )  # fmt: skip
            omega = token_weight + d * 0.0
            if PER_SEQUENCE:
                omega = omega / tl.maximum(tl.load(counts + row, mask=valid, other=1), 1).to(tl.float32)
            plain: tl.constexpr = CORRECTION == "none" or KIND == "vespo"
            policy = value if plain else w * value
            scale = omega if plain else omega * w
            loss = omega * policy
            upstream = scale * d_ratio
            ratio_grad = tl.where(upstream != 0, upstream * rho, 0.0)
            kl, kl_weight, kl_ratio_grad = d * 0.0, omega * kl_coef, d * 0.0
            kl_ratio, kl_moves = rho, moves
            grad = scale * d_logprob
            if KL != "none":
                q = tl.where(valid, logp - load_or_zero(ref + at, inside, True), 0.0)
                kl, dkl = kl_estimate(q, kl_input_clamp, kl_clamp, KL, STRAIGHT_THROUGH)
                if IMPORTANCE == "own":
                    kl_ratio, kl_moves = own, tl.abs(d) <= limit
                if IMPORTANCE == "none":
                    loss += kl_weight * kl
                    grad += kl_weight * dkl
                else:
                    loss += kl_weight * kl_ratio * kl
                    grad += kl_weight * kl_ratio * dkl
                    kl_ratio_grad = tl.where(kl_weight * kl != 0, kl_weight * kl * kl_ratio, 0.0)
            if LEVEL == "sequence" and SHARED and pass_ == 0:
                shared_grads += tl.where(valid, ratio_grad, 0.0)
                shared_kl_grads += tl.where(valid, kl_ratio_grad, 0.0)
            else:
                if LEVEL == "sequence" and SHARED:
                    grad += tl.where(moves, shared_grad / count, 0.0)
                    if IMPORTANCE == "ratio":
                        grad += tl.where(moves, shared_kl_grad / count, 0.0)
                    elif IMPORTANCE == "own":
                        grad += tl.where(kl_moves, kl_ratio_grad, 0.0)
                else:
                    grad += tl.where(moves, ratio_grad, 0.0)
                    if IMPORTANCE != "none":
                        grad += tl.where(kl_moves, kl_ratio_grad, 0.0)
                h = load_or_zero(entropy + at, inside, ENTROPY)
                if ENTROPY:
                    entropy_omega = entropy_weight + d * 0.0
                    if ENTROPY_PER_SEQUENCE:
                        entropy_omega = entropy_omega / tl.maximum(tl.load(counts + row, mask=valid, other=1), 1).to(
                            tl.float32
                        )
                    bonus = -entropy_coef * entropy_omega
                    loss += bonus * h
                    if BONUS:
                        tl.store(dentropy + at, tl.where(valid, bonus, 0.0), mask=here)
                if GRAD:
                    tl.store(dlogprob + at, tl.where(valid, grad, 0.0), mask=here)

                loss_sum += tl.where(valid, loss, 0.0)
                policy_sum += tl.where(valid, omega * policy, 0.0)
                tokens += tl.where(valid, 1.0, 0.0)
                ratio_sum += tl.where(valid, rho, 0.0)
                least = tl.minimum(least, tl.where(valid, rho, float("inf")))
                most = tl.maximum(most, tl.where(valid, rho, float("-inf")))
                lows += tl.where(valid & low, 1.0, 0.0)
                highs += tl.where(valid & high, 1.0, 0.0)
                if DUAL or CAPPED:
                    duals += tl.where(valid & dual, 1.0, 0.0)
                k1 += tl.where(valid, -d, 0.0)
                if BOUNDED_RATIOS:
                    k3 += tl.where(valid, expm1_minus_x(log_ratio, own), 0.0)
                else:
                    x = clamp(d, -EXPONENT_LIMIT, EXPONENT_LIMIT)
                    k3 += tl.where(valid, expm1_minus_x(x, tl.exp(x)), 0.0)
                v = tl.where(valid, rho if plain else rho * w, 0.0)
                if BOUNDED_RATIOS and plain:
                    squares += v * v
                else:  # in units of the largest so far, lane by lane
                    new_top = tl.maximum(top, v)
                    unit = 1.0 / tl.where(new_top > 0, new_top, 1.0)
                    u, rescale = v * unit, top * unit
                    share = share * rescale + u
                    squares = squares * rescale * rescale + u * u
                    top = new_top
                if ENTROPY:
                    entropies += tl.where(valid, h, 0.0)
                if KL != "none":
                    kls += tl.where(valid, kl, 0.0)
                if ROLLOUT:
                    x = clamp(gap, -EXPONENT_LIMIT, EXPONENT_LIMIT)
                    gaps += tl.where(valid, expm1_minus_x(x, tl.exp(x)), 0.0)
                    missings += tl.where(valid & unknown, 1.0, 0.0)
                if CORRECTION != "none":
                    weights += tl.where(valid, w, 0.0)
                    outs += tl.where(valid & out, 1.0, 0.0)
        if LEVEL == "sequence" and SHARED and pass_ == 0:
            shared_grad, shared_kl_grad = tl.sum(shared_grads, 0), tl.sum(shared_kl_grads, 0)

    if BOUNDED_RATIOS and (CORRECTION == "none" or KIND == "vespo"):
        share, largest, rescale = ratio_sum, 1.0, zero + 1.0
    else:
        largest = tl.max(top, 0)
        rescale = top / tl.where(largest > 0, largest, 1.0)
    to = partial + first_program + program
    tl.store(to, tl.sum(loss_sum, 0))
    tl.store(to + P, tl.sum(policy_sum, 0))
    tl.store(to + 2 * P, tl.sum(tokens, 0))
    tl.store(to + 3 * P, tl.sum(ratio_sum, 0))
    tl.store(to + 4 * P, tl.min(least, 0))
    tl.store(to + 5 * P, tl.max(most, 0))
    tl.store(to + 6 * P, tl.sum(lows, 0))
    tl.store(to + 7 * P, tl.sum(highs, 0))
    tl.store(to + 8 * P, tl.sum(duals, 0))
    tl.store(to + 9 * P, tl.sum(k1, 0))
    tl.store(to + 10 * P, tl.sum(k3, 0))
    tl.store(to + 11 * P, largest)
    tl.store(to + 12 * P, tl.sum(share * rescale, 0))
    tl.store(to + 13 * P, tl.sum(squares * rescale * rescale, 0))
    tl.store(to + 14 * P, tl.sum(entropies, 0))
    tl.store(to + 15 * P, tl.sum(kls, 0))
    tl.store(to + 16 * P, tl.sum(gaps, 0))
    tl.store(to + 17 * P, tl.sum(missings, 0))
    tl.store(to + 18 * P, tl.sum(weights, 0))
    tl.store(to + 19 * P, tl.sum(outs, 0))


@triton.jit(do_not_specialize=["parts"])
def count_kernel(mask, counts, T, parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens in the loss of one part of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    n = tl.zeros([BLOCK], tl.int32)
    for c in range(PART // BLOCK):
        t = part.to(tl.int64) * PART + c * BLOCK + i
        n += (tl.load(mask + row * T + t, mask=t < T, other=0) != 0).to(tl.int32)
    tl.store(counts + row * parts + part, tl.sum(n, 0).to(tl.int64))


@triton.jit
def scale_kernel(upstream, gradient, out, N, BLOCK: tl.constexpr):
    """A gradient times the one that arrives, rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradient + i, mask=i < N, other=0.0).to(tl.float32) * tl.load(upstream).to(tl.float32)
    tl.store(out + i, stored_as(g, out.dtype.element_ty), mask=i < N)


@triton.jit(do_not_specialize=["sequences"])
def tokens_kernel(counts, out, sequences, SIZE: tl.constexpr):
    """Tokens in the loss, and sequences that have some; one program."""
    i = tl.arange(0, SIZE)
    tokens, filled = tl.zeros([SIZE], tl.int64), tl.zeros([SIZE], tl.int64)
    for c in range(tl.cdiv(sequences, SIZE)):
        n = tl.load(counts + c * SIZE + i, mask=c * SIZE + i < sequences, other=0)
        tokens += n
        filled += (n > 0).to(tl.int64)
    tl.store(out, tl.sum(tokens, 0))
    tl.store(out + 1, tl.sum(filled, 0))


@triton.jit(do_not_specialize=["P"])
def total_kernel(partial, loss, out, P, SIZE: tl.constexpr):
    """One statistic of the whole batch: partials in order, then over the tokens where it is a mean."""
    k = tl.program_id(0)
    i = tl.arange(0, SIZE)
    tokens, whole = 0.0, 0.0
    least, most = float("inf"), float("-inf")
    top = 0.0
    for c in range(tl.cdiv(P, SIZE)):
        there = c * SIZE + i < P
        at = partial + c * SIZE + i
        tokens += tl.sum(tl.load(at + TOKENS * P, mask=there, other=0.0), 0)
        if k == SHARE:
            top = tl.maximum(top, tl.max(tl.load(at + TOP * P, mask=there, other=0.0), 0))
        else:
            x = tl.load(at + k * P, mask=there, other=0.0)
            whole += tl.sum(x, 0)
            least = tl.minimum(least, tl.min(tl.where(there, x, float("inf")), 0))
            most = tl.maximum(most, tl.max(tl.where(there, x, float("-inf")), 0))
    n = tl.maximum(tokens, 1.0)
    if k == SHARE:
        # (sum v)^2 / (n sum v^2), every v over the largest of all.
        unit = tl.where(top > 0, top, 1.0)
        squares = 0.0
        for c in range(tl.cdiv(P, SIZE)):
            there = c * SIZE + i < P
            at = partial + c * SIZE + i
            part = tl.load(at + TOP * P, mask=there, other=0.0) / unit
            whole += tl.sum(tl.load(at + SHARE * P, mask=there, other=0.0) * part, 0)
            squares += tl.sum(tl.load(at + SQUARES * P, mask=there, other=0.0) * part * part, 0)
        result = tl.where(squares > 0, whole * whole / (n * tl.where(squares > 0, squares, 1.0)), 0.0)
    elif k == LEAST:
        result = tl.where(tokens > 0, least, 0.0)
    elif k == MOST:
        result = tl.where(tokens > 0, most, 0.0)
    elif (k == LOSS) | (k == POLICY) | (k == TOKENS):
        result = whole
    else:
        result = whole / n
    tl.store(out + k, result)
    if k == LOSS:
        tl.store(loss, result)
