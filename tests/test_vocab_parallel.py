"""A vocabulary split over the ranks of a process group: three processes over gloo, and shards joined in one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_common.row_statistics import join, law, side_by_side, sweep, temperatures, tile_width
from rlkernel_torch.direct import linear_logprob
from tests import vocab_parallel_ranks as ranks
from tests.logprob_inputs import rows

RESULTS = ("logprob", "lse", "entropy", "log_kept_mass", "hidden")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank saved."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(ranks.__file__)), "RANK", str(out / "store"), str(out)]
    processes = [
        subprocess.Popen([c.replace("RANK", str(r)) for c in command], stderr=subprocess.PIPE, text=True)
        for r in range(ranks.WORLD)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [torch.load(out / f"{r}.pt", weights_only=False) for r in range(ranks.WORLD)]


def plain(dtype, backward):
    return ranks.run(ranks.operands(dtype), slice(None), None, dtype, backward)


def assert_equal(a, b, names):
    for name in names:
        assert torch.equal(torch.nan_to_num(a[name], nan=7e7), torch.nan_to_num(b[name], nan=7e7)), name


@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_group_of_one_gives_the_bits_of_the_plain_call(found, dtype, backward):
    got, want = found[0]["one", dtype, backward], plain(dtype, backward)
    assert_equal(got, want, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("split", ["two", "uneven", "three"])
def test_shards_of_any_size_equal_the_whole(found, split, dtype):
    want = plain(dtype, "recompute")
    members, sizes = ranks.SPLITS[split]
    got = [found[r][split, dtype, "recompute"] for r in members]
    bound = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-6}
    wide = (
        {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 2**-7}
    )  # neighbours in bf16
    for name in RESULTS:
        torch.testing.assert_close(got[0][name], want[name], equal_nan=True, **(wide if name == "hidden" else bound))
    for name in ("weight", "bias"):
        assert [g[name].shape[0] for g in got] == list(sizes)
        torch.testing.assert_close(torch.cat([g[name] for g in got]), want[name], **wide)
    assert got[0]["invalid"].tolist() == [i == 9 for i in range(70)]


@pytest.mark.parametrize("split", ["two", "uneven", "three"])
def test_all_ranks_get_the_same_bits(found, split):
    members, _ = ranks.SPLITS[split]
    for key in ((split, torch.bfloat16, "recompute"), (split, torch.float64, "save"), (split, "plain")):
        for r in members[1:]:
            first, other = found[members[0]][key], found[r][key]
            assert_equal(first, other, [n for n in (*RESULTS, "invalid") if n in first])


def test_saving_and_recomputing_agree_on_every_shard(found):
    for r in range(3):
        assert_equal(*(found[r]["three", torch.float64, mode] for mode in ("save", "recompute")), (*RESULTS, "weight"))


def test_ranks_that_hold_other_tokens_are_refused(found):
    assert [f["refused"] for f in found] == ["hidden"] * 3


@given(
    cuts=st.lists(st.integers(1, 2999), max_size=5, unique=True).map(sorted),
    seed=st.integers(0, 100),
    peak=st.sampled_from((0.0, 20.0)),
)
@settings(derandomize=True, deadline=None, max_examples=25)
def test_joining_any_shards_in_one_process_gives_the_whole(cuts, seed, peak):
    """What a simulated run of more ranks would gather: top, total, moment and target of each shard."""
    logits, ids = rows(6, 3000, seed=seed, dtype=torch.float64, peak=peak)
    T = temperatures(torch.linspace(0.5, 2, 6), torch.Size((6,)), torch.float64, logits.device)
    parts = []
    for first, last in zip([0, *cuts], [*cuts, 3000], strict=True):
        y = logits[:, first:last]
        parts.append(join(sweep(y, ids - first, T, tile_width(last - first), None, moment=True), T))
    shards = side_by_side([_column(p) for p in parts])
    got = law(join(shards, T), T)
    whole = law(join(sweep(logits, ids, T, tile_width(3000), None, moment=True), T), T)
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(got, name), getattr(whole, name), atol=1e-12, rtol=1e-9)


def _column(part):
    return part._replace(
        target=part.target[:, None],
        rest=part.rest._replace(**{n: getattr(part.rest, n)[:, None] for n in ("top", "total", "moment")}),
    )


def test_the_plain_call_needs_no_process_group():
    x = ranks.operands(torch.float32)
    assert linear_logprob(x.hidden, x.weight, x.ids, group=None).logprob.shape == (70,)
