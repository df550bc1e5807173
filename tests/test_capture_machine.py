"""capture@1 under any order of calls, weight updates, mode changes, pauses and evictions; the model is a plain run."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from rlkernel_common.graphs.verify import same_bits
from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import Bucket
from rlkernel_torch.direct import capture

SIZES = (2, 4, 8)


class Decode(nn.Module):
    """A step that reads weights, draws, depends on its mode, and writes state."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x, temperature, scale):
        self.steps += 1
        z = self.head(x) * scale / temperature
        z = nn.functional.dropout(z, 0.5, self.training)
        return {"z": z, "u": torch.rand(x.shape[0])}


def pad(x, rows):
    """The padded input of a replay: in the memory order of the caller's, for a matmul rounds by order."""
    nan = torch.full((rows, 3), float("nan")) if x.is_contiguous() else torch.full((3, rows), float("nan")).T
    nan[: x.shape[0]] = x
    return nan


class Captured(RuleBasedStateMachine):
    @initialize(outputs=st.sampled_from(["clone", "view"]), verify=st.sampled_from(["never", "always"]))
    def start(self, outputs, verify):
        torch.manual_seed(0)
        self.outputs = outputs
        self.model = Decode().requires_grad_(requires_grad=False)
        self.plain = copy.deepcopy(self.model)
        self.state = torch.get_rng_state()
        self.captured = capture(
            self.model,
            (torch.zeros(1, 3), 1.0, torch.ones(())),
            buckets=(Bucket({"x": 0}, SIZES),),
            pad={"x": float("nan")},
            mutates=(self.model.steps,),
            outputs=outputs,
            verify=verify,
            max_graphs=3,
            warmup=2,
        )
        self.calls, self.paused = 0, False
        self.kept: list[tuple[dict, dict]] = []  # results handed out, and what they must be for ever

    @precondition(lambda self: not self.paused)
    @rule(n=st.integers(0, 8), temperature=st.sampled_from([1.0, 0.5]), scale=st.integers(1, 3), strided=st.booleans())
    def call(self, n, temperature, scale, strided):
        padded = next(s for s in SIZES if s >= n)
        x = torch.arange(n * 3.0).view(3, n).T if strided else torch.arange(n * 3.0).view(n, 3)
        x_before, factor = x.clone(), torch.tensor(float(scale))
        torch.set_rng_state(self.state)
        expected = self.plain(pad(x, padded), temperature, factor)
        after = torch.get_rng_state()
        torch.set_rng_state(self.state)
        result = self.captured(x, temperature, factor)
        assert torch.equal(after, torch.get_rng_state())
        assert same_bits(x_before, x)
        for name in expected:
            assert same_bits(expected[name][:n], result[name]), name
        self.state = after
        self.calls += 1
        if self.outputs == "clone":
            self.kept.append((result, {k: v.clone() for k, v in result.items()}))

    @rule(value=st.integers(-2, 2))
    def write_weights_in_place(self, value):
        for m in (self.model, self.plain):
            m.head.weight.fill_(value)

    @precondition(lambda self: not self.paused)
    @rule(value=st.integers(-2, 2))
    def rebind_weights(self, value):
        with self.captured.weight_update() as update:
            for m in (self.model, self.plain):
                m.head.weight = nn.Parameter(torch.full((2, 3), float(value)), requires_grad=False)
        assert update.changed == ("fn.head.weight",)

    @rule(mode=st.booleans())
    def train(self, mode):
        self.model.train(mode)
        self.plain.train(mode)

    @rule(seed=st.integers(0, 3))
    def seed(self, seed):
        torch.manual_seed(seed)
        self.state = torch.get_rng_state()

    @rule(mode=st.sampled_from(["keep", "discard"]))
    def pause(self, mode):
        self.captured.pause(mode)
        self.paused = True
        with pytest.raises(CaptureError):
            self.captured(torch.zeros(1, 3), 1.0, torch.ones(()))

    @rule()
    def resume(self):
        self.captured.resume()
        self.paused = False

    @rule()
    def invalidate(self):
        self.captured.invalidate()

    @precondition(lambda self: not self.paused)
    @rule()
    def warm(self):
        self.captured.warm()

    @invariant()
    def holds(self):
        if not hasattr(self, "captured"):
            return
        stats = self.captured.stats
        assert stats.graphs <= 3
        assert stats.replays == self.calls
        assert stats.captures >= stats.graphs + stats.evictions
        assert sum(stats.recaptures.values()) <= stats.captures
        assert stats.eager_calls == {}
        assert int(self.model.steps) == int(self.plain.steps) == self.calls
        assert all(same_bits(now[k], was[k]) for now, was in self.kept for k in was)


Captured.TestCase.settings = settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=25)
TestCaptured = Captured.TestCase
