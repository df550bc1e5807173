"""Audit: sampled calls are compared with the reference, and each difference beyond tolerance is reported."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import pluggy
import pytest
import torch

import rlkernel as rlk
from rlkernel import audit, hooks, policy, provenance, record
from rlkernel.audit import Audited, compare
from rlkernel.discover import load_target
from rlkernel.plans import Choice
from rlkernel_core.decision import Call, Decision, OpPolicy
from rlkernel_core.errors import AuditWarning, ConfigError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobResult
from tests.audited import backend
from tests.command_line import answer

pytestmark = pytest.mark.usefixtures("fresh")

hookimpl = pluggy.HookimplMarker("rlkernel")
LOGITS = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([0, 3, 6, 2])
ROWS = torch.arange(64)
LAWS = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))


class Recorder:
    def __init__(self) -> None:
        self.heard = []

    @hookimpl
    def rlkernel_audit(self, decision, report) -> None:
        self.heard.append((decision.backend, [d.output for d in report.differences], report.error))


@pytest.fixture
def recorder():
    """An observer of audits, for the time of a test."""
    found = Recorder()
    hooks.register(found)
    yield found
    hooks.unregister(found)


def told(target: str, calls: int = 1, every: int = 1, op: str = "logprob", run=None, **options) -> list[str]:
    """What is said about calls of an implementation; the policy is left behind."""
    with (
        rlk.registered(backend(target, op, **options)),
        rlk.use("acme", audit=every),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(calls):
            run() if run else rlk.logprob(LOGITS, IDS)
        told.figures = next((r.audit for r in provenance.status() if r.backend == "acme"), None)
    return [str(w.message) for w in said if w.category is AuditWarning]


def test_a_log_probability_that_is_off_is_reported_with_operator_backend_output_and_size() -> None:
    (said,) = told("off")
    assert all(text in said for text in ("logprob@1", "acme", "tests.audited:off", "differs", "in logprob", "0.01"))
    assert "rlkernel conformance run acme --op logprob" in said


def test_a_right_implementation_is_not_reported(recorder) -> None:
    assert told("right") == []
    assert (recorder.heard, told.figures) == ([], Audited(calls=1))


def test_either_side_may_be_off_by_the_tolerance() -> None:
    assert told("off_within_tolerance") == []
    assert 0.5 < told.figures.worst < 1


def test_nan_on_one_side_is_a_difference() -> None:
    (said,) = told("nan_in_one_row")
    assert "1 of 4 entries are NaN or infinite on one side alone" in said


def test_another_dtype_is_a_difference() -> None:
    (said,) = told("doubles")
    assert "in logprob" in said
    assert "float64" in said


def test_a_prepared_implementation_is_audited_too() -> None:
    assert len(told("prepared_off", prepared=True)) == 1


def test_what_is_warned_once_is_counted_and_heard_every_time(recorder) -> None:
    assert len(told("off", calls=3)) == 1
    assert recorder.heard == [("acme", ["logprob"], "")] * 3
    assert (told.figures.calls, told.figures.differing, told.figures.failed) == (3, 3, 0)
    assert told.figures.worst > 100


@pytest.mark.parametrize(("every", "compared"), [(1, 7), (3, 3), (7, 1), (100, 1)])
def test_the_first_and_every_nth_call_of_a_plan_are_compared(every, compared) -> None:
    told("off", calls=7, every=every)
    assert told.figures.calls == compared


def test_a_plan_of_another_shape_begins_anew() -> None:
    told("off", every=100, run=lambda: [rlk.logprob(LOGITS[:n], IDS[:n]) for n in (1, 2, 2, 3)])
    assert told.figures.calls == 3


def test_without_the_setting_nothing_is_wrapped_or_counted() -> None:
    with rlk.registered(backend("off")), rlk.use("acme"):
        rlk.logprob(LOGITS, IDS)
        (plan,) = policy.current().tables["logprob"].values()
        assert plan.run is load_target("tests.audited:off")
        assert plan.choice.audit is None


def test_calls_of_the_reference_itself_are_not_compared() -> None:
    with rlk.use("torch", audit=1):
        rlk.logprob(LOGITS, IDS)
        (plan,) = policy.current().tables["logprob"].values()
    assert plan.run is load_target(plan.choice.decision.target)


def test_the_setting_may_be_one_operators() -> None:
    with rlk.registered(backend("off")):
        with rlk.use("acme", "torch", audit=1, logprob={"audit": 0}):
            rlk.logprob(LOGITS, IDS)
        with rlk.use("acme", "torch", logprob={"audit": 1}), pytest.warns(AuditWarning):
            rlk.logprob(LOGITS, IDS)


def test_results_and_gradients_are_those_of_the_implementation() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        logits = LOGITS.clone().requires_grad_()
        found = rlk.logprob(logits, IDS).logprob
        found.sum().backward()
        return found.detach(), logits.grad

    with rlk.registered(backend("off")), rlk.use("acme"):
        expected = run()
        with rlk.use(audit=1), pytest.warns(AuditWarning):
            actual = run()
    assert all(torch.equal(e, a) for e, a in zip(expected, actual, strict=True))


def test_the_reference_is_given_the_same_record_without_gradients() -> None:
    spec = OPERATORS["logprob"]
    logits = LOGITS.clone().requires_grad_()
    call = spec.call(logits, IDS, temperature=0.5)
    cut = audit.detached(call)
    assert (cut.logits.requires_grad, cut.logits.data_ptr()) == (False, logits.data_ptr())
    assert (cut.ids is IDS, cut.temperature) == (True, 0.5)
    plain = spec.call(LOGITS, IDS)
    assert audit.detached(plain) is plain


def test_a_reference_that_raises_does_not_disturb_the_call(recorder, monkeypatch) -> None:
    def broken(call):
        raise MemoryError("no room for the reference")

    monkeypatch.setattr("rlkernel_torch.logprob.logprob", broken)
    (said,) = told("right", calls=2)
    assert "cannot be compared with the reference: MemoryError: no room for the reference" in said
    assert [error for _, _, error in recorder.heard] == ["MemoryError: no room for the reference"] * 2
    assert told.figures == Audited(failed=2)


def test_what_the_reference_does_not_take_is_told_once_and_runs(recorder) -> None:
    call = Call("logprob@1", "cpu", "int8")
    choice = Choice(len, False, Decision(call, OpPolicy(audit=1), "acme", "a:b", "acme 1", ()))
    spec = OPERATORS["logprob"]
    with pytest.warns(AuditWarning, match="dtype/unsupported"):
        run = audit.audited(len, choice, spec, spec.call(LOGITS, IDS))
    assert (run is len, choice.audit, len(recorder.heard)) == (True, Audited(failed=1), 1)


def test_an_observer_may_call_the_operator_that_differs() -> None:
    class Calls:
        heard = 0

        @hookimpl
        def rlkernel_audit(self) -> None:
            self.heard += 1
            rlk.logprob(LOGITS, IDS)

    calls = Calls()
    hooks.register(calls)
    told("off")
    hooks.unregister(calls)
    assert calls.heard == 1


def test_an_audit_warning_made_an_error_is_raised_by_the_call() -> None:
    with rlk.registered(backend("off")), rlk.use("acme", audit=1), warnings.catch_warnings():
        warnings.simplefilter("error", AuditWarning)
        for _ in range(2):
            with pytest.raises(AuditWarning, match="logprob"):
                rlk.logprob(LOGITS, IDS)


def draw():
    return rlk.sample(LAWS, seed=ROWS, step=0, top_p=0.9, temperature=0.8)


def test_draws_are_compared_by_the_rows_that_hold_another_token() -> None:
    assert told("sample_right", op="sample", run=draw) == []
    said = told("sample_ignores_seed", op="sample", run=draw)
    assert any("of 64 rows hold another token" in text and "score 4e-06" in text for text in said)


def test_a_row_that_may_be_a_tie_is_no_difference() -> None:
    assert told("sample_one_tie", op="sample", run=draw) == []
    assert told.figures.worst == 1


def test_quantized_weights_must_be_equal() -> None:
    def run():
        return rlk.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)), "int4_g32")

    assert told("quantize_right", op="quantize", run=run) == []
    (said,) = told("quantize_one_code", op="quantize", run=run)
    assert "in parts.codes: 1 of" in said


def test_a_call_that_writes_into_a_weight_is_not_audited() -> None:
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    out = rlk.quantize(w, "int4_g32")
    assert told("quantize_one_code", op="quantize", run=lambda: rlk.quantize(w, "int4_g32", out=out)) == []
    assert told.figures is None


def test_a_call_with_a_process_group_is_not_audited(alone) -> None:
    call = OPERATORS["whiten"].call(LOGITS, process_group=torch.distributed.group.WORLD)
    choice = Choice(len, False, Decision(Call("whiten@1", "cpu"), OpPolicy(audit=1), "acme", "a:b", "acme 1", ()))
    assert audit.audited(len, choice, OPERATORS["whiten"], call) is len


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert told("off") == []
    assert told.figures == Audited()


def test_a_compiled_call_is_audited_when_it_runs() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob * 2, backend="aot_eager", fullgraph=True)
    assert len(told("off", run=lambda: compiled(LOGITS, IDS))) == 1
    assert told.figures.differing == 1


SPEC = OPERATORS["logprob"]
GOOD = LogprobResult(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 4.0]), invalid=torch.tensor([False, False]))


def test_equal_results_have_no_difference_nan_and_infinities_included() -> None:
    odd = replace(GOOD, logprob=torch.tensor([torch.nan, -torch.inf]))
    report = compare(SPEC, "float32", odd, replace(odd, logprob=odd.logprob.clone()))
    assert (report.differences, report.worst) == ((), 0.0)


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"logprob": torch.tensor([-1.0, -torch.inf])}, "logprob"),
        ({"lse": torch.tensor([3.0, 4.1])}, "lse"),
        ({"lse": torch.tensor([3.0])}, "lse"),
        ({"entropy": torch.tensor([3.0, 4.0])}, "entropy"),
        ({"invalid": torch.tensor([False, True])}, "invalid"),
        ({"invalid": None}, "invalid"),
    ],
)
def test_a_difference_names_its_output(changes, output) -> None:
    report = compare(SPEC, "float32", replace(GOOD, **changes), GOOD)
    assert [d.output for d in report.differences] == [output]
    assert report.worst > 1


def test_the_tolerance_of_the_dtype_counts() -> None:
    near = replace(GOOD, logprob=GOOD.logprob + 1e-6)
    assert compare(SPEC, "float32", near, GOOD).differences == ()
    assert [d.output for d in compare(SPEC, "float64", near, GOOD).differences] == ["logprob"]


def test_a_relative_tolerance_is_relative_to_the_largest_expected() -> None:
    spec = OPERATORS["qmatmul"]
    expected = torch.tensor([[100.0, 0.0]])
    assert compare(spec, "bfloat16", expected + 0.5, expected).differences == ()
    (found,) = compare(spec, "bfloat16", expected + 2.0, expected).differences
    assert found.output == "result"


def test_empty_results_agree() -> None:
    empty = LogprobResult(torch.zeros(0), torch.zeros(0))
    assert compare(SPEC, "float32", empty, empty).worst == 0.0


@pytest.mark.parametrize("figures", [Audited(3, 1, 2, 4.5), Audited(1, 1, 0, math.inf), Audited()])
def test_figures_survive_json(figures) -> None:
    text = json.dumps(figures.as_dict(), allow_nan=False)
    assert Audited.of(json.loads(text)) == figures


def test_status_of_a_run_says_what_its_audits_found(cli, tmp_path) -> None:
    with rlk.registered(backend("off")), rlk.use("acme", audit=2):
        with pytest.warns(AuditWarning):
            rlk.logprob(LOGITS, IDS)
        for _ in range(2):
            rlk.logprob(LOGITS, IDS)
        record.write(tmp_path)
    assert "2 calls compared, 2 differ" in cli("status", str(tmp_path)).stdout
    (found,) = answer(cli("status", str(tmp_path), "--json"))["decisions"]
    assert (found["audit"]["calls"], found["audit"]["differing"]) == (2, 2)
    (ran,) = record.read(tmp_path)[1]
    assert (ran.calls, ran.audit.calls) == (3, 2)


@pytest.mark.parametrize("value", [-1, True, "often", 1.5])
def test_a_setting_that_is_no_count_is_an_error(value) -> None:
    with pytest.raises(ConfigError, match="audit"):
        rlk.use(audit=value)
