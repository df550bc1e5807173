"""The noise contract: Philox words of a token of a request, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel_common import philox
from rlkernel_core.definitions import sampling as oracle

# Known answers of philox4x32_10 published with Random123: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# Words at both ends of the range, found by search over the steps of seed 1, stream 0: (step, id, word).
EXTREMES = [(1105669362, 3, 0), (1546927590, 1, 0), (2249695892, 3, 2**32 - 1), (2919165377, 1, 2**32 - 1)]
SEEDS, STEPS = (0, 1, 2**62, -1, -(2**63)), (0, 7, 2**32 - 1, 2**32, -5)


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter, key, words) -> None:
    one = [torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key]
    assert [int(w) for w in philox.philox4x32(tuple(one[0]), tuple(one[1]))] == list(words)


@pytest.mark.parametrize("stream", [0, 1, 3, 2**32 - 1])
@pytest.mark.parametrize("V", [1, 3, 4, 37])
def test_words_are_those_of_the_contract_bit_for_bit(V, stream) -> None:
    words = philox.range_words(torch.tensor(SEEDS), torch.tensor(STEPS), 0, V, stream)
    expected = [oracle.words(s, t, V, stream).astype(np.int64) for s, t in zip(SEEDS, STEPS, strict=True)]
    assert words.tolist() == np.stack(expected).tolist()


@pytest.mark.parametrize("low, high", [(0, 1), (1, 2), (3, 9), (4, 8), (5, 37), (36, 37)])
def test_a_range_is_a_slice_of_the_vocabulary(low, high) -> None:
    seeds, steps = torch.tensor(SEEDS), torch.tensor(STEPS)
    whole = philox.range_words(seeds, steps, 0, 37, 0)
    assert torch.equal(whole[:, low:high], philox.range_words(seeds, steps, low, high, 0))


def test_the_word_of_one_token_is_that_of_the_range() -> None:
    seeds, steps, ids = torch.tensor(SEEDS), torch.tensor(STEPS), torch.tensor([0, 36, 5, 2, 11])
    whole = philox.range_words(seeds, steps, 0, 37, 2)
    assert torch.equal(whole.gather(1, ids[:, None])[:, 0], philox.token_words(seeds, steps, ids, 2))


@pytest.mark.parametrize("step, token, word", EXTREMES)
def test_extreme_words_are_reached(step, token, word) -> None:
    assert philox.token_words(torch.tensor([1]), torch.tensor([step]), torch.tensor([token]), 0).tolist() == [word]


def test_uniforms_are_exact_midpoints_inside_the_unit_interval() -> None:
    u = philox.uniform(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert u.tolist() == [2.0**-33, 3 * 2.0**-33, 0.5 + 2.0**-33, 1 - 2.0**-33]
    assert (1 - u).tolist()[3] == 2.0**-33


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_and_bounded_for_every_word(dtype) -> None:
    g = philox.gumbel(torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1]), dtype)
    assert torch.isfinite(g).all()
    assert (float(g.max()), float(g.min())) == (pytest.approx(22.8739, abs=1e-3), pytest.approx(-3.1300, abs=1e-3))


def test_noise_is_that_of_the_oracle() -> None:
    g = philox.gumbel(philox.range_words(torch.tensor([5]), torch.tensor([9]), 0, 4096, 0), torch.float64)
    torch.testing.assert_close(g[0], torch.from_numpy(oracle.gumbel(oracle.words(5, 9, 4096))), rtol=1e-14, atol=1e-14)


def test_fp32_noise_keeps_its_precision_at_both_ends() -> None:
    ends = torch.cat((torch.arange(4096), 2**31 + torch.arange(-2048, 2048), 2**32 - 1 - torch.arange(4096)))
    exact, single = philox.gumbel(ends, torch.float64), philox.gumbel(ends, torch.float32)
    assert float((single.double() - exact).abs().max()) < 2e-6


@pytest.mark.parametrize("gap", [5, 10, 14, 16, 18, 20, 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tail_of_the_noise_has_its_exact_mass(gap, dtype) -> None:
    """P(g > t) = 1 - exp(-exp(-t)) to one word in 2^32: noise of 24 bits has no mass at all above 17 nats."""
    expected = -np.expm1(-np.exp(-float(gap))) * 2**32
    near = torch.arange(max(0, int(expected) - 700), int(expected) + 700)
    above = philox.gumbel(near, dtype) > gap
    assert abs(int(near[0]) + int(above.sum()) - expected) <= (1 if dtype == torch.float64 else 1 + 4e-7 * expected)


def test_bits_are_balanced_and_independent_of_seed_step_and_stream() -> None:
    n = 1 << 14
    zero = torch.zeros(n, dtype=torch.int64)
    count = torch.arange(n)
    families = [
        philox.range_words(zero[:1], zero[:1], 0, n, 0)[0],
        philox.token_words(count, zero, zero, 0),
        philox.token_words(zero, count, zero, 0),
        philox.range_words(zero[:1], zero[:1], 0, n, 1)[0],
    ]
    bits = torch.stack([(w[:, None] >> torch.arange(32)) & 1 for w in families]).double() * 2 - 1  # [4, n, 32]
    limit = 6 * n**0.5  # six standard deviations; 128 sums and 6 * 32 products: false alarm below 1e-6
    assert float(bits.sum(1).abs().max()) < limit
    products = torch.stack([bits[i] * bits[j] for i in range(4) for j in range(i)])
    assert float(products.sum(1)[:, :].abs().max()) < limit
