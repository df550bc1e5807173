"""Messages between a trial and a judged process: what is sent arrives, and no answer runs code or takes all memory."""

from __future__ import annotations

import json
import pickle
import socket
import struct
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.spec.logprob import LogprobResult, Support
from rlkernel_judge import wire

DTYPES = ("float32", "bfloat16", "float64", "int64", "bool", "uint8")


def sent(value: object) -> object:
    """A value as it arrives in the judged process."""
    header, blocks, _ = wire.encode_request(value)
    return wire.decode_request(header, [bytearray(b) for b in blocks], "cpu")[0]


def answered(value: object) -> object:
    """A value as it comes back."""
    tensors: list[torch.Tensor] = []
    encoded = json.loads(json.dumps(wire.encode_result(value, tensors)))
    blocks = [bytearray(wire.to_bytes(x)) for x in tensors]
    return wire.decode_result(encoded, wire.tensors_of(encoded, blocks, "cpu"))


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99))
def test_a_tensor_comes_there_and_back_with_its_bits(dtype, shape, seed) -> None:
    x = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
    there = sent({"x": x})["x"]
    back = answered((x,))[0]
    assert (there.dtype, there.shape, back.dtype, back.shape) == (x.dtype, x.shape, x.dtype, x.shape)
    assert torch.equal(there, x)
    assert torch.equal(back, x)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, 1:3],
        lambda x: x[::2],
        lambda x: x[:1].expand(4, -1),
        lambda x: x.unfold(0, 2, 1),
    ],
)
def test_strides_arrive_as_they_are(view) -> None:
    x = view(torch.arange(20.0).view(4, 5))
    there = sent(x)
    assert (there.stride(), torch.equal(there, x)) == (x.stride(), True)


def test_one_tensor_twice_stays_one_tensor() -> None:
    x = torch.zeros(3, requires_grad=True)
    a, b = sent((x, [x]))
    assert (a is b[0], a.requires_grad) == (True, True)


def test_arguments_of_the_contract_arrive_whole() -> None:
    support = sent(Support(torch.tensor([1, 2]), torch.tensor([0, 2])))
    assert (type(support), support.ids.tolist()) == (Support, [1, 2])


def test_results_of_the_contract_come_back_whole() -> None:
    back = answered(LogprobResult(torch.ones(2), torch.zeros(2), None, invalid=torch.tensor([True, False])))
    assert (type(back), back.entropy, back.invalid.tolist()) == (LogprobResult, None, [True, False])


class Lazy(torch.Tensor):
    """Does its work when it is looked at."""


@pytest.mark.parametrize("value", [object(), {"x": torch.ones(2).as_subclass(Lazy)}, torch.eye(2).to_sparse(), Lazy])
def test_what_is_no_plain_result_is_refused_by_name(value) -> None:
    with pytest.raises(ValueError, match="not plain tensors"):
        answered(value)


@pytest.mark.parametrize(
    "encoded",
    [
        {"dataclass": "subprocess:Popen", "of": {"args": "true"}},
        {"dataclass": "rlkernel_core.spec.logprob:check", "of": {}},
        {"dataclass": "rlkernel_core.spec.nothing:X", "of": {}},
        {"torch": "load"},
        {"pickle": "gASVAAAA"},
        {"tensor": 0, "dtype": "float32", "shape": [3], "grad": False},
    ],
)
def test_no_answer_names_code_to_run(encoded) -> None:
    with pytest.raises((ValueError, ImportError, IndexError)):
        wire.decode_result(encoded, [])


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", wire.MAX_HEADER + 1),
        struct.pack("<I", 2) + b"{}" + struct.pack("<I", wire.MAX_BLOCKS + 1),
        struct.pack("<I", 2) + b"{}" + struct.pack("<I", 1) + struct.pack("<Q", 1 << 60),
    ],
)
def test_an_answer_beyond_the_limits_is_not_read(frame) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame)
        with pytest.raises(wire.ConnectionLost) as caught:
            wire.receive(ours, time.monotonic() + 5)
    assert caught.value.fault == "protocol_error"


def test_silence_ends_at_its_time_and_a_closed_door_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, pytest.raises(wire.ConnectionLost) as late:
            wire.receive(ours, time.monotonic() + 0.01)
        with pytest.raises(wire.ConnectionLost) as closed:
            wire.receive(ours, time.monotonic() + 5)
    assert (late.value.fault, closed.value.fault) == ("timeout", "closed")


def test_what_goes_to_the_candidate_holds_no_tensor_data_in_its_pickle() -> None:
    header, blocks, _ = wire.encode_request({"x": torch.arange(1000)})
    assert (len(header) < 500, [len(b) for b in blocks]) == (True, [8000])
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(header)
