"""Results know their sources: what is of others is marked, and suites are shared by several devices."""

from __future__ import annotations

import json
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import pytest
from rlkernel_bench import evidence
from rlkernel_bench.compare import compare
from rlkernel_bench.report import as_csv, markdown
from rlkernel_bench.results import joined, read, seal, write
from rlkernel_bench.shared import ALONE, Shared

from rlkernel_core.errors import ConfigError
from tests.test_bench_results import candidate, content, peer

NOW = evidence.Present("cuda").of("triton", ["logprob"])
OTHER = {"logprob": "0" * 16}


def test_a_backend_has_a_fingerprint_for_each_operator_of_a_workload_and_a_peer_has_none() -> None:
    present = evidence.Present("cuda")
    assert list(present.of("triton:eager", ["logprob", "sample"])) == ["logprob", "sample"]
    assert present.of("cuda", ["whiten"]) == {}  # which it does not implement
    assert present.of("liger", ["logprob"]) == {}
    assert present.of("reference", ["whiten"]) == present.of("torch", ["whiten"])


@pytest.mark.parametrize(("sources", "older"), [(NOW, []), (OTHER, ["logprob"]), ({}, ["logprob"])])
def test_a_number_is_older_where_its_sources_are_not_those_of_now(sources, older) -> None:
    present = evidence.Present("cuda")
    assert present.older({"op": "logprob"}, candidate(sources=sources)) == older
    assert present.older({"op": "logprob"}, peer(sources=sources)) == []
    assert present.older({"op": "logprob"}, candidate(sources=sources, eager=None)) == []


def test_a_report_marks_what_is_older() -> None:
    kept = content(candidate(sources=OTHER), candidate("cuda", sources={}), peer())
    lines = markdown([kept]).splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith(("| triton | m", "| cuda | m"))] == [
        "measured, older",
        "measured",  # which does not implement logprob
    ]
    assert [row.rpartition(",")[2] for row in as_csv([kept]).splitlines()] == ["older", "logprob", "", ""]


def test_a_comparison_says_which_side_is_older() -> None:
    [change] = compare(content(candidate(us=100.0, sources=OTHER)), content(candidate(us=150.0, sources=NOW)), 0.05)
    assert (change.verdict, change.older) == ("slower", "old")


def test_results_of_schema_1_are_read_and_older(tmp_path) -> None:
    kept = seal({k: v for k, v in content(candidate()).items() if k not in {"schema", "hash"}} | {"schema": 1})
    write(kept, tmp_path)
    assert [(e.backend, e.op, e.state) for e in evidence.evidence(tmp_path)] == [("triton", "logprob", "older")]
    assert read(tmp_path)["schema"] == 1


def test_what_is_older_has_the_command_that_renews_it(cli, tmp_path) -> None:
    write(content(candidate(sources=OTHER)), Path("results/h200/old"))
    write(content(candidate(sources=NOW)), Path("results/h200/new"))
    rows = json.loads(cli("bench", "evidence", "results", "--json").stdout)
    command = "rlkernel bench run --suite logprob --size full --device cuda --out results/h200/old"
    assert [(r["results"], r["state"], r["command"]) for r in rows] == [
        ("results/h200/new", "current", ""),
        ("results/h200/old", "older", command),
    ]
    said = cli("bench", "evidence", "results").stdout
    assert ("1 of 2 to renew" in said, command in said) == (True, True)


def test_the_command_renews_it(cli) -> None:
    words = "bench run --suite policy_loss --device cpu --backend torch --peers none --seconds 0.001 --out kept"
    assert cli(*shlex.split(words)).exit_code == 0
    kept = read(Path("kept"))
    assert {e.state for e in evidence.evidence(Path("kept"))} == {"current"}
    for result in kept["results"]:
        result["candidates"][0]["sources"] = {"policy_loss": "0" * 16}
    write(seal({k: v for k, v in kept.items() if k not in {"schema", "hash"}}), Path("kept"))
    [due] = evidence.evidence(Path("kept"))
    more = "--backend torch --peers none --seconds 0.001"
    assert cli(*shlex.split(due.command)[1:], *shlex.split(more)).exit_code == 0
    assert {e.state for e in evidence.evidence(Path("kept"))} == {"current"}


def test_results_of_several_devices_are_joined_in_order_with_what_each_device_was() -> None:
    first, second = ({**content(candidate()), "device": f"cuda:{i}", "ended": ""} for i in range(2))
    whole = joined([first, second], ["logprob on cuda:1 ended with -9"])
    assert (whole["device"], [d["device"] for d in whole["devices"]]) == ("cuda:0,cuda:1", ["cuda:0", "cuda:1"])
    assert (len(whole["results"]), whole["ended"]) == (2, "logprob on cuda:1 ended with -9")


def test_a_report_says_what_each_device_could_do() -> None:
    first, second = ({**content(candidate()), "device": f"cuda:{i}", "ended": ""} for i in range(2))
    second["ceilings"] = {**second["ceilings"], "copy": 3e12}
    text = markdown([joined([first, second])])
    assert ("copy 4000 GB/s" in text, "copy 3000 GB/s" in text) == (True, True)


@pytest.mark.slow  # the longest of these
def test_two_places_share_the_suites_of_a_run(cli) -> None:
    words = "bench run --suite policy_loss --suite verify --device cpu,cpu --backend torch --peers none"
    done = cli(*shlex.split(words), "--seconds", "0.001", "--out", "both")
    assert done.exit_code == 0, done.output
    kept = read(Path("both"))
    assert (kept["device"], kept["suites"], kept["ended"]) == ("cpu", ["policy_loss", "verify"], "")
    assert {r["status"] for result in kept["results"] for r in result["candidates"]} == {"measured"}


class Places:
    """Processes that measure one suite each, but for a device that is lost; the first of each device run together."""

    def __init__(self, lost: str, devices: list[str]) -> None:
        self.lost, self.commands = lost, []
        self.first, self.together = set(devices), Barrier(len(devices), timeout=60)

    def __call__(self, command, **options):
        self.commands.append(command)
        at = dict(pairwise(command))
        if at["--device"] in self.first and at["--suite"] not in ALONE:
            self.first.discard(at["--device"])
            self.together.wait()
        if at["--device"] == self.lost:
            return subprocess.CompletedProcess(command, -9, "", "Killed")
        kept = content(candidate()) | {"suites": [at["--suite"]], "device": at["--device"], "ended": ""}
        kept["results"] = [{**r, "suite": at["--suite"]} for r in kept["results"]]
        write(seal({k: v for k, v in kept.items() if k != "hash"}), Path(at["--out"]))
        return subprocess.CompletedProcess(command, 0, "measured\n", "")


def places(monkeypatch, lost: str, suites: list[str], devices: list[str]) -> tuple[Places, Shared]:
    run = Places(lost, devices)
    monkeypatch.setattr("rlkernel_bench.shared.subprocess.run", run)
    return run, Shared(suites, devices, ["--size", "toy"], lambda _: None, lambda _: None)


def test_a_device_that_is_lost_takes_no_further_suite_and_the_run_says_so(monkeypatch) -> None:
    run, shared = places(monkeypatch, "cuda:1", ["logprob", "sample", "verify"], ["cuda:0", "cuda:1"])
    kept = shared.run()
    assert [command.count("cuda:1") for command in run.commands].count(1) == 1
    assert len(kept["suites"]) == 2
    assert "on cuda:1 ended with -9: Killed" in kept["ended"]


def test_where_every_device_is_lost_nothing_was_measured(monkeypatch) -> None:
    _, shared = places(monkeypatch, "cuda:0", ["logprob", "sample"], ["cuda:0"])
    with pytest.raises(ConfigError, match="logprob on cuda:0 ended with -9: Killed; sample: no device was left"):
        shared.run()


def test_suites_that_use_several_devices_run_after_the_others(monkeypatch) -> None:
    run, shared = places(monkeypatch, "", ["ranks", "logprob", "sample"], ["cuda:0", "cuda:1"])
    assert shared.run()["suites"] == ["ranks", "logprob", "sample"]
    assert run.commands[-1][4:9] == ["run", "--suite", "ranks", "--device", "cuda:0"]


def test_devices_of_several_kinds_are_an_error(monkeypatch) -> None:
    _, shared = places(monkeypatch, "", ["logprob"], ["cpu", "cuda:0"])
    with pytest.raises(ConfigError, match="a run of its own"):
        shared.run()
