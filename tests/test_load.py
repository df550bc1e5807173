"""Models filled from files one weight at a time: the same bits, a bounded peak, sizes told before."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

import rlkernel as rlk
from rlkernel import checkpoints, nn
from rlkernel.checkpoints.footprint import WORKSPACE, Footprint, footprint
from rlkernel_core.errors import ArgumentError, MemoryBudgetError, UnknownNameError
from rlkernel_core.host.memory import Memory
from tests.command_line import answer

GIB = 1 << 30
POLICY = nn.QuantPolicy("int4_g32")


class Model(torch.nn.Module):
    def __init__(self, layers=2, width=64, *, tied=False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=i == 0) for i in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.lm_head = torch.nn.Linear(width, 32, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x))


IDS = torch.arange(6).view(2, 3)


@pytest.fixture
def dense(tmp_path):
    torch.manual_seed(0)
    model = Model()
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    return model, tmp_path / "dense.safetensors"


def empty(**how) -> Model:
    with torch.device("meta"):
        return Model(**how)


def test_a_model_is_filled_as_if_it_had_been_quantized_whole(dense) -> None:
    model, path = dense
    filled = empty()
    report = nn.load_quantized(filled, path, POLICY)
    assert report.formats == nn.quantize_model(model, POLICY) == {"blocks.0": "int4_g32", "blocks.1": "int4_g32"}
    assert all(
        torch.equal(t, other)
        for t, other in zip(model.state_dict().values(), filled.state_dict().values(), strict=True)
    )
    assert torch.equal(model(IDS), filled(IDS))
    assert report.bytes == sum(t.nbytes for n, t in model.state_dict().items() if not n.endswith("quant_meta"))


def test_weights_are_four_bit_where_no_policy_is_named(tmp_path) -> None:
    model, filled = Model(width=128), empty(width=128)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    report = nn.load_quantized(filled, tmp_path / "dense.safetensors")
    assert report.formats == nn.quantize_model(model) == {"blocks.0": "int4_g128", "blocks.1": "int4_g128"}


def test_adapters_and_prepacked_layouts_are_made_on_the_way(dense) -> None:
    filled = empty()
    nn.load_quantized(filled, dense[1], nn.QuantPolicy("int4_g32", lora_rank=4, prepack=True))
    assert {n for n, p in filled.named_parameters() if p.requires_grad} == {
        f"blocks.{i}.lora_{x}" for i in (0, 1) for x in "AB"
    }
    assert (
        filled.blocks[0].weight.layout
        == rlk.prepack(rlk.quantize(dense[0].blocks[0].weight.detach(), "int4_g32")).layout
    )


def test_a_head_that_shares_its_weight_is_filled_once_and_stays_tied(tmp_path) -> None:
    model = Model(tied=True)
    save_file({n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}, tmp_path / "tied.safetensors")
    filled = empty(tied=True)
    nn.load_quantized(filled, tmp_path / "tied.safetensors", nn.QuantPolicy("int4_g32", skip=()))
    assert torch.equal(filled.lm_head.weight, model.embed.weight)
    assert filled.lm_head.weight.data_ptr() == filled.embed.weight.data_ptr()


def test_weights_that_are_quantized_already_stay_bit_for_bit(dense, tmp_path) -> None:
    checkpoints.convert(dense[1], tmp_path / "own.safetensors", format="int4_g64", skip=("embed*", "lm_head*", "norm*"))
    filled = empty()
    assert set(nn.load_quantized(filled, tmp_path / "own.safetensors", "nf4").formats.values()) == {"int4_g64"}
    assert filled.blocks[1].weight.same_bits(rlk.quantize(dense[0].blocks[1].weight.detach(), "int4_g64"))


def test_shards_are_one_checkpoint_and_every_tensor_is_placed(dense, tmp_path) -> None:
    state, seen = dense[0].state_dict(), []
    names = list(state)
    save_file({n: state[n] for n in names[:3]}, tmp_path / "1.safetensors")
    save_file({n: state[n] for n in names[3:]}, tmp_path / "2.safetensors")
    filled = empty()
    shards = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    nn.load_quantized(filled, shards, POLICY, place=lambda t: seen.append(t.shape) or t)
    assert len(seen) == len(names)
    assert filled(IDS).shape == (2, 3, 32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"blocks.7.weight": torch.zeros(64, 64)}, UnknownNameError, r"blocks\.7\.weight"),
        ({"blocks.1.weight": torch.zeros(64, 65)}, ArgumentError, r"must be \[64, 64\]"),
        ({"norm.bias": None}, ArgumentError, r"lacks norm\.bias"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused_before_anything_is_loaded(
    dense, tmp_path, change, error, message
) -> None:
    state = {n: t for n, t in (dense[0].state_dict() | change).items() if t is not None}
    save_file(state, tmp_path / "other.safetensors")
    filled = empty()
    with pytest.raises(error, match=message):
        nn.load_quantized(filled, tmp_path / "other.safetensors", POLICY)
    assert {t.device.type for t in filled.state_dict().values()} == {"meta"}


def test_a_quantized_weight_that_is_no_linear_of_the_model_is_refused(dense, tmp_path) -> None:
    checkpoints.convert(dense[1], tmp_path / "own.safetensors", format="int4_g32", skip=("lm_head*", "norm*"))
    with pytest.raises(ArgumentError, match="embed.*is quantized, and no Linear"):
        nn.load_quantized(empty(), tmp_path / "own.safetensors", POLICY)


def peak(run, mapped: int) -> int:
    """Most bytes that torch has allocated at a time while `run` runs, without the file's mapping, which it counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()
    live = most = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(mapped - abs(event.nbytes())) > 1 << 16:
            live += event.nbytes()
            most = max(most, live)
    del kept
    return most


def test_the_peak_is_what_stays_and_one_layer_whatever_the_depth(tmp_path) -> None:
    """A model of eight layers of 4 MiB; quantized whole it would be there twice, read whole once more."""
    over = {}
    for layers in (2, 8):
        path = tmp_path / f"{layers}.safetensors"
        save_file(Model(layers, 1024).state_dict(), path)
        told = footprint(path, format="int4_g32")
        filled = empty(layers=layers, width=1024)
        policy = nn.QuantPolicy("int4_g32", prepack=True)
        most = peak(lambda m=filled, p=path, how=policy: nn.load_quantized(m, p, how), path.stat().st_size)
        packed = sum(part.nbytes for block in filled.blocks for part in block.weight.parts.values())
        over[layers] = most - packed
        assert most <= told.peak
    assert over[8] < 3 * 4 * 1024**2  # of 32 MiB of dense layers
    assert abs(over[8] - over[2]) < 1024**2


def test_the_footprint_is_what_loading_places(dense, tmp_path) -> None:
    told = footprint(dense[1], format="int4_g32", skip=("embed*", "lm_head*", "norm*"), lora_rank=4, train=True)
    assert told.total - told.parts["LoRA of rank 4"] - told.parts["its gradients and Adam moments"] == (
        nn.load_quantized(empty(), dense[1], POLICY).bytes
    )
    assert told.parts["LoRA of rank 4"] == 2 * 4 * (64 + 64) * 2
    assert told.parts["its gradients and Adam moments"] == 2 * 4 * (64 + 64) * 12
    assert told.passing - WORKSPACE == 64 * 64 * 4 + told.parts["weights in int4_g32"] // 2
    assert footprint(dense[1]).parts == {"dense weights": sum(t.nbytes for t in dense[0].state_dict().values())}


def test_a_footprint_that_would_swap_is_refused_and_names_its_largest_part() -> None:
    plan = Footprint({"weights in int4_g128": 3 * GIB, "KV cache": GIB}, GIB // 2)
    plan.require(Memory(total=8 * GIB, available=7 * GIB, free=0, cached=0))
    with pytest.raises(MemoryBudgetError, match=r"a run needs 4\.50 GiB, and 3\.80 GiB may be taken .* is weights in"):
        plan.require(Memory(total=8 * GIB, available=5 * GIB, free=0, cached=0), "a run")


def test_a_model_that_would_swap_is_refused_before_anything_is_loaded(dense) -> None:
    filled = empty()
    small = Memory(total=2 * GIB, available=GIB + 4096, free=0, cached=0)
    with pytest.raises(MemoryBudgetError, match="filling this model needs 0.02 GiB, and 0.00 GiB may be taken"):
        nn.load_quantized(filled, dense[1], POLICY, within=small)
    assert {t.device.type for t in filled.state_dict().values()} == {"meta"}
    nn.load_quantized(filled, dense[1], POLICY, within=Memory(2 * GIB, 2 * GIB, 0, 0))


def test_the_command_says_whether_a_checkpoint_fits(cli, dense) -> None:
    found = answer(cli("memory", str(dense[1]), "--format", "int4_g32", "--extra", "0.25", "--json"))
    assert (found["fits"], found["plan"]["parts"]["extra"]) == (True, GIB // 4)
    assert (
        found["memory"]["budget"] == found["memory"]["available"] - found["memory"]["reserve"]
        or found["memory"]["limit"]
    )
    refused = cli("memory", str(dense[1]), "--extra", "1000000")
    assert (refused.exit_code, "does not fit" in refused.stdout) == (1, True)
