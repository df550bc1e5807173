"""attention by FlashAttention 3, whose operator is a stand-in with the schema of the library's 0.0.3.

The stand-in does what the library does, and leaves undone what it may leave: rows that see no key hold a number, a page
that is none reads as zeros, lse is by heads.
"""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.attention import AttentionCall
from rlkernel_cuda.fa3 import NEEDED, backend
from rlkernel_cuda.fa3 import attention as module
from rlkernel_torch.direct import attention as definition

# As the library registers it (fa3-fwd 0.0.3).
SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,"
    "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,Tensor? rotary_cos = None,"
    "Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,bool is_rotary_interleaved = False,"
    "Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
UNWRITTEN = 777.0


def stand_in(q, k, v, **given):
    """In fp32, a sequence at a time."""
    cu_q, used, table = given["cu_seqlens_q"], given["seqused_k"], given["page_table"]
    cu_k, scale, causal = given["cu_seqlens_k"], given["softmax_scale"], given["is_causal"]
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("seqused_k", used), ("page_table", table)):
        assert x is None or (x.dtype == torch.int32 and x.is_contiguous()), name
    for x in (q, k, v):
        assert (x.stride(-1), x.data_ptr() % 16) == (1, 0)
        assert all(s % 8 == 0 for s in x.stride()[:-1])
    assert min(len(q), k.numel(), len(cu_q) - 1) > 0
    assert given["num_splits"] == 1
    assert given["max_seqlen_q"] > 192  # more than a tile has rows: else other tiles, and no pages
    out, lse = torch.full_like(q, UNWRITTEN), torch.full((q.shape[1], len(q)), UNWRITTEN)
    each = q.shape[1] // k.shape[-2]
    for b, (start, end) in enumerate(pairwise(cu_q.tolist())):
        if table is None:
            rows = slice(cu_k[b], cu_k[b + 1])
            keys, values = k[rows], v[rows]
        else:
            n, (N, G) = int(used[b]), k.shape[:2]
            ids = table[b, : -(-n // G)].long()
            real = (ids >= 0) & (ids < N)
            keys, values = ((x[ids.clamp(0, N - 1)] * real[:, None, None, None]).flatten(0, 1)[:n] for x in (k, v))
        m, n = end - start, len(keys)
        x, y, z = (t.float().transpose(0, 1) for t in (q[start:end], keys, values))
        s = x @ y.repeat_interleave(each, 0).transpose(1, 2) * scale
        if causal:
            at = n - m + torch.arange(m)
            s = s.masked_fill(torch.arange(n)[None] > at[:, None], -torch.inf)
        sees = s.isfinite().any(-1).any(0)
        y = (s.softmax(-1) @ z.repeat_interleave(each, 0)).transpose(0, 1).to(q.dtype)
        lse[:, start:end][:, sees], out[start:end][sees] = s.logsumexp(-1)[:, sees], y[sees]
    none = q.new_empty(0)
    return out, lse, none, none


@pytest.fixture
def installed(monkeypatch):
    """A stand-in for the library, in which arguments may be missing, or which may not load."""
    open_libraries = []

    def make(schema=SCHEMA, raises=None):
        if raises is not None:
            monkeypatch.setattr(module, "import_module", lambda name: (_ for _ in ()).throw(raises))
            return
        for name in ("fa3_fwd", "fa3_fwd._C"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        found = torch.library.Library("fa3_fwd", "FRAGMENT")
        open_libraries.append(found)
        if schema is not None:
            found.define(schema)
            names = [a.name for a in torch._C.parse_schema(f"fa3_fwd::{schema}").arguments]
            found.impl("fwd", lambda *args: stand_in(**dict(zip(names, args, strict=False))), "CPU")

    module.library.cache_clear()
    yield make
    module.library.cache_clear()
    for found in open_libraries:
        found._destroy()
    if hasattr(torch.ops, "fa3_fwd"):
        del torch.ops.fa3_fwd


def rows(lengths, *, heads=(4, 2), D=16, spare=0, seed=0, **options):
    """A call of packed rows: (queries, keys) of each sequence, and rows of none."""
    g = torch.Generator().manual_seed(seed)
    (Hq, Hk), counts = heads, [sum(n[i] for n in lengths) for i in (0, 1)]
    q, k, v = (
        torch.randn(n, h, D, generator=g).bfloat16()
        for n, h in zip((counts[0] + spare, *counts[1:] * 2), (Hq, Hk, Hk), strict=True)
    )
    cu = [torch.tensor([0, *[n[i] for n in lengths]]).cumsum(0).int() for i in (0, 1)]
    return {"q": q, "k": k, "v": v, "cu_q": cu[0], "cu_k": cu[1], **options}


def pages(given, G=128):
    """The same with keys in pages that lie in reverse; the tables are longer than needed."""
    cu = given["cu_k"].tolist()
    each = [-(-(b - a) // G) for a, b in pairwise(cu)]
    N, table = sum(each), torch.full((len(each), max(each) + 1), 2**30, dtype=torch.int32)
    pools, at = {n: torch.zeros(N, G, *given[n].shape[1:], dtype=given[n].dtype) for n in "kv"}, N
    for b, (start, end) in enumerate(pairwise(cu)):
        for j in range(start, end, G):
            at -= 1
            table[b, (j - start) // G] = at
            for name, pool in pools.items():
                some = given[name][j : min(j + G, end)]
                pool[at, : len(some)] = some
    used = given["cu_k"].diff()
    return {n: x for n, x in given.items() if n != "cu_k"} | pools | {"page_table": table, "seqused_k": used}


def agree(found, given):
    want = definition(**given)
    torch.testing.assert_close(found.out, want.out, rtol=2**-7, atol=2**-7, equal_nan=True)
    torch.testing.assert_close(found.lse, want.lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert (found.out.is_contiguous(), found.lse.is_contiguous()) == (True, True)


MIXED = ((5, 5), (1, 9), (0, 4), (3, 0), (4, 2), (40, 70))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spare", [0, 3])
def test_prompts_parts_nothing_asked_and_rows_of_no_sequence_are_what_attention_means(installed, causal, spare) -> None:
    installed()
    given = rows(MIXED, spare=spare, causal=causal)
    agree(module.attention(AttentionCall(**given)), given)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("G", "causal"), [(128, True), (384, False)])
def test_pages_of_whole_tiles_are_rows_in_another_place(installed, kind, G, causal) -> None:
    installed()
    given = pages(rows(((3, 300), (1, 128), (2, 400)), scale=0.3, causal=causal), G)
    given |= {n: given[n].to(kind) for n in ("cu_q", "page_table", "seqused_k")}
    assert module.fits(AttentionCall(**given)) is None
    agree(module.attention(AttentionCall(**given)), given)


@pytest.mark.parametrize("page", [3, -1, 2**30])
@pytest.mark.parametrize("causal", [True, False])
def test_a_page_that_is_none_is_nan_to_those_that_see_it(installed, page, causal) -> None:
    installed()
    given = pages(rows(((200, 140), (2, 100)), causal=causal), 384 if not causal else 128)
    given["page_table"][0, 0 if not causal else 1] = page  # there are 3 pages, or 2
    found = module.attention(AttentionCall(**given))
    seen = torch.zeros(202, dtype=torch.bool)
    seen[:200] = not causal
    seen[188:200] = True  # positions 128 to 139
    assert torch.equal(found.out.isnan().all(-1).all(-1), seen)
    assert torch.equal(found.lse.isnan().all(-1), seen)
    agree(found, given)


def test_a_table_of_int64_beyond_32_bits_is_no_page(installed) -> None:
    installed()
    given = pages(rows(((2, 20), (2, 100))))
    table = given["page_table"].long()
    table[0, 0] = 2**32  # 0 in 32 bits
    found = module.attention(AttentionCall(**{**given, "page_table": table}))
    assert (found.out[:2].isnan().all(), found.out[2:].isnan().any()) == (True, False)


@pytest.mark.parametrize("paged", [False, True])
def test_a_sequence_beyond_the_bound_is_nan_and_the_others_stay(installed, paged) -> None:
    installed()
    given = rows(((5, 5), (4, 70), (2, 3)), max_k=69)
    given = pages(given) if paged else given
    found = module.attention(AttentionCall(**given))
    assert found.out.isnan().all(-1).all(-1).tolist() == [*[False] * 5, *[True] * 4, False, False]
    agree(found, given)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [((3, 0), (1, 0)), ()])
def test_without_keys_the_library_is_not_asked(installed, lengths, causal) -> None:
    installed()
    given = rows(lengths, spare=2, causal=causal)
    agree(module.attention(AttentionCall(**given)), given)


def test_no_query_gives_no_row(installed) -> None:
    installed()
    found = module.attention(AttentionCall(**rows(((0, 3),))))
    assert (found.out.shape, found.lse.shape) == ((0, 4, 16), (0, 4))


@pytest.mark.parametrize(("width", "first"), [(17, 0), (24, 1)])
def test_rows_that_tma_does_not_read_are_copied(installed, width, first) -> None:
    installed()
    given = rows(((4, 40),))
    wide = {n: torch.randn(*given[n].shape[:-1], width).bfloat16() for n in "qkv"}
    given |= {n: x[..., first : first + 16] for n, x in wide.items()}
    agree(module.attention(AttentionCall(**given)), given)


def test_rows_of_no_key_are_written_whole_where_they_are_long(installed) -> None:
    installed()
    given = rows(((2, 1),), D=128, spare=2)
    agree(module.attention(AttentionCall(**given)), given)


def test_a_bad_page_is_found_behind_many(installed) -> None:
    installed()
    given = pages(rows(((2, 128 * 128 + 1), (1, 5)), heads=(1, 1), D=8))
    given["page_table"][0, 128] = -1  # the page of the last key
    found = module.attention(AttentionCall(**given))
    assert found.out.isnan().all(-1).all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(("B", "spare"), [(1, 0), (7, 1), (8, 0), (200, 5)])
def test_the_sequence_of_a_row_is_found_among_many(installed, B, spare) -> None:
    installed()
    given = rows((*((b % 3, b % 4 + 1) for b in range(B)), (1, 2)), spare=spare, heads=(2, 1))
    agree(module.attention(AttentionCall(**given)), given)


@pytest.mark.parametrize(
    ("D", "G", "causal", "said"),
    [
        (20, 0, True, "width of 20"),
        (264, 0, True, "width of 264"),
        (64, 16, True, "multiple of 128"),
        (64, 128, False, "multiple of 192"),
        (96, 128, True, "multiple of 144"),
        (128, 64, True, "multiple of 128"),
        (200, 128, True, "multiple of 80"),
    ],
)
def test_widths_and_pages_that_do_not_fit_are_a_reason_with_a_remedy(installed, D, G, causal, said) -> None:
    installed()
    given = rows(((2, 3),), D=D, causal=causal)
    reason = module.fits(AttentionCall(**(pages(given, G) if G else given)))
    assert said in f"{reason.text} {reason.fix}"


def test_pages_that_would_have_to_be_copied_are_a_reason(installed) -> None:
    installed()
    given = pages(rows(((2, 3),)))
    given["v"] = torch.randn(*given["v"].shape[:-1], 17).bfloat16()[..., 1:]
    assert "contiguous pages" in module.fits(AttentionCall(**given)).fix


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"raises": ImportError("libcudart.so.13")}, "cannot be loaded here: ImportError: libcudart.so.13"),
        ({"schema": None}, f"not as it was in {NEEDED}"),
    ],
)
def test_a_library_that_cannot_run_is_a_reason_and_an_error(installed, fault, said) -> None:
    installed(**fault)
    call = AttentionCall(**rows(((2, 3),)))
    reason = module.fits(call)
    assert said in reason.text
    assert reason.fix
    with pytest.raises(RLKernelError, match="FlashAttention"):
        module.attention(call)


def test_its_self_test_runs_it_and_notices_a_wrong_result(installed, monkeypatch) -> None:
    installed()
    module.self_test("cpu")
    assert f"{module.self_test.__module__}:self_test" == backend.self_test
    monkeypatch.setattr(sys.modules[__name__], "stand_in", lambda q, k, v, **given: (q * 2, q[..., 0].T.float(), q, q))
    with pytest.raises(RLKernelError, match="off by 1"):
        module.self_test("cpu")
