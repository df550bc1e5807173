"""rlkernel bench: what is wrong gets no number, what is too good is an error, and what is absent is said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rlkernel_bench import ceilings, suites, timing
from rlkernel_bench.candidates import Candidate, peers, prepared
from rlkernel_bench.ceilings import Ceilings
from rlkernel_bench.environment import reasons
from rlkernel_bench.gates import elementwise, frobenius, verdict
from rlkernel_bench.measure import Effort, measure
from rlkernel_bench.peers import PEERS
from rlkernel_bench.run import fails, run
from rlkernel_bench.suites import SIZES, SUITES
from rlkernel_bench.work import GOALS, Goal, Judgment, Problem, Work

from rlkernel import policy
from rlkernel_core.errors import ResolutionError, UnknownNameError
from rlkernel_core.quant.spec import FORMATS
from rlkernel_core.spec import OPERATORS

MACHINE = Ceilings(copy=1e12, read=1e12, cached=1e12, flops={"float32": 1e12}, cache_bytes=1 << 20)
MEASURE = ceilings.measure
QUICK = Effort(0.001, memory=False)
WORKS = [w for size in SIZES for w in suites.works(SUITES, size)]
DOUBLE = Work("none", "logprob", {"N": 64, "V": 8}, "float32", bytes="8*N*V")


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """Ceilings are measured once, by a test of their own."""
    monkeypatch.setattr(ceilings, "measure", lambda device: MACHINE)


def doubling(work: Work = DOUBLE) -> Problem:
    """A workload whose right answer is twice its input."""

    def judge(given, want, found):
        error = float((found["y"] - want).abs().max())
        return {"y": Judgment(error, error / 0.1, error / 1.0)}

    return Problem(work, lambda seed: {"x": torch.full((64, 8), 1.0 + seed)}, {}, lambda given: 2 * given["x"], judge)


def found(run, *, kind="backend", work=DOUBLE, machine=MACHINE, effort=QUICK) -> dict:
    """What is said of one candidate."""
    candidates = [Candidate("one", kind, run=run)]
    return measure(doubling(work), candidates, "cpu", machine, effort)["candidates"][0]


def right(given):
    return {"y": 2 * given["x"]}


def test_a_right_result_is_measured() -> None:
    said = found(right)
    assert said["status"] == "measured"
    assert said["eager"]["low"] <= said["eager"]["median"] <= said["eager"]["high"]


@pytest.mark.parametrize("off", [0.5, math.nan])
def test_a_wrong_result_gets_no_number(off) -> None:
    said = found(lambda given: {"y": 2 * given["x"] + off})
    assert (said["status"], "eager" in said, "memory" in said) == ("wrong", False, False)


def test_a_peer_may_be_coarse_and_a_backend_may_not() -> None:
    def rounded(given):
        return {"y": 2 * given["x"] + 0.5}

    assert [found(rounded, kind=kind)["status"] for kind in ("peer", "backend")] == ["coarse", "wrong"]


def test_a_number_below_the_floor_is_an_error_of_the_benchmark() -> None:
    slow = replace(MACHINE, copy=1.0, read=1.0, cached=1.0)
    said = found(right, machine=slow)
    assert said["status"] == "impossible"
    assert "below the floor" in said["message"]


def raising(error):
    def run(given):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no"), "error"),
        (NotImplementedError("no"), "refused"),
        (ResolutionError("no"), "refused"),
        (torch.OutOfMemoryError("no"), "oom"),
    ],
)
def test_what_raises_has_a_status_and_leaves_the_others_alone(error, status) -> None:
    candidates = [Candidate("bad", "backend", run=raising(error)), Candidate("good", "backend", run=right)]
    said = measure(doubling(), candidates, "cpu", MACHINE, QUICK)["candidates"]
    assert [c["status"] for c in said] == [status, "measured"]
    assert said[0]["message"].endswith("no")


def test_weights_are_arranged_for_a_kernel_by_whoever_can(monkeypatch) -> None:
    """A backend may have a product and no way to pack weights for it, as ours for Hopper has."""
    problem = replace(doubling(Work("none", "qmatmul", {"M": 1}, "float32", bytes="M")), prepare=lambda _: decided())

    def decided():
        return {op: policy.current().policy.of(op).order for op in ("qmatmul", "prepack")}

    want = {"qmatmul": ("torch",), "prepack": ("auto",)}
    assert prepared("reference", problem, lambda inputs: inputs)({"x": 1}) == want
    assert prepared("reference", problem, lambda _: decided())({"x": 1}) == dict.fromkeys(want, ("torch",))


def test_memory_is_what_a_call_takes_beyond_its_results() -> None:
    def greedy(given):
        scratch = torch.zeros(1 << 18)  # 1 MiB
        return {"y": 2 * given["x"] + 0 * scratch[0]}

    said = found(greedy, effort=Effort(0.001))["memory"]
    assert 1 << 20 <= said["extra_bytes"] < (1 << 20) + (1 << 14)
    assert said["peak_bytes"] >= said["extra_bytes"] + 64 * 8 * 4


def test_memory_at_several_sizes_gives_what_a_row_costs() -> None:
    def squares(given):
        return {"y": 2 * given["x"] + 0 * (given["x"][:, :, None] * given["x"][:, None]).sum()}

    said = found(squares, work=replace(DOUBLE, memory_at=("N", (16, 64))))["memory"]
    assert said["extra_bytes_per_N"] >= 8 * 8 * 4


def test_the_ruler_is_divided_by_round_for_round() -> None:
    work = replace(DOUBLE, ruler="one", flops="N*V", rate="float32")
    candidates = [
        Candidate("one", "ruler", run=right),
        Candidate("two", "backend", run=lambda g: right(g) and right(g)),
    ]
    said = measure(doubling(work), candidates, "cpu", MACHINE, QUICK)["candidates"]
    assert said[0]["times_ruler"]["median"] == 1.0
    assert said[1]["times_ruler"]["n"] <= said[0]["times_ruler"]["n"]


def test_a_goal_is_judged_for_our_own_and_on_its_device_alone() -> None:
    goals = (Goal(1e9, "us"), Goal(0.0, "us"), Goal(1.0, "us", "H200"), Goal(1.0, "us", variant="other"))
    work = replace(DOUBLE, goals=goals)
    assert [(g["number"], g["met"]) for g in found(right, work=work)["goals"]] == [(1e9, True), (0.0, False)]
    assert found(right, work=work, kind="peer")["goals"] == []


class Clock(timing.Stopwatch):
    """Each call takes the time it returns."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.calls: list[str] = []

    def once(self, run) -> float:
        name, t = run()
        self.calls.append(name)
        return t


def test_rounds_mix_all_candidates_in_changing_order_and_slow_ones_take_part_in_few() -> None:
    clock = Clock()
    runs = {"quick": lambda i: ("quick", 1e4), "other": lambda i: ("other", 1e4), "slow": lambda i: ("slow", 1e6)}
    readings = timing.mixed(clock, runs, seconds=0.2, queued=False)
    assert {name: len(r) for name, r in readings.items()} == {"quick": 20, "other": 20, "slow": 2}
    assert readings["slow"].keys() <= readings["quick"].keys()
    firsts = [name for name in clock.calls if name != "slow"][::2]
    assert set(firsts) == {"quick", "other"}


def test_tolerances_are_those_of_the_spec() -> None:
    want = torch.tensor([-1.0, -30.0], dtype=torch.float64)
    within = elementwise("logprob", "logprob", "bfloat16", (want + 1e-5).float(), want)
    beyond = elementwise("logprob", "logprob", "bfloat16", (want + 1e-4).float(), want)
    assert (within.over <= 1, beyond.over > 1, beyond.coarse < 1) == (True, True, True)
    assert elementwise("logprob", "logprob", "float32", torch.tensor([math.nan, 0.0]), want).over == math.inf
    assert frobenius(torch.tensor([math.nan]), torch.tensor([1.0]), 1e-3).over == math.inf
    assert verdict({}, peer=True) == "wrong"


def test_every_workload_has_a_floor_a_known_operator_and_goals_with_units() -> None:
    for work in WORKS:
        assert work.clock != "device" or work.floor(work.bytes) > 0, work
        assert {op for op in work.op.split(",") if op} <= set(OPERATORS), work
        assert {g.unit for g in work.goals} <= set(GOALS), work
        assert work.ruler is None or work.clock != "device" or work.ruler in PEERS, work


def test_few_rows_are_bound_by_memory_and_many_by_arithmetic() -> None:
    bound = {w.sizes["M"]: w.compute_bound for w in suites.works(["qmatmul"], "full") if w.sizes["N"] == 28672}
    assert bound == {1: False, 16: False, 64: True, 128: True, 256: True}
    assert all(w.compute_bound for w in suites.works(["linear_logprob", "linear_policy_loss"], "full"))
    assert not any(w.compute_bound for w in suites.works(["logprob", "sample", "advantage"], "full"))


def test_names_tell_the_workloads_of_a_suite_apart() -> None:
    for size in SIZES:
        names = [(w.suite, w.op, w.name) for w in suites.works(SUITES, size)]
        assert len(names) == len(set(names))


ELSEWHERE = {"dispatch", "host", "trainers"}  # test_bench_host has the rows of `host`; `trainers` needs TRL and verl
# Rows that stand for the rest, which are the same code on other sizes, kinds and dtypes. Of `seeds` the chains, for its
# other rows are those of other suites; of `ranks`, where each row starts a world, one of each kind.
OWN = {
    "advantage": ("kind=gae", "64x8 float32 forward kind=grpo"),
    "linear_policy_loss": ("float32",),
    "seeds": ("ratio", "chain", "update"),
    "ranks": ("2x1536 float32 collective", "head forward+backward", "split loss", "top-k", "top-p 0.999"),
}


@pytest.mark.parametrize(
    "suite",
    [pytest.param(s, marks=[pytest.mark.slow] if s == "ranks" else []) for s in SUITES if s not in ELSEWHERE],
)
def test_the_reference_and_plain_torch_are_right_on_every_toy_workload(suite) -> None:
    content = run([suite], use=("reference",), against=("torch",), effort=QUICK, only=OWN.get(suite, ()))
    assert fails(content) == []
    said = [c for r in content["results"] for c in r["candidates"] if c["status"] != "absent"]
    assert {c["status"] for c in said if c["kind"] == "backend"} == {"measured"}
    assert {c["status"] for c in said if c["kind"] != "backend"} <= {"measured", "coarse"}


def test_a_device_that_is_lost_ends_the_run_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr("rlkernel_bench.run._tidied", lambda device: "the device was lost: CUDA error")
    kept = []
    content = run(["policy_loss"], use=("reference",), against=(), effort=QUICK, keep=kept.append)
    assert (len(content["results"]), len(kept)) == (1, 1)
    assert fails(content) == ["the device was lost: CUDA error"]


def test_a_format_that_does_not_exist_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.delitem(FORMATS, "mxfp4")
    content = run(["seeds"], only=["mxfp4"], effort=QUICK)
    assert [r["status"] for r in content["results"]] == ["refused"]
    assert "unknown format 'mxfp4'" in content["results"][0]["message"]


def test_the_way_to_a_kernel_in_a_compiled_graph_is_measured_beside_an_addition() -> None:
    content = run(["dispatch"], size="full", only=["compiled backend=eager"], effort=QUICK)
    said = {c["name"]: c["status"] for c in content["results"][0]["candidates"]}
    assert said == dict.fromkeys(("direct", "dispatch"), "measured")


def test_an_absent_peer_says_what_is_missing_and_whether_its_adapter_ever_ran() -> None:
    problem = suites.problem(suites.works(["linear_logprob"], "toy")[0], "cpu")
    said = {c.name: c for c in peers(problem, None, "cuda")}
    assert said["cce"].status == "absent"
    assert "cut_cross_entropy (pip install cut-cross-entropy)" in said["cce"].message
    assert {name: bool(c.ran) for name, c in said.items() if name in {"cce", "liger", "torch"}} == {
        "cce": False,
        "liger": True,
        "torch": True,
    }


def test_every_adapter_names_its_source_and_its_operators_exist() -> None:
    chains = {"replay", "ratio_kl", "decode", "ppo", "rollout", "experts", "adapters"}
    for peer in PEERS.values():
        assert peer.source
        assert set(peer.calls) <= set(OPERATORS) | chains


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["logprb"]}, "unknown suite 'logprb'; did you mean 'logprob'"),
        ({"names": ["logprob"], "size": "tiny"}, "unknown size 'tiny'"),
        ({"names": ["logprob"], "use": ("acme",)}, "unknown backend 'acme'"),
        ({"names": ["logprob"], "against": ("ligr",)}, "unknown peer 'ligr'; did you mean 'liger'"),
    ],
)
def test_unknown_names_are_refused_before_anything_is_measured(arguments, message) -> None:
    with pytest.raises(UnknownNameError, match=message):
        run(**arguments)


def test_ceilings_are_measured_and_a_cache_is_no_slower_than_memory() -> None:
    known = MEASURE("cpu")
    assert min(known.copy, known.read, *known.flops.values()) > 1e8
    assert known.floor_us(known.copy, 0, "float32") <= 1e6
    assert known.floor_us(1, known.flops["float32"], "float32") == pytest.approx(1e6)


def test_throttle_reasons_have_names() -> None:
    assert reasons("0x0000000000000004") == ["power cap"]
    assert reasons("0x0000000000000000") == []
    assert reasons("[N/A]") == []
