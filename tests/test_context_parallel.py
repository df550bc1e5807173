"""Labels of packed sequences over the ranks of context parallelism, against a definition token by token."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

import rlkernel as rlk
from rlkernel.context_parallel import LAYOUTS, next_ids
from tests.process_groups import in_ranks


def naive_labels(ids, starts, lengths):
    """Each token's next one, sequence by sequence."""
    labels = [-100] * len(ids)
    for start, length in zip(starts, lengths, strict=False):
        for t in range(length - 1):
            labels[start + t] = ids[start + t + 1]
    return labels


def naive_places(layout, starts, total, rank, ranks):
    """The tokens of a rank, one by one."""
    if layout == "ulysses":
        return [t for t in range(total) if t // (total // ranks) == rank]
    found = []
    for start, end in pairwise(starts):
        tokens = list(range(start, end))
        pieces = ranks if layout == "ring" else 2 * ranks
        cut = [tokens[len(tokens) * i // pieces : len(tokens) * (i + 1) // pieces] for i in range(pieces)]
        found += cut[rank] if layout == "ring" else cut[rank] + cut[2 * ranks - 1 - rank]
    return found


@st.composite
def batches(draw):
    """(layout, ranks, ids, starts, lengths): every id another, so that no leak looks right."""
    layout, ranks = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 4))
    unit = {"ulysses": 1, "ring": ranks, "zigzag": 2 * ranks}[layout]
    sizes = [unit * draw(st.integers(0, 5)) for _ in range(draw(st.integers(1, 5)))]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    total = starts[-1] + (draw(st.integers(0, 3)) if layout == "ulysses" else 0)
    total += -total % ranks
    lengths = [draw(st.integers(0, size)) for size in sizes] if draw(st.booleans()) else sizes
    return layout, ranks, list(range(1000, 1000 + total)), starts, lengths


@given(batches(), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_labels_of_all_ranks_are_those_of_the_whole_batch(batch, dtype) -> None:
    layout, ranks, ids, starts, lengths = batch
    labels = naive_labels(ids, starts, lengths)
    for rank in range(ranks):
        mine = next_ids(
            torch.tensor(ids, dtype=dtype), torch.tensor(starts), layout=layout, rank=rank, ranks=ranks,
            lengths=torch.tensor(lengths),
        )  # fmt: skip
        places = naive_places(layout, starts, len(ids), rank, ranks)
        assert places == mine.places.tolist()
        assert [ids[p] for p in places] == mine.ids.tolist()
        assert [labels[p] for p in places] == mine.labels.tolist()
        assert (dtype, dtype) == (mine.ids.dtype, mine.labels.dtype)


BATCH = torch.arange(16, dtype=torch.int32) + 100
STARTS = torch.tensor([0, 8, 8, 16])
LENGTHS = torch.tensor([8, 0, 5])


def alike(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for layout in LAYOUTS:
        whole = next_ids(BATCH, STARTS, layout=layout, rank=rank, ranks=2, lengths=LENGTHS)
        share = next_ids(whole.ids, STARTS, layout=layout, lengths=LENGTHS, group=dist.group.WORLD)
        for name in ("ids", "labels", "places"):
            assert getattr(whole, name).tolist() == getattr(share, name).tolist()
    with pytest.raises(rlk.ArgumentError, match=r"^group: has a rank and a size of its own; got rank=1, ranks=2"):
        next_ids(share.ids, STARTS, layout="zigzag", rank=1, ranks=2, group=dist.group.WORLD)
    with pytest.raises(rlk.ArgumentError, match="ids"):
        next_ids(BATCH[:7], STARTS, layout="zigzag", group=dist.group.WORLD)
    dist.destroy_process_group()


def test_shares_of_a_group_give_the_labels_of_the_whole_batch(tmp_path) -> None:
    in_ranks(2, alike, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("layout", {"layout": "striped"}),
        ("ids", {"ids": torch.zeros(16)}),
        ("ids", {"ids": torch.zeros(2, 8, dtype=torch.int64)}),
        ("ids", {"ids": torch.zeros(17, dtype=torch.int64), "layout": "ulysses"}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([1, 16])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 17])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 9, 8, 16])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 6, 16]), "layout": "zigzag"}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 8])}),
        ("lengths", {"lengths": torch.tensor([8, 0])}),
        ("lengths", {"lengths": torch.tensor([8, 0, 9])}),
        ("rank", {"rank": 2}),
        ("ranks", {"ranks": 0}),
        ("group", {"group": 3}),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(name, changes) -> None:
    given = {"ids": BATCH, "cu_seqlens": STARTS, "layout": "ring", "rank": 0, "ranks": 2, **changes}
    with pytest.raises(rlk.ArgumentError, match=f"^{name}: "):
        next_ids(given.pop("ids"), given.pop("cu_seqlens"), **given)


def test_errors_name_the_sequence_and_stay_short_in_a_large_batch() -> None:
    starts = torch.arange(0, 4 * 2001, 4)
    starts[-1] += 1
    with pytest.raises(
        rlk.ArgumentError, match=r"^cu_seqlens: must give sequence 1999 a multiple of 2 tokens"
    ) as found:
        next_ids(torch.arange(8001), starts, layout="ring", ranks=2)
    assert len(str(found.value)) < 300
    with pytest.raises(rlk.ArgumentError, match="^cu_seqlens: must go from 0") as found:
        next_ids(torch.arange(8001), starts + 1, layout="ring", ranks=2)
    assert len(str(found.value)) < 300
    lengths = torch.full((2000,), 4)
    lengths[7] = 5
    with pytest.raises(rlk.ArgumentError, match="^lengths: must be 0 to 4 for sequence 7; got 5"):
        next_ids(torch.arange(8001), starts, layout="ulysses", lengths=lengths)
