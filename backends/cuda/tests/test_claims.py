"""What the manifest says, what importing it costs, and what the fits-checks refuse."""

import subprocess
import sys
import tomllib
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

from rlkernel_core.gradients import Pair
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_cuda import backend, cublaslt, fa3, flashinfer

HERE = Path(__file__).parents[1]
LIBRARIES = (cublaslt.backend, fa3.backend, flashinfer.backend)
IMPLS = tuple(impl for one in (backend, *LIBRARIES) for impl in one.impls)


def test_the_entry_point_names_the_backend() -> None:
    points = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"]["rlkernel.backends"]
    libraries = {b.name: f"rlkernel_cuda.{b.name}:backend" for b in LIBRARIES}
    assert points == {backend.name: "rlkernel_cuda:backend", **libraries}


def test_importing_claims_loads_neither_torch_nor_triton() -> None:
    modules = "rlkernel_cuda, rlkernel_cuda.cublaslt, rlkernel_cuda.fa3, rlkernel_cuda.flashinfer"
    code = f"import sys, {modules}; print({{'torch', 'triton', 'rlkernel_triton'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("impl", IMPLS, ids=lambda i: i.target)
def test_targets_and_checks_take_the_record_of_their_operator(impl) -> None:
    record = OPERATORS[impl.op.partition("@")[0]].record.__name__
    for target in filter(None, (impl.target, impl.check)):
        module, _, name = target.partition(":")
        parameters = signature(getattr(import_module(module), name)).parameters.values()
        assert [p.annotation for p in parameters] == [record]


@pytest.mark.parametrize("impl", IMPLS, ids=lambda i: i.target)
def test_every_operator_is_prepared_and_one_with_gradients_brings_its_pair(impl) -> None:
    op = impl.op.partition("@")[0]
    assert impl.prepared
    assert (impl.gradient is not None) == ("grad" in impl.supports)
    if impl.gradient is not None:
        module, _, name = impl.gradient.partition(":")
        pair = getattr(import_module(module), name)
        assert (issubclass(pair, Pair), pair.op) == (True, op)


@pytest.mark.parametrize("impl", IMPLS, ids=lambda i: i.target)
def test_only_features_of_the_operator_are_claimed_and_only_on_hopper(impl) -> None:
    spec = OPERATORS[impl.op.partition("@")[0]]
    assert impl.supports < spec.feature_names
    assert impl.requires.arch == ("sm90",)
    dtypes = {
        "rlkernel_cuda.sample": ("bfloat16", "float16", "float32"),
        "rlkernel_cuda.qmatmul": ("bfloat16", "float16"),
        "rlkernel_cuda.cublaslt.linear": ("bfloat16", "float16"),
    }
    module = impl.target.partition(":")[0].removesuffix(".launch")
    assert impl.requires.dtypes == dtypes.get(module, ("bfloat16",))


def fits(weight) -> Reason | None:
    from rlkernel_cuda.linear_logprob.launch import fits

    hidden = torch.empty(3, weight.shape[1], dtype=torch.bfloat16)
    return fits(LinearLogprobCall(hidden, weight, torch.zeros(3, dtype=torch.long)))


@pytest.mark.parametrize("D", [8, 12, 4096])
def test_heads_that_tma_reads_and_small_ones_that_are_copied_fit(D) -> None:
    assert fits(torch.empty(1000, D, dtype=torch.bfloat16)) is None


def test_a_large_head_that_would_have_to_be_copied_is_refused_with_a_remedy() -> None:
    reason = fits(torch.empty(50257, 1, dtype=torch.bfloat16).expand(50257, 4095))
    assert reason is not None
    assert (reason.slug, "multiple of 8" in reason.fix) == ("shape/unsupported", True)


def test_sizes_beyond_32_bit_coordinates_are_refused() -> None:
    reason = fits(torch.empty(2**30, 8, dtype=torch.bfloat16, device="meta"))
    assert reason is not None
    assert "32-bit" in reason.text
