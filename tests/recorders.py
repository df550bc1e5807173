"""Recorders for tests of capture: frozen, unlucky, and one that evicts by generation."""

from __future__ import annotations

import torch

from rlkernel_common.graphs.eager import EagerRecorder
from rlkernel_common.graphs.engine import Graphed
from rlkernel_common.graphs.graph import Options
from rlkernel_core.spec.graphed import CaptureGroup

DEFAULTS = {
    "buckets": (),
    "pad": {},
    "static": (),
    "mutates": (),
    "outputs": "clone",
    "rng": "follow",
    "generators": (),
    "verify": "auto",
    "guard": "sync",
    "on_guard_fail": "recapture",
    "on_capture_error": "raise",
    "warmup": 1,
    "max_graphs": 32,
    "collectives": False,
    "autograd": False,
}


def graphed(fn, example, recorder, **options):
    """A graphed callable over a recorder of our own."""
    return Graphed(fn, example, Options(**(DEFAULTS | options)), CaptureGroup(), recorder, torch.device("cpu"))


class Frozen(EagerRecorder):
    """A recorder as broken as can be: every replay gives what was recorded."""

    verify = "first"

    def record(self, program):
        recording = super().record(program)
        recording.replay = lambda: None
        return recording


class Unlucky(EagerRecorder):
    """Its recordings fail as a driver fails, after drawing and writing."""

    errors = (RuntimeError,)

    def record(self, program):
        program.call(program.inputs)
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")


class ByGeneration(EagerRecorder):
    evict = "generation"
