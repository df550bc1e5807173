"""The example of a whole step as one graph: the weights are those of a step whose kernels are launched."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[1] / "examples" / "captured_update" / "update.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("captured_update", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "captured_update", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_update_and_optimizer_in_one_graph_have_the_weights_of_both_without(example) -> None:
    sizes = example.Sizes(B=4, T=6, D=8, V=19, layers=1)
    torch.manual_seed(0)
    plain = example.Policy(sizes)
    whole, start = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizer = example.optimizer_of(plain, "cpu")
    update, step = example.update_of(plain, sizes), example.whole_step(whole, sizes, "cpu")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), start.parameters(), strict=True))
    expected = example.train(update, optimizer, sizes, "cpu", 3)
    assert expected == example.train(step, None, sizes, "cpu", 3)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), plain.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(whole.parameters(), start.parameters(), strict=True))
    assert [float(x["step"]) for x in optimizer.state.values()] == [3.0] * len(optimizer.state)
    assert step.stats.captures == 1
