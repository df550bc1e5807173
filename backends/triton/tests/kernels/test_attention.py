"""attention against its definition, and the bits of a query: on both paths, in a prompt, behind a cache, in pages."""

import numpy as np
import pytest
import torch

from rlkernel_core.definitions import attention as direct
from rlkernel_core.spec.attention import SPEC, AttentionCall, scale_of
from rlkernel_triton.attention.launch import attention, fits
from rlkernel_triton.attention.tiles import CHUNK, TILES, tile_for
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.launchers import Recorder, using

BOUND = next(t for t in SPEC.tolerances if (t.output, t.dtype) == ("out", "float32"))
LONG = CHUNK + 80  # keys: two chunks
EMPTY = 300  # sequences without queries: so many programs that a program walks all chunks
NAMES = ("q", "k", "v", "sinks")


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)


def run(device, **arguments):
    on = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    result = attention(AttentionCall(**on))
    return result.out.detach().cpu(), result.lse.detach().cpu()


def same_bits(found, want):
    return [torch.equal(a, b) for a, b in zip(found, want, strict=True)]


# Queries, keys, heads of queries and of keys, width, options. Some sequences lack queries or keys, one has more queries
# than keys; the last rows of q belong to none.
CASES = {
    "groups": ((5, 0, 70, 3), (9, 3, 70, 0), (6, 2), 20, {}),
    "one head": ((65, 4), (65, 2), (1, 1), 16, {}),
    "groups of seven": ((20, 11), (20, 80), (7, 1), 24, {"sinks": True}),
    "groups of 70": ((3, 2), (3, 9), (70, 1), 16, {"sinks": True, "softcap": 3.0}),
    "bidirectional": ((5, 70, 4), (9, 70, 2), (4, 2), 33, {"causal": False}),
    "window": ((70, 90), (70, 200), (2, 1), 20, {"window": 67, "scale": 0.3}),
    "softcap, window, sinks": ((9, 3), (70, 0), (4, 4), 130, {"softcap": 2.0, "window": 5, "sinks": True}),
}


def within(found, want) -> bool:
    bound = BOUND.atol * want.size + BOUND.rtol * want.bent + 1e-30
    return bool((np.abs(found.numpy().astype(np.float64) - want.value) <= bound).all())


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_definition(case, device) -> None:
    m, n, (Hq, Hk), D, options = CASES[case]
    options = dict(options)
    T, S = sum(m) + 2, sum(n) + 1
    given = {"q": drawn(T, Hq, D), "k": drawn(S, Hk, D, seed=1), "v": drawn(S, Hk, D, seed=2)}
    if options.pop("sinks", False):
        given["sinks"] = drawn(Hq, seed=3)
    leaves = {name: x.detach().clone().to(device).requires_grad_() for name, x in given.items()}
    cu_q, cu_k = offsets(m), offsets(n)
    call = AttentionCall(**leaves, cu_q=cu_q.to(device), cu_k=cu_k.to(device), **options)
    result = attention(call)
    up = drawn(T, Hq, D, seed=4), drawn(T, Hq, seed=5)
    grads = torch.autograd.grad([result.out, result.lse], list(leaves.values()), [x.to(device) for x in up])
    found = dict(zip(leaves, (g.cpu() for g in grads), strict=True))
    numbers = {name: x.double().numpy() for name, x in given.items()}
    g, g_lse = (x.double().numpy() for x in up)
    sinks, checked, due = numbers.get("sinks"), [], 0.0
    how = [options.get("causal", True), options.get("window"), options.get("softcap"), sinks]
    for b in range(len(m)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = numbers["q"][rows], numbers["k"][keys], numbers["v"][keys], scale_of(call), *how
        out, lse = direct.attention(*one)
        real = np.isfinite(lse.value)
        checked.append(within(result.out[rows].detach().cpu(), out))
        assert np.array_equal(np.isfinite(result.lse[rows].detach().cpu().numpy()), real)
        lse = direct.Reached(*(np.where(real, x, 0.0) for x in lse))
        checked.append(within(torch.nan_to_num(result.lse[rows].detach().cpu(), neginf=0.0), lse))
        *wanted, of_sinks = direct.attention_gradients(*one, g[rows], g_lse[rows])
        checked += [within(found[x][at], y) for x, at, y in zip("qkv", (rows, keys, keys), wanted, strict=True)]
        due = due if of_sinks is None else of_sinks.value + due
    assert checked == [True] * len(checked)
    if sinks is not None:
        due = due + g_lse[sum(m) :].sum(0)
        np.testing.assert_allclose(found["sinks"].numpy(), due, rtol=1e-4, atol=1e-4)
    assert [found[x][end:].abs().sum().item() for x, end in (("q", sum(m)), ("k", sum(n)), ("v", sum(n)))] == [0.0] * 3


def long_prompt(dtype, **options):
    """Queries, keys and values of a sequence of LONG keys, and options with what they say drawn."""
    q, k, v = (drawn(LONG, heads, 16, seed=s, dtype=dtype) for s, heads in enumerate((2, 1, 1)))
    if options.pop("sinks", False):
        options["sinks"] = drawn(2, seed=7)
    return q, k, v, options


PROMPTS = {
    "bf16": (torch.bfloat16, {}),
    "fp32, window, softcap, sinks": (torch.float32, {"window": 150, "softcap": 5.0, "sinks": True}),
}


def paged(k, v, G, n, seed=0):
    """Keys and values of one sequence in pages of G, in an order that is drawn, and the table; NaN where no key is."""
    P = -(-n // G)
    order = torch.randperm(P + 3, generator=torch.Generator().manual_seed(seed))[:P]
    pages = []
    for x in (k, v):
        held = x.new_full((P + 3, G, *x.shape[1:]), float("nan"))
        for i, page in enumerate(order.tolist()):
            part = x[i * G : min((i + 1) * G, n)]
            held[page, : len(part)] = part
        pages.append(held)
    return (*pages, order[None])


def tails(q, k, v):
    """The last queries of a prompt: how many, and a call that has them first."""
    cu = {"cu_q": offsets([70]), "cu_k": offsets([LONG])}
    yield "behind a cache", 70, {"q": q[-70:], "k": k, "v": v, **cu}
    yield "alone", 1, {"q": q[-1:], "k": k, "v": v, "cu_q": offsets([1]), "cu_k": offsets([LONG])}
    for G in (16, 7):
        k_pages, v_pages, table = paged(k, v, G, LONG)
        used = torch.tensor([LONG], dtype=torch.int64)
        pages = {"k": k_pages, "v": v_pages, "page_table": table, "seqused_k": used, "cu_q": offsets([3], torch.int64)}
        yield f"in pages of {G}", 3, {"q": q[-3:], **pages}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_query_has_the_same_bits_wherever_it_is_asked(prompt, device) -> None:
    """In a prompt programs walk all chunks; few queries are split."""
    q, k, v, options = long_prompt(prompt[0], **prompt[1])
    out, lse = run(device, q=q, k=k, v=v, cu_q=offsets([LONG] + [0] * EMPTY), **options)
    found = {}
    for name, last, call in tails(q, k, v):
        result = run(device, **call, **options)
        found[name] = same_bits([x[:last] for x in result], (out[-last:], lse[-last:]))
    assert found == {name: [True, True] for name in found}


def test_a_query_has_the_same_bits_beside_another_sequence(device) -> None:
    q, k, v, _ = long_prompt(torch.float32)
    want = run(device, q=q[:70], k=k[:90], v=v[:90], cu_q=offsets([70]), cu_k=offsets([90]))
    mixed = {
        "q": torch.cat([q[500:533], q[:70]]),
        **{n: torch.cat([x[700:707], x[:90]]) for n, x in (("k", k), ("v", v))},
    }
    found = run(device, **mixed, cu_q=offsets([33, 70]), cu_k=offsets([7, 90]))
    assert same_bits([x[33:] for x in found], want) == [True, True]


def gradients(device, q, k, v, up, **places):
    leaves = [x.detach().clone().to(device).requires_grad_() for x in (q, k, v)]
    result = attention(AttentionCall(*leaves, **{n: x.to(device) for n, x in places.items()}))
    return [x.cpu() for x in torch.autograd.grad([result.out, result.lse], leaves, [x.to(device) for x in up])]


def test_gradients_of_a_sequence_have_the_same_bits_beside_another(device) -> None:
    m, n, first = (33, 70), (50, 90), (33, 50)
    q, up = drawn(sum(m), 4, 16), (drawn(sum(m), 4, 16, seed=3), drawn(sum(m), 4, seed=4))
    k, v = (drawn(sum(n), 2, 16, seed=s) for s in (1, 2))
    both = gradients(device, q, k, v, up, cu_q=offsets(m), cu_k=offsets(n))
    last = [x[first[0] :] for x in (q, *up)], [x[first[1] :] for x in (k, v)]
    one = gradients(device, last[0][0], *last[1], last[0][1:], cu_q=offsets(m[1:]), cu_k=offsets(n[1:]))
    assert same_bits([both[0][first[0] :], *(x[first[1] :] for x in both[1:])], one) == [True] * 3


def test_queries_of_keys_in_pages_have_the_gradient_of_keys_in_rows(device) -> None:
    q, k, v = drawn(5, 4, 16), drawn(90, 2, 16, seed=1), drawn(90, 2, 16, seed=2)
    up = drawn(5, 4, 16, seed=3), drawn(5, 4, seed=4)
    want = gradients(device, q, k, v, up, cu_q=offsets([5]), cu_k=offsets([90]))[0]
    k_pages, v_pages, table = paged(k, v, 16, 90)
    leaf = q.clone().to(device).requires_grad_()
    on = {"cu_q": offsets([5]), "page_table": table, "seqused_k": torch.tensor([90], dtype=torch.int32)}
    result = attention(
        AttentionCall(leaf, k_pages.to(device), v_pages.to(device), **{n: x.to(device) for n, x in on.items()})
    )
    found = torch.autograd.grad([result.out, result.lse], leaf, [x.to(device) for x in up])[0]
    assert torch.equal(found.cpu(), want)


def test_a_page_that_is_none_gives_nan_to_the_queries_that_see_it(device) -> None:
    q, k, v = drawn(90, 2, 16), drawn(90, 1, 16, seed=1), drawn(90, 1, 16, seed=2)
    k_pages, v_pages, table = paged(k, v, 16, 90)
    places = {"k": k_pages, "v": v_pages, "cu_q": offsets([90]), "seqused_k": torch.tensor([90], dtype=torch.int32)}
    want = run(device, q=q, **places, page_table=table)
    for none in (-1, len(k_pages), 1 << 40):
        lost = table.clone()
        lost[0, 3] = none
        found = run(device, q=q, **places, page_table=lost)
        assert same_bits([x[:48] for x in found], [x[:48] for x in want]) == [True, True]
        assert [bool(x[48:].isnan().all()) for x in found] == [True, True]


@pytest.mark.parametrize("n", [90, LONG])
def test_a_bound_on_keys_changes_no_bit_where_it_holds_and_gives_nan_where_not(n, device) -> None:
    q, k, v = drawn(7, 2, 16), drawn(n + 4, 1, 16, seed=1), drawn(n + 4, 1, 16, seed=2)
    call = {"q": q, "k": k, "v": v, "cu_q": offsets([3, 3]), "cu_k": offsets([n, 4]), "sinks": drawn(2, seed=3)}
    want = run(device, **call)
    assert same_bits(run(device, **call, max_k=n), want) == [True, True]
    for most in (n - 1, 4):
        found = run(device, **call, max_k=most)
        assert [bool(x[:3].isnan().all()) for x in found] == [True, True]
        assert same_bits([x[3:] for x in found], [x[3:] for x in want]) == [True, True]


def test_nan_of_another_sequence_reaches_no_query(device) -> None:
    q, k, v = drawn(40, 2, 16), drawn(40, 1, 16, seed=1), drawn(40, 1, 16, seed=2)
    want = run(device, q=q, k=k, v=v, cu_q=offsets([20, 20]))
    for x in (k, v):
        x[20:] = float("nan")
    found = run(device, q=q, k=k, v=v, cu_q=offsets([20, 20]))
    assert same_bits([x[:20] for x in found], [x[:20] for x in want]) == [True, True]


@pytest.mark.parametrize("sinks", [None, drawn(3, seed=9)], ids=["no sinks", "sinks"])
def test_rows_of_no_sequence_see_no_key(sinks, device) -> None:
    q, k, v = drawn(80, 3, 16), drawn(10, 3, 16, seed=1), drawn(10, 3, 16, seed=2)
    out, lse = run(device, q=q, k=k, v=v, cu_q=offsets([2]), cu_k=offsets([10]), sinks=sinks)
    alone = torch.full((3,), -torch.inf) if sinks is None else sinks
    assert torch.equal(out[2:], torch.zeros(78, 3, 16))
    assert torch.equal(lse[2:], alone.expand(78, 3))


def test_heads_of_a_fused_or_transposed_projection_are_read_where_they_lie(device) -> None:
    fused = drawn(70, 8, 16)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    want = run(device, q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), cu_q=offsets([70]))
    assert same_bits(run(device, q=q, k=k, v=v, cu_q=offsets([70])), want) == [True, True]
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for other in (turned, across):
        found = run(device, **dict(zip("qkv", other, strict=True)), cu_q=offsets([70], torch.int64))
        assert same_bits(found, want) == [True, True]


def test_offsets_beyond_the_rows_read_no_other_memory(device) -> None:
    q, k, v = drawn(20, 2, 16), drawn(20, 2, 16, seed=1), drawn(20, 2, 16, seed=2)
    want = run(device, q=q, k=k, v=v, cu_q=offsets([5]), cu_k=offsets([5]))
    far = torch.tensor([0, 5, 1 << 40])
    found = run(device, q=q, k=k, v=v, cu_q=far, cu_k=far)
    assert same_bits([x[:5] for x in found], [x[:5] for x in want]) == [True, True]


def kernels_of(T, B, S):
    """Names of the kernels of a call of keys in rows, by their count of queries, sequences and keys."""
    recorder = Recorder()
    q, kv = torch.empty(T, 4, 16, device="meta"), torch.empty(S, 2, 16, device="meta")
    cu = torch.empty(B + 1, dtype=torch.int32, device="meta")
    with using(recorder):
        attention(AttentionCall(q, kv, kv, cu_q=cu, cu_k=cu))
    return [build.kernel.partition(":")[2] for build in recorder.builds]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU decides by its multiprocessors")
def test_few_queries_of_many_keys_are_split_by_sizes_alone() -> None:
    found = [kernels_of(70, 1, LONG), kernels_of(70, 1, CHUNK), kernels_of(70, 1 + EMPTY, LONG)]
    assert found == [["attend", "merge_chunks"], ["attend"], ["attend"]]


def test_the_order_of_sums_is_named_by_its_tiles_and_chunks() -> None:
    (keys,) = {tile.KEYS for kernel, _, size, _, tile in TILES if (kernel, size) == ("forward", 2)}
    assert CLAIMS["attention"].sums == f"mma16/k{keys}/c{CHUNK}/f32"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [16, 128, 256])
def test_every_kernel_has_a_tile(size, width) -> None:
    tiles = [
        tile_for(kernel, arch, size, width) for kernel in ("forward", "queries", "keys") for arch in ("sm90", "gfx942")
    ]
    assert [tile.KEYS >= 16 and tile.ROWS >= 16 for tile in tiles] == [True] * 6


def test_heads_beyond_256_are_refused() -> None:
    def call(D):
        x = torch.empty(2, 1, D, device="meta")
        return AttentionCall(x, x, x, cu_q=torch.empty(2, dtype=torch.int32, device="meta"))

    assert fits(call(256)) is None
    assert "257" in fits(call(257)).text
