"""How the doctor finds out: drivers' files and tools, a child process for torch, and the command line around it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from rlkernel.doctor import diagnose, examine, machine
from rlkernel.doctor.hardware import Gpu, Hardware, gfx, look
from rlkernel.doctor.torchbuild import TorchBuild, ask
from tests import boards
from tests.command_line import answer
from tests.plugins import good

SMI = (
    "NVIDIA H100 80GB HBM3, 9.0, 570.86.15\nNVIDIA H100 80GB HBM3, 9.0, 570.86.15\n",
    "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |\n",
)
SELF_TEST = """
from rlkernel_core import Backend, Impl, Requires


def check(device):
    {body}


impl = Impl(op="logprob@1", target="acme_plugin:check", requires=Requires(device="cpu"))
backend = Backend(name="acme", api=(2, 0), impls=(impl,), self_test="acme_plugin:check")
"""


TORCH_HERE = functools.cache(ask)


@pytest.fixture(autouse=True)
def torch_is_asked_once(monkeypatch) -> None:
    """Each child that imports torch takes seconds, and says what the first one said."""
    monkeypatch.setattr(machine, "ask", TORCH_HERE)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nothing() -> None:
    return None


def test_an_empty_machine_has_nothing(tmp_path) -> None:
    assert look(tmp_path, nothing) == Hardware()


def test_nvidia_cards_come_from_the_drivers_tool(tmp_path) -> None:
    found = look(tmp_path, lambda: SMI)
    assert found.nvidia == (Gpu("NVIDIA H100 80GB HBM3", "sm90"),) * 2
    assert (found.nvidia_driver, found.nvidia_cuda, found.nvidia_problem) == ("570.86.15", "12.8", None)


def test_a_driver_that_does_not_answer_is_a_problem(tmp_path) -> None:
    said = "failed: Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86"
    found = look(tmp_path, lambda: (said, ""))
    assert (found.gpus, found.nvidia_problem) == ((), "Failed to initialize NVML: Driver/library version mismatch")


def test_a_device_file_without_the_tool_is_a_problem(tmp_path) -> None:
    write(tmp_path / "dev/nvidia0", "")
    assert look(tmp_path, nothing).nvidia_problem == "/dev/nvidia0 is there and nvidia-smi is not"


def test_a_tool_too_old_to_know_the_capability_still_names_the_card(tmp_path) -> None:
    found = look(tmp_path, lambda: ("Tesla K80, [N/A], 470.1\n", ""))
    assert (found.nvidia, found.nvidia_cuda) == ((Gpu("Tesla K80", None),), None)


def test_amd_cards_come_from_the_kernel_drivers_topology(tmp_path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n")
    write(nodes / "1/properties", "cpu_cores_count 0\nsimd_count 304\ngfx_target_version 90402\n")
    write(tmp_path / "dev/kfd", "")
    found = look(tmp_path, nothing)
    assert (found.amd, found.amd_device, found.amd_access) == ((Gpu("AMD GPU", "gfx942"),), True, True)


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110001, "gfx1101"), (120001, "gfx1201")],
)
def test_architectures_are_spelled_as_the_compiler_does(version, name) -> None:
    assert gfx(version) == name


def test_a_jetson_is_known_with_its_memory_and_power(tmp_path) -> None:
    found = look(boards.plant(tmp_path, boards.ORIN_NANO), lambda: ("failed: no devices", ""))
    assert (found.jetson, found.nvidia_problem) == (Gpu(found.board.name, "sm87"), None)
    assert (found.gpus, found.nvidia_tool) == ((found.jetson,), True)
    assert (found.board.module, found.memory.zram, found.power.mode) == ("p3767-0005", 2 << 30, "MAXN_SUPER")


def test_memory_and_power_are_looked_at_on_a_jetson_alone(tmp_path) -> None:
    found = look(boards.plant(tmp_path, boards.CONTAINER | {"sys/devices/soc1/family": "other"}), nothing)
    assert found == Hardware()


@pytest.mark.parametrize(
    ("arch", "archs", "covered"),
    [
        ("sm90", ("sm_80", "sm_90"), True),
        ("sm89", ("sm_80", "sm_90"), True),  # binary code of an older minor version
        ("sm87", ("sm_90",), False),
        ("sm87", ("sm_80", "sm_86"), False),  # not from the desktop to a Jetson
        ("sm87", ("sm_87",), True),
        ("sm89", ("sm_87",), False),
        ("sm120", ("sm_80", "sm_90"), False),
        ("sm120", ("sm_90", "compute_90"), True),  # PTX, compiled on the spot
        ("sm80", ("sm_90", "compute_90"), False),
        ("sm90", ("sm_90a",), True),
        ("sm100", ("sm_90a", "compute_90a"), False),  # architecture-specific code runs nowhere else
        ("sm103", ("sm_100f",), True),
        ("gfx942", ("gfx90a", "gfx942"), True),
        ("gfx1031", ("gfx1030",), False),
        ("sm90", (), None),
    ],
)
def test_a_build_covers_an_architecture(arch, archs, covered) -> None:
    assert TorchBuild("2.9", archs=archs).covers(arch) is covered


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    import torch

    found = ask()
    assert (found.version, found.error, found.cuda, found.hip) == (
        torch.__version__,
        "",
        torch.version.cuda,
        torch.version.hip,
    )


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12: cannot open"),
        ("import os; os.abort()", "the process ended with status -6"),
        ("raise SystemExit(3)", "the process ended with status 3"),
    ],
)
def test_a_torch_that_dies_at_import_is_an_answer(tmp_path, monkeypatch, source, error) -> None:
    write(tmp_path / "torch.py", source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert ask().error.startswith(error)


def test_the_command_works_here_and_finds_no_problem(cli) -> None:
    found = answer(cli("doctor", "--json"))
    assert (found["counts"]["problem"], set(found["findings"])) == (0, {"Machine", "Packages", "rlkernel"})
    said = cli("doctor")
    assert (said.exit_code, "backend torch" in said.stdout, "0 problem(s)" in said.stdout) == (0, True, True)


def test_a_malformed_configuration_is_a_problem_and_not_the_end(cli, tmp_path, monkeypatch) -> None:
    write(tmp_path / "here/rlkernel.toml", "[rlkernel]\nordr = []\n")
    monkeypatch.setenv("RLKERNEL_ORDR", "auto")
    result = cli("doctor")
    assert result.exit_code == 1
    assert all(word in result.stdout for word in ("'RLKERNEL_ORDR'", "'ordr'", "'order'", "backend torch"))


def test_a_cache_folder_that_cannot_be_written_is_a_warning(cli, tmp_path, monkeypatch) -> None:
    write(tmp_path / "file", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = answer(cli("doctor", "--json"))["findings"]["rlkernel"]
    assert [f["severity"] for f in found if f["code"] == "cache/read-only"] == ["warning"]


def test_a_plugin_that_cannot_be_loaded_is_named_with_its_reason(cli, plug) -> None:
    plug("acme", "raise RuntimeError('driver too old')")
    plug("zeta", good("zeta"))
    result = cli("doctor")
    assert (result.exit_code, "load/import-error" in result.stdout) == (0, True)
    assert all(word in result.stdout for word in ("acme 1.0", "acme_plugin:backend", "RuntimeError", "zeta 1.0"))


def probed(cli, *words: str) -> tuple[int, set[str]]:
    """The exit status of `doctor`, and what it says of self-tests."""
    result = cli("doctor", *words, "--json")
    found = [f for section in answer(result)["findings"].values() for f in section if "acme" in f["text"]]
    return result.exit_code, {f["code"] for f in found if f["code"].startswith("probe/")}


def test_self_tests_are_recalled_and_run_on_request(cli, plug, monkeypatch) -> None:
    site = plug("acme", SELF_TEST.format(body="raise ValueError('wrong result')"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert probed(cli) == (0, {"probe/untested"})
    assert probed(cli, "--probe") == probed(cli) == (1, {"probe/failed"})
    plug("acme", SELF_TEST.format(body="return None"))
    assert probed(cli) == (1, {"probe/failed"})
    assert probed(cli, "--probe") == probed(cli) == (0, {"probe/passed"})


def test_the_facts_of_this_machine_make_a_diagnosis(cli) -> None:
    cli("config")
    found = [f for section in diagnose(examine()).values() for f in section]
    assert {"python/version", "rlkernel/versions", "config/order"} <= {f.code for f in found}
