"""The CUDA driver over a library that answers as drivers do: what is refused says what would change it."""

import ctypes
from types import SimpleNamespace

import pytest

from rlkernel_triton.aot.bundle import write_bundle
from rlkernel_triton.aot.bundle_launcher import BundleLauncher
from rlkernel_triton.aot.configurations import Code, Configuration
from rlkernel_triton.aot.driver import Driver, DriverError

TOO_NEW, NO_CODE, REFUSED = 222, 209, 218
SAID = {TOO_NEW: b"the provided PTX was compiled with an unsupported toolchain."}
LOG = b"ptxas fatal   : Unsupported .version 9.9; current version is '8.5'"


def orin(loads):
    """libcuda of an Orin, in which loading a module has an outcome."""

    def attribute(out, which, _) -> int:
        out._obj.value = {75: 8, 76: 7}[which]
        return 0

    def load(module, image, count, options, values) -> int:
        if loads:
            ctypes.memmove(values[0], LOG, len(LOG))
        return loads

    def say(result, out) -> int:
        out._obj.value = SAID.get(result, b"no")
        return 0

    def current(out) -> int:
        out._obj.value = 1
        return 0

    return SimpleNamespace(
        cuInit=lambda _: 0, cuDeviceGet=lambda *_: 0, cuDeviceGetAttribute=attribute, cuCtxGetCurrent=current,
        cuModuleLoadDataEx=load, cuModuleGetFunction=lambda *_: 0, cuGetErrorString=say,
    )  # fmt: skip


@pytest.fixture
def bundle(tmp_path):
    """PTX for sm_80 alone, which an Orin's driver compiles."""
    code = Code(Configuration("m:kernel", (), ()), "sm_80", "kernel", 0, 0, 1, 0, "s", (), {"ptx": ""})
    return write_bundle(tmp_path / "some.zip", [(code, {"ptx": b".version 9.9"})], {})


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (TOO_NEW, "this driver reads no PTX as new as this; update it"),
        (REFUSED, "the PTX is refused"),
        (NO_CODE, "no mac"),
    ],
)
def test_code_that_the_driver_refuses_is_told_with_its_bundle_and_what_to_build(code, meaning, bundle, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: orin(loads=code))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    with pytest.raises(DriverError) as caught:
        BundleLauncher(bundle, Driver()).load_one()
    told = str(caught.value)
    assert told.startswith(f"ptx for sm_80 of {bundle.path}: loading kernel: CUDA error {code}, ")
    assert meaning in told
    assert LOG.decode() in told
    assert told.endswith("rlkernel aot build --target sm_87")


def test_what_the_driver_takes_is_loaded(bundle, monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: orin(loads=0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    BundleLauncher(bundle, Driver()).load_one()
