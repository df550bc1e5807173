"""sample on a Hopper GPU: the reference's tokens, bits that depend on the row alone, capture; skipped without one."""

import pytest
import torch

from rlkernel_core.spec.sample import SampleCall
from rlkernel_torch.direct import sample as reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
FIELDS = ("token", "logprob", "log_kept_mass", "raw_logprob", "kept_count", "status", "threshold", "threshold_id")


def sample(*args, **options):
    from rlkernel_cuda.sample.launch import prepare

    asked = SampleCall(*args, **options)
    return prepare(asked)(asked)


def case(N=70, V=32003, sigma=3.0, dtype=torch.float32):
    g = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(N, V, device="cuda", generator=g).mul(sigma).to(dtype)
    return x, {"seed": torch.arange(N, device="cuda"), "step": 3, "raw_logprob": True}


LAWS = {
    "none": {},
    "usual": {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    "nucleus": {"top_p": 0.9},
    "min-p": {"min_p": 0.02},
    "many": {"top_k": 2000, "top_p": 0.5},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_results_are_the_reference_s(law, dtype) -> None:
    x, rest = case(dtype=dtype)
    have, want = sample(x, **rest, **law), reference(x, **rest, **law)
    assert have.token.tolist() == want.token.tolist()
    assert (have.kept_count - want.kept_count).abs().max() <= 1
    torch.testing.assert_close(have.logprob, want.logprob, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(have.raw_logprob, want.raw_logprob, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_bits_depend_on_the_row_alone(law, monkeypatch) -> None:
    from rlkernel_cuda.sample import launch as call

    x, rest = case(N=600)  # more rows than multiprocessors: blocks that read on have several each
    whole = sample(x, **rest, **law)
    turned = sample(x.flip(0), **{**rest, "seed": rest["seed"].flip(0)}, **law)
    alone = sample(x[5:6], **{**rest, "seed": rest["seed"][5:6]}, **law)
    shapes = {shape for _, shape in (*call.FILTERED, *call.CUT, *call.PLAIN)}
    for name in FIELDS:
        a = getattr(whole, name)
        assert torch.equal(a, getattr(turned, name).flip(0)), name
        assert torch.equal(a[5:6], getattr(alone, name)), name
    for shape in shapes:
        for table in ("FILTERED", "CUT") if shape.finishers else ("FILTERED", "CUT", "PLAIN"):
            monkeypatch.setattr(call, table, ((2**31, shape),))
        other = sample(x, **rest, **law)
        assert [n for n in FIELDS if not torch.equal(getattr(whole, n), getattr(other, n))] == []


def test_replays_draw_as_eager_calls_do() -> None:
    x, rest = case(N=5)
    rest["step"] = torch.zeros(5, dtype=torch.int64, device="cuda")
    sample(x, **rest, top_k=50, top_p=0.95)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(x, **rest, top_k=50, top_p=0.95)
    for step in range(20):
        rest["step"].fill_(step)
        x.normal_().mul_(3)
        graph.replay()
        eager = sample(x, **rest, top_k=50, top_p=0.95)
        assert torch.equal(out.token, eager.token)
        assert torch.equal(out.logprob, eager.logprob)
