"""fp8 products by libraries on a Hopper GPU: codes of tokens, the contract's bound, repetition, capture."""

from importlib import import_module
from importlib.util import find_spec
from shutil import which

import pytest
import torch

from rlkernel_core import quant as reference
from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.spec.qmatmul import UNITS, QmatmulCall, accumulation_bound

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
BLOCKS = reference.QuantSpec.named("fp8_block128", act="block128_fp8")
TOKENS = reference.QuantSpec.named("fp8_channel", act="token_fp8")
LIBRARIES = [("flashinfer", BLOCKS), ("cublaslt", BLOCKS), ("cublaslt", TOKENS)]


def library(name):
    if name == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("needs flashinfer-python")
    return import_module(f"rlkernel_cuda.{name}.qmatmul")


def product(spec, M, N=640, K=1024):
    g = torch.Generator("cuda").manual_seed(M)
    full = torch.randn(N, K, device="cuda", generator=g)
    return torch.randn(M, K, device="cuda", generator=g).bfloat16(), reference.quantize(full, spec)


def test_tokens_have_the_codes_and_scales_of_the_definition() -> None:
    from rlkernel_cuda.common.quantize_tokens import coded

    x, _ = product(BLOCKS, 77)
    x *= 10.0 ** torch.arange(-38, 39, device="cuda")[:, None]
    x[3, 200], x[4, 10], x[5, :128] = float("nan"), float("inf"), -0.0
    codes, scale = coded(x, 4)
    want = quantize_activation(x.float(), BLOCKS)
    assert torch.equal(codes[:77].view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(scale[:, :77].t().nan_to_num(7.0), want.scale.nan_to_num(7.0))


@pytest.mark.parametrize(("name", "spec"), LIBRARIES)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 640, 1024), (7, 256, 384), (16, 128, 128), (33, 640, 1024), (301, 384, 640)]
)
def test_a_product_is_within_the_bound(name, spec, M, N, K) -> None:
    module = library(name)
    if (name, spec) == ("cublaslt", BLOCKS):
        K = -(-K // 512) * 512
    x, w = product(spec, M, N, K)
    assert module.fits(QmatmulCall(x, w)) is None
    given = quantize_activation(x.float(), spec).value().double()
    exact = reference.dequantize(w, dtype=torch.float32).double()
    want = given @ exact.t()
    bound = accumulation_bound(want, given.abs() @ exact.abs().t(), unit=UNITS["bfloat16"], inner=K)
    y = module.qmatmul(QmatmulCall(x, w))
    assert bool(((y.double() - want).abs() <= bound).all())
    assert torch.equal(y, module.qmatmul(QmatmulCall(x, w)))


@pytest.mark.parametrize(("name", "spec"), LIBRARIES)
def test_a_token_that_is_not_finite_spoils_its_row_alone(name, spec) -> None:
    module = library(name)
    x, w = product(spec, 40)
    x[3, 200], x[9, 10] = float("nan"), float("inf")
    bad = ~module.qmatmul(QmatmulCall(x, w)).isfinite()
    assert bad.all(1).nonzero().flatten().tolist() == [3, 9]
    assert bad.any(1).nonzero().flatten().tolist() == [3, 9]


@pytest.mark.parametrize(("name", "spec"), LIBRARIES)
def test_a_replay_sees_new_tokens_and_a_new_weight(name, spec) -> None:
    module = library(name)
    (x, w), (other, written) = product(spec, 48), product(spec, 48, 640, 1024)
    module.qmatmul(QmatmulCall(x, w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module.qmatmul(QmatmulCall(x, w))
    x.copy_(2 * other)
    for part in w.parts:
        w.parts[part].copy_(written.parts[part])
    graph.replay()
    assert torch.equal(y, module.qmatmul(QmatmulCall(2 * other, written)))


def test_a_compiler_that_fails_is_a_reason_and_ends_no_process_of_ours(monkeypatch, tmp_path) -> None:
    """DeepGEMM does not look at what nvcc returned, and exits when it finds no kernel."""
    from rlkernel.discover import Candidate
    from rlkernel.probe import probe
    from rlkernel_cuda.flashinfer import backend

    library("flashinfer")
    candidate = Candidate("flashinfer", "rlkernel-cuda", "0.1.0", backend)
    assert probe(candidate, "cuda:0", "subprocess", cache=tmp_path / "right") is None
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TRTLLM_DG_NVCC_COMPILER", which("false"))
    reason = probe(candidate, "cuda:0", "subprocess", cache=tmp_path / "wrong")
    assert reason.slug in {"probe/crashed", "probe/failed"}
