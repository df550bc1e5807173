"""What a benchmark and a conformance report note on a Jetson: the board, and its sensors in place of nvidia-smi."""

from __future__ import annotations

import pytest
from rlkernel_bench import environment

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
    assert documents.place({"device": "cuda:0", "environment": env}) == (
        "Jetson Orin Nano 8 GB (developer kit) (JetPack 6.2, MAXN_SUPER)"
    )
    assert "board" not in report.environment("cpu", tmp_path / "elsewhere")


def test_nothing_of_this_is_noted_elsewhere(tmp_path) -> None:
    assert "board" not in environment.environment("cpu", tmp_path)
    assert environment.gpu_state("cpu", tmp_path) is None
