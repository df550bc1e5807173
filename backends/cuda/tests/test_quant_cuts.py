"""How products with quantized weights are cut, what is refused, and that the kernels compile for sm_90a."""

import re
import shutil
import subprocess

import pytest
import torch

from rlkernel_core import quant as reference
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_cuda.common import driver
from rlkernel_cuda.qmatmul import choice, kernels
from rlkernel_cuda.qmatmul.launch import fits

SHAPES = [(28672, 4096), (6144, 4096), (4096, 14336), (57344, 8192), (128256, 4096), (19456, 2560), (5120, 17408)]
DECLARED = 1 << 10  # bytes of shared memory for barriers, beside what is asked for and scales


class Weight:
    """What a cut depends on."""

    def __init__(self, kind, shape, layout="triton_w4", scale=torch.bfloat16):
        self.spec, self.shape, self.layout = reference.QuantSpec.named(kind), shape, layout
        self.parts = {"scale": torch.empty(1, dtype=scale)}


def eight(shape):
    return Weight("int8_channel", shape, "canonical", torch.float32)


@pytest.mark.parametrize("kind", ["int4_g128", "int4_g32_asym", "int8_channel", "fp8_block128"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_divide_the_depth_and_fit_a_block(kind, shape) -> None:
    w = Weight(kind, shape)
    for M in (1, 8, 9, 16, 33, 65, 256, 257, 100_000):
        cut = choice.cut(M, w)
        declared = DECLARED + (cut.stages * kernels.scales(cut, w.spec) if isinstance(cut, kernels.W4Wgmma) else 0)
        if isinstance(cut, kernels.W4Wgmma):
            assert (M > 16, w.spec.element) == (True, "int4")
        elif cut is not None:
            assert (shape[1] % (256 * cut.parts), cut.threads <= 1024, cut.tokens >= M) == (0, True, True)
        assert cut is None or kernels.shared(cut) + declared <= driver.SHARED
        assert cut is None or cut.stages >= choice.LEAST_STAGES


def test_tokens_of_a_class_have_one_cut() -> None:
    w = Weight("int4_g128", (28672, 4096))
    classes = (range(1, 9), range(9, 17), range(33, 65), range(65, 129), range(129, 9000, 97))
    assert [len({choice.cut(M, w) for M in Ms}) for Ms in classes] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("shape", "M", "expected"),
    [
        ((28672, 4096), 64, (64, 4, False)),  # 112 tiles of 256 rows, of 132 multiprocessors
        ((34816, 5120), 64, (64, 4, True)),  # 136 tiles would be two waves
        ((4096, 14336), 64, (64, 2, True)),
        ((28672, 4096), 128, (128, 2, False)),
        ((6144, 4096), 128, (128, 2, True)),
        ((28672, 4096), 256, (256, 2, False)),
        ((5120, 17408), 1024, (128, 2, True)),  # 160 whole tiles would be two waves
        ((8192, 8192), 1024, (256, 2, False)),
    ],
)
def test_blocks_share_a_tile_where_whole_tiles_would_leave_multiprocessors_idle(shape, M, expected) -> None:
    cut = choice.cut(M, Weight("int4_g128", shape))
    assert (cut.tokens, cut.warpgroups, cut.split) == expected


def test_small_weights_with_few_tokens_are_left_to_the_portable_kernel() -> None:
    assert [choice.cut(M, Weight("int4_g128", (6144, 4096))) for M in (17, 64)] == [None, None]


def tiled(x, element, of):
    """What a description of TMA says of the memory of x, its slowest dimension first."""
    steps = [1, *(bytes_ // element for bytes_ in of.strides)]
    return x.as_strided(of.sizes[::-1], steps[::-1])


@pytest.mark.parametrize("M", [33, 65, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stage_is_one_box_of_x_and_one_of_codes(shape, M) -> None:
    (N, K), w = shape, Weight("int4_g128", shape)
    cut = choice.many4(N, K, M, w.spec, 132) or kernels.W4Wgmma(64, 2, 5, split=False)
    x = torch.arange(5 * 256, dtype=torch.int16).view(5, 256)
    of = kernels.tokens_of(5, 256, cut)
    assert torch.equal(tiled(x, 2, of), x.view(5, 4, 64).transpose(0, 1))
    assert (of.box, of.swizzle) == ((64, cut.tokens, cut.steps), driver.SWIZZLE_128B)
    codes = torch.arange(3 * 4 * 128, dtype=torch.int32).view(3, 4, 128)
    of = kernels.words_of(48, 256, 4 * cut.warpgroups, cut.steps)
    assert torch.equal(tiled(codes, 4, of), codes.view(3, 512))
    assert (of.box, max(of.box) <= 256, of.swizzle) == ((128 * cut.steps, 4 * cut.warpgroups), True, 0)


def refused(w, M=3, dtype=torch.bfloat16, **rest):
    reason = fits(QmatmulCall(torch.zeros(M, w.shape[1], dtype=dtype), w, **rest))
    return None if reason is None else reason.slug


@pytest.mark.parametrize(
    ("w", "call"),
    [
        (Weight("int4_g128", (256, 512), "canonical"), {}),
        (Weight("int4_g128", (256, 512)), {"dtype": torch.float16}),
        (Weight("int4_g128", (256, 512)), {"bias": torch.zeros(256)}),
        (Weight("int4_g128", (256, 512)), {"M": 30}),
        (eight((256, 512)), {"M": 17}),
        (eight((250, 512)), {}),
    ],
)
def test_what_no_kernel_here_takes_is_left_to_others(w, call) -> None:
    assert refused(w, **call) == "shape/unsupported"


@pytest.mark.parametrize("w", [Weight("int4_g128", (256, 512)), eight((256, 512))])
def test_weights_as_the_kernels_read_them_fit(w) -> None:
    assert refused(w) is None


CUTS = [
    ("int4_g64_asym", kernels.W4SmallM(16, 3, 2, 1, 4)),
    ("int4_g128", kernels.W4SmallM(16, 24, 1, 1, 8, cluster=2, ahead=4)),
    ("int4_g128", kernels.W4Wgmma(128, 2, 5, split=True)),
    ("int4_g128_asym", kernels.W4Wgmma(64, 2, 5, split=False, warpgroups=4)),
    ("int4_g32", kernels.W4Wgmma(256, 1, 5, split=False)),
    ("fp8_block128", kernels.W8SmallM(8, 3, 4, 4)),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here; NVRTC compiles the same source at run time")
@pytest.mark.parametrize(("kind", "cut"), CUTS, ids=str)
def test_kernels_compile_without_spills(kind, cut, tmp_path) -> None:
    source, options, _ = kernels.build(cut, Weight(kind, (1024, 4096)), torch.bfloat16)
    target = [
        "-cubin",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-std=c++17",
        "-O3",
        "-Xptxas",
        "-v",
        f"-I{driver.ROOT}",
    ]
    command = ["nvcc", *target, *options, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [spilled] = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert int(spilled) <= 64
