"""Deltas of weights: the newer version's bits in every dtype and format, or an error and nothing written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rlkernel as rlk
from rlkernel import nn
from rlkernel_conformance.quantized_weights import SPECS
from rlkernel_core.quant import QuantTensor, pack, quantize

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.int8, torch.int64, torch.bool),
)  # fmt: skip
SHARES = (0.0, 0.001, 0.03, 0.5, 1.0)  # of elements that change


def raw(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def bits(weight: Tensor | QuantTensor) -> list[bytes]:
    tensors = weight.parts.values() if isinstance(weight, QuantTensor) else [weight]
    return [raw(x).numpy().tobytes() for x in tensors]


def versions(shape, dtype, share, seed):
    """Random bits, NaN among them, and the same with some elements changed."""
    g = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    most = 2 if dtype == torch.bool else 256

    def drawn():
        return torch.randint(0, most, (*shape, size), generator=g, dtype=torch.uint8)

    old, other = drawn(), drawn()
    new = torch.where(torch.rand(*shape, 1, generator=g) < share, other, old)
    return tuple(x.view(dtype).view(shape) for x in (old, new))


def copy(w: QuantTensor) -> QuantTensor:
    return QuantTensor(w.spec, w.shape, w.dtype, {n: p.clone() for n, p in w.parts.items()}, w.layout)


@given(
    st.sampled_from([(), (1,), (7, 9), (3, 0), (70_000,), (2, 65_536)]), st.sampled_from(DTYPES),
    st.sampled_from(SHARES), st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_dense_weight_gets_the_bits_of_the_newer_version(shape, dtype, share, seed) -> None:
    old, new = versions(shape, dtype, share, seed)
    delta, expected, address = nn.weight_delta(old, new), bits(new), old.data_ptr()
    nn.apply_delta_(old, delta)
    assert (expected, address) == (bits(old), old.data_ptr())
    assert delta.numel() <= new.nbytes + 80


@pytest.mark.parametrize("kind", SPECS)
def test_a_packed_weight_gets_the_bits_of_the_newer_version(kind) -> None:
    g = torch.Generator().manual_seed(3)
    first = torch.randn(16, 256, generator=g)
    second = first + (torch.rand(16, 256, generator=g) < 0.05) * 0.3
    old, new = quantize(first, SPECS[kind]), quantize(second, SPECS[kind])
    kept = {name: part.data_ptr() for name, part in old.parts.items()}
    nn.apply_delta_(old, nn.weight_delta(old, new))
    assert old.same_bits(new)
    assert kept == {name: part.data_ptr() for name, part in old.parts.items()}


def test_a_weight_of_another_layout_and_strided_ones_take_deltas() -> None:
    first, second = torch.randn(64, 256), torch.randn(64, 256)
    old, new = (pack(quantize(x, "int4_g64")) for x in (first, second))
    nn.apply_delta_(old, nn.weight_delta(old, new))
    assert old.same_bits(new)
    wide = torch.nn.Parameter(torch.randn(8, 12).t())
    new = torch.randn(12, 8)
    nn.apply_delta_(wide, nn.weight_delta(wide, new))
    assert bits(wide) == bits(new)


def small():
    old, new = versions((20, 10), torch.bfloat16, 0.1, 5)
    return old, new, nn.weight_delta(old, new)


@given(st.data())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_any_changed_byte_of_a_delta_is_found_and_nothing_is_written(data) -> None:
    old, _, delta = small()
    at, flip = data.draw(st.integers(0, len(delta) - 1)), data.draw(st.integers(1, 255))
    delta[at] ^= flip
    before = bits(old)
    with pytest.raises(rlk.ArgumentError, match="delta"):
        nn.apply_delta_(old, delta)
    assert before == bits(old)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_changed_byte_of_the_base_is_found_and_nothing_is_written(data) -> None:
    packed = data.draw(st.booleans())
    if packed:
        weight, other = (
            quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(i)), "nf4") for i in (1, 2)
        )
        delta, parts = nn.weight_delta(weight, other), list(weight.parts.values())
    else:
        weight, _, delta = small()
        parts = [weight]
    part = raw(data.draw(st.sampled_from(parts)))
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    before = bits(weight)
    with pytest.raises(rlk.ArgumentError, match=r"weight: is not the version"):
        nn.apply_delta_(weight, delta)
    assert before == bits(weight)


@pytest.mark.parametrize("cut", [1, 8, 56, 72])
def test_a_delta_that_is_cut_short_or_too_long_is_found(cut) -> None:
    old, _, delta = small()
    for damaged in (delta[:-cut], torch.cat([delta, delta[:cut]]), delta[:cut]):
        with pytest.raises(rlk.ArgumentError, match="damaged"):
            nn.apply_delta_(old, damaged)


def test_a_delta_is_applied_once_and_in_order() -> None:
    old, new, delta = small()
    nn.apply_delta_(old, delta)
    with pytest.raises(rlk.ArgumentError, match="newer version already"):
        nn.apply_delta_(old, delta)
    assert bits(old) == bits(new)


@pytest.mark.parametrize("other", [torch.zeros(10, 20).bfloat16(), torch.zeros(20, 10).half(), torch.zeros(200)])
def test_a_weight_of_another_form_is_refused(other) -> None:
    old, _, delta = small()
    with pytest.raises(rlk.ArgumentError, match="another form"):
        nn.apply_delta_(other, delta)
    with pytest.raises(rlk.ArgumentError, match="must be as old"):
        nn.weight_delta(old, other)


@pytest.mark.parametrize(
    "weight", [torch.zeros(1, 4).expand(3, 4), torch.zeros(6).as_strided((3, 4), (1, 1))], ids=["expanded", "windows"]
)
def test_a_weight_whose_elements_share_memory_is_refused(weight) -> None:
    with pytest.raises(rlk.ArgumentError, match="share memory"):
        nn.apply_delta_(weight, nn.weight_delta(torch.zeros(3, 4), torch.randn(3, 4)))


def test_a_column_a_row_and_every_other_element_of_a_weight_take_deltas() -> None:
    for part in (lambda x: x[:, 2], lambda x: x[1], lambda x: x[:, None, ::2], lambda x: x[:0]):
        whole, new = torch.zeros(4, 6), torch.randn(4, 6)
        nn.apply_delta_(part(whole), nn.weight_delta(part(whole).clone(), part(new).clone()))
        expected = torch.zeros(4, 6)
        part(expected).copy_(part(new))
        assert torch.equal(expected, whole)


def test_packed_weights_of_two_formats_are_refused() -> None:
    w = torch.randn(4, 64)
    with pytest.raises(rlk.ArgumentError, match="must be as old"):
        nn.weight_delta(quantize(w, "int4_g64"), quantize(w, "int4_g32"))


@pytest.mark.parametrize("wrong", [torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8), b"RLDELTA1"])
def test_what_is_no_delta_is_refused_by_its_type(wrong) -> None:
    with pytest.raises(rlk.ArgumentTypeError, match=r"delta: must be a uint8 tensor"):
        nn.apply_delta_(torch.zeros(3), wrong)


def test_a_changed_element_costs_two_bytes_more_than_itself() -> None:
    old = torch.randn(1 << 20).bfloat16()
    new = old.clone()
    raw(new).view(torch.int16)[::50] += 1
    changed = -(-len(old) // 50)
    assert nn.weight_delta(old, new).numel() == 8 * 8 + 4 * 16 + 8 * -(-2 * changed // 8) * 2
    assert nn.weight_delta(old, old).numel() == 8 * 8 + 4 * 16
