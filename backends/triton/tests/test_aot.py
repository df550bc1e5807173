"""Bundles: what is compiled fits its target, a file is the same whoever writes it, and what cannot run says why."""

import json
import os
import subprocess
import sys
import zipfile
import zlib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_triton.aot import compiling, tables
from rlkernel_triton.aot.backend import FromBundles
from rlkernel_triton.aot.builds import Argument, Build, Code
from rlkernel_triton.aot.bundle import BundleError, written
from rlkernel_triton.aot.command import listed
from rlkernel_triton.aot.compiling import closed, compiled, compiler, limits
from rlkernel_triton.aot.driver import Driver, DriverError
from rlkernel_triton.aot.hosts import Host, implementation
from rlkernel_triton.aot.launching import FromBundle, served_by
from rlkernel_triton.aot.planning import plan_for
from rlkernel_triton.aot.standin import triton as stand_in
from rlkernel_triton.aot.targets import TARGETS, resident
from rlkernel_triton.recorded import recorded

W4A16 = [f"int4_g128, {M} tokens" for M in (4, 20, 50)]  # what rollouts with 4-bit weights launch
TABLE = tables.read()


def some(target, kernel, count=1):
    """The first configurations of a kernel on a target, in the order of their text."""
    found = [b for b in tables.chosen(TABLE, target) if b.kernel.endswith(f":{kernel}")]
    return sorted(found, key=lambda b: b.text)[:count]


def shipped(build):
    """A recorded build as one of a bundle."""
    return Build(build.kernel, build.types, build.constants, build.divisible, build.num_warps, build.num_stages)


@pytest.fixture(scope="module")
def orin(tmp_path_factory):
    """A bundle for sm_87: log-probabilities of bf16 without options, forward."""
    wanted = [
        b
        for name in ("sweep", "law")
        for b in tables.chosen(TABLE, "sm_87", ("logprob",))
        if b.kernel.endswith(f":{name}")
        and dict(b.types).get("logits", "*bf16") == "*bf16"
        and not any(dict(b.constants).get(n) for n in ("HAS_MASK", "HAS_T", "HAS_CAP", "SUPPORT", "MOMENT"))
    ]
    path = tmp_path_factory.mktemp("bundle") / "orin.zip"
    return written(path, [code for alike in closed(wanted) for code in compiled(alike, "sm_87")], compiler())


class Recording:
    """A driver whose device is whatever is asked for, whose memory is the CPU's, and which keeps what it is told."""

    tensors = "cpu"

    def __init__(self, capability=(8, 7)):
        self.major_minor, self.loaded, self.launched = capability, [], []

    def capability(self, device):
        return self.major_minor

    def enter(self, device):
        pass

    def load(self, code, entry, shared):
        self.loaded.append((code, entry, shared))
        return entry

    def launch(self, kernel, grid, threads, shared, stream, kinds, values):
        self.launched.append((kernel, grid, threads, dict(zip(kinds, values, strict=False)), len(values)))


@pytest.fixture
def over():
    """Make a host over a bundle and a driver; it is forgotten afterwards."""
    made = []

    def make(bundle, driver, *others, **options):
        launcher = FromBundle(bundle, driver, **options)
        launcher.others = tuple(FromBundle(other, driver) for other in others)
        host = Host(f"test{len(made)}", stand_in(launcher))
        made.append(host)
        plan_for(host, launcher.target())
        return host

    yield make
    for host in made:
        sys.meta_path.remove(host)
        for name in [n for n in sys.modules if n == host.package or n.startswith(f"{host.package}.")]:
            del sys.modules[name]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_for_every_target_within_its_limits(target) -> None:
    try:
        compiling.require(target)
    except ArgumentError as error:
        pytest.skip(str(error))
    made = list(compiled(some(target, "sweep"), target))
    assert limits(made) == []
    ((code, files),) = made
    assert code.spilled == 0
    assert code.arguments >= len(code.build.types)
    assert set(files) == {"hsaco"} if target.startswith("gfx") else {"cubin", *(["ptx"] if TARGETS[target].ptx else [])}


@pytest.mark.parametrize("target", ["sm_80", "sm_87"])
def test_ptx_is_of_the_version_that_the_oldest_driver_reads_and_uses_nothing_of_later_chips(target) -> None:
    ((_, files),) = compiled(some(target, "sweep"), target)
    text = files["ptx"].decode()
    assert f".version 8.5\n.target {target}" in text
    assert not [word for word in ("wgmma", "cp.async.bulk", "tcgen05", "mbarrier") if word in text]


def test_a_four_bit_product_leaves_room_for_two_programs_on_an_orin_and_spills_nothing() -> None:
    few = [shipped(r.build) for r in recorded("qmatmul", "sm_87") if r.label in W4A16]
    made = list(compiled(few, "sm_87"))
    assert len(made) >= 2
    for code, files in made:
        assert code.spilled == 0
        assert resident("sm_87", code.registers, code.shared, code.build.num_warps) >= 2
        assert b"mma.sync" in files["ptx"]


def test_a_bundle_built_twice_has_the_same_bytes(orin, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    again = written(tmp_path / "again.zip", list(compiled([c.build for c in orin.codes][::-1], "sm_87")), compiler())
    assert again.path.read_bytes() == orin.path.read_bytes()


def test_a_bundle_keeps_what_was_compiled(orin) -> None:
    described = listed(str(orin.path))
    assert described["targets"] == {"sm_87": ["cubin", "ptx"]}
    assert described["builds"] == len(orin.codes) == sum(row["builds"] for row in described["kernels"])
    assert [Code.of(json.loads(json.dumps(c.document()))) for c in orin.codes] == list(orin.codes)


def test_code_that_is_the_same_is_there_once_and_packed_with_its_like(orin, tmp_path) -> None:
    files = [(c, {kind: orin.read(at) for kind, at in c.files.items()}) for c in orin.codes]
    twice = files + [(replace(c, build=replace(c.build, options=(("again", 1),))), own) for c, own in files]
    both = written(tmp_path / "twice.zip", twice, compiler())
    assert (len(both.codes), {c.files["cubin"] for c in both.codes}) == (
        2 * len(orin.codes),
        {c.files["cubin"] for c in orin.codes},
    )
    assert both.path.stat().st_size < 1.1 * orin.path.stat().st_size
    assert orin.path.stat().st_size < 0.7 * sum(len(zlib.compress(x, 9)) for _, own in files for x in own.values())


def test_an_operator_runs_from_a_bundle_on_the_code_of_its_configuration(orin, over) -> None:
    driver = Recording()
    host = over(orin, driver)
    logits = torch.randn(3, 32000).bfloat16()
    implementation(host, "logprob")(LogprobCall(logits, torch.arange(3)))
    assert [(entry, grid, threads) for entry, grid, threads, _, _ in driver.launched] == [
        ("sweep", (3, 1, 1), 64),
        ("law", (1, 1, 1), 128),
    ]
    _, _, _, given, count = driver.launched[0]
    assert given["*bf16"] == logits.data_ptr()
    code = max((c for c in orin.codes if c.entry == "sweep"), key=lambda c: c.build.promises)
    assert count == code.arguments
    assert [code[:4] for code, _, _ in driver.loaded] == [b"\x7fELF"] * 2


def test_a_second_call_loads_nothing(orin, over) -> None:
    driver = Recording()
    run = implementation(over(orin, driver), "logprob")
    for _ in range(3):
        run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))
    assert (len(driver.loaded), len(driver.launched)) == (2, 6)


def test_unaligned_rows_run_on_the_code_that_was_promised_nothing(orin, over) -> None:
    driver = Recording()
    run = implementation(over(orin, driver), "logprob")
    run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))
    run(LogprobCall(torch.randn(2, 32001).bfloat16()[:, 1:], torch.arange(2)))
    aligned, unaligned = driver.loaded[0], driver.loaded[2]
    assert (aligned[1], unaligned[1]) == ("sweep", "sweep")
    assert aligned[0] != unaligned[0]


def test_another_chip_gets_the_ptx(orin, over) -> None:
    driver = Recording((9, 0))
    implementation(over(orin, driver), "logprob")(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2)))
    assert driver.loaded[0][0].startswith(b"//")
    assert b".target sm_87" in driver.loaded[0][0]


def test_the_code_of_one_chip_is_planned_as_there_whatever_runs_it(orin, over) -> None:
    host = over(orin, Recording((9, 0)))
    planned = host.module("rlkernel_triton.quant.product").machine(torch.device("cpu"))
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
    assert served_by(device, available) == found


def test_a_bundle_without_code_for_the_chip_says_what_it_has_and_how_to_build_more(orin) -> None:
    with pytest.raises(BundleError, match=r"no code for sm_75; it has sm_87 \(cubin/ptx\).*--target sm_75"):
        FromBundle(orin, Recording((7, 5)))


def test_a_missing_configuration_is_named_with_the_ways_out(orin, over) -> None:
    run = implementation(over(orin, Recording()), "logprob")
    with pytest.raises(BundleError, match=r"none for HAS_MASK=False, HAS_T=False, HAS_CAP=True.*AOT_MISSING=FILE"):
        run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2), softcap=30.0))


def test_what_one_bundle_lacks_another_may_have(orin, over, tmp_path) -> None:
    capped = [
        b
        for b in tables.chosen(TABLE, "sm_87", ("logprob",))
        if b.kernel.endswith(":sweep") and dict(b.types)["logits"] == "*bf16"
        if {n for n in ("HAS_MASK", "HAS_T", "HAS_CAP", "MOMENT") if dict(b.constants).get(n)} == {"HAS_CAP"}
    ]
    mine = written(tmp_path / "mine.zip", list(compiled(capped, "sm_87")), compiler())
    driver = Recording()
    run = implementation(over(orin, driver, mine), "logprob")
    run(LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2), softcap=30.0))
    assert [entry for _, entry, _ in driver.loaded] == ["sweep", "law"]


def test_a_bundle_of_other_operators_is_loaded_where_the_self_test_finds_no_kernels_for_it(
    tmp_path, monkeypatch
) -> None:
    scan = some("sm_87", "scan_kernel")
    written(tmp_path / "scan.zip", list(compiled(scan, "sm_87")), compiler())
    driver = Recording()
    monkeypatch.setattr("rlkernel_triton.aot.driver.Driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    FromBundles("scans", lambda: [tmp_path]).self_test("cpu")
    assert [entry for _, entry, _ in driver.loaded] == ["scan_kernel"]


def test_code_of_another_source_is_refused(orin, over, tmp_path) -> None:
    old = [(replace(c, source="0" * 16), {kind: orin.read(at) for kind, at in c.files.items()}) for c in orin.codes]
    stale = written(tmp_path / "stale.zip", old, compiler())
    run = implementation(over(stale, Recording()), "logprob")
    with pytest.raises(
        BundleError, match=r"built from another rlkernel_triton\.logprob_kernels:sweep .*build it again"
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
    wide = Build("m:k", (("n", "i64"),), ())
    narrow = Build("m:k", (("n", "i32"),), ())
    assert wide.serves({"n": Argument("i32")})
    assert not narrow.serves({"n": Argument("i64")})
    assert not Build("m:k", (), (("n", 1),)).serves({"n": Argument("i32")})
    assert Build("m:k", (), (("n", 1),)).serves({"n": Argument("i32", one=True)})
    assert not Build("m:k", (("n", "i32"),), (), ("n",)).serves({"n": Argument("i32", divisible=False)})


def test_an_operator_over_a_bundle_needs_neither_triton_nor_a_compiler_and_planning_it_no_sympy(orin) -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"  # as where it is not installed
        "import rlkernel_triton.aot.backend as aot\n"
        "print({'torch', 'numpy'} & set(sys.modules))\n"
        "from pathlib import Path\n"
        "from test_aot_driver import Nothing\n"
        "from rlkernel_triton.aot.bundle import Bundle\n"
        "from rlkernel_triton.aot.hosts import Host, implementation\n"
        "from rlkernel_triton.aot.launching import FromBundle\n"
        "from rlkernel_triton.aot.standin import triton\n"
        "import torch\n"
        "from rlkernel_core.spec.logprob import LogprobCall\n"
        f"launcher = FromBundle(Bundle(Path({str(orin.path)!r})), Nothing())\n"
        "host = Host('bare', triton(launcher))\n"
        "for op in aot.OPERATORS:\n"
        "    implementation(host, op)\n"
        "call = LogprobCall(torch.randn(2, 32000).bfloat16(), torch.arange(2))\n"
        "out = implementation(host, 'logprob')(call)\n"
        "print(out.logprob.shape)\n"
        "from rlkernel_triton.aot.rehearsal import Rehearsals\n"
        "logits = torch.randn(2, 32000).bfloat16().requires_grad_()\n"
        "said = Rehearsals('planned', launcher).missing('logprob', LogprobCall(logits, torch.arange(2)))\n"
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


def test_kernels_compiled_on_the_spot_are_untouched_by_a_host(orin, over) -> None:
    from rlkernel_triton.logprob_kernels import sweep

    copy = over(orin, Recording()).module("rlkernel_triton.logprob_kernels")
    assert isinstance(sweep, triton.runtime.jit.KernelInterface)
    assert copy.sweep is not sweep
    assert copy.sweep.id == "rlkernel_triton.logprob_kernels:sweep"
