"""Random numbers that belong to a token of a request: Philox4x32-10 as `rlkernel_core.spec.sampling` defines it.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

The Gumbel maximum as an exponential race: with E = -ln(1 - u) the token of weight w with the least time E / w is the
one with the largest y + g, since y + g = -ln(E / w). `exponential_bound` bounds E from below by a few products, so that
the least time is nearly known without a logarithm a token: take E itself of the token with the least bound, and then
look only at tokens whose bound is not above that time. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton

TWO_32: tl.constexpr = tl.constexpr(2.0**-32)
# Above every rounding of `exponential_bound`, of a weight and of y: 23 nats below the best, y is off by 6e-6 at most.
BOUND_SLACK: tl.constexpr = tl.constexpr(1.0 + 2.0**-14)


@triton.jit
def uniform(words):
    """u = (word + 1/2) / 2^32, rounded."""
    return tl.fma(words.to(tl.float32), TWO_32, 0.5 * TWO_32)


@triton.jit
def exponential(words):
    """-ln(1 - u) with u = (word + 1/2) / 2^32, to a few ulp: log1p through the logarithm of a rounded 1 - u."""
    low = words < 0x80000000
    u = uniform(words)
    far = uniform(words ^ 0xFFFFFFFF)
    f = tl.where(low, 1.0 - u, far)
    return tl.where(low, ((f - 1.0) + u) / f, 0.0) - tl.log(f)


@triton.jit
def exponential_bound(u):
    """At most -ln(1 - u), and near it: the first terms of its series."""
    return u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))


@triton.jit
def _philox(seed, step, block, stream):
    """Four random words of blocks of four ids. What does not depend on the block stays scalar for as long as it can."""
    c0 = block
    c1 = (step & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = stream.to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        # One wide multiplication gives both halves.
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def philox_words(seed, step, block, stream):
    """[..., 4] words of blocks [...] of four ids, in the order of the ids."""
    a, b, c, d = _philox(seed, step, block.to(tl.uint32), stream)
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, block.shape + [4])  # noqa: RUF005 the compiler knows no star


@triton.jit
def arrival_bounds(y, seed, step, block, stream):
    """[L, W] lower bounds of the times E * 2 ** -y of L x W tokens. block: [L, W / 4], of four ids each."""
    return exponential_bound(uniform(tl.reshape(philox_words(seed, step, block, stream), y.shape))) * tl.exp2(-y)


@triton.jit
def exponential_noise(seed, step, ids, stream):
    """E of any ids of one request."""
    a, b, c, d = _philox(seed, step, (ids >> 2).to(tl.uint32), stream)
    j = ids & 3
    word = tl.where(j == 0, a, tl.where(j == 1, b, tl.where(j == 2, c, d)))
    return exponential(word)


@triton.jit
def gumbel_noise(seed, step, ids, stream):
    """fp32 noise of any ids of one request."""
    return -tl.log(exponential_noise(seed, step, ids, stream))
