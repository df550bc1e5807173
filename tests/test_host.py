"""Machines read from their files: boards and near misses, memory and its budget, power and clocks."""

from __future__ import annotations

import pytest

from rlkernel_core.errors import MemoryBudgetError
from rlkernel_core.host.allocator import faults
from rlkernel_core.host.board import board
from rlkernel_core.host.boards import CHIPS, JETPACKS, MODULES, RELEASES, released
from rlkernel_core.host.memory import Memory, gpu_held, memory, size
from rlkernel_core.host.power import Clock, power
from tests import boards
from tests.boards import plant

GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "name", "module", "arch", "l4t", "jetpack", "tegra_driver"),
    [
        (boards.ORIN_NANO, "Jetson Orin Nano 8 GB (developer kit)", "p3767-0005", "sm87", "36.4.3", "6.2", True),
        (boards.ORIN_NX, "Jetson Orin NX 16 GB", "p3767-0000", "sm87", "36.5.0", "6.2.2", True),
        (boards.AGX_ORIN, "Jetson AGX Orin 64 GB", "p3701-0005", "sm87", "39.2.0", "7.2", False),
        (boards.THOR, "Jetson T5000 (Thor)", "p3834-0008", "sm110", "38.2.0", "7.0", False),
    ],
)
def test_a_board_is_known_by_its_device_tree(tmp_path, files, name, module, arch, l4t, jetpack, tegra_driver) -> None:
    found = board(plant(tmp_path, files))
    assert (found.sold_as.name, found.module, found.kind.arch, found.l4t) == (name, module, arch, l4t)
    assert (found.release.jetpack, found.release.tegra_driver) == (jetpack, tegra_driver)
    assert found.evidence == ("/proc/device-tree", "/etc/nv_tegra_release")


def test_a_container_without_device_tree_and_release_is_known_by_the_chips_number(tmp_path) -> None:
    found = board(plant(tmp_path, boards.CONTAINER))
    assert (found.name, found.kind.arch) == ("NVIDIA Jetson Orin Nano Developer Kit", "sm87")
    assert (found.sold_as, found.release, found.evidence) == (None, None, ("/sys/devices/soc1",))


def test_a_board_whose_model_is_not_in_the_table_is_a_board_of_its_chip(tmp_path) -> None:
    found = board(plant(tmp_path, boards.tree("", "acme,carrier", "nvidia,p3767-9999", "nvidia,tegra234")))
    assert (found.name, found.sold_as, found.kind.arch, found.l4t) == ("Jetson Orin", None, "sm87", None)


@pytest.mark.parametrize("name", boards.NEAR)
def test_a_near_miss_is_no_jetson(tmp_path, name) -> None:
    assert board(plant(tmp_path, boards.NEAR[name])) is None


@pytest.mark.parametrize(
    ("l4t", "jetpack"),
    [("36.4.3", "6.2"), ("36.4.99", "6.1 to 6.2.1"), ("36.9", "6"), ("40.1", None), ("", None), (None, None)],
)
def test_a_release_is_known_exactly_or_by_its_number(l4t, jetpack) -> None:
    found = released(l4t)
    assert (found.jetpack if found else None) == jetpack


def test_the_tables_fit_together() -> None:
    assert {m.chip for m in MODULES.values()} <= set(CHIPS)
    assert [l4t for l4t in JETPACKS if l4t.rpartition(".")[0] not in RELEASES] == []
    # 128 CUDA cores a multiprocessor: the counts NVIDIA sells them by.
    cores = {m.multiprocessors * 128 for m in MODULES.values() if m.chip == "nvidia,tegra234"}
    assert cores == {512, 1024, 1792, 2048}


def test_the_budget_is_what_is_available_less_a_reserve_and_not_what_is_free(tmp_path) -> None:
    found = memory(plant(tmp_path, boards.ORIN_NANO))
    assert found.total == boards.KIB_8GB << 10
    assert found.reserve == int(0.15 * found.total)
    assert found.budget == (6200 << 20) - found.reserve
    assert found.free < found.budget < found.available
    assert (found.swap_total, found.zram) == (4 * GIB, 2 * GIB)


def test_a_small_board_keeps_a_whole_gibibyte() -> None:
    assert Memory(total=4 * GIB, available=3 * GIB, free=0, cached=0).budget == 2 * GIB
    assert Memory(total=4 * GIB, available=GIB // 2, free=0, cached=0).budget == 0


def test_a_containers_limit_counts_and_what_its_page_cache_gives_back_too(tmp_path) -> None:
    found = memory(plant(tmp_path, boards.CONTAINER))
    assert found.limit == (2048 - 1536 + 256) << 20
    assert found.budget == found.limit


def test_a_container_without_a_limit_has_the_machines_budget(tmp_path) -> None:
    found = memory(plant(tmp_path, boards.ORIN_NANO | {"sys/fs/cgroup/memory.max": "max\n"}))
    assert found.limit is None


def test_what_would_swap_is_refused_with_its_numbers(tmp_path) -> None:
    found = memory(plant(tmp_path, boards.ORIN_NANO))
    found.require(found.budget, "a model")
    with pytest.raises(MemoryBudgetError, match=r"a model needs 4\.88 GiB, and 4\.88 GiB may be taken") as caught:
        found.require(found.budget + 1, "a model", "Take int4.")
    assert (caught.value.needed, caught.value.budget) == (found.budget + 1, found.budget)
    assert "6.05 GiB of 7.80 GiB available, 1.17 GiB reserved for the system" in str(caught.value)
    assert str(caught.value).endswith("Take int4.")
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "nonsense"])
def test_a_kernel_that_does_not_tell_has_no_budget(tmp_path, text) -> None:
    assert memory(plant(tmp_path, {"proc/meminfo": text})) is None


def test_sizes_are_said_for_people() -> None:
    assert [size(n) for n in (512, 3 << 20, int(1.5 * GIB))] == ["0 KiB", "3.0 MiB", "1.50 GiB"]


def test_power_is_read_from_the_sensors_of_an_orin(tmp_path) -> None:
    found = power(plant(tmp_path, boards.ORIN_NANO))
    assert found.mode == "MAXN_SUPER"
    assert found.rails == pytest.approx({"VDD_IN": 6.096, "VDD_CPU_GPU_CV": 1.5216, "VDD_SOC": 1.47088})
    assert (found.watts, found.watts_of) == (pytest.approx(6.096), "VDD_IN")
    assert found.celsius == {"cpu": 48.5, "gpu": 47.0}  # a zone that is off is left out
    assert (found.gpu, found.gpu.held) == (Clock(306.0, 306.0, 1020.0), False)
    assert found.over_current == 4


def test_rails_that_are_not_connected_do_not_count_and_without_an_input_rail_the_sum_is_said_to_be_one(
    tmp_path,
) -> None:
    found = power(plant(tmp_path, boards.AGX_ORIN))
    assert found.rails == pytest.approx(
        {"VDD_GPU_SOC": 9.5, "VDD_CPU_CV": 1.9, "VIN_SYS_5V0": 3.9936, "VDDQ_VDD2_1V8AO": 0.4992}
    )
    assert (found.watts, found.watts_of, found.gpu.held) == (pytest.approx(15.8928), "sum of rails", True)


def test_thor_has_a_sensor_of_its_input(tmp_path) -> None:
    found = power(plant(tmp_path, boards.THOR))
    assert (found.watts, found.watts_of, found.gpu.mhz) == (46.25, "VIN", 1575.0)


def test_the_mode_is_asked_of_the_tool_where_no_file_says_it(tmp_path) -> None:
    assert power(tmp_path, lambda: "NV Power Mode: MAXN\n0\n").mode == "MAXN"
    assert power(tmp_path, lambda: "NVPM ERROR: Error opening ...").mode is None


def test_a_machine_without_sensors_says_nothing(tmp_path) -> None:
    found = power(tmp_path)
    assert found.as_dict() == {
        "mode": None, "rails": {}, "celsius": {}, "gpu": None, "over_current": None,
        "watts": None, "watts_of": "sum of rails",
    }  # fmt: skip


def test_a_sensor_that_answers_with_an_error_is_left_out(tmp_path) -> None:
    root = plant(tmp_path, boards.ORIN_NANO)
    (root / "sys/class/hwmon/hwmon1/in2_input").unlink()
    (root / "sys/class/hwmon/hwmon1/in2_input").mkdir()
    assert set(power(root).rails) == {"VDD_IN", "VDD_SOC"}


@pytest.mark.parametrize(
    ("environ", "fixes"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, [(True, "unset PYTORCH_CUDA_ALLOC_CONF")]),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"},
            [(True, "export PYTORCH_ALLOC_CONF=max_split_size_mb:64")],
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, [(False, "unset PYTORCH_CUDA_ALLOC_CONF")]),
    ],
)
def test_allocator_settings_that_fail_on_tegra_are_found_with_their_remedy(environ, fixes) -> None:
    assert [(f.fatal, f.fix) for f in faults(environ)] == fixes


def test_what_the_gpu_driver_holds_is_read_where_root_may(tmp_path) -> None:
    clients = "CLIENT PROCESS PID SIZE\nuser python 4121 812340K\nuser Xorg 900 20480K\ntotal                 832820K\n"
    assert gpu_held(plant(tmp_path, {"sys/kernel/debug/nvmap/iovmm/clients": clients})) == 832820 << 10
    assert gpu_held(tmp_path / "elsewhere") is None
