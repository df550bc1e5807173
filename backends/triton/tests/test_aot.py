"""Bundles: what is compiled fits its target, a file is the same whoever writes it, and what cannot run says why."""

import json
import os
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_core.spec.quantize import PrepackCall, QuantizeCall
from rlkernel_triton.aot import compiling
from rlkernel_triton.aot.backend import BundleBackend
from rlkernel_triton.aot.bundle import BundleError, write_bundle
from rlkernel_triton.aot.bundle_launcher import BundleLauncher, best_code_for
from rlkernel_triton.aot.command import listed
from rlkernel_triton.aot.compiling import compiled, compiler, exceeded_limits, with_specializations
from rlkernel_triton.aot.configuration_recorder import ConfigurationRecorder
from rlkernel_triton.aot.configurations import Argument, Code, Configuration
from rlkernel_triton.aot.driver import Driver, DriverError
from rlkernel_triton.launchers import Scope, current, using
from rlkernel_triton.launchers.targets import TARGETS, occupancy
from rlkernel_triton.policy_loss.kernels import scale_kernel
from rlkernel_triton.quant.tile_config import machine
from tests.aot_calls import Recording, builds, bundle_of, of_rows, run


def partial_softmax(target):
    """The build of a target that reads rows of bf16 logits."""
    return [b for b in of_rows(target) if b.kernel.endswith(":partial_softmax")]


@pytest.fixture(scope="module")
def orin(tmp_path_factory):
    """A bundle for sm_87: log-probabilities of bf16 without options, forward."""
    return bundle_of(tmp_path_factory.mktemp("bundle") / "orin.zip", of_rows())


def over(bundle, driver, *others):
    """What runs log-probabilities from a bundle and others."""
    launcher = BundleLauncher(bundle, driver)
    launcher.others = tuple(BundleLauncher(other, driver) for other in others)
    return run(launcher)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_for_every_target_within_its_limits(target) -> None:
    try:
        compiling.require(target)
    except ArgumentError as error:
        pytest.skip(str(error))
    made = list(compiled(partial_softmax(target), target))
    assert exceeded_limits(made) == []
    ((code, files),) = made
    assert code.spilled == 0
    assert code.arguments >= len(code.configuration.types)
    assert set(files) == {"hsaco"} if target.startswith("gfx") else {"cubin", *(["ptx"] if TARGETS[target].ptx else [])}


@pytest.mark.parametrize("target", ["sm_80", "sm_87"])
def test_ptx_is_of_the_version_that_the_oldest_driver_reads_and_uses_nothing_of_later_chips(target) -> None:
    ((_, files),) = compiled(partial_softmax(target), target)
    text = files["ptx"].decode()
    assert f".version 8.5\n.target {target}" in text
    assert not [word for word in ("wgmma", "cp.async.bulk", "tcgen05", "mbarrier") if word in text]


@pytest.mark.parametrize("tokens", [8, 33])
def test_a_four_bit_product_leaves_room_for_two_programs_on_an_orin_and_spills_nothing(tokens) -> None:
    recorder = ConfigurationRecorder("sm_87")
    half = {"dtype": torch.bfloat16}
    w = recorder.planned("quantize")(QuantizeCall(torch.zeros(2048, 2048, **half), "int4_g128"))
    w = recorder.planned("prepack")(PrepackCall(w))
    recorder.planned("qmatmul")(QmatmulCall(torch.zeros(tokens, 2048, **half), w))
    (words,) = [b for _, b in recorder.seen if b.kernel.endswith(":w4_product_kernel")]
    specialized = [b for alike in with_specializations([words]) for b in alike if b.divisible]
    made = list(compiled(specialized, "sm_87"))
    assert made
    for code, files in made:
        assert code.spilled == 0
        assert occupancy("sm_87", code.registers, code.shared, code.configuration.num_warps) >= 2
        assert b"mma.sync" in files["ptx"]


def test_a_bundle_built_twice_has_the_same_bytes(orin, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    again = write_bundle(
        tmp_path / "again.zip", list(compiled([c.configuration for c in orin.codes][::-1], "sm_87")), compiler()
    )
    assert again.path.read_bytes() == orin.path.read_bytes()


def test_a_bundle_keeps_what_was_compiled(orin) -> None:
    described = listed(str(orin.path))
    assert described["targets"] == {"sm_87": ["cubin", "ptx"]}
    assert described["builds"] == len(orin.codes) == sum(row["builds"] for row in described["kernels"])
    assert [Code.of(json.loads(json.dumps(c.document()))) for c in orin.codes] == list(orin.codes)


def test_code_that_is_the_same_is_there_once_and_packed_with_its_like(orin, tmp_path) -> None:
    files = [(c, {kind: orin.read(at) for kind, at in c.files.items()}) for c in orin.codes]
    twice = files + [
        (replace(c, configuration=replace(c.configuration, options=(("again", 1),))), own) for c, own in files
    ]
    both = write_bundle(tmp_path / "twice.zip", twice, compiler())
    assert (len(both.codes), {c.files["cubin"] for c in both.codes}) == (
        2 * len(orin.codes),
        {c.files["cubin"] for c in orin.codes},
    )
    assert both.path.stat().st_size < 1.1 * orin.path.stat().st_size
    assert orin.path.stat().st_size < 0.7 * sum(len(zlib.compress(x, 9)) for _, own in files for x in own.values())


def test_an_operator_runs_from_a_bundle_on_the_code_of_its_configuration(orin) -> None:
    driver = Recording()
    logits = torch.randn(3, 32000).bfloat16()
    over(orin, driver)(LogprobCall(logits, torch.arange(3)))
    assert [(entry, grid, threads) for entry, grid, threads, _, _ in driver.launched] == [
        ("partial_softmax", (3, 1, 1), 128),
        ("merge_softmax", (1, 1, 1), 128),
    ]
    _, _, _, given, count = driver.launched[0]
    assert given["*bf16"] == logits.data_ptr()
    code = max((c for c in orin.codes if c.entry == "partial_softmax"), key=lambda c: c.configuration.specialization)
    assert count == code.arguments
    assert [code[:4] for code, _, _ in driver.loaded] == [b"\x7fELF"] * 2


def test_a_second_call_loads_nothing(orin) -> None:
    driver = Recording()
    run = over(orin, driver)
    for _ in range(3):
        run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))
    assert (len(driver.loaded), len(driver.launched)) == (2, 6)


def test_unaligned_rows_run_on_the_code_that_assumes_nothing(orin) -> None:
    driver = Recording()
    run = over(orin, driver)
    run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))
    run(LogprobCall(torch.randn(2, 32001).bfloat16()[:, 1:], torch.arange(2)))
    aligned, unaligned = driver.loaded[0], driver.loaded[2]
    assert (aligned[1], unaligned[1]) == ("partial_softmax", "partial_softmax")
    assert aligned[0] != unaligned[0]


def test_another_chip_gets_the_ptx(orin) -> None:
    driver = Recording((9, 0))
    over(orin, driver)(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))
    assert driver.loaded[0][0].startswith(b"//")
    assert b".target sm_87" in driver.loaded[0][0]


def test_the_code_of_one_chip_is_planned_as_there_whatever_runs_it(orin) -> None:
    with using(BundleLauncher(orin, Recording((9, 0)))):
        planned = machine(torch.device("cpu"))
    assert (planned.kind, planned.multiprocessors) == ("jetson", 8)


@pytest.mark.parametrize(
    ("device", "available", "found"),
    [
        ("sm_87", {"sm_87": ["cubin", "ptx"]}, ("sm_87", "cubin")),
        ("sm_89", {"sm_80": ["cubin", "ptx"], "sm_86": ["cubin"]}, ("sm_86", "cubin")),
        ("sm_87", {"sm_80": ["cubin", "ptx"]}, ("sm_80", "ptx")),  # no cubin of the desktop on a Tegra chip
        ("sm_89", {"sm_87": ["cubin", "ptx"]}, ("sm_87", "ptx")),  # nor the other way
        ("sm_100", {"sm_90": ["cubin"]}, None),
        ("sm_80", {"sm_87": ["cubin", "ptx"]}, None),  # nothing runs on an earlier chip
        ("sm_110", {"sm_80": ["ptx"], "sm_87": ["ptx"]}, ("sm_87", "ptx")),
    ],
)
def test_what_serves_a_chip(device, available, found) -> None:
    assert best_code_for(device, available) == found


def test_a_bundle_without_code_for_the_chip_says_what_it_has_and_how_to_build_more(orin) -> None:
    with pytest.raises(BundleError, match=r"no code for sm_75; it has sm_87 \(cubin/ptx\).*--target sm_75"):
        BundleLauncher(orin, Recording((7, 5)))


def test_a_missing_configuration_is_named_with_the_ways_out(orin) -> None:
    run = over(orin, Recording())
    with pytest.raises(BundleError, match=r"none for HAS_MASK=False, HAS_T=False, HAS_CAP=True.*AOT_MISSING=FILE"):
        run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2), softcap=30.0))


def test_what_one_bundle_lacks_another_may_have(orin, tmp_path) -> None:
    capped = [b for b in of_rows(softcap=30.0) if b.kernel.endswith(":partial_softmax")]
    mine = write_bundle(tmp_path / "mine.zip", list(compiled(capped, "sm_87")), compiler())
    driver = Recording()
    run = over(orin, driver, mine)
    run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2), softcap=30.0))
    assert [entry for _, entry, _ in driver.loaded] == ["partial_softmax", "merge_softmax"]


def test_a_bundle_of_other_operators_is_loaded_where_the_self_test_finds_no_kernels_for_it(
    tmp_path, monkeypatch
) -> None:
    returns = builds("sm_87", "advantage", rewards=torch.zeros(2, 8), kind="returns")
    scan = [b for b in returns if b.kernel.endswith(":scan_kernel")]
    write_bundle(tmp_path / "scan.zip", list(compiled(scan, "sm_87")), compiler())
    driver = Recording()
    monkeypatch.setattr("rlkernel_triton.aot.driver.Driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    BundleBackend(lambda: [tmp_path]).self_test("cpu")
    assert [entry for _, entry, _ in driver.loaded] == ["scan_kernel"]


def test_code_of_another_source_is_refused(orin, tmp_path) -> None:
    old = [(replace(c, source="0" * 16), {kind: orin.read(at) for kind, at in c.files.items()}) for c in orin.codes]
    stale = write_bundle(tmp_path / "stale.zip", old, compiler())
    run = over(stale, Recording())
    with pytest.raises(
        BundleError, match=r"built from another rlkernel_triton\.logprob\.kernels:partial_softmax .*build it again"
    ):
        run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))


def damaged(kind, orin, path):
    if kind == "no zip":
        path.write_bytes(b"PK no")
    elif kind == "cut":
        path.write_bytes(orin.path.read_bytes()[:-100])
    else:
        with zipfile.ZipFile(orin.path) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                data = old.read(name)
                if kind == "another format" and name == "bundle.json":
                    data = data.replace(b'"format": 2', b'"format": 9')
                if kind == "changed code" and name.endswith(".cubin.0.xz"):
                    data = data[:-1] + b"?"
                new.writestr(name, data)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no zip", "is no bundle of rlkernel, or damaged"),
        ("cut", "is no bundle of rlkernel, or damaged"),
        ("another format", "has format 9, this rlkernel reads 2"),
        ("changed code", "is damaged: its SHA-256 differs"),
        ("missing", "there is no bundle at"),
    ],
)
def test_a_damaged_bundle_is_refused_with_the_line_that_makes_a_new_one(kind, said, orin, tmp_path) -> None:
    path = tmp_path / "x.zip"
    if kind != "missing":
        damaged(kind, orin, path)
    with pytest.raises(BundleError, match=f"{said}.*rlkernel aot build --target sm_87 --out x.zip"):
        listed(str(path))


def test_a_machine_without_a_driver_is_told_what_to_install() -> None:
    with pytest.raises(DriverError, match=r"no-such-cuda.*Install NVIDIA's driver"):
        Driver("no-such-cuda.so")


def test_a_build_serves_wider_numbers_and_no_narrower_ones() -> None:
    wide = Configuration("m:k", (("n", "i64"),), ())
    narrow = Configuration("m:k", (("n", "i32"),), ())
    assert wide.serves({"n": Argument("i32")})
    assert not narrow.serves({"n": Argument("i64")})
    assert not Configuration("m:k", (), (("n", 1),)).serves({"n": Argument("i32")})
    assert Configuration("m:k", (), (("n", 1),)).serves({"n": Argument("i32", one=True)})
    assert not Configuration("m:k", (("n", "i32"),), (), ("n",)).serves({"n": Argument("i32", divisible=False)})


def test_an_operator_over_a_bundle_needs_neither_triton_nor_a_compiler_and_planning_it_no_sympy(orin) -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"  # as where it is not installed
        "import rlkernel_triton.aot.backend as aot\n"
        "print({'torch', 'numpy'} & set(sys.modules))\n"
        "from pathlib import Path\n"
        "from test_aot_driver import Nothing\n"
        "from rlkernel_triton.aot.bundle import Bundle\n"
        "from rlkernel_triton.aot.bundle_launcher import BundleLauncher, LookupLauncher\n"
        "from rlkernel_triton.launchers import Scope\n"
        "from rlkernel_triton.prepared import prepared\n"
        "import torch\n"
        "from rlkernel_core.spec.logprob import LogprobCall\n"
        f"launcher = BundleLauncher(Bundle(Path({str(orin.path)!r})), Nothing())\n"
        "scope = Scope(launcher, launcher.target)\n"
        "for op in aot.OPERATORS:\n"
        "    prepare = prepared(op, scope)\n"
        "call = LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2))\n"
        "out = prepared('logprob', scope)(call)(call)\n"
        "print(out.logprob.shape)\n"
        "from rlkernel_triton.aot.dry_run import DryRuns\n"
        "logits = torch.randn(2, 32000).bfloat16().requires_grad_()\n"
        "dry_runs = DryRuns(scope._replace(launcher=LookupLauncher(launcher)))\n"
        "said = dry_runs.missing('logprob', LogprobCall(logits, torch.arange(2)))\n"
        "print(said.slug, 'sympy' in sys.modules)\n"  # it takes a second, and comes with gradients given to autograd
    ).replace("from test_aot_driver import Nothing\n", NOTHING)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.splitlines() == ["set()", "torch.Size([2])", "shape/unsupported False"]


NOTHING = """
class Nothing:
    tensors = "cpu"
    capability = lambda self, device: (8, 7)
    enter = lambda self, device: None
    load = lambda self, code, entry, shared: entry
    launch = lambda self, *call: None
"""


def test_gradients_run_on_code_of_the_bundle_that_forward_ran_on(tmp_path) -> None:
    whole = bundle_of(tmp_path / "whole.zip", of_rows(grad=True, entropy=True))
    driver, x = Recording(), torch.randn(2, 32000).bfloat16().requires_grad_()
    out = over(whole, driver)(LogprobCall(x, torch.arange(2), entropy=True))
    assert current() == Scope()
    with ThreadPoolExecutor(1) as pool:  # as autograd's threads, where nothing is said of a launcher
        pool.submit((out.logprob + out.entropy).sum().backward).result()
    assert [entry for entry, *_ in driver.launched] == ["partial_softmax", "merge_softmax", "softmax_backward"]


def test_a_launch_that_names_too_few_arguments_is_refused(orin) -> None:
    launch = BundleLauncher(orin, Recording()).bind(scale_kernel, N=1, BLOCK=16)
    with pytest.raises(TypeError, match=r"takes 3 arguments at run time \(upstream, gradient, out\), got 1"):
        launch((1,), torch.zeros(1))
