"""Random words that belong to a token of a request, not to a row of a batch: Philox4x32-10 in torch integers.

    key = (seed low, seed high), counter = (id div 4, step low, step high, stream), word = id mod 4

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. All products are formed in
16-bit halves, so nothing overflows int64 and the bits are the same on every device.

From a word w in [0, 2^32) to noise, in float64: u = (w + 1/2) / 2^32 and 1 - u are exact and never 0 or 1,
E = -ln(1 - u) lies in [1.1e-10, 22.9], g = -ln E in [-3.2, 22.9]. In fp32 both ends keep their relative precision:

    w < 2^31:  E = -log1p(-fp32(u))        else:  E = -log(fp32(1 - u))

An implementation that evaluates either form to a few ulp draws the same token unless the two best scores y + g are
closer than their rounding (the `score` tolerance). Fewer random bits are not enough: 24-bit noise loses 44 % of the
mass of tokens 18 nats below the best.

Legend: N rows · n ids. Imports nothing but torch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1
ROUNDS: Final = 10
MASK: Final = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words from a counter of four words and a key of two, all int64 tensors in [0, 2^32)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def range_words(seed: Tensor, step: Tensor, low: int, high: int, stream: int) -> Tensor:
    """[N, high - low] int64: the words of the ids in [low, high); seed and step are [N] int64."""
    block = torch.arange(low // 4, (high + 3) // 4, device=seed.device)
    words = torch.stack(_block(seed[:, None], step[:, None], block, stream), -1)
    return words.flatten(-2)[:, low % 4 : low % 4 + high - low]


def token_words(seed: Tensor, step: Tensor, ids: Tensor, stream: int) -> Tensor:
    """[n] int64: the word of one id in [0, 2^34) per entry; all of seed, step, ids are [n] int64."""
    words = torch.stack(_block(seed, step, ids >> 2, stream), -1)
    return words.gather(-1, (ids & 3)[:, None])[:, 0]


def uniform(words: Tensor) -> Tensor:
    """(w + 1/2) / 2^32, exact in float64, in the open interval (0, 1)."""
    return (words.double() + 0.5) * 2.0**-32


def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise -ln(-ln(1 - u)) in float64 or, by the form that keeps relative precision, in fp32."""
    u = uniform(words)
    if dtype == torch.float64:
        return -torch.log(-torch.log1p(-u))
    small = -torch.log1p(-u.to(dtype))
    large = -torch.log((1 - u).to(dtype))
    return -torch.log(torch.where(words < 2**31, small, large))


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product of two words."""
    lower, upper = (b & 0xFFFF) * a, (b >> 16) * a  # each below 2^48
    return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & MASK


def _block(seed: Tensor, step: Tensor, block: Tensor, stream: int) -> tuple[Tensor, ...]:
    """The four words of a block of four ids; the arguments broadcast."""
    low, high, block = step & MASK, (step >> 32) & MASK, block & MASK
    return philox4x32((block, low, high, torch.full_like(low, stream)), (seed & MASK, (seed >> 32) & MASK))
