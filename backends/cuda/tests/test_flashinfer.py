"""The backend `flashinfer`: what it computes with a stand-in, and a reason for all that keeps it from running."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch

import rlkernel as rlk
from rlkernel.survey import Situation, foresee
from rlkernel_core.errors import CaptureError, RLKernelError
from rlkernel_core.quant import quantize
from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_cuda.common import quantize_tokens as token_kernels
from rlkernel_cuda.flashinfer import NEEDED, backend
from rlkernel_cuda.flashinfer import qmatmul as module
from rlkernel_torch.direct import qmatmul as definition

SPEC = QuantSpec.named("fp8_block128", act="block128_fp8")
CALL = frozenset({"format:fp8_block128", "act:block128_fp8"})


def product(M=5, N=256, K=384, spec=SPEC, device="cpu"):
    g = torch.Generator().manual_seed(M)
    w = quantize(torch.randn(N, K, generator=g).to(device), spec)
    return torch.randn(M, K, generator=g).bfloat16().to(device), w


def coded(x, multiple):
    """The definition of a kernel: emulated/test_token_kernels.py."""
    made = quantize_activation(x.float(), SPEC)
    rows = (0, 0, 0, -len(x) % multiple)
    codes = torch.nn.functional.pad(made.codes.view(torch.uint8), rows).view(made.codes.dtype)
    return codes, torch.nn.functional.pad(made.scale.t(), (0, -len(x) % multiple)).contiguous()


class Runner:
    """What FlashInfer's runner does with codes, in float64."""

    def __init__(self, factor=1):
        self.factor = factor

    def configure_workspace(self, workspace):
        assert workspace.dtype == torch.uint8

    def run_gemm(self, codes, weight, y, scale, weight_scale):
        M, K = codes.shape
        assert scale.is_contiguous()
        assert scale.shape == (K // 128, -(-M // 4) * 4)
        x = codes.double() * scale.t()[:M].double().repeat_interleave(128, 1)
        rows = weight_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        y.copy_(self.factor * x @ (weight.double() * rows).t())


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A stand-in for FlashInfer and for nvcc, with faults where they are asked for."""

    def make(*, raises=None, without=False, compiler=True, factor=1):
        def get():
            if raises is not None:
                raise raises
            return Runner(factor)

        for name in ("flashinfer", "flashinfer.gemm", "flashinfer.gemm.gemm_base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        if not without:
            sys.modules["flashinfer.gemm.gemm_base"].get_fp8_blockscale_gemm_runner_sm90 = get
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir()
        nvcc.touch(mode=0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path if compiler else tmp_path / "nowhere"))
        monkeypatch.delenv("TRTLLM_DG_NVCC_COMPILER", raising=False)
        monkeypatch.setattr(token_kernels, "coded", coded)

    module.runner.cache_clear()
    monkeypatch.setattr(module, "_built", set())
    yield make
    module.runner.cache_clear()


@pytest.mark.parametrize("M", [1, 4, 7])
def test_it_computes_what_qmatmul_means(installed, M) -> None:
    installed()
    x, w = product(M)
    assert module.fits(QmatmulCall(x, w)) is None
    torch.testing.assert_close(module.qmatmul(QmatmulCall(x, w)), definition(x, w), rtol=2**-7, atol=2**-7)


def test_no_token_gives_no_row(installed) -> None:
    installed()
    x, w = product(4)
    assert module.qmatmul(QmatmulCall(x[:0].view(0, 2, 384), w)).shape == (0, 2, 256)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"compiler": False}, "nvcc, which is not found"),
        (
            {"raises": RuntimeError("Ninja build failed")},
            "cannot be loaded or built here: RuntimeError: Ninja build failed",
        ),
        ({"raises": ImportError("libnvrtc.so.13")}, "cannot be loaded or built here: ImportError: libnvrtc.so.13"),
        ({"without": True}, "not as it was in 0.7.2"),
    ],
)
def test_a_flashinfer_that_cannot_run_is_a_reason_and_an_error(installed, fault, said) -> None:
    installed(**fault)
    x, w = product()
    reason = module.fits(QmatmulCall(x, w))
    assert said in reason.text
    assert reason.fix
    with pytest.raises(RLKernelError, match="FlashInfer"):
        module.qmatmul(QmatmulCall(x, w))


def test_its_self_test_multiplies(installed) -> None:
    installed()
    module.self_test("cpu")
    assert f"{module.self_test.__module__}:self_test" == backend.self_test


def test_its_self_test_notices_a_wrong_product_and_a_flashinfer_that_cannot_run(installed) -> None:
    installed(factor=2)
    with pytest.raises(RLKernelError, match="sums of 128 ones are off by 128"):
        module.self_test("cpu")
    module.runner.cache_clear()
    sys.modules["flashinfer.gemm.gemm_base"] = ModuleType("renamed")
    with pytest.raises(RLKernelError, match="not as it was"):
        module.self_test("cpu")


@pytest.mark.parametrize(
    ("shape", "spec", "said"),
    [
        ({"N": 192}, SPEC, "192 x 384"),
        ({"K": 320}, SPEC, "256 x 320"),
        ({}, QuantSpec.named("fp8_block128"), "tokens of 8 bits"),
    ],
)
def test_what_does_not_fit_is_a_reason(installed, shape, spec, said) -> None:
    installed()
    reason = module.fits(QmatmulCall(*product(**shape, spec=spec)))
    assert said in reason.text


def test_a_weight_that_does_not_begin_at_16_bytes_is_a_reason(installed) -> None:
    """Clause QM-97 on an H200: CUDA makes no descriptor of such a tensor, and DeepGEMM raises an assertion."""
    installed()
    x, w = product()
    codes = w.parts["codes"]
    memory = torch.empty(codes.numel() + 32, dtype=codes.dtype)
    begin = 1 - memory.data_ptr() % 16
    moved = memory[begin % 16 :][: codes.numel()].view_as(codes)
    moved.copy_(codes)
    reason = module.fits(QmatmulCall(x, dataclasses.replace(w, parts={**w.parts, "codes": moved})))
    assert reason.text == "a weight that is not contiguous, or not at a multiple of 16 bytes"


def test_a_product_is_not_compiled_inside_a_capture(installed, monkeypatch) -> None:
    installed()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    class OnGpu(torch.Tensor):
        is_cuda = True

    x, w = product()
    with pytest.raises(CaptureError, match="call it once before"):
        module.qmatmul(QmatmulCall(x.as_subclass(OnGpu), w))


def foreseen(monkeypatch, version, arch="sm90"):
    """The reason of a machine with some version of FlashInfer, or None where it would run."""
    from rlkernel import decide

    packages = {"flashinfer-python": version} if version else {}
    monkeypatch.setattr(decide, "PackageVersions", lambda: packages)
    situation = Situation(device="cuda", arch=arch, dtype="bfloat16", features=CALL)
    with rlk.registered(backend), rlk.use("flashinfer", fallback="error"):
        decision = foresee("qmatmul", situation, locked=False)
    return next((r.reason for r in decision.rejected if r.backend == "flashinfer"), None)


@pytest.mark.parametrize(
    ("version", "arch", "slug"),
    [
        (None, "sm90", "environment/missing-package"),
        ("0.7.1", "sm90", "environment/package-version"),
        ("0.8.0", "sm90", "environment/package-version"),
        ("0.7.2.post1", "sm80", "arch/unsupported"),
    ],
)
def test_absence_another_version_and_another_chip_are_reasons(monkeypatch, version, arch, slug) -> None:
    reason = foreseen(monkeypatch, version, arch)
    assert reason.slug == slug
    assert "flashinfer-python" in reason.text + reason.fix + NEEDED


def test_in_its_window_on_hopper_it_runs_where_it_is_named_and_nowhere_else(monkeypatch) -> None:
    assert foreseen(monkeypatch, "0.7.2.post1") is None
    with rlk.registered(backend):
        situation = Situation(device="cuda", arch="sm90", dtype="bfloat16", features=CALL)
        mine = next(r for r in foresee("qmatmul", situation).rejected if r.backend == "flashinfer")
    assert mine.reason.slug == "policy/third-party"
