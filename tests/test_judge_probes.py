"""What one call shows of a candidate's conduct, and probes for results that no kernel made of these inputs."""

from __future__ import annotations

import time

import pytest
import torch

from rlkernel_conformance.compare import Violation
from rlkernel_judge import sandbox
from rlkernel_judge.probes import run_probes
from rlkernel_judge.trial import fault_of
from rlkernel_judge.worker_client import CandidateError, Worker, call_candidate
from rlkernel_judge.workloads import draw, small
from tests.judged import (
    ALIAS,
    BORROWS_OR_NOT,
    CHEATS,
    DIFFERENTIABLE,
    HEAD,
    LAZY,
    OF_A_RECORD,
    ONE_BUFFER,
    RIGHT,
    SLOW,
    THREAD,
    UNWRITTEN,
    WRITES_INPUT,
)


@pytest.fixture(scope="module")
def worker():
    """A worker that takes one candidate after another."""
    with Worker(sandbox.choose(), "logprob", "cpu", sandbox.Limits()) as found:
        found.ask("ready")
        yield found


def loaded(worker: Worker, source: str, op: str = "logprob") -> Worker:
    worker.op, worker.deadline = op, time.monotonic() + 60
    worker.ask("load", source=source, impls=(), op=op, compile=False)
    return worker


def called(worker: Worker, source: str, **more):
    """Arguments and result of one call."""
    given = draw(small("logprob", "float32"), 0, "cpu") | more
    return given, call_candidate(loaded(worker, source), given)


def test_a_lazy_tensor_is_no_result_and_is_named(worker) -> None:
    with pytest.raises(Violation, match=r"holds a candidate\.Lazy"):
        called(worker, LAZY)


def test_what_it_writes_to_its_arguments_is_seen_in_ours(worker) -> None:
    given, _ = called(worker, WRITES_INPUT)
    assert given["logits"].abs().max() == 0


def test_a_gradient_is_computed_in_the_judged_process(worker) -> None:
    given = draw(small("logprob", "float32"), 0, "cpu")
    leaf = given["logits"].requires_grad_()
    (grad,) = torch.autograd.grad(call_candidate(loaded(worker, DIFFERENTIABLE), given).logprob.sum(), leaf)
    want = torch.nn.functional.one_hot(given["ids"], leaf.shape[-1]) - leaf.detach().softmax(-1)
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("change", [{}, {"temperature": 2.0}])
def test_a_function_of_a_record_gives_what_one_of_the_arguments_gives(worker, change) -> None:
    (_, one), (_, two) = (called(worker, source, **change) for source in (RIGHT, OF_A_RECORD))
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
def test_what_a_candidate_raises_has_its_name_and_line(worker, source, fault, words) -> None:
    with pytest.raises(CandidateError, match=words) as raised:
        called(worker, source, temperature=2.0)
    assert fault == fault_of(raised.value)


def test_a_bare_tensor_is_no_result_of_this_operator(worker) -> None:
    with pytest.raises(Violation, match="LogprobResult or a dict of its fields is expected"):
        called(worker, f"{HEAD}\n    return logits[:, 0]\n")


def caught(worker: Worker, source: str, op: str = "logprob") -> list[str]:
    """Names of the probes that refute a candidate."""
    loaded(worker, source, op)
    return [p.name for p in run_probes(worker, op, "float32") if not p.held]


@pytest.mark.parametrize("source", [RIGHT, DIFFERENTIABLE, OF_A_RECORD])
def test_an_honest_candidate_passes_every_probe(worker, source) -> None:
    assert caught(worker, source) == []


def test_a_cache_by_shape_gives_one_answer_to_all(worker) -> None:
    assert "not cached by shape" in caught(worker, CHEATS["not cached by shape"])


@pytest.mark.parametrize("probe", ["not cached by address", "not cached by fingerprint"])
def test_a_cache_is_caught_by_the_probe_made_for_it(worker, probe) -> None:
    assert probe in caught(worker, CHEATS[probe])


def test_results_on_one_buffer_are_gone_when_they_are_looked_at(worker) -> None:
    assert "not cached by shape" in caught(worker, ONE_BUFFER)


def test_a_result_that_is_memory_of_an_argument_does_not_stay(worker) -> None:
    assert caught(worker, ALIAS, "shape_rewards")[0] == "results stay"


def test_memory_that_is_never_written_shows(worker) -> None:
    assert "all written" in caught(worker, UNWRITTEN)


def test_a_lazy_tensor_is_no_result(worker) -> None:
    assert "not cached by shape" in caught(worker, LAZY)


def test_being_slow_is_no_cheat(worker) -> None:
    assert caught(worker, SLOW) == []


def test_a_thread_that_is_left_is_found_by_counting(worker) -> None:
    assert "nothing left running" in caught(worker, THREAD)


def test_what_a_candidate_borrows_is_refused_when_it_is_loaded(worker) -> None:  # last: these leave their marks
    with pytest.raises(CandidateError, match=r"import of rlkernel_torch.*: not for a candidate"):
        loaded(worker, CHEATS["nothing borrowed"])


def test_what_a_candidate_tried_to_borrow_is_named_though_it_went_on_without(worker) -> None:
    assert "nothing borrowed" in caught(worker, BORROWS_OR_NOT)


def test_what_a_candidate_replaces_is_named(worker) -> None:
    assert "nothing replaced" in caught(worker, CHEATS["nothing replaced"])
