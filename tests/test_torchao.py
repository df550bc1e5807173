"""torchao's `quantize_` with rlkernel's configuration: the weights and layers of `rlkernel.nn`."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel import nn
from rlkernel.integrations import torchao
from tests.test_nn import IDS, Model

theirs = pytest.importorskip("torchao.quantization", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")


def models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    one, other = Model(), Model()
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("prepack", [False, True])
def test_quantize_makes_the_layers_of_quantize_model(prepack) -> None:
    ours, made = models()
    nn.quantize_model(ours, nn.QuantPolicy("int4_g32", prepack=prepack))
    theirs.quantize_(made, torchao.config("int4_g32", prepack=prepack), filter_fn=torchao.layers(made))
    weights = {n: m.weight for n, m in made.named_modules() if isinstance(m, nn.QuantLinear)}
    assert {n for n, m in ours.named_modules() if isinstance(m, nn.QuantLinear)} == set(weights)
    assert [n for n, w in weights.items() if not w.same_bits(ours.get_submodule(n).weight)] == []
    assert torch.equal(ours(IDS), made(IDS))


def test_their_table_of_names_gives_layers_formats_of_their_own() -> None:
    _, made = models()
    table = theirs.FqnToConfig({"blocks.0.up": torchao.config("nf4"), "re:.*down": torchao.config("int8_channel")})
    theirs.quantize_(made, table, filter_fn=None)
    assert {n: m.weight.format for n, m in made.named_modules() if isinstance(m, nn.QuantLinear)} == {
        "blocks.0.up": "nf4",
        "blocks.0.down": "int8_channel",
        "blocks.1.down": "int8_channel",
    }


def test_what_is_no_linear_layer_and_no_format_is_refused() -> None:
    _, made = models()
    with pytest.raises(rlk.HostError, match=r"Embedding is no torch\.nn\.Linear"):
        theirs.quantize_(made, torchao.config(), filter_fn=lambda _, name: name == "embed")
    with pytest.raises(rlk.UnknownNameError, match="did you mean 'int4_g32'"):
        torchao.config("int4_g33")
