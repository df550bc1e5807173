"""linear by cuBLASLt: what is asked of the library, on a machine without it; and its bits, on a Hopper GPU."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rlkernel_core.spec.linear import LinearCall
from rlkernel_cuda.cublaslt import library, linear
from rlkernel_torch.linear import linear as plain

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TYPES = {2: torch.float16, 14: torch.bfloat16}


class StubLibrary:
    """libcublasLt's place: descriptions are kept by number, and a product is made by torch from where it lies."""

    def __init__(self):
        self.made, self.wanted, self.destroyed, self.algorithms = {}, {}, [], 1

    def _make(self, place, made):
        place._obj.value = len(self.made) + 1
        self.made[place._obj.value] = made
        return 0

    def cublasLtCreate(self, place):  # noqa: N802 the library's names
        return self._make(place, "handle")

    def cublasLtMatmulDescCreate(self, place, *types):  # noqa: N802
        assert types == (68, 0)  # sums and factors in fp32
        return self._make(place, {})

    def cublasLtMatrixLayoutCreate(self, place, kind, *sizes):  # noqa: N802
        return self._make(place, (TYPES[kind], *[n.value for n in sizes]))

    def cublasLtMatmulPreferenceCreate(self, place):  # noqa: N802
        return self._make(place, self.wanted)

    def cublasLtMatmulDescSetAttribute(self, of, attribute, value, size):  # noqa: N802
        assert size.value == ctypes.sizeof(value._obj)
        self.made[of.value][attribute] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute  # noqa: N815

    def cublasLtMatmulAlgoGetHeuristic(self, *given):  # noqa: N802
        given[-1]._obj.value = self.algorithms
        return 0

    def cublasLtMatmulPreferenceDestroy(self, of):  # noqa: N802
        self.destroyed.append(of.value)
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy  # noqa: N815

    def cublasLtMatmul(self, handle, what, alpha, *rest):  # noqa: N802
        a, of_a, b, of_b, beta, c, of_c, d, of_d, _, workspace, workspace_bytes, _ = rest
        assert (alpha._obj.value, workspace, workspace_bytes.value) == (1.0, None, 0)
        how = self.made[what.value]
        first, second, added, out = (self._read(*m) for m in ((a, of_a), (b, of_b), (c, of_c), (d, of_d)))
        found = (first.T if how[3] else first).float() @ (second.T if how[4] else second).float()
        if beta._obj.value:
            found += added.float()
        if how.get(7) == 4:
            found += self._memory(how[8], out.dtype, len(out)).float()[:, None]
        out.copy_(found)
        return 0

    def _read(self, address, layout):
        kind, rows, columns, leading = self.made[layout.value]
        return self._memory(address.value, kind, leading * columns).view(columns, leading).T[:rows]

    @staticmethod
    def _memory(address, kind, count):
        return torch.frombuffer((ctypes.c_byte * (2 * count)).from_address(address), dtype=kind)


@pytest.fixture
def stub(monkeypatch):
    made = StubLibrary()
    monkeypatch.setattr(library, "_library", lambda: made)
    monkeypatch.setattr(library, "_handle", lambda device: ctypes.c_void_p(0))
    monkeypatch.setattr(linear, "on_device_of", lambda x: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return made


def given(device="cpu", dtype=torch.bfloat16, M=5, N=24, K=40, *, seed=1):
    g = torch.Generator(device).manual_seed(seed)
    made = {
        "x": torch.randn(M, K, generator=g, device=device),
        "weight": torch.randn(N, K, generator=g, device=device) / K**0.5,
        "bias": torch.randn(N, generator=g, device=device),
        "residual": torch.randn(M, N, generator=g, device=device),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def graded(run, given, up):
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    y = run(LinearCall(**leaves))
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), up), strict=True))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "K"), [(24, 40), (24, 43), (21, 40), (1, 1)])
def test_what_is_asked_for_is_the_product_and_its_gradients(stub, N, K, dtype) -> None:
    call = given(dtype=dtype, N=N, K=K)
    up = torch.randn(5, N, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, want = (graded(run, call, up) for run in (lambda c: linear.prepare(c)(c), plain))
    torch.testing.assert_close(found, want, atol=2e-2, rtol=1e-2)


def test_no_workspace_and_no_split_sum_is_asked_for(stub) -> None:
    call = LinearCall(**given())
    linear.prepare(call)(call)
    assert (stub.wanted[1], stub.wanted[3]) == (0, 0)
    assert [stub.wanted[n] for n in (5, 6, 7, 8)] == [16] * 4


def test_operands_that_lie_apart_or_off_are_copied(stub) -> None:
    call = given()
    want = linear.prepare(LinearCall(**call))(LinearCall(**call))
    wide = {name: torch.empty(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype) for name, x in call.items()}
    apart = {name: wide[name][..., 1::2].copy_(x) for name, x in call.items()}
    off = {name: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for name, x in call.items()}
    for other in (apart, off):
        assert torch.equal(linear.prepare(LinearCall(**other))(LinearCall(**other)), want)


def test_descriptions_are_handed_back(stub) -> None:
    product = library.Matmul(torch.empty(0, dtype=torch.bfloat16), 8, 8, 8)
    del product
    assert sorted(stub.destroyed) == sorted(stub.made)


def test_a_product_without_an_algorithm_is_an_error(stub) -> None:
    stub.algorithms = 0
    with pytest.raises(library.RLKernelError, match="no algorithm for this product that splits no sum"):
        library.Matmul(torch.empty(0, dtype=torch.bfloat16), 8, 8, 8)


# The products of a layer of Qwen3-8B and of Qwen3-0.6B; K that is no multiple of 64 has masks in its last step.
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 3072), (2048, 1024), (1024, 1001)]
ROWS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 200, 255, 257, 512, 777, 1024, 2049, 4096)


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(N, K) -> None:
    call = given("cuda", M=8192, N=N, K=K)
    up = torch.randn(8192, N, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).bfloat16()

    def rows(M):
        some = {name: x[:M] if name in {"x", "residual"} else x for name, x in call.items()}
        found = graded(lambda c: linear.prepare(c)(c), some, up[:M])
        return {name: found[name] for name in ("y", "x", "residual")}

    whole = rows(8192)
    differ = [(M, name) for M in ROWS for name, x in rows(M).items() if not torch.equal(x, whole[name][:M])]
    assert differ == []


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
def test_a_bias_and_a_residual_of_zeros_change_no_bit() -> None:
    call = given("cuda", M=300, N=1024, K=4096)
    bare = {name: call[name] for name in ("x", "weight")}
    zeros = {name: torch.zeros_like(call[name]) for name in ("bias", "residual")}
    want = linear.prepare(LinearCall(**bare))(LinearCall(**bare))
    for more in ({"bias": zeros["bias"]}, {"residual": zeros["residual"]}, zeros):
        found = LinearCall(**bare, **more)
        assert torch.equal(linear.prepare(found)(found), want)
