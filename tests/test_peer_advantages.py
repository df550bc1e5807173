"""Presets of `advantage` against numbers that the frameworks' own functions computed.

tests/peers/advantages.json holds the inputs, and for each record the version, the arguments of `advantage` (names of
inputs, or numbers) and the advantages and returns that the function named by the preset's source returned for them.
The batch has masked tokens inside, rows of one token, groups of four, a constant one and one of a single member.
advantages_small.json is the same with rewards and values times 1e-4: there a variance is as small as the eps of the
whitening, and a std not much larger than that of a group, so that their sizes and places show.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec.advantage_presets import PRESETS, advantage_preset
from rlkernel_torch.direct import advantage, whiten

_IDS = ("ragged", "fours", "anchor", "lengths")


def read(name):
    """(inputs, record) of every record of a file."""
    content = json.loads((Path(__file__).parent / "peers" / name).read_text())
    inputs = {}
    for key, x in content["inputs"].items():
        dtype = torch.int64 if key in _IDS else torch.bool if key in ("mask", "not_alone") else torch.float64
        inputs[key] = torch.tensor([math.nan if v is None else v for v in x], dtype=dtype)
    return [pytest.param(inputs, r, id=f"{r['framework']}-{r['estimator']}") for r in content["records"]]


CASES = read("advantages.json") + read("advantages_small.json")
RECORDS = [case.values[1] for case in CASES]
# Presets that reproduce what masked positions hold, too.
EVERYWHERE = {("verl", "gae"), ("areal", "gae")}


def close(actual, expected, where):
    # some peers compute in fp32; the file has eight digits
    torch.testing.assert_close(actual.double()[where], expected[where], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("inputs", "record"), CASES)
def test_a_preset_gives_the_recorded_numbers_of_its_framework(inputs, record):
    args = {n: inputs.get(x, x) if isinstance(x, str) else x for n, x in record["args"].items()}
    preset = advantage_preset(record["framework"], record["estimator"])
    whitening = {n: preset.pop(n) for n in list(preset) if n.startswith("whiten") and "whitened_by" in record}
    result = advantage(**args, **preset, **({"whiten": "none"} if whitening else {}))
    actual, expected = result.advantages, torch.tensor(record["advantages"], dtype=torch.float64)
    valid = torch.ones_like(expected, dtype=torch.bool)
    if expected.dim() == 2 and "mask" in args:
        valid = args["mask"]
    if whitening:
        valid = inputs[record["whitened_by"]]
        actual = whiten(actual, mask=valid, ddof=whitening["whiten_ddof"], eps=whitening["whiten_eps"]).y
    if (record["framework"], record["estimator"]) in EVERYWHERE:
        valid = torch.ones_like(valid)
    elif expected.dim() == 2:
        assert actual[~valid].eq(0).all()
    close(actual, expected, valid)
    if "returns" in record:
        close(result.returns, torch.tensor(record["returns"], dtype=torch.float64), valid)


def test_no_preset_is_without_a_record():
    recorded = {(r["framework"], r["estimator"]) for r in RECORDS}
    # The recorder found the same code in January's verl for the rows that equal today's.
    same = {("verl_jan26", name) for name, row in PRESETS["verl_jan26"].items() if row.args == _verl_args(name)}
    rows = {(framework, estimator) for framework, table in PRESETS.items() for estimator in table}
    assert recorded | same >= rows
    assert recorded <= rows


def _verl_args(name):
    return PRESETS["verl"][name].args if name in PRESETS["verl"] else None


def test_every_source_names_the_version_that_was_recorded():
    for record in RECORDS:
        source = PRESETS[record["framework"]][record["estimator"]].source
        assert all(word in source for word in record["of"].split()), (source, record["of"])


def test_frameworks_that_refuse_a_group_of_one():
    for framework, estimator in (("openrlhf", "group_norm"), ("openrlhf", "rloo"), ("verl", "grpo_passk")):
        with pytest.raises(ArgumentError, match="fewer than two"):
            advantage(torch.zeros(3), group=torch.tensor([0, 0, 1]), **advantage_preset(framework, estimator))


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'openrlhf'"):
        advantage_preset("open_rlhf", "grpo")
    with pytest.raises(UnknownNameError, match="did you mean 'group_norm'"):
        advantage_preset("openrlhf", "groupnorm")
    advantage_preset("verl", "grpo")["eps"] = 1.0  # a copy
    assert advantage_preset("verl", "grpo")["eps"] == 1e-6
