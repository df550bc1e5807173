"""The kernels compile for sm_90a without a GPU and without spills worth speaking of.

Gluon's and Triton's by the Triton that is installed, builds that plain calls take; `tools/compile_gate.py`
does all of them. CUDA C++ by nvcc where there is one. Compiled is not the same as run: that takes test_gpu_*.py.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel_cuda.common import driver, tiles
from rlkernel_cuda.linear_divergence import compare
from rlkernel_cuda.linear_logprob import logits, products

GATE = Path(__file__).parents[1] / "tools" / "compile_gate.py"
SPILLED = 256  # bytes a thread: once a tile, beside 64 steps of wgmma


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("cuda_compile_gate", GATE)  # another backend's has the same name
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LABELS = (
    "STATS",
    "SAVE",
    "GRAD",
    "GRAD bias counted",
    "merge tiles",
    "rows each=True counted=True",
    "results entropy=True counted=True",
    "upstream all=True counted=True",
    "saved {'CAP': False, 'COUNTED': False}",
    "tokens by blocks",
    "divergences {'KIND': 'reverse_kl', 'HAS_MASK': True} save=True",
    "gradient of divergences {'KIND': 'reverse_kl', 'HAS_MASK': False}",
)


@pytest.mark.parametrize("label", LABELS)
def test_gluon_and_triton_kernels_compile(gate, label, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    [build] = [b for b in gate.builds() if b.label == label]
    needs = gate.compiled(build)
    assert needs["spilled"] <= SPILLED
    assert needs["shared"] <= gate.SHARED
    assert (needs["wgmma"] > 0) == (build.kernel.__name__ == "logits_kernel")


CUDA = [
    *((logits.SOURCE, {"MODE": m, "BIAS": m > 0, "CAP": m > 0, "COUNTED": m > 0}) for m in (0, 1, 2)),
    *((compare.SOURCE, {"REVERSE": r, "SAVE": s}) for r, s in ((0, 1), (1, 0), (1, 1))),
    *((products.SOURCE, {"TRANSPOSED": t, "ADD": 1, "ROUND": t, "COUNTED": t}) for t in (0, 1)),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("source", sorted(driver.ROOT.rglob("*.cu")), ids=lambda source: source.stem)
def test_an_editor_can_read_every_source_with_the_flags_in_the_repository(source, tmp_path) -> None:
    """nvcc stands for clangd: every include and every macro of a build is in compile_flags.txt."""
    flags = (driver.ROOT.parent / "compile_flags.txt").read_text().split()
    macros = [flag for flag in flags if flag.startswith("-D")]
    target = ["-ptx", "-arch=sm_90a", "-std=c++17", f"-I{driver.ROOT}"]
    command = ["nvcc", *target, *macros, "-o", str(tmp_path / "kernel.ptx"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here; NVRTC compiles the same source at run time")
@pytest.mark.parametrize("source, flags", CUDA)
def test_cuda_kernels_compile_without_spills(source, flags, tmp_path) -> None:
    macros = [f"-D{n}={int(v)}" for n, v in {**flags, **driver.shape(tiles.PAIR)}.items()]
    target = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-Xptxas", "-v", f"-I{driver.ROOT}"]
    command = ["nvcc", *target, *macros, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [spilled] = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert int(spilled) <= 32
    tile = tiles.PAIR
    ring = tile.stages * (tile.consumers * tile.rows + tile.cols) * tile.depth * 2
    assert ring + 1024 <= driver.SHARED
