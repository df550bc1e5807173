"""Formats of weights as codes of a KV cache: a row is a head vector, and tokens are written one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rlkernel as rlk

PAGES, G, HEADS, D = 3, 4, 2, 64
PLACES = [(2, 0), (2, 1), (2, 2), (2, 3), (0, 0)]  # page and row of each token
# Formats that docs/quantization.md lists, and what it says each loses of normal numbers with 64 columns a scale, or 32.
FORMATS = {
    "int4_channel": 0.103,
    "int4_channel_asym": 0.0911,
    "int4_g32_asym": 0.0809,
    "hqq4": 0.0898,
    "q4l": 0.103,
    "mxfp4": 0.115,
    "gguf_q4_0": 0.086,
    "int8_channel": 0.0062,
    "fp8_channel": 0.0265,
    "mxfp8": 0.0293,
    "gguf_q8_0": 0.00535,
}


def vectors(seed: int) -> Tensor:
    return torch.randn(len(PLACES), HEADS, D, generator=torch.Generator().manual_seed(seed))


def written(tokens: Tensor, name: str) -> rlk.QuantTensor:
    """A cache into which the tokens were written one by one."""
    cache = rlk.quantize(torch.zeros(PAGES * G * HEADS, D), name)
    for token, (page, place) in zip(tokens, PLACES, strict=True):
        first = (page * G + place) * HEADS
        for part, codes in rlk.quantize(token, cache.spec).parts.items():
            cache.parts[part][first : first + HEADS] = codes
    return cache


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_at_a_time_has_the_bits_of_the_cache_at_once(name) -> None:
    tokens, whole = vectors(0), torch.zeros(PAGES, G, HEADS, D)
    for token, (page, place) in zip(tokens, PLACES, strict=True):
        whole[page, place] = token
    assert written(tokens, name).same_bits(rlk.quantize(whole.flatten(0, 2), name))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_within_the_error_of_the_format_and_other_pages_are_untouched(name) -> None:
    tokens = vectors(1)
    read = rlk.dequantize(written(tokens, name)).view(PAGES, G, HEADS, D)
    found = torch.stack([read[page, place] for page, place in PLACES])
    assert float((found - tokens).norm() / tokens.norm()) < 1.2 * FORMATS[name]
    assert not read[1].any()
    assert not read[0, 1:].any()


@pytest.mark.parametrize("name", ["int4_channel_asym", "int8_channel"])
def test_attention_reads_the_decoded_pages(name) -> None:
    k, v, q = vectors(2), vectors(3), torch.randn(1, 4, D, generator=torch.Generator().manual_seed(4))
    pages = [rlk.dequantize(written(x, name)).view(PAGES, G, HEADS, D) for x in (k, v)]
    options = {"cu_q": torch.tensor([0, 1], dtype=torch.int32), "seqused_k": torch.tensor([5], dtype=torch.int32)}
    found = rlk.attention(q, *pages, page_table=torch.tensor([[2, 0]], dtype=torch.int32), **options).out
    rows = [torch.stack([x[page, place] for page, place in PLACES]) for x in pages]
    cu_k = torch.tensor([0, 5], dtype=torch.int32)
    assert torch.equal(found, rlk.attention(q, *rows, cu_q=options["cu_q"], cu_k=cu_k).out)
    exact = rlk.attention(q, k, v, cu_q=options["cu_q"], cu_k=cu_k).out
    assert float((found - exact).norm() / exact.norm()) < 2 * FORMATS[name]


def test_a_rotation_spreads_large_channels_and_keeps_scores() -> None:
    g = torch.Generator().manual_seed(5)
    k, q = torch.randn(256, D, generator=g), torch.randn(D, generator=g)
    k[:, 5] *= 20
    rotation = torch.ones(1, 1)
    while len(rotation) < D:
        rotation = torch.cat([torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)])
    rotation = rotation * torch.where(torch.rand(D, generator=g) < 0.5, -1.0, 1.0) / math.sqrt(D)
    torch.testing.assert_close((k @ rotation.t()) @ (rotation @ q), k @ q, rtol=1e-4, atol=1e-3)

    def error(x: Tensor) -> float:
        return float((rlk.dequantize(rlk.quantize(x, "int4_channel")) - x).norm() / x.norm())

    assert error(k @ rotation.t()) < 0.5 * error(k)
