"""torch's row-wise fp8 product: what it computes, in the flavour of each architecture, and where it runs."""

import pytest
import torch

import rlkernel as rlk
from rlkernel.survey import Situation, foresee
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_rocm.hipblaslt import FLAVOURS, backend
from rlkernel_rocm.hipblaslt.qmatmul import fits_fnuz, fits_ocp, qmatmul
from rlkernel_torch.direct import qmatmul as definition

FITS = {"fnuz": fits_fnuz, "ocp": fits_ocp}


def weight(element, N=32, K=48):
    g = torch.Generator().manual_seed(0)
    spec = QuantSpec.named("fp8_channel", act="token_fp8", element=element)
    return rlk.quantize(torch.randn(N, K, generator=g), spec)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_it_computes_what_qmatmul_means(flavour) -> None:
    w = weight(FLAVOURS[flavour][1])
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert FITS[flavour](QmatmulCall(x, w)) is None
    torch.testing.assert_close(qmatmul(QmatmulCall(x, w)), definition(x, w), rtol=2**-7, atol=2**-7)


def test_each_architecture_takes_its_own_flavour() -> None:
    taken = {arch: flavour for flavour, (archs, _) in FLAVOURS.items() for arch in archs}
    assert taken == {arch: row.fp8 for arch, row in ARCHITECTURES.items() if row.fp8}


@pytest.mark.parametrize(("flavour", "other"), [("fnuz", "ocp"), ("ocp", "fnuz")])
def test_the_other_flavour_is_a_reason_with_the_way_out(flavour, other) -> None:
    reason = FITS[flavour](QmatmulCall(torch.ones(2, 48, dtype=torch.bfloat16), weight(FLAVOURS[other][1])))
    assert "not e4m3fn" in reason.text
    assert reason.fix == "rlkernel_rocm.fp8 converts weights"


def test_a_width_that_the_library_does_not_take_is_a_reason() -> None:
    reason = fits_ocp(QmatmulCall(torch.ones(2, 40, dtype=torch.bfloat16), weight("e4m3fn", 32, 40)))
    assert (reason.text, reason.fix) == ("a weight of 32 x 40", "multiples of 16")


def test_it_runs_only_where_it_is_named() -> None:
    features = frozenset({"format:fp8_channel", "act:token_fp8", "element:e4m3fnuz"})
    situation = Situation(device="cuda", arch="gfx942", dtype="bfloat16", features=features)
    with rlk.registered(backend):
        assert "hipblaslt" in {r.backend for r in foresee("qmatmul", situation).rejected}
        with rlk.use("hipblaslt", fallback="error"):
            assert foresee("qmatmul", situation).backend == "hipblaslt"
