"""The fingerprint of an operator's sources: what changes it, and what does not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import rlkernel as rlk
import rlkernel_core
from rlkernel import sources
from rlkernel.sources import targets_of
from rlkernel_conformance.example_calls import base
from rlkernel_conformance.manifests import sources_of
from rlkernel_core.manifest import Backend, Impl, Requires
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.spec import FORMATS
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import backend as plain_torch

PACKAGE = {
    "__init__.py": "from .scan import scan_kernel as exported\n",
    "claims.py": "CLAIM = 'any dtype'\nTABLE = {'scan': 'kernels.op:run', 'sum': 'kernels.other:sum_all'}\n",
    "tiles.py": "TILE = 64\nOTHER = 8\nTILES = {}\nTILES['wide'] = 128\n",
    "scan.py": '''
from kernels import tiles as cut
from kernels.tiles import OTHER

BUILDS = [OTHER]

def scan_kernel(x):
    """Sums."""
    return x * cut.TILE  # elements

def other_kernel(x):
    return x + cut.TILES["wide"]
''',
    "op.py": """
from kernels.claims import CLAIM

def run(x):
    from kernels.scan import scan_kernel as kernel
    return kernel(x)

def fits(x):
    return CLAIM

def through_the_package(x):
    import kernels
    return kernels.exported(x)

def by_its_name(op):
    from importlib import import_module
    from kernels.claims import TABLE
    module, _, name = TABLE[op].partition(":")
    return getattr(import_module(module), name)

def compiled():
    from pathlib import Path
    return Path(__file__).with_name("scan.cu").read_text()
""",
    "other.py": "def sum_all(x):\n    return x.sum()\n",
    "scan.cu": '#include "tile.cuh"\n// sums\n__global__ void scan() { /* all */ }\n',
    "tile.cuh": "#define TILE 64\n",
    "alone.cu": "// nobody names this\n",
}


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """The fingerprint of functions of a package of which one file reads otherwise."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "kernels"
    folder.mkdir()

    def one(file="op.py", old="", new="", targets=("kernels.op:run",), elsewhere=()):
        assert old in PACKAGE[file]
        for name, text in PACKAGE.items():
            (folder / name).write_text(text.replace(old, new) if name == file else text)
        return sources.fingerprint(targets, frozenset(elsewhere))

    return one


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("claims.py", "any", "one"),
        ("tiles.py", "OTHER = 8", "OTHER = 9"),  # a table of builds alone names it
        ("tiles.py", "128", "256"),  # another kernel's
        ("scan.py", "# elements", "# tokens"),
        ("scan.py", "Sums.", "Sums of rows."),
        ("scan.py", "x * cut.TILE", "(x\n        * cut.TILE)"),
        ("scan.py", "BUILDS = [OTHER]", "BUILDS = []"),
        ("scan.py", "x + cut", "x - cut"),
        ("op.py", "return CLAIM", "return None"),
        ("scan.cu", "scan()", "scanned()"),
    ],
)
def test_what_a_function_does_not_reach_leaves_its_fingerprint(hashed, file, old, new) -> None:
    assert hashed(file, old, new) == hashed()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiles.py", "TILE = 64", "TILE = 32"),
        ("scan.py", "x * cut", "x - cut"),
        ("op.py", "return kernel(x)", "return kernel(-x)"),
    ],
)
def test_what_a_function_reaches_changes_its_fingerprint(hashed, file, old, new) -> None:
    assert hashed(file, old, new) != hashed()


def test_a_definition_that_was_moved_is_the_same(hashed, tmp_path) -> None:
    before = hashed()
    folder = tmp_path / "kernels"
    (folder / "moved.py").write_text(PACKAGE["scan.py"])
    (folder / "scan.py").write_text("from kernels.moved import scan_kernel\n")
    assert sources.fingerprint(["kernels.op:run"]) == before


@pytest.mark.parametrize(
    ("target", "file", "old", "new"),
    [
        ("kernels.scan:other_kernel", "tiles.py", "128", "256"),  # what a statement puts into a table is the table's
        ("kernels.op:through_the_package", "scan.py", "x * cut", "x - cut"),
        ("kernels.op:by_its_name", "scan.py", "x * cut", "x - cut"),
        ("kernels.op:compiled", "scan.cu", "scan()", "scanned()"),
        ("kernels.op:compiled", "tile.cuh", "64", "32"),
    ],
)
def test_names_are_followed_through_packages_strings_and_includes(hashed, target, file, old, new) -> None:
    assert hashed(file, old, new, targets=[target]) != hashed(targets=[target])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("scan.cu", "// sums", "// adds up"), ("scan.cu", "/* all */", ""), ("alone.cu", "this", "it")],
)
def test_comments_of_cuda_sources_and_files_that_nobody_names_do_not_count(hashed, file, old, new) -> None:
    assert hashed(file, old, new, targets=["kernels.op:compiled"]) == hashed(targets=["kernels.op:compiled"])


def test_a_table_of_claims_leads_to_the_operator_alone_and_does_not_count_itself(hashed) -> None:
    asked = {"targets": ["kernels.op:by_its_name"], "elsewhere": ["kernels.other:sum_all"]}
    assert hashed("other.py", "x.sum()", "x.sum(0)", **asked) == hashed(**asked)
    assert hashed("claims.py", "'sum'", "'total'", **asked) == hashed(**asked)
    assert hashed("scan.py", "x * cut", "x - cut", **asked) != hashed(**asked)


def test_every_operator_of_plain_torch_has_a_fingerprint_of_its_own() -> None:
    found = {op: sources_of(plain_torch, op, "cpu") for op in (spec.id for spec in OPERATORS.values())}
    assert len(set(found.values())) == len(found)
    assert found["whiten@1"] == sources_of(plain_torch, "whiten@1", "cuda:1")


def test_an_operator_more_in_the_catalog_leaves_the_fingerprints_of_others() -> None:
    places = {place for _, place in sources.reached(["rlkernel_torch.rms_norm:rms_norm"])}
    assert {p for p in places if p.startswith("rlkernel_core.spec:")} == {
        "rlkernel_core.spec:_Catalog",
        "rlkernel_core.spec:OPERATORS",
    }


@pytest.fixture
def of_changed_core(tmp_path, monkeypatch):
    """The sources of an operator of plain torch, where a file of the contract reads otherwise."""
    copied, home = tmp_path / "rlkernel_core", sources._home
    shutil.copytree(Path(rlkernel_core.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "_home", lambda package: copied if package == "rlkernel_core" else home(package))

    def of(op, file="", old="", new=""):
        if file:
            text = (copied / file).read_text()
            assert old in text
            (copied / file).write_text(text.replace(old, new))
        return sources_of(plain_torch, f"{op}@1", "cpu")

    return of


def test_a_change_of_a_codec_changes_the_sources_of_operators_with_quantized_weights_alone(of_changed_core) -> None:
    ops = ("quantize", "qmatmul", "linear_logprob", "logprob", "linear")
    before = {op: of_changed_core(op) for op in ops}
    of_changed_core("quantize", "quant/nf4.py", "def decode(", "def decode(  # rows\n")
    assert {op: of_changed_core(op) for op in ops} == before
    of_changed_core("quantize", "quant/nf4.py", "stop * shape[1]", "stop")
    changed = {op for op in ops if of_changed_core(op) != before[op]}
    assert changed == {"quantize", "qmatmul", "linear_logprob"}


def test_every_codec_is_among_the_sources_of_quantize_and_qmatmul() -> None:
    codecs = {type(codec_of(row.spec)) for row in FORMATS.values()}
    places = {f"{codec.__module__}:{codec.__name__}" for codec in codecs}
    for op in ("quantize@1", "qmatmul@1"):
        found = {place for _, place in sources.reached(t for i in plain_torch.of(op) for t in targets_of(i))}
        assert places - found == set()


def test_an_implementation_for_another_device_does_not_count() -> None:
    def of(*devices):
        impls = [Impl(op="whiten@1", target=f"acme.{d}:whiten", requires=Requires(device=d)) for d in devices]
        return Backend(name="acme", api=(2, 0), impls=tuple(impls))

    assert sources_of(of("cpu"), "whiten@1", "cpu") == sources_of(of("cpu", "cuda"), "whiten@1", "cpu")


@pytest.mark.parametrize("op", OPERATORS)
def test_every_function_that_plain_torch_runs_is_among_the_sources_of_its_operator(op) -> None:
    ran = set()

    def profile(frame, event, arg):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        written = code.co_filename.endswith(".py") and "<" not in code.co_qualname.partition(".")[0]
        if event == "call" and written and module.startswith(("rlkernel_torch", "rlkernel_common")):
            ran.add(f"{module}:{code.co_qualname.partition('.')[0]}")

    with rlk.use("torch"):
        first, second = base(op), base(op)
        getattr(rlk, op)(**first)  # which imports what it needs
        sys.setprofile(profile)
        try:
            getattr(rlk, op)(**second)
        finally:
            sys.setprofile(None)
    impls = plain_torch.of(OPERATORS[op].id)
    assert ran - {place for _, place in sources.reached(t for i in impls for t in targets_of(i))} == set()
    assert {i.target for i in impls} <= ran
