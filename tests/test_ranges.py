"""Profiler ranges: each call shows under the id of its decision where the policy asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity

import rlkernel as rlk
from rlkernel import policy, ranges
from rlkernel.decide import plan_for
from rlkernel.discover import load_target
from rlkernel_core.decision import Call, Decision, OpPolicy
from rlkernel_core.errors import ConfigError
from rlkernel_core.spec import OPERATORS

pytestmark = pytest.mark.usefixtures("fresh")

LOGITS = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([0, 3, 6, 2])
DECISION = Decision(
    Call("logprob@1", "cuda", "float32", arch="sm90"), OpPolicy(profile=True), "acme", "a:b", "acme 1.0", ()
)


def shown(run) -> dict[str, int]:
    """Our ranges in a profile of `run`, each with its count."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        run()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("rlkernel.")}


def plans(op: str) -> list:
    return list(policy.current().tables[op].values())


def test_without_the_setting_a_plan_runs_the_implementation_itself() -> None:
    rlk.logprob(LOGITS, IDS)
    (plan,) = plans("logprob")
    assert plan.run is load_target(plan.choice.decision.target)
    assert shown(lambda: rlk.logprob(LOGITS, IDS)) == {}


def test_each_call_is_a_range_named_by_operator_backend_and_decision() -> None:
    with rlk.use(profile=True):
        rlk.logprob(LOGITS, IDS)
        found = shown(lambda: [rlk.logprob(LOGITS, IDS) for _ in range(3)])
    assert found == {f"rlkernel.logprob torch {rlk.last_decision('logprob').hash}": 3}


def test_a_range_has_the_id_that_an_explanation_prints() -> None:
    with rlk.use(profile=True):
        said = rlk.explain("logprob", LOGITS, IDS)
        found = shown(lambda: rlk.logprob(LOGITS, IDS))
    assert list(found) == [ranges.label(said.decision)]
    assert "profile=true" in said


def test_profiled_calls_have_plans_of_their_own() -> None:
    rlk.logprob(LOGITS, IDS)
    with rlk.use(profile=True):
        rlk.logprob(LOGITS, IDS)
    assert shown(lambda: rlk.logprob(LOGITS, IDS)) == {}
    with rlk.use(profile=True):
        assert list(shown(lambda: rlk.logprob(LOGITS, IDS)).values()) == [1]


def test_one_operator_alone_may_be_profiled() -> None:
    rlk.configure(ops={"whiten": {"profile": True}})
    found = shown(lambda: [rlk.logprob(LOGITS, IDS), rlk.whiten(LOGITS)])
    assert [name.split()[0] for name in found] == ["rlkernel.whiten"]


def test_what_bind_hands_out_keeps_its_ranges() -> None:
    with rlk.use(profile=True):
        bound = rlk.logprob.bind(LOGITS, IDS)
    plain = rlk.logprob.bind(LOGITS, IDS)
    assert list(shown(lambda: bound(LOGITS, IDS)).values()) == [1]
    assert shown(lambda: plain(LOGITS, IDS)) == {}


def test_a_profiled_call_gives_the_same_results_and_gradients() -> None:
    def run() -> list[torch.Tensor]:
        logits = LOGITS.clone().requires_grad_()
        found = rlk.logprob(logits, IDS, entropy=True)
        (found.logprob.sum() + found.entropy.sum()).backward()
        return [found.logprob, found.entropy, logits.grad]

    expected = run()
    with rlk.use(profile=True):
        actual = run()
    assert all(torch.equal(e, a) for e, a in zip(expected, actual, strict=True))


def test_a_range_ends_where_the_implementation_raises(monkeypatch) -> None:
    heard = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: heard.append(("push", name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: heard.append(("pop",)))

    def fails(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ranges.ranged(fails, DECISION)(None)
    assert heard == [("push", ranges.label(DECISION)), ("pop",)]


def test_nvtx_gets_the_ranges_of_calls_on_an_accelerator_alone(monkeypatch) -> None:
    heard = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", heard.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: heard.append("end"))

    def work(call):
        heard.append("work")
        return call

    assert ranges.ranged(work, DECISION)(3) == 3
    assert heard == [f"rlkernel.logprob acme {DECISION.hash}", "work", "end"]
    ranges.ranged(work, replace(DECISION, call=replace(DECISION.call, device="cpu")))(3)
    assert heard[3:] == ["work"]


def test_a_compiled_call_is_a_range_too() -> None:
    def step(logits, ids):
        return rlk.logprob(logits, ids).logprob * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled(LOGITS, IDS)
    assert shown(lambda: compiled(LOGITS, IDS)) == {}
    with rlk.use(profile=True):
        compiled(LOGITS, IDS)
        found = shown(lambda: compiled(LOGITS, IDS))
    assert list(found.values()) == [1]
    assert shown(lambda: compiled(LOGITS, IDS)) == {}


def test_a_setting_that_is_no_truth_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match="profile"):
        rlk.use(profile="yes")


def test_every_operators_range_has_its_name() -> None:
    for spec in OPERATORS.values():
        named = replace(DECISION, call=replace(DECISION.call, op=spec.id))
        assert ranges.label(named).split()[0] == f"rlkernel.{spec.name}"


def test_a_plan_made_for_no_key_is_in_a_range_too() -> None:
    spec = OPERATORS["logprob"]
    with rlk.use(profile=True):
        plan = plan_for(spec, None, spec.call(LOGITS, IDS))
    assert list(shown(lambda: plan.run(spec.call(LOGITS, IDS))).values()) == [1]
