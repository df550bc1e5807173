"""What a benchmark and a conformance report note on a Jetson: the board, and its sensors in place of nvidia-smi."""

from __future__ import annotations

import pytest
from rlkernel_bench import environment, measure, suites
from rlkernel_bench.run import run
from rlkernel_bench.telemetry import Telemetry

from rlkernel_conformance import documents, report
from tests import boards


def test_results_name_the_board_its_power_mode_and_its_memory(tmp_path) -> None:
    root = boards.plant(tmp_path, boards.ORIN_NANO)
    said = environment.environment("cpu", root)
    assert said["board"] == {
        "name": "Jetson Orin Nano 8 GB (developer kit)",
        "l4t": "36.4.3",
        "jetpack": "6.2",
        "power_mode": "MAXN_SUPER",
        "clocks_held": False,
    }
    assert said["memory"]["budget"] == said["memory"]["available"] - said["memory"]["reserve"]


def test_the_state_of_the_card_comes_from_the_boards_sensors(tmp_path) -> None:
    state = environment.gpu_state("cuda", boards.plant(tmp_path, boards.ORIN_NANO))
    assert (state["sm_mhz"], state["celsius"], state["throttled_by"]) == (306.0, 48.5, None)
    assert (state["watts"], state["watts_of"], state["over_current"]) == (pytest.approx(6.096), "VDD_IN", 4)
    assert set(state["rails"]) == {"VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"}


def test_a_conformance_report_names_the_board_whose_gpu_has_its_familys_name(tmp_path) -> None:
    env = report.environment("cpu", boards.plant(tmp_path, boards.ORIN_NANO)) | {"device_name": "Orin"}
    assert documents.place({"device": "cuda:0", "runs": {"1": {"environment": env}}}) == (
        "Jetson Orin Nano 8 GB (developer kit) (JetPack 6.2, MAXN_SUPER)"
    )
    assert "board" not in report.environment("cpu", tmp_path / "elsewhere")


def test_sensors_are_read_while_something_runs(tmp_path) -> None:
    root = boards.plant(tmp_path, boards.ORIN_NANO)
    with Telemetry(root, every_s=3600) as seen:  # a look before and a look after
        boards.plant(root, boards.ina3221("sys/class/hwmon/hwmon1", ("VDD_IN", 5000, 3000)))
        boards.plant(root, boards.zones(cpu=61, gpu=72.5) | boards.clock("17000000.gpu", 1020, 306, 1020))
        boards.plant(root, {"sys/class/hwmon/hwmon3/oc1_event_cnt": "2\n"})
    assert seen.noted()["during"] == {
        "looks": 2,
        "watts_mean": pytest.approx((6.096 + 15.0) / 2),
        "watts_max": 15.0,
        "watts_of": "VDD_IN",
        "sm_mhz_min": 306.0,
        "sm_mhz_max": 1020.0,
        "celsius_max": 72.5,
        "over_current": 2,
    }


def test_looks_go_on_by_themselves_until_the_work_ends(tmp_path) -> None:
    seen = Telemetry(boards.plant(tmp_path, boards.THOR), every_s=0.001)
    with seen:
        while len(seen.states) < 4:
            pass
    ended = len(seen.states)
    assert (seen.noted()["during"]["looks"], seen.noted()["during"]["watts_mean"]) == (ended, pytest.approx(46.25))
    assert seen.states[-1].watts_of == "VIN"


def test_results_have_what_the_sensors_said_while_each_candidate_ran(tmp_path, monkeypatch) -> None:
    root = boards.plant(tmp_path, boards.ORIN_NANO)
    monkeypatch.setattr(measure, "Telemetry", lambda: Telemetry(root))
    work = suites.works(["logprob"], "toy", [])[0]
    found = run([work.suite], only=[work.name], use=["reference"], against=[])["results"][0]
    assert found["gpu"]["during"]["watts_of"] == "VDD_IN"
    assert [c["during"]["watts_max"] for c in found["candidates"] if "eager" in c] == [pytest.approx(6.096)]


def test_elsewhere_no_thread_runs(tmp_path) -> None:
    with Telemetry(tmp_path) as seen:
        pass
    assert (seen.noted(), seen.states) == ({}, [])


def test_nothing_of_this_is_noted_elsewhere(tmp_path) -> None:
    assert "board" not in environment.environment("cpu", tmp_path)
    assert environment.gpu_state("cpu", tmp_path) is None
