"""Machines that are written down: what a process on them would see, and what is wrong."""

import pytest

from rlkernel_rocm.detect import detect, override

MI300, MI350, RX7900, UNKNOWN = 90402, 90500, 110000, 100301


@pytest.fixture
def machine(tmp_path):
    def make(*versions):
        """A file system whose driver lists a CPU and GPUs of these versions."""
        for i, version in enumerate((0, *versions)):
            folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(i)
            folder.mkdir(parents=True)
            text = f"cpu_cores_count {0 if version else 64}\ngfx_target_version {version}\nunique_id {i}\n"
            (folder / "properties").write_text(text)
        return tmp_path

    return make


def codes(found):
    return [p.code for p in found.problems]


def test_gpus_come_in_the_order_of_their_nodes(machine) -> None:
    root = machine(*[MI300] * 9, MI350, MI300)
    assert [g.arch for g in detect(root).visible] == ["gfx942"] * 9 + ["gfx950", "gfx942"]


def test_a_machine_without_the_driver_has_no_gpu(tmp_path) -> None:
    found = detect(tmp_path)
    assert (found.archs, codes(found)) == ((), ["no-device"])
    assert "--device=/dev/kfd" in found.problems[0].fix


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({}, ["gfx942", "gfx950", "gfx942"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["gfx950"]),
        ({"CUDA_VISIBLE_DEVICES": "2,1"}, ["gfx942", "gfx950"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0"}, ["gfx950"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002"}, ["gfx950"]),
        ({"HIP_VISIBLE_DEVICES": "0,-1,1"}, ["gfx942"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, ["gfx950"]),
    ],
)
def test_variables_choose_one_after_another(machine, environ, want) -> None:
    assert [g.arch for g in detect(machine(MI300, MI350, MI300), environ).visible] == want


@pytest.mark.parametrize(
    ("versions", "environ", "want"),
    [
        ((MI300,), {}, []),
        ((MI300, MI350), {}, ["mixed-devices"]),
        ((MI300, MI350), {"HIP_VISIBLE_DEVICES": "0"}, []),
        ((MI300,), {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["visible-devices"]),
        ((MI300,), {"ROCR_VISIBLE_DEVICES": ""}, ["hidden"]),
        ((RX7900,), {"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}, ["override"]),
        ((MI300,), {"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}, []),
        ((MI300,), {"HSA_OVERRIDE_GFX_VERSION": "gfx942"}, ["override"]),
        ((UNKNOWN,), {}, ["unknown-architecture"]),
        ((UNKNOWN,), {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, ["override", "unknown-architecture"]),
    ],
)
def test_what_is_wrong_is_named(machine, versions, environ, want) -> None:
    assert codes(detect(machine(*versions), environ)) == want


def test_an_override_names_an_architecture() -> None:
    assert [override(v) for v in ("9.0.10", "11.0.0", "9.4", None)] == ["gfx90a", "gfx1100", None, None]
