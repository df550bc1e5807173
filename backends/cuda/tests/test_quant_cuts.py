"""How products with quantised weights are cut, what is refused, and that the kernels compile for sm_90a."""

import re
import shutil
import subprocess

import pytest
import torch

from rlkernel_core import quant as reference
from rlkernel_cuda import driver
from rlkernel_cuda.quant import choice, launch
from rlkernel_cuda.quant.qmatmul import fits
from rlkernel_triton.quant import codec, storage

SHAPES = [(28672, 4096), (6144, 4096), (4096, 14336), (57344, 8192), (128256, 4096), (19456, 2560), (5120, 17408)]


class Weight:
    """What a cut depends on."""

    def __init__(self, kind, shape):
        self.spec, self.shape = reference.QuantSpec.named(kind), shape
        self.parts = {"scale": torch.empty(0, dtype=torch.bfloat16)}


@pytest.mark.parametrize("kind", ["int4_g128", "int4_g32_asym", "int8_channel", "fp8_block128"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_divide_the_depth_and_fit_a_block(kind, shape) -> None:
    w = Weight(kind, shape)
    for M in (1, 8, 9, 16, 17, 64, 65, 256, 257, 100_000):
        cut = choice.cut(M, w)
        if cut is None:
            assert (w.spec.element == "int4", M > 16) == (False, True)
        elif isinstance(cut, launch.Wide):
            assert launch.shared(cut, w) + 16384 <= driver.SHARED
            assert cut.split == (M <= 256)
        else:
            assert (shape[1] % (256 * cut.parts), cut.threads <= 1024, cut.tokens >= M) == (0, True, True)
            assert launch.shared(cut, w) + 1024 <= driver.SHARED


def test_tokens_of_a_class_have_one_cut() -> None:
    w = Weight("int4_g128", (28672, 4096))
    classes = [
        {choice.cut(M, w) for M in Ms} for Ms in (range(1, 9), range(9, 17), range(17, 33), range(257, 9000, 97))
    ]
    assert [len(c) for c in classes] == [1, 1, 1, 1]


def packed(kind="int4_g128", N=256, K=512, **options):
    return codec.prepack(reference.quantize(torch.randn(N, K), reference.QuantSpec.named(kind, **options)))


def refused(w, x=None, **rest):
    x = torch.zeros(3, w.shape[1], dtype=torch.bfloat16) if x is None else x
    reason = fits(x, w, **rest)
    return None if reason is None else reason.slug


def test_weights_that_are_not_packed_scales_and_biases_of_another_dtype_are_left_to_others(monkeypatch) -> None:
    w = Weight("int4_g128", (256, 512))
    w.layout, w.parts = storage.W4, {"scale": torch.empty(4, 256, dtype=torch.bfloat16)}
    assert refused(w) is None
    w.layout = "canonical"
    assert refused(w) == "shape/unsupported"
    w.layout = storage.W4
    assert refused(w, torch.zeros(3, 512, dtype=torch.float16)) == "shape/unsupported"
    assert refused(w, bias=torch.zeros(256)) == "shape/unsupported"
    assert refused(Eight((256, 512)), torch.zeros(17, 512, dtype=torch.bfloat16)) == "shape/unsupported"
    assert refused(Eight((250, 512))) == "shape/unsupported"
    assert refused(Eight((256, 512))) is None


class Eight(Weight):
    """int8, canonical."""

    layout = "canonical"

    def __init__(self, shape):
        super().__init__("int8_channel", shape)
        self.parts = {"scale": torch.empty(shape[0], 1)}


CUTS = [
    ("int4_g64_asym", launch.Stream(16, 3, 4, 1, 3)),
    ("int4_g128", launch.Wide(64, 2, 8, split=True)),
    ("int4_g32", launch.Wide(256, 1, 5, split=False)),
    ("fp8_block128", launch.Narrow8(8, 3, 4, 4)),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here; NVRTC compiles the same source at run time")
@pytest.mark.parametrize(("kind", "cut"), CUTS, ids=str)
def test_kernels_compile_without_spills(kind, cut, tmp_path) -> None:
    sources, options, _ = launch.build(cut, Weight(kind, (1024, 4096)), torch.bfloat16)
    source = tmp_path / "kernel.cu"
    source.write_text("\n".join(p.read_text() for p in sources))
    target = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v"]
    command = ["nvcc", *target, *options, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [spilled] = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert int(spilled) <= 32
