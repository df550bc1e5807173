"""`tools/kernel_hub.py`: a repository of the kernel hub that is `logprob` on Triton, alone and unchanged."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from rlkernel.integrations import trl_functions
from tools import kernel_hub
from tools.hub import functions

triton = pytest.importorskip("triton")
CHILD = """
import json, os, pkgutil, sys
from importlib import import_module, util

variant, *folders = sys.argv[1:]
sys.path += folders
assert util.find_spec("rlkernel") is util.find_spec("rlkernel_core") is util.find_spec("rlkernel_triton") is None
import torch

def load(name):  # as kernels.importer does
    spec = util.spec_from_file_location(name, variant + "/__init__.py")
    sys.modules[name] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

kernel = load("_kernel")
every = [import_module(m.name) for m in pkgutil.walk_packages(kernel.__path__, "_kernel.")]
generator = torch.Generator().manual_seed(0)
x = 4 * torch.randn(3, 4, 300, generator=generator)
ids, several = torch.randint(0, 300, (3, 4), generator=generator), torch.randint(0, 300, (3, 4, 2), generator=generator)
mask = torch.rand(3, 4, generator=generator) > 0.3
T = 0.7
error = {}

def compare(name, run, define):
    have, want = x.clone().requires_grad_(), x.double().requires_grad_()
    got = [y for y in run(have)]
    z = torch.log_softmax(want / T, -1)
    expected = [y for y in define(z)]
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        error[f"{name} {i}"] = float((a - b).abs().max().detach())
    sum((i + 1) * y.sum() for i, y in enumerate(got) if y.requires_grad).backward()
    sum((i + 1) * y.sum() for i, y in enumerate(expected) if y.requires_grad).backward()
    error[f"{name} gradient"] = float((have.grad - want.grad).abs().max())

def chosen(z):
    return z.gather(-1, ids[..., None])[..., 0]

def entropy(z):
    return -(z.exp() * z).sum(-1)

both = kernel.selective_log_softmax_and_entropy
compare("both", lambda x: both(x, ids, temperature=T), lambda z: (chosen(z), entropy(z)))
compare("masked", lambda x: both(x, ids, True, T, mask), lambda z: (chosen(z) * mask, entropy(z) * mask))
compare("detached", lambda x: both(x, ids, False, T), lambda z: (chosen(z), entropy(z).detach()))
compare("one", lambda x: [kernel.selective_log_softmax(x, ids, T)], lambda z: [chosen(z)])
counted = several > 100
compare("several", lambda x: [kernel.selective_log_softmax(x, several, T, counted)],
        lambda z: [z.gather(-1, several) * counted])

def refused(call):
    try:
        return str(call())
    except Exception as found:
        return type(found).__name__ + ": " + str(found)

said = {"float64": refused(lambda: both(x.double(), ids)), "T": refused(lambda: both(x, ids, temperature=0.0))}
del os.environ["TRITON_INTERPRET"]  # read where kernels are declared
said["cpu"] = refused(lambda: load("_again").selective_log_softmax(x, ids))
sys.modules["triton"] = None
said["no Triton"] = refused(lambda: load("_without"))
print(json.dumps({"error": error, "said": said, "modules": len(every)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The repository, written once."""
    out = tmp_path_factory.mktemp("hub") / "kernel"
    kernel_hub.main([str(out)])
    return out


@pytest.fixture(scope="module")
def ran(folder):
    """What a process says that finds the built kernel, torch and Triton, and nothing of ours."""
    places = {str(Path(m.__file__).parents[1]) for m in (torch, triton)}
    command = [sys.executable, "-I", "-S", "-B", "-c", CHILD, str(folder / "build/torch-cuda"), *sorted(places)]
    own = {"PATH": os.environ["PATH"], "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(folder):
    """Path -> bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_alone_it_gives_the_values_and_gradients_of_float64(ran) -> None:
    assert {name: error for name, error in ran["error"].items() if not error < 5e-6} == {}
    assert len(ran["error"]) == 13


def test_alone_it_refuses_what_it_cannot_do(ran) -> None:
    starts = {
        "float64": "ArgumentError: logits",
        "T": "ArgumentError: temperature",
        "cpu": "RLKernelError: Triton cannot launch kernels on cpu",
        "no Triton": "ImportError: rlkernel_logprob is made of Triton kernels",
    }
    assert {name: said for name, said in ran["said"].items() if not said.startswith(starts[name])} == {}


def test_two_runs_write_the_same_bytes(folder, tmp_path) -> None:
    kernel_hub.main([str(tmp_path / "again")])
    assert files(tmp_path / "again") == files(folder)


def test_nothing_of_ours_is_imported_by_an_absolute_name(folder) -> None:
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [(path.name, name) for name in names if name.startswith("rlkernel")]
    assert found == []


def test_kernels_are_ours_but_for_imports(folder) -> None:
    def unlike(line):
        return not line.lstrip().startswith("from ")

    for name in ("logprob/kernels.py", "logprob/launch.py", "common/softmax.py", "launchers/jit.py"):
        ours = (kernel_hub.PACKAGES["rlkernel_triton"] / "rlkernel_triton" / name).read_text()
        theirs = (folder / "build/torch-cuda/rlkernel_triton" / name).read_text()
        assert list(filter(unlike, theirs.splitlines())) == list(filter(unlike, ours.splitlines()))


def test_every_build_is_the_source(folder) -> None:
    every = files(folder)

    def below(part):
        return {path.removeprefix(part): x for path, x in every.items() if path.startswith(part)}

    source = below("torch-ext/rlkernel_logprob/")
    builds = [below(f"build/torch-{name}/") for name in ("cuda", "rocm")]
    assert [set(x) - set(source) for x in builds] == [{"metadata.json"}] * 2
    assert [source.items() <= x.items() for x in builds] == [True, True]


def test_metadata_has_the_digest_of_every_file_of_its_build(folder) -> None:
    for backend in ("cuda", "rocm"):
        every = files(folder / f"build/torch-{backend}")
        said = json.loads(every.pop("metadata.json"))
        assert said["backend"]["type"] == backend
        assert said["digest"]["files"] == {p: b64encode(sha256(x).digest()).decode() for p, x in every.items()}


def test_functions_have_the_parameters_of_those_in_place_of_trl() -> None:
    for name in functions.__all__:
        assert inspect.signature(getattr(functions, name)) == inspect.signature(getattr(trl_functions, name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import numpy as np", "imports numpy"),
        ("import rlkernel_core", "imports rlkernel_core"),
        ("from einops import rearrange", "imports einops"),
        ("def f():\n    from rlkernel.dispatch import run", "imports rlkernel.dispatch"),
        ("from . import kernels", r"imports \."),
        ("from rlkernel_core.nothing import x", "imports rlkernel_core.nothing"),
        ("from rlkernel_core.manifest import Backend", r"rlkernel_core/manifest\.py imports pydantic"),
        ("importlib.import_module(name)", r"calls importlib\.import_module\(name\)"),
        ("import_module('rlkernel_core.checks', None)", "calls import_module"),
        ("from rlkernel_core  import checks", "is not written as `from rlkernel_core import`"),
    ],
)
def test_what_cannot_be_taken_along_is_refused_by_name(tmp_path, text, said) -> None:
    start = tmp_path / "functions.py"
    start.write_text(text)
    with pytest.raises(kernel_hub.CannotTakeError, match=said):
        kernel_hub.taken(start)


def test_imports_for_type_checkers_are_not_followed(tmp_path) -> None:
    start = tmp_path / "functions.py"
    start.write_text("if TYPE_CHECKING:\n    from numpy import x\n    from rlkernel_core.manifest import Backend\n")
    assert list(kernel_hub.taken(start)) == ["__init__.py"]


def test_a_folder_with_files_is_left_alone(folder, capsys) -> None:
    with pytest.raises(SystemExit):
        kernel_hub.main([str(folder)])
    assert "is not an empty folder" in capsys.readouterr().err


def test_the_hub_s_own_library_loads_and_checks_it(folder) -> None:
    kernels = pytest.importorskip("kernels")
    checks = pytest.importorskip("kernels._rust")
    checks.Build.open(folder)
    for backend in kernel_hub.architectures():
        variant = folder / "build" / f"torch-{backend}"
        metadata = checks.Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(checks.Digest.hash_variant(metadata.digest.algorithm, variant))
        assert kernels.get_local_kernel(variant).__all__ == functions.__all__
