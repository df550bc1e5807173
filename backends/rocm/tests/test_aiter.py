"""Calls into AITER: bound to recorded signatures, run with a stand-in, refused where AITER is something else."""

import inspect
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

import rlkernel as rlk
from rlkernel.doctor.software import AITER_INSTALL
from rlkernel.survey import Situation, foresee
from rlkernel_core.errors import CaptureError, RLKernelError
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_rocm.aiter import backend, calls
from rlkernel_rocm.aiter.qmatmul import fits_gfx942, fits_gfx950, qmatmul
from rlkernel_torch.direct import qmatmul as definition

RECORDED = json.loads((Path(calls.__file__).parent / "signatures.json").read_text())


def recorded(version, spec):
    """The signature of a function in one version of AITER."""
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = []
    for text in RECORDED[version][spec.name]:
        default = None if text.endswith("=") else inspect.Parameter.empty
        parameters.append(inspect.Parameter(text.strip("*="), kinds[text.startswith("*")], default=default))
    return inspect.Signature(parameters)


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize("spec", calls.CALLS, ids=lambda s: s.function)
def test_every_call_binds_to_the_parameters_it_means(spec, version) -> None:
    bound = recorded(version, spec).bind(*spec.arguments)
    assert dict(bound.arguments) == {name: name for name in spec.arguments}


@pytest.fixture
def installed(monkeypatch):
    """AITER's distribution in some version, and a module in its place."""

    def make(version="0.1.20.post1", *, raises=None, dist="amd-aiter", fake=False):
        def answer(name):
            if name == dist:
                return version
            raise metadata.PackageNotFoundError(name)

        def gemm_a8w8(XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, splitK=None):
            assert x_scale.shape == (XQ.shape[0], 1)
            assert w_scale.shape == (1, WQ.shape[0])
            return (XQ.double() @ WQ.double().T * x_scale * w_scale).to(dtype)

        def gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, isBpreshuffled=False):
            assert not isBpreshuffled
            wide = [s.double().repeat_interleave(128, 1) for s in (x_scale, w_scale)]
            return ((XQ.double() * wide[0]) @ (WQ.double() * wide[1].repeat_interleave(128, 0)).T).to(dtype)

        stands_in = {f.__name__: f for f in (gemm_a8w8, gemm_a8w8_blockscale)}
        assert {s.function for s in calls.CALLS} == set(stands_in)
        for spec in calls.CALLS:
            assert list(inspect.signature(stands_in[spec.function]).parameters) == [
                text.strip("*=") for text in RECORDED["0.1.20.post1"][spec.name]
            ]
        monkeypatch.setattr(calls, "version", answer)
        monkeypatch.setattr(calls, "packages_distributions", lambda: {"aiter": [dist]})
        if raises is not None:

            def fail(_):
                raise raises

            monkeypatch.setattr(calls, "import_module", fail)
        else:
            for name in ("aiter", "aiter.ops", "aiter.ops.gemm_op_a8w8"):
                module = ModuleType(name)
                module.__path__ = []
                setattr(module, calls.FAKE, fake)
                monkeypatch.setitem(sys.modules, name, module)
            vars(sys.modules["aiter.ops.gemm_op_a8w8"]).update(stands_in)
        calls.load.cache_clear()

    yield make
    calls.load.cache_clear()


@pytest.mark.parametrize("weight", ["int8_w8a8", "fp8_channel"])
def test_the_call_computes_what_qmatmul_means(installed, weight) -> None:
    installed()
    g = torch.Generator().manual_seed(0)
    options = {} if weight == "int8_w8a8" else {"act": "token_fp8", "element": "e4m3fnuz"}
    w = rlk.quantize(torch.randn(32, 48, generator=g), QuantSpec.named(weight, **options))
    x = torch.randn(2, 5, 48, generator=g).bfloat16()
    assert fits_gfx942(QmatmulCall(x, w)) is None
    torch.testing.assert_close(qmatmul(QmatmulCall(x, w)), definition(x, w), rtol=2**-7, atol=1e-6)


def test_a_product_of_blocks_computes_what_qmatmul_means(installed) -> None:
    installed()
    g = torch.Generator().manual_seed(0)
    spec = QuantSpec.named("fp8_block128", act="block128_fp8", element="e4m3fnuz")
    w = rlk.quantize(torch.randn(256, 384, generator=g), spec)
    x = torch.randn(3, 384, generator=g).bfloat16()
    assert fits_gfx942(QmatmulCall(x, w)) is None
    torch.testing.assert_close(qmatmul(QmatmulCall(x, w)), definition(x, w), rtol=2**-7, atol=2**-7)


def test_a_product_is_not_built_inside_a_capture(installed, monkeypatch) -> None:
    installed()
    w = rlk.quantize(torch.randn(32, 48), QuantSpec.named("int8_w8a8"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    class OnGpu(torch.Tensor):
        is_cuda = True

    with pytest.raises(CaptureError, match="call it once before"):
        qmatmul(QmatmulCall(torch.ones(2, 48, dtype=torch.float16).as_subclass(OnGpu), w))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"version": "0.1.7.post2.dev18"}, "older than 0.1.12"),
        ({"dist": "aiter", "version": "0.13.20191203"}, "pip uninstall aiter"),
        ({"raises": RuntimeError("ROCm version file not found")}, "cannot be imported: RuntimeError: ROCm version"),
        ({"raises": SystemExit("build failed")}, "cannot be imported: SystemExit: build failed"),
        ({"raises": KeyError("gfx000")}, "cannot be imported: KeyError"),
        ({"fake": True}, "stand-in"),
    ],
)
def test_an_aiter_that_is_not_what_it_should_be_is_refused(installed, how, said) -> None:
    installed(**how)
    with pytest.raises(RLKernelError, match=said):
        calls.load(calls.GEMM_A8W8)


def test_without_aiter_the_error_has_the_line_that_installs_it() -> None:
    with pytest.raises(RLKernelError) as caught:
        calls.load(calls.GEMM_A8W8)
    assert str(caught.value) == f"amd-aiter is not installed: {calls.INSTALL}"


def test_that_line_is_the_doctors_too_and_asks_for_a_version_whose_signatures_are_on_record() -> None:
    assert calls.INSTALL == AITER_INSTALL
    (version,) = re.findall(r"amd-aiter==([^+]+)\+", calls.INSTALL)
    assert version in RECORDED
    assert calls.INSTALL.endswith(f"/v{version}")


@pytest.mark.parametrize(
    ("weight", "options", "shape", "said"),
    [
        ("fp8_channel", {"act": "token_fp8"}, (32, 48), "e4m3fnuz, not e4m3fn"),
        ("fp8_channel", {"element": "e4m3fnuz"}, (32, 48), "inputs of 8 bits"),
        ("int8_w8a8", {}, (32, 40), "32 x 40"),
        ("fp8_block128", {"act": "block128_fp8", "element": "e4m3fnuz"}, (32, 128), "multiples of 128"),
    ],
)
def test_what_does_not_fit_is_a_reason(weight, options, shape, said) -> None:
    w = rlk.quantize(torch.randn(*shape), QuantSpec.named(weight, **options))
    reason = fits_gfx942(QmatmulCall(torch.ones(2, shape[1], dtype=torch.bfloat16), w))
    assert said in f"{reason.text}; {reason.fix}"


def test_the_flavour_of_fp8_is_that_of_the_architecture() -> None:
    w = rlk.quantize(torch.randn(32, 48), QuantSpec.named("fp8_channel", act="token_fp8"))
    assert fits_gfx950(QmatmulCall(torch.ones(2, 48, dtype=torch.bfloat16), w)) is None


def test_it_runs_only_where_it_is_named() -> None:
    situation = Situation(device="cuda", arch="gfx942", dtype="bfloat16", features=frozenset({"format:int8_w8a8"}))
    with rlk.registered(backend):
        mine = next(r for r in foresee("qmatmul", situation).rejected if r.backend == "aiter")
        assert mine.reason.slug == "policy/third-party"
        with rlk.use("aiter", fallback="error"):
            decision = foresee("qmatmul", situation)
    assert decision.backend is None
    assert "amd-aiter" in decision.rejected[0].reason.text
