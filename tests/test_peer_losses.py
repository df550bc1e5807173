"""Presets of `policy_loss` against losses and gradients that TRL 1.16.0 and verl (0.9.1, 1dda039) computed.

tests/peers/losses.json holds the inputs, and for each record the presets, the version, the arguments (names of inputs,
or numbers), the loss, and its gradients. The batch has a row without tokens, a masked token inside, ratios at both
sides of every bound, log-ratios beyond 20, and a sequence whose rollout weight is beyond 3.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec.policy_presets import PRESETS, policy_loss_preset
from rlkernel_torch.direct import policy_loss

_FILE = json.loads((Path(__file__).parent / "peers" / "losses.json").read_text())
INPUTS = {
    name: torch.tensor(x, dtype=torch.bool if name == "mask" else torch.float64) for name, x in _FILE["inputs"].items()
}
RECORDS = _FILE["records"]


def named(record):
    return "+".join(record["presets"])


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_a_preset_gives_the_recorded_loss_and_gradient_of_its_framework(record):
    args = {n: INPUTS[x] if isinstance(x, str) else x for n, x in record["args"].items()}
    logprob = INPUTS["logprob"].clone().requires_grad_()
    leaves = {"grad": logprob}
    if "entropy" in args:
        leaves["grad_entropy"] = args["entropy"] = args["entropy"].clone().requires_grad_()
    old = args.pop("old_logprob", None)
    preset = policy_loss_preset(*record["presets"])
    loss = policy_loss(logprob, old, INPUTS["adv"], mask=INPUTS["mask"], **args, **preset).loss
    loss.backward()
    # 1e-7: verl adds 1e-8 to token counts, and both take some constants in fp32
    assert loss.item() == pytest.approx(record["loss"], rel=1e-7)
    for name, leaf in leaves.items():
        expected = torch.tensor(record[name], dtype=torch.float64)
        torch.testing.assert_close(leaf.grad, expected, rtol=2e-7, atol=1e-8)


def test_no_preset_is_without_a_record():
    assert {name for record in RECORDS for name in record["presets"]} == set(PRESETS)


def test_an_unknown_preset_suggests_the_nearest_and_two_kinds_clash():
    with pytest.raises(UnknownNameError, match="trl_grpo"):
        policy_loss_preset("trl_grop")
    with pytest.raises(ArgumentError, match="kind"):
        policy_loss_preset("trl_grpo", "verl_ppo")
