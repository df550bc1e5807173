"""A record of a rollout from which any machine can draw every token again, and the check that does.

    from rlkernel import rollouts

    record = rollouts.from_drawing(drawing, weights="step 120")     # of transformers' generate; see also the others
    rollouts.write("rollout.safetensors", record)

    record = rollouts.read("rollout.safetensors")                   # somewhere else
    found = rollouts.verify(record, logits, tolerance=0.25)
    assert found.ok, found.complaints()

A draw of `sample` depends on the logits, the law, a seed, a step and token ids, and on nothing else. Who has the model
computes the logits again, and with them every draw. Where its numerics are those of the rollout, the tokens are equal;
where they are not, a token that differs must be one that logits within a stated tolerance would have given.

This package may import torch and numpy when it is imported; the command line imports it when it is asked for.
"""

from __future__ import annotations

from rlkernel.rollouts.engines import from_drawing, from_generated, from_sglang, from_vllm
from rlkernel.rollouts.model import Builtin, ModelLogits, pretrained
from rlkernel.rollouts.record import MOST, Params, Record, Rollout
from rlkernel.rollouts.record_file import read, write
from rlkernel.rollouts.redraw import ALPHA, TYPICAL, Verdict
from rlkernel.rollouts.replay import Replay, Token, replay
from rlkernel.rollouts.verify import Complaint, Verification, verify

__all__ = [
    "ALPHA",
    "MOST",
    "TYPICAL",
    "Builtin",
    "Complaint",
    "ModelLogits",
    "Params",
    "Record",
    "Replay",
    "Rollout",
    "Token",
    "Verdict",
    "Verification",
    "from_drawing",
    "from_generated",
    "from_sglang",
    "from_vllm",
    "pretrained",
    "read",
    "replay",
    "verify",
    "write",
]
