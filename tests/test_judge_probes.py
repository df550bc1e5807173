"""What one call shows of a candidate's conduct, and probes for results that no kernel made of these inputs."""

from __future__ import annotations

import time

import pytest
import torch

from rlkernel_conformance.compare import Violation
from rlkernel_judge import sandbox
from rlkernel_judge.probes import probed
from rlkernel_judge.trial import fault_of
from rlkernel_judge.worker_client import CandidateError, Seat, gathered
from rlkernel_judge.workloads import draw, small
from tests.judged import (
    ALIAS,
    CHEATS,
    DIFFERENTIABLE,
    HEAD,
    LAZY,
    OF_A_RECORD,
    ONE_BUFFER,
    RIGHT,
    SLOW,
    UNWRITTEN,
    WRITES_INPUT,
)


@pytest.fixture(scope="module")
def seat():
    """A host that takes one candidate after another."""
    with Seat(sandbox.cage(), "logprob", "cpu", sandbox.Limits()) as found:
        yield found


def loaded(seat: Seat, source: str, op: str = "logprob") -> Seat:
    seat.op, seat.until = op, time.monotonic() + 60
    seat.ask("load", source=source, impls=(), op=op, compile=False)
    return seat


def called(seat: Seat, source: str, **more):
    """Arguments and result of one call."""
    given = draw(small("logprob", "float32"), 0, "cpu") | more
    return given, gathered(loaded(seat, source), given)


def test_a_lazy_tensor_is_no_result_and_is_named(seat) -> None:
    with pytest.raises(Violation, match=r"holds a candidate\.Lazy"):
        called(seat, LAZY)


def test_what_it_writes_to_its_arguments_is_seen_in_ours(seat) -> None:
    given, _ = called(seat, WRITES_INPUT)
    assert given["logits"].abs().max() == 0


def test_a_gradient_is_computed_in_the_judged_process(seat) -> None:
    given = draw(small("logprob", "float32"), 0, "cpu")
    leaf = given["logits"].requires_grad_()
    (grad,) = torch.autograd.grad(gathered(loaded(seat, DIFFERENTIABLE), given).logprob.sum(), leaf)
    want = torch.nn.functional.one_hot(given["ids"], leaf.shape[-1]) - leaf.detach().softmax(-1)
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("change", [{}, {"temperature": 2.0}])
def test_a_function_of_a_record_gives_what_one_of_the_arguments_gives(seat, change) -> None:
    (_, one), (_, two) = (called(seat, source, **change) for source in (RIGHT, OF_A_RECORD))
    assert (one.logprob.tolist(), one.lse.tolist()) == (two.logprob.tolist(), two.lse.tolist())


@pytest.mark.parametrize(
    ("source", "fault", "words"),
    [
        ("import no_such_module\n" + RIGHT, "import_error", "no_such_module"),
        (
            f"{HEAD}\n    return logits + undefined\n",
            "unknown",
            r"NameError: name 'undefined' is not defined \(line 2\)",
        ),
        (
            RIGHT.replace(", temperature=1.0", ", scale=1.0").replace(" / temperature", ""),
            "unknown",
            "no argument 'temp",
        ),
        ("raise KeyboardInterrupt\n" + RIGHT, "protocol_error", "KeyboardInterrupt"),
        ("import sys\nsys.exit(0)\n" + RIGHT, "protocol_error", "SystemExit"),
        ("class MemoryError(Exception): ...\nraise MemoryError\n" + RIGHT, "out_of_memory", "MemoryError"),
    ],
)
def test_what_a_candidate_raises_has_its_name_and_line(seat, source, fault, words) -> None:
    with pytest.raises(CandidateError, match=words) as raised:
        called(seat, source, temperature=2.0)
    assert fault == fault_of(raised.value)


def test_a_bare_tensor_is_no_result_of_this_operator(seat) -> None:
    with pytest.raises(Violation, match="LogprobResult or a dict of its fields is expected"):
        called(seat, f"{HEAD}\n    return logits[:, 0]\n")


def caught(seat: Seat, source: str, op: str = "logprob") -> list[str]:
    """Names of the probes that refute a candidate."""
    loaded(seat, source, op)
    return [p.name for p in probed(seat, op, "float32") if not p.held]


@pytest.mark.parametrize("source", [RIGHT, DIFFERENTIABLE, OF_A_RECORD])
def test_an_honest_candidate_passes_every_probe(seat, source) -> None:
    assert caught(seat, source) == []


def test_a_cache_by_shape_gives_one_answer_to_all(seat) -> None:
    assert "not cached by shape" in caught(seat, CHEATS["not cached by shape"])


@pytest.mark.parametrize("probe", ["not cached by address", "not cached by fingerprint"])
def test_a_cache_is_caught_by_the_probe_made_for_it(seat, probe) -> None:
    assert probe in caught(seat, CHEATS[probe])


def test_results_on_one_buffer_are_gone_when_they_are_looked_at(seat) -> None:
    assert "not cached by shape" in caught(seat, ONE_BUFFER)


def test_a_result_that_is_memory_of_an_argument_does_not_stay(seat) -> None:
    assert caught(seat, ALIAS, "shape_rewards")[0] == "results stay"


def test_memory_that_is_never_written_shows(seat) -> None:
    assert "all written" in caught(seat, UNWRITTEN)


def test_a_lazy_tensor_is_no_result(seat) -> None:
    assert "not cached by shape" in caught(seat, LAZY)


def test_being_slow_is_no_cheat(seat) -> None:
    assert caught(seat, SLOW) == []


@pytest.mark.parametrize("probe", ["nothing borrowed", "nothing replaced"])  # last: they leave their marks
def test_what_a_candidate_borrows_or_replaces_is_named(seat, probe) -> None:
    assert probe in caught(seat, CHEATS[probe])
