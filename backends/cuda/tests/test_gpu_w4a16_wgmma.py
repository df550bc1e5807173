"""The clauses of qmatmul against the kernel for many tokens on a Hopper GPU.

The suite draws a handful of tokens, for which another kernel is ahead; here this one takes every weight of 4 bits.
"""

import pytest
import torch

import rlkernel as rlk
from rlkernel import policy
from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_cuda import QUANTIZED
from rlkernel_cuda.qmatmul import choice, kernels

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.skipif(not {"cuda", "triton"} <= {*policy.installed()}, reason="the other backend packs weights"),
]
CUTS = {"whole tiles": kernels.W4Wgmma(256, 1, 4, split=False), "shared tiles": kernels.W4Wgmma(64, 2, 4, split=True)}
EFFORT = Profile("some", 10, 60, thorough=False)


@pytest.mark.parametrize("cut", CUTS)
def test_clauses_hold_however_many_tokens_there_are(cut, monkeypatch) -> None:
    chosen, formats = choice.cut, set()

    def always(M, w, multiprocessors=132):
        if w.spec.element != "int4":
            return chosen(M, w, multiprocessors)
        if w.shape[0] % 128 or w.shape[1] % 128:
            return None
        formats.add(w.spec.kind)
        return CUTS[cut]

    monkeypatch.setattr(choice, "cut", always)
    rlk.refresh()  # what was planned with other cuts
    with (subject := Subject("cuda", "qmatmul", "cuda")).chosen():
        outcomes = [carry_out(subject, attack, EFFORT) for attack in clauses_of(subject)[0]]
    assert {o.clause: (o.status, o.message) for o in outcomes if o.status != "held"} == {}
    claimed = {f.removeprefix("format:") for f in QUANTIZED if f.startswith("format:int4")}
    assert claimed <= {kind.partition("[")[0] for kind in formats}
