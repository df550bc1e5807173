"""Quantized heads on Triton: every format and layout is the head that it stands for, and no copy of it is made.

The law of a quantized head is that of its exact values in fp32, so it is compared with the stored head of these.
On a GPU hidden states of 16 bits are multiplied by matrix units with two bf16 numbers for each decoded one.
"""

import pytest
import torch

import rlkernel as rlk
from rlkernel_core import quant as reference
from rlkernel_core.quant import QuantSpec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_torch import direct
from rlkernel_triton.linear_logprob import launch as linear_logprob
from rlkernel_triton.linear_logprob import workspace as memory

named = QuantSpec.named
# One of each way in which codes are read.
SPECS = [
    named("int4_g32"), named("int4_channel_asym"), named("nf4"), named("nf4", double_quant=True), named("hqq4"),
    named("fp8_tensor", element="e5m2"), named("mxfp8"), named("nvfp4"), named("gguf_q6_k"),
]  # fmt: skip
IN_TILES = [named(name) for name in ("int4_g128", "nf4", "mxfp4", "nvfp4")]
N, D, V = 5, 33, 130
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head(spec, device, shape=(V, D), *, tiles=False):
    """A quantized head and the values that it stands for."""
    w = reference.quantize(3 / shape[1] ** 0.5 * drawn(*shape), spec).to(device)
    exact = reference.dequantize(w, dtype=torch.float32)
    return rlk.prepack(w) if tiles else w, exact


def draw(hidden, weight, run=rlk.lm_head_sample, **more):
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return run(hidden, weight, seed=rows, step=3, temperature=0.9, **more)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_draws_from_every_format_are_those_of_its_values(device, spec) -> None:
    w, exact = head(spec, device)
    hidden = drawn(N, D, seed=1).to(device)
    found, want = draw(hidden, w), draw(hidden, exact, direct.lm_head_sample)
    assert found.token.tolist() == want.token.tolist()
    torch.testing.assert_close(found.logprob, want.logprob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spec", IN_TILES, ids=str)
def test_draws_from_tiles_are_those_of_the_canonical_layout(device, spec) -> None:
    canonical, _ = head(spec, device, (192, 256))
    tiles, _ = head(spec, device, (192, 256), tiles=True)
    hidden = drawn(N, 256, seed=1).to(device, torch.bfloat16)
    found, want = draw(hidden, tiles), draw(hidden, canonical)
    assert (tiles.layout != canonical.layout, found.token.tolist()) == (True, want.token.tolist())
    # A layout may order the inputs within a step of the matrix instruction otherwise: on an H200 last bits differ.
    torch.testing.assert_close(found.logprob, want.logprob, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_draw_with_every_option_keeps_what_the_values_keep(device, dtype) -> None:
    w, exact = head(named("int4_g32"), device, (V, 64))
    hidden, bias = drawn(N, 64, seed=1).to(device, dtype), drawn(V, seed=2).to(device, dtype)
    lora = rlk.LoRA(drawn(4, 64, seed=3).to(device, dtype), drawn(V, 4, seed=4).to(device, dtype), 0.25)
    more = {"bias": bias, "lora": lora, "softcap": 9.0, "logit_scale": 0.5, "top_k": 1, "raw_logprob": True}
    found, want = draw(hidden, w, **more), draw(hidden.float(), exact, direct.lm_head_sample, **more)
    assert found.token.tolist() == want.token.tolist()
    torch.testing.assert_close(found.raw_logprob, want.raw_logprob, atol=TOLERANCE[dtype], rtol=0)


def test_a_row_draws_the_same_bits_alone_and_among_others(device) -> None:
    w, _ = head(named("int4_g32"), device)
    hidden = drawn(34, D, seed=1).to(device)  # of two tiles
    seeds = torch.arange(34, device=device)
    alone = rlk.lm_head_sample(hidden[33:], w, seed=33, step=3)
    every = rlk.lm_head_sample(hidden, w, seed=seeds, step=3)
    assert (alone.token.item(), alone.logprob.item()) == (every.token[33].item(), every.logprob[33].item())


def gradients(given, weight, run=rlk.linear_logprob, **options):
    """Results, and gradients of hidden states, bias, A and B, of a quantized head or of its values."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    x, bias, A, B = leaves
    ids = torch.arange(x.shape[0], device=x.device) * 7 % weight.shape[0]
    out = run(x, weight, ids, bias=bias, lora=rlk.LoRA(A, B, 0.5), entropy=True, **options)
    up = torch.linspace(-1, 1, x.shape[0], device=x.device)
    (out.logprob * up + out.entropy).sum().backward()
    return (out.logprob, out.lse, out.entropy), [leaf.grad for leaf in leaves]


def operands(device, dtype, N, D, V):
    sizes = ((N, D), (V,), (4, D), (V, 4))
    return [(1 if i < 2 else 0.3) * drawn(*size, seed=i + 5).to(device, dtype) for i, size in enumerate(sizes)]


def holds(spec, device, dtype, size=(N, D, V), *, tiles=False, **options):
    """A quantized head against its values in fp32, on hidden states of a type."""
    N, D, V = size
    w, exact = head(spec, device, (V, D), tiles=tiles)
    given = operands(device, dtype, N, D, V)
    found, grads = gradients(given, w, **options)
    want, exact_grads = gradients([x.double() for x in given], exact.double(), direct.linear_logprob)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=TOLERANCE[dtype], rtol=1e-5)
    relative = 2e-5 if dtype == torch.float32 else 4.2e-3
    for a, b in zip(grads, exact_grads, strict=True):
        assert float((a.double() - b).norm()) <= relative * float(b.norm())


@pytest.mark.parametrize("spec", SPECS[2:5], ids=str)
def test_log_probabilities_and_gradients_of_a_format_are_those_of_its_values(device, spec) -> None:
    holds(spec, device, torch.float32)


@pytest.mark.parametrize("backward", ["save", "recompute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_of_hidden_states_of_16_bits_are_not_those_of_a_rounded_head(device, dtype, backward) -> None:
    holds(named("fp8_channel"), device, dtype, backward=backward)


def test_a_head_in_tiles_is_decoded_from_rows_that_are_no_multiple_of_16(device, monkeypatch) -> None:
    monkeypatch.setattr("rlkernel_common.vocab_parallel.LEAST_PIECE", 40)
    holds(named("int4_g128"), device, torch.float32, (N, 128, 320), tiles=True)


def test_blocks_of_rows_and_columns_take_the_head_in_panels(device, monkeypatch) -> None:
    monkeypatch.setattr(memory, "BLOCKS", ((4, 512),))
    holds(named("nf4"), device, torch.float32, (N, D, 1100))


def test_what_a_call_takes_is_less_than_the_head(device) -> None:
    w, _ = head(named("int4_g32"), device, (1 << 15, 32))
    hidden = torch.empty(64, 32, device=device, requires_grad=True)
    call = LinearLogprobCall(hidden, w, torch.zeros(64, dtype=torch.int64, device=device), backward="recompute")
    least = linear_logprob.workspace(call)
    stored = LinearLogprobCall(hidden, torch.empty(1 << 15, 32, device=device), call.ids, backward="recompute")
    assert least - linear_logprob.workspace(stored) <= (1 << 15) * 32 * 4 // 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of a GPU is counted")
def test_memory_of_a_gpu_stays_below_what_is_stated(device) -> None:
    w, _ = head(named("int4_g128"), device, (1 << 16, 1024))
    hidden = torch.randn(512, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(512, device=device)
    stated = linear_logprob.workspace(LinearLogprobCall(hidden, w, ids, backward="recompute"))
    rlk.linear_logprob(hidden, w, ids, backward="recompute").logprob.sum().backward()
    torch.cuda.synchronize()
    hidden.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rlk.linear_logprob(hidden, w, ids, backward="recompute").logprob.sum().backward()
    assert torch.cuda.max_memory_allocated() - before - hidden.nbytes <= stated < (1 << 16) * 1024 * 2


def test_a_head_whose_columns_are_out_of_order_is_refused_by_name(device) -> None:
    w = reference.quantize(drawn(V, 64), named("int4_g32", act_order=True)).to(device)
    hidden = drawn(N, 64, seed=1).to(device)
    with pytest.raises(rlk.ResolutionError, match="act_order"):
        rlk.linear_logprob(hidden, w, torch.zeros(N, dtype=torch.int64, device=device))
    with pytest.raises(rlk.ResolutionError, match="act_order"):
        draw(hidden, w)
