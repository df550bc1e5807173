"""What our names in verl's registries compute, without verl: its recorded losses, and a registry of the test's own."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel.integrations import verl as ours
from rlkernel.integrations import verl_engine
from rlkernel.integrations.host import KEPT
from rlkernel_core.spec.policy_presets import PRESETS

_FILE = json.loads((Path(__file__).parent / "peers" / "losses.json").read_text())
INPUTS = {
    name: torch.tensor(x, dtype=torch.bool if name == "mask" else torch.float64) for name, x in _FILE["inputs"].items()
}
BY_PRESET = {preset: name for name, (preset, _) in ours.LOSSES.items()}
RECORDS = [r for r in _FILE["records"] if len(r["presets"]) == 1 and r["presets"][0] in BY_PRESET]


class Config(SimpleNamespace):
    """As verl's configurations: attributes, and `get`."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def actor(**batch):
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    rest = {"tau_pos": 1.0, "tau_neg": 1.05, "policy_loss": Config(dro_beta=0.3)}
    return Config(**bounds, **rest, global_batch_info=batch)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r['presets'][0]}-{r['args']['old_logprob']}")
def test_the_recorded_loss_and_gradient_of_verl(record) -> None:
    name = BY_PRESET[record["presets"][0]]
    logprob = INPUTS["logprob"].clone().requires_grad_()
    old = INPUTS[record["args"]["old_logprob"]]
    loss, _ = ours.loss(name, old, logprob, INPUTS["adv"], INPUTS["mask"], config=actor())
    loss.backward()
    assert loss.item() == pytest.approx(record["loss"], rel=1e-6)
    torch.testing.assert_close(logprob.grad, torch.tensor(record["grad"], dtype=torch.float64), rtol=1e-6, atol=1e-8)


def test_every_loss_has_a_record() -> None:
    assert {BY_PRESET[r["presets"][0]] for r in RECORDS} == set(ours.LOSSES)
    assert BY_PRESET.keys() <= PRESETS.keys()


def test_ranks_without_global_counts_are_refused() -> None:
    args = (INPUTS["old"], INPUTS["logprob"], INPUTS["adv"], INPUTS["mask"])
    with pytest.raises(rlk.HostError, match="rlkernel_vanilla: token-mean over 2 ranks needs the global counts"):
        ours.loss("vanilla", *args, config=actor(dp_size=2))


@pytest.mark.parametrize(("version", "same"), [("0.9.0", True), ("0.9.1", False)])
def test_gspo_of_verl_090_is_a_mean_over_sequences_whatever_the_mode(version, same, monkeypatch) -> None:
    monkeypatch.setattr("rlkernel.integrations.host.version", lambda _: version)
    ours._old.cache_clear()
    args = (INPUTS["old"], INPUTS["logprob"], INPUTS["adv"], INPUTS["mask"])
    losses = {ours.loss("gspo", *args, mode, actor())[0].item() for mode in ("token-mean", "seq-mean-token-mean")}
    ours._old.cache_clear()
    assert (len(losses) == 1) == same


def test_groups_may_have_any_names() -> None:
    rewards, mask = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]]), torch.ones(3, 2)
    adv, returns = ours.estimate("rloo", rewards, mask, index=np.array(["x", "y", "x"], dtype=object))
    assert adv[:, 0].tolist() == [-4.0, 3.0, 4.0]  # verl gives a group of one its raw reward
    assert torch.equal(adv, returns)


def test_the_plugin_says_why_it_registers_nothing(monkeypatch) -> None:
    plugin = importlib.import_module("rlkernel.integrations.verl_plugin")

    def refused() -> None:
        raise rlk.HostError("verl is not installed")

    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setattr(ours, "register", refused)
    with pytest.warns(rlk.PluginWarning, match=r"rlkernel_\* is not registered with verl: verl is not installed"):
        importlib.reload(plugin)


def test_the_plugin_of_the_engines_keeps_their_fused_head_replaced(monkeypatch) -> None:
    module = ModuleType(verl_engine.KERNEL.module)
    module.linear_cross_entropy = original = object()
    module.LinearCrossEntropy = SimpleNamespace(
        forward=lambda ctx, hidden, weight, labels, temperature, reduction, dist_process_group: None
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("rlkernel.integrations.host.version", lambda _: verl_engine.HOST.tested)
    plugin = importlib.import_module("rlkernel.integrations.verl_engine_plugin")
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    importlib.reload(plugin)
    gc.collect()  # a block that nobody holds ends
    assert module.linear_cross_entropy is not original
    module.linear_cross_entropy(torch.randn(1, 3, 4), torch.randn(5, 4), torch.tensor([[0, 1, 2]]))
    KEPT.close()
    assert module.linear_cross_entropy is original
