"""What docs/aot.md says that bundles always serve is what they are built of: calls drawn within the limits, planned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.aot.configuration_recorder import ConfigurationRecorder, launched
from rlkernel_triton.aot.workloads import ADAPTED, BOARD, FILTERS, FORMATS, HEADS, KINDS, PAGE, SAMPLING, SHARED

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
FLAG = st.booleans()


@pytest.fixture(scope="module")
def planned():
    """Plan a call as on an Orin; the builds that bundles lack for it."""
    recorder, there = ConfigurationRecorder("sm_87"), frozenset(launched("sm_87"))

    def missing(op, **args):
        recorder.seen.clear()
        out = recorder.planned(op)(OPERATORS[op].call(**args))
        return {build for _, build in recorder.seen} - there, out

    return missing


def laid(shape, dtype, draw):
    """A tensor that begins anywhere and whose rows may lie apart."""
    width = shape[-1] + draw(st.integers(0, 17))
    skip = draw(st.integers(0, 9))
    return torch.zeros(*shape[:-1], width + 9, dtype=dtype)[..., skip : skip + shape[-1]]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_log_probabilities(planned, data) -> None:
    draw = data.draw
    N, V = draw(st.integers(1, 300)), draw(st.one_of(st.integers(1, 5000), st.integers(1, 262144)))
    N = min(N, max(1, (1 << 21) // V))
    top = draw(st.integers(0, min(32, V)))
    logits = laid((N, V), draw(DTYPES), draw).requires_grad_(draw(FLAG))
    support = Support(ids=torch.arange(N), offsets=torch.arange(N + 1)) if draw(FLAG) else None
    lacking, _ = planned(
        "logprob",
        logits=logits,
        ids=torch.zeros(N, dtype=torch.int64),
        temperature=torch.ones(N) if draw(FLAG) else 0.7,
        softcap=draw(st.sampled_from([None, 30.0])),
        mask=torch.ones(N, dtype=torch.bool) if draw(FLAG) else None,
        entropy=draw(FLAG),
        top_logprobs=top,
        support=support,
    )
    assert lacking == set()


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_heads(planned, data) -> None:
    draw = data.draw
    N, D, V = draw(st.integers(1, 40)), draw(st.integers(1, 80)), draw(st.integers(1, 2 ** draw(st.integers(1, 18))))
    dtype = draw(DTYPES)
    lacking, _ = planned(
        "linear_logprob",
        hidden=laid((N, D), dtype, draw).requires_grad_(draw(FLAG)),
        weight=torch.zeros(V, D, dtype=dtype).requires_grad_(draw(FLAG)),
        ids=torch.zeros(N, dtype=torch.int64),
        temperature=torch.ones(N) if draw(FLAG) else 0.7,
        mask=torch.ones(N, dtype=torch.bool) if draw(FLAG) else None,
        entropy=draw(FLAG),
    )
    assert lacking == set()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_losses(planned, data) -> None:
    draw = data.draw
    B = draw(st.integers(1, 600))
    T = draw(st.integers(1, (1 << 20) // B))
    old, entropy = torch.zeros(B, T), draw(FLAG)
    more = {"ref_logprob": old, "kl_coef": 0.1} if draw(FLAG) else {}
    lacking, _ = planned(
        "policy_loss",
        logprob=torch.zeros(B, T, requires_grad=True),
        old_logprob=old,
        advantages=torch.zeros(B) if draw(FLAG) else torch.zeros(B, T),
        kind=draw(st.sampled_from(KINDS)),
        mask=torch.ones(B, T, dtype=torch.bool),
        **({"entropy": torch.zeros(B, T), "entropy_coef": 0.01} if entropy else {}),
        **more,
    )
    assert lacking == set()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_weights(planned, data) -> None:
    draw = data.draw
    name, dtype = draw(st.sampled_from(FORMATS)), draw(st.sampled_from([torch.bfloat16, torch.float16]))
    N, K = 64 * draw(st.integers(1, 50)), 128 * draw(st.integers(1, 12))
    lacking, w = planned("quantize", weight=torch.zeros(N, K, dtype=dtype), format=name)
    more, w = planned("prepack", w=w)
    lacking |= more
    x = laid((draw(st.integers(1, 130)), K), dtype, draw)
    for bias in (None, torch.zeros(N, dtype=dtype)):
        lacking |= planned("qmatmul", x=x, w=w, bias=bias)[0]
    if name in ADAPTED and N >= 1024:
        adapter = LoRA(torch.zeros(rank := draw(st.integers(1, 16)), K, dtype=dtype), torch.zeros(N, rank, dtype=dtype))
        lacking |= planned("qmatmul", x=x, w=w, residual=torch.zeros(x.shape[0], N, dtype=dtype))[0]
        lacking |= planned("qmatmul", x=x.detach().requires_grad_(), w=w, lora=adapter)[0]
    if name in ADAPTED and N >= 2048 and N % 128 == 0:
        lacking |= planned("qmatmul", x=x, w=w, activation="swiglu", lora=adapter)[0]
    assert lacking == set()


@pytest.mark.parametrize(("batch", "width"), BOARD.items())
def test_the_example_for_boards(planned, batch, width) -> None:
    hidden = torch.zeros(8 * batch, width).requires_grad_()
    mask = torch.ones(batch, 4, dtype=torch.bool)
    head = {"weight": torch.zeros(13, width), "ids": torch.zeros(4 * batch, dtype=torch.int64), "mask": mask.view(-1)}
    lacking, _ = planned("linear_logprob", hidden=hidden[: 4 * batch], **head)
    now, old = torch.zeros(batch, 4).requires_grad_(), torch.zeros(batch, 4)
    given = {"advantages": torch.zeros(batch), "mask": mask, "kind": "grpo", "clip": (0.2, 0.28)}
    lacking |= planned("policy_loss", logprob=now, old_logprob=old, **given)[0]
    rows = torch.zeros(batch, dtype=torch.int64)
    lacking |= planned("sample", logits=torch.zeros(batch, 13), temperature=1.0, seed=rows, step=rows)[0]
    for n, k in ((3, 1), (1, 1), (4, 1), (1, 4)):
        N, K = n * width, k * width
        more, w = planned("quantize", weight=torch.zeros(N, K), format="int4_g32")
        adapter = LoRA(torch.zeros(8, K), torch.zeros(N, 8))
        for tokens in (batch, 8 * batch):
            more |= planned("qmatmul", x=torch.zeros(tokens, K).requires_grad_(), w=w, lora=adapter)[0]
        lacking |= more
    assert lacking == set()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_advantages(planned, data) -> None:
    draw = data.draw
    B = draw(st.integers(1, 300))
    T = draw(st.integers(1, (1 << 20) // B))
    mask = torch.ones(B, T, dtype=torch.bool) if draw(FLAG) else None
    rewards = torch.zeros(B, T)
    gae = {"values": torch.zeros(B, T), "gamma": 0.99, "lam": 0.95}
    kind, more = draw(st.sampled_from([("gae", gae), ("reinforce_pp", {}), ("returns", {"gamma": 0.5})]))
    assert planned("advantage", rewards=rewards, kind=kind, mask=mask, **more)[0] == set()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_draws(planned, data) -> None:
    draw = data.draw
    N, V = draw(st.integers(1, 20) | st.integers(100, 300)), 16 * draw(st.integers(1025, 16384))
    sampling = {"temperature": 0.8, **{n: SAMPLING[n] for n in draw(st.sampled_from(FILTERS))}}
    if each := draw(FLAG):
        sampling = {
            n: torch.full((N,), v, dtype=torch.int64 if n == "top_k" else torch.float32) for n, v in sampling.items()
        }
    rows = torch.zeros(N, dtype=torch.int64)
    noise = {"seed": rows if each or N > 1 else 7, "step": rows if each else draw(st.integers(0, 2**31 - 1))}
    logits = laid((N, V), draw(st.sampled_from([torch.bfloat16, torch.float32])), draw)
    assert planned("sample", logits=logits, **sampling, **noise)[0] == set()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_layers_of_decoders(planned, data) -> None:
    draw, grad = data.draw, data.draw(FLAG)
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    M, N, K = draw(st.integers(1, 700)), 128 * draw(st.integers(1, 40)), 128 * draw(st.integers(1, 12))
    x, residual = (laid((M, n), dtype, draw).requires_grad_(grad) for n in (K, K))
    weight, bias = torch.zeros(N, K, dtype=dtype, requires_grad=grad), torch.zeros(N, dtype=dtype)
    lacking, _ = planned("linear", x=x, weight=weight, bias=draw(st.sampled_from([None, bias])))
    lacking |= planned("rms_norm", x=x, weight=x.new_zeros(K), eps=1e-6, residual=residual if draw(FLAG) else None)[0]
    lacking |= planned("glu", x=torch.zeros(M, 2 * K, dtype=dtype, requires_grad=grad), activation="silu")[0]
    assert lacking == set()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_attention_and_positions(planned, data) -> None:
    draw, D, shared = data.draw, data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(SHARED))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    B, M, heads = draw(st.integers(1, 70)), draw(st.integers(1, 5000)), draw(st.integers(1, 4))
    q, k, v = (torch.zeros(M, n, D, dtype=dtype) for n in (shared * heads, heads, heads))
    weights = {"q_weight": q.new_zeros(D), "k_weight": q.new_zeros(D), "eps": 1e-6} if draw(FLAG) else {}
    table = torch.zeros(8192, D)
    lacking, _ = planned("rope", q=q, k=k, positions=torch.zeros(M, dtype=torch.int64), table=table, **weights)
    cu = torch.zeros(B + 1, dtype=torch.int32)
    lacking |= planned("attention", q=q.clone().requires_grad_(draw(FLAG)), k=k, v=v, cu_q=cu)[0]
    width = draw(st.integers(1, 200))
    pages = {"page_table": torch.zeros(B, width, dtype=torch.int32), "max_k": width * PAGE}
    kept = torch.zeros(300, PAGE, heads, D, dtype=dtype)
    lacking |= planned("attention", q=q, k=kept, v=kept, cu_q=cu, seqused_k=torch.zeros(B, dtype=torch.int32), **pages)[
        0
    ]
    assert lacking == set()
