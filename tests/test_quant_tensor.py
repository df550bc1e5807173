"""QuantTensor: taken apart and put together, saved, moved, repacked; layouts that are not known are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlkernel_core import tree
from rlkernel_core.errors import ArgumentError, LayoutError, UnknownNameError
from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor, pack, quantize, unpack, update_
from rlkernel_core.quant.nibbles import pack_high_first, pack_low_first, unpack_high_first, unpack_low_first
from rlkernel_torch.direct import prepack
from rlkernel_torch.direct import quantize as quantize_op

EVERY = [*FORMATS, QuantSpec.named("nf4", double_quant=True)]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("count", [1, 2, 7, 256])
@pytest.mark.parametrize(("there", "back"), [(pack_low_first, unpack_low_first), (pack_high_first, unpack_high_first)])
def test_unpacking_nibbles_undoes_packing(there, back, count) -> None:
    codes = torch.randint(0, 16, (3, count), dtype=torch.uint8)
    assert torch.equal(codes, back(there(codes), count))


def test_the_two_nibble_orders_differ() -> None:
    codes = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert pack_low_first(codes).tolist() == [[0x21, 0x03]]
    assert pack_high_first(codes).tolist() == [[0x12, 0x30]]


def test_tiles_are_contiguous_rows_by_bytes() -> None:
    w = quantize(normal(32, 256), "int4_g128")  # 128 bytes a row: two by two tiles
    tiles = pack(w).parts["codes"]
    assert tiles.shape == (2, 2, 16, 64)
    assert torch.equal(w.parts["codes"][16:, 64:], tiles[1, 1])
    assert tiles.data_ptr() != w.parts["codes"].data_ptr()


def test_prepacking_twice_changes_nothing() -> None:
    w = quantize(normal(20, 20), "nf4")
    packed = prepack(w)
    assert prepack(packed) is packed
    assert prepack(w, layout="canonical") is w


def test_a_flat_format_with_odd_rows_is_not_tiled() -> None:
    with pytest.raises(ArgumentError, match="odd K = 7"):
        prepack(quantize(normal(4, 7), "nf4"))


def test_the_layout_of_another_backend_is_neither_written_to_nor_unpacked() -> None:
    foreign = dataclasses.replace(quantize(normal(16, 64), "int4_g64"), layout="acme_swizzled")
    for call in (
        lambda: quantize_op(normal(16, 64), "int4_g64", out=foreign),
        lambda: update_(foreign, normal(16, 64)),
        lambda: unpack(foreign),
    ):
        with pytest.raises(LayoutError, match="acme_swizzled"):
            call()


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_flatten_and_unflatten(spec) -> None:
    w = quantize(normal(10, 40), spec)
    tensors, meta = w.flatten()
    assert hash(meta) == hash(w.flatten()[1])
    again = QuantTensor.unflatten(tensors, meta)
    assert w.same_bits(again)
    assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in again.parts.values()]


def test_nested_arguments_may_hold_one() -> None:
    w = quantize(normal(4, 8), "int4_g32_asym")
    leaves, structure = tree.flatten({"w": w})
    assert {"w.parts.codes", "w.parts.scale", "w.parts.zero"} <= set(structure.names())
    assert w.same_bits(structure.build(leaves)["w"])


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_state_dict_round_trip(spec) -> None:
    w = quantize(normal(10, 40), spec, dtype=torch.bfloat16)
    state = w.state_dict("layer.")
    assert all(isinstance(t, torch.Tensor) for t in state.values())
    again = QuantTensor.from_state_dict(state, "layer.")
    assert w.same_bits(again)
    assert (again.dtype, again.spec) == (torch.bfloat16, w.spec)
    packed = prepack(w)
    assert QuantTensor.from_state_dict(packed.state_dict()).same_bits(packed)


def test_a_damaged_state_is_refused() -> None:
    state = quantize(normal(10, 40), "int4_g32").state_dict()
    with pytest.raises(ArgumentError, match="has no 'x.quant_meta'"):
        QuantTensor.from_state_dict(state, "x.")
    with pytest.raises(ArgumentError, match="lacks scale"):
        QuantTensor.from_state_dict({k: v for k, v in state.items() if k != "scale"})
    with pytest.raises(ArgumentError, match=r"parts\['scale'\]: int4_g32 of \(10, 40\) needs"):
        QuantTensor.from_state_dict({**state, "scale": state["scale"].float()})
    unknown = bytes(state["quant_meta"].tolist()).replace(b'"format": "int4_g32"', b'"format": "int4_g33"')
    with pytest.raises(UnknownNameError, match="did you mean 'int4_g32'"):
        QuantTensor.from_state_dict({**state, "quant_meta": torch.tensor(list(unknown), dtype=torch.uint8)})


def test_moving_to_where_it_is_returns_itself() -> None:
    w = quantize(normal(4, 8), "nf4")
    assert w.to("cpu") is w
    moved = w.to("meta")
    assert (moved.device.type, moved.shape, moved.nbytes) == ("meta", (4, 8), w.nbytes)


def test_same_bits_sees_every_difference() -> None:
    w = quantize(normal(4, 8), "int8_channel")
    w.parts["scale"][0] = torch.nan
    assert w.same_bits(QuantTensor.from_state_dict(w.state_dict()))
    for other in (
        quantize(normal(4, 8), "int8_w8a8"),
        quantize(normal(4, 8), "int8_channel"),
        quantize(normal(4, 8), "int8_channel", dtype=torch.float16),
        prepack(w),
    ):
        assert not w.same_bits(other)


# bytes for 4096 x 4096, as the documentation states them
@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("int4_g128", 4 + 16 / 128),
        ("int4_g32", 4 + 16 / 32),
        ("int4_g128_asym", 4 + 24 / 128),
        ("int4_channel", 4 + 16 / 4096),
        ("nf4", 4 + 32 / 64),
        (QuantSpec.named("nf4", double_quant=True), 4 + 8 / 64 + 32 / (64 * 256)),
        ("int8_channel", 8 + 32 / 4096),
        ("fp8_tensor", 8),
        ("fp8_block128", 8 + 32 / 128**2),
    ],
    ids=str,
)
def test_bytes_per_weight(spec, bits) -> None:
    w = quantize(torch.empty(4096, 4096, device="meta"), spec)
    assert abs(w.nbytes * 8 / 4096**2 - bits) < 1e-3


def test_specs_say_what_differs_from_their_format() -> None:
    spec = QuantSpec.named("fp8_channel", element="e5m2", act="token_fp8")
    assert str(spec) == "fp8_channel[element=e5m2,act=token_fp8]"
    assert spec.features("element") == {"format:fp8_channel", "element:e5m2"}
    assert QuantSpec.named("nf4", double_quant=True).features("double_quant") == {"format:nf4", "double_quant"}
    assert hash(QuantSpec.named("nf4")) == hash(QuantSpec.named("nf4"))


def test_a_weight_prints_what_it_is() -> None:
    w = quantize(normal(16, 64), "int4_g64")
    assert repr(w) == "QuantTensor(int4_g64, [16, 64], 544 bytes on cpu)"
    assert "layout=reference_tiled" in repr(prepack(w))
