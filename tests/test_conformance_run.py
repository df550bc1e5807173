"""A run as a whole: manifests that are not installed, several devices, devices that fail, progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Lock

import pytest

import rlkernel as rlk
from rlkernel_conformance.device_pool import Work, attack_on_devices
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.manifests import load
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.ranks import capturing
from rlkernel_conformance.run import run
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.manifest import Backend, Impl, Requires

ROOT = Path(__file__).parents[1]
EFFORT = Profile("test", 1, 60, thorough=False)
OPS = ("group_filter", "whiten", "shape_rewards")
WORK = [Work(Subject("torch", op, "cuda:0"), tuple(attacks_with_leak_check(op).values())[:3]) for op in OPS]

# A backend that shows whether its worker sees a variable: it serves where it does.
CHEERFUL = """
import os
from rlkernel_core import Backend, Impl, Requires
from rlkernel_torch import backend as reference
from rlkernel_torch.advantage.filtering import group_filter as right


def group_filter(call):
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET is not set")
    return right(call)


backend = Backend(
    name="cheerful",
    api=(2, 0),
    impls=(
        Impl(
            op="group_filter@1",
            target="cheerful_kernels:group_filter",
            requires=Requires(device="*"),
            supports=reference.of("group_filter@1")[0].supports,
        ),
    ),
)
other = "no manifest"
"""


@pytest.fixture
def cheerful(tmp_path, monkeypatch):
    (tmp_path / "cheerful_kernels.py").write_text(CHEERFUL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("cheerful_kernels", None)
    rlk.refresh()


def test_a_backend_that_is_not_installed_is_attacked_with_the_variables_it_needs(cheerful, tmp_path) -> None:
    words = ["run", "cheerful", "--manifest", "cheerful_kernels:backend", "--op", "group_filter", "--clause", "GF-01"]
    words += ["--report", "made"]
    code = "from rlkernel.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "conformance", *words],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads((tmp_path / "made" / "report.json").read_text())["operators"]["group_filter@1"]["clauses"]
    assert [(c["clause"], c["status"]) for c in found if c["status"] != "not_run"] == [("GF-01", "held")], done.stderr
    assert "Triton interpreter, CPU" in (tmp_path / "made" / "report.md").read_text()
    assert "`TRITON_INTERPRET=1`" in (tmp_path / "made" / "report.md").read_text()
    assert "   1/" in done.stderr.splitlines()[0]  # progress


@pytest.mark.parametrize(
    "where, message",
    [
        ("no_such_module:backend", "No module named 'no_such_module'"),
        ("cheerful_kernels:nothing", "no manifest at"),
        ("cheerful_kernels", "no manifest at"),
        ("cheerful_kernels:other", "is a str, not a"),
    ],
)
def test_what_is_no_manifest_is_an_error_that_says_so(cheerful, where, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load(where)


def test_a_manifest_of_another_name_is_an_error(cheerful) -> None:
    with pytest.raises(ConfigError, match="of 'cheerful', not of 'gloomy'"):
        run("gloomy", EFFORT, manifest="cheerful_kernels:backend")


def test_devices_of_several_kinds_are_an_error() -> None:
    with pytest.raises(ConfigError, match="a run of its own"):
        run("torch", EFFORT, devices=("cpu", "cuda:0"))


@pytest.mark.parametrize(("gpus", "ranks"), [(1, ["cuda:0"]), (4, ["cuda:3", "cuda:0"])])
def test_a_graph_holds_the_collectives_of_as_many_ranks_as_there_are_gpus(monkeypatch, gpus, ranks) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = capturing(Subject("torch", "capture", f"cuda:{gpus - 1}"), 2)
    assert [str(device) for device in found] == ranks


def test_several_processes_share_an_operator_and_its_report_is_the_same() -> None:
    alone, shared = (run("torch", EFFORT, ops=OPS[:1], jobs=jobs) for jobs in (1, 2))
    assert shared["hash"] == alone["hash"]


def test_two_places_share_a_run_and_every_clause_is_told_once() -> None:
    seen = []
    content = run("torch", EFFORT, ops=OPS[:2], devices=("cpu", "cpu"), watch=seen.append)
    assert [p.done for p in seen] == list(range(1, seen[0].due + 1))
    attacked = [
        (op.partition("@")[0], c["clause"])
        for op, found in content["operators"].items()
        for c in found["clauses"]
        if c["status"] == "held"
    ]
    assert sorted(attacked) == sorted((p.outcome.op, p.outcome.clause) for p in seen)
    assert {op for op, _ in attacked} == set(OPS[:2])


class Places:
    """Attacks that hold, but for devices that fail after some clauses."""

    def __init__(self, **lives: int) -> None:
        self.lives = {name.replace("_", ":"): count for name, count in lives.items()}
        self.seen: dict[str, int] = {}
        self.lock = Lock()

    def __call__(self, subject, attacks):
        found = []
        for attack in attacks:
            with self.lock:
                self.seen[subject.device] = self.seen.get(subject.device, 0) + 1
                alive = self.seen[subject.device] <= self.lives.get(subject.device, 1000)
            status, text = ("held", "") if alive else ("not_run", f"{subject.device} is gone")
            script = f"reproduce(device={subject.device!r})"
            found.append(Outcome(subject.op, attack.clause.id, "t", status, message=text, reproduce=script))
        return found


def test_what_a_device_that_fails_has_left_is_done_by_the_others() -> None:
    outcomes = attack_on_devices(WORK, ("cuda:0", "cuda:1"), 1, Places(cuda_1=1))
    assert {op: [o.status for o in found] for op, found in outcomes.items()} == {op: ["held"] * 3 for op in OPS}
    assert {o.reproduce for found in outcomes.values() for o in found} == {"reproduce(device='cuda:0')"}


def test_where_every_device_fails_what_is_left_is_not_run() -> None:
    places = Places(cuda_0=2, cuda_1=2)
    outcomes = attack_on_devices(WORK, ("cuda:0", "cuda:1"), 1, places)
    found = [o for op in OPS for o in outcomes[op]]
    assert sum(o.status == "held" for o in found) == 4
    assert {o.message for o in found if o.status == "not_run"} <= {
        "cuda:0 is gone",
        "cuda:1 is gone",
        "no device was left",
    }
    assert {op: sorted(o.clause for o in outcomes[op]) for op in OPS} == {
        w.subject.op: sorted(a.clause.id for a in w.attacks) for w in WORK
    }


def test_a_device_that_fails_is_no_second_time_used() -> None:
    places = Places(cuda_0=0, cuda_1=0)
    outcomes = attack_on_devices(WORK, ("cuda:0", "cuda:1"), 1, places)
    assert all(seen <= 3 for seen in places.seen.values())  # one operator, and none after
    assert {o.status for found in outcomes.values() for o in found} == {"not_run"}


def test_a_run_without_a_device_is_unfinished_and_blames_nobody() -> None:
    content = run("torch", EFFORT, ops=("whiten",), devices=("cuda:63",))
    statuses = {c["status"] for c in content["operators"]["whiten@1"]["clauses"]}
    assert (content["verdict"], statuses) == ("unfinished", {"not_run"})


def test_a_device_whose_name_is_part_of_a_claimed_one_is_not_claimed() -> None:
    impl = Impl(op="whiten@1", target="a.b:c", requires=Requires(device="acme2"))
    with rlk.registered(Backend(name="acme", api=(2, 0), impls=(impl,))):
        assert Subject("acme", "whiten", "acme").impls == ()
        assert Subject("acme", "whiten", "acme2:1").impls == (impl,)


def test_a_run_whose_time_is_over_says_which_clauses_it_did_not_reach() -> None:
    content = run("torch", Profile("test", 1, 30), ops=("group_filter",), within=0.0)
    [found] = content["operators"].values()
    assert {c["status"] for c in found["clauses"]} == {"not_run"}
    assert "--within" in found["clauses"][0]["message"]
    assert content["verdict"] == "unfinished"


def test_a_run_of_some_clauses_says_that_the_others_were_not_asked_for() -> None:
    asked = {"ops": ("group_filter",), "clauses": ("GF-91",)}
    content = run("torch", Profile("test", 1, 30), **asked)
    [found] = content["operators"].values()
    ran = [c["clause"] for c in found["clauses"] if c["status"] != "not_run"]
    assert (ran, content["verdict"]) == (["GF-91"], "unfinished")
    assert {c["message"] for c in found["clauses"] if c["clause"] != "GF-91"} == {
        "not asked for: the run was of other clauses"
    }
    with pytest.raises(UnknownNameError, match="did you mean 'GF-91'"):
        run("torch", Profile("test", 1, 30), ops=("group_filter",), clauses=("GF91",))
