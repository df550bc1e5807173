"""rollout_buffer@1: reserve, append, finish, pop, release; capacity, backpressure, files."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rlkernel_core.errors import ArgumentError, BufferFullError, StaleBatchError, UnknownNameError
from rlkernel_core.spec.rollouts import STATUS, Field, RolloutBatch, Slots
from rlkernel_torch.direct import capture, rollout_buffer
from tests.rollouts import balanced, buffer, fill, tokens


def test_tokens_come_out_in_the_order_they_went_in():
    buf = rollout_buffer(64, 8, page_tokens=4)
    slots = buf.reserve([9, 3], [5, 5], version=2)
    for t in range(9):
        buf.append(
            slots,
            {"token": torch.tensor([t, 50 + t]), "logprob": torch.tensor([-t / 8, math.nan])},
            alive=torch.tensor([True, t < 2]),
        )
    buf.finish(slots, [1.0, 0.0], status=["length", "stop"])
    with buf.pop(groups=1) as batch:
        assert isinstance(batch, RolloutBatch)
        assert batch["token"].tolist() == [*range(9), 50, 51]
        assert batch["logprob"][:9].tolist() == [-t / 8 for t in range(9)]
        assert batch["mask"].tolist() == [1] * 11
        assert batch.cu_seqlens.tolist() == [0, 9, 11]
        assert (batch.group.tolist(), batch.group_ids.tolist()) == ([0, 0], [5, 5])
        assert (batch.reward.tolist(), batch.version.tolist()) == ([1.0, 0.0], [2, 2])
        assert batch.status.tolist() == [STATUS["length"], STATUS["stop"]]
    assert buf.stats.used == {"tokens": 0, "seqs": 0, "groups": 0}
    balanced(buf.stats)


def test_exactly_the_capacity_fits_and_not_one_token_more():
    buf = buffer(tokens=16, seqs=4)
    slots = buf.reserve(4, [0, 1, 2, 3])
    for t in range(4):
        buf.append(slots, tokens(t, t, t, t))
    assert buf.stats.stored == 16
    before = buf.stats
    with pytest.raises(BufferFullError, match="out of tokens and seqs"):
        buf.reserve(1, [4])
    assert buf.stats == before
    buf.finish(slots)
    assert buf.pop(groups=4)["token"].tolist() == [0, 1, 2, 3] * 4
    with pytest.raises(BufferFullError, match="out of groups"):
        buffer(max_groups=1).reserve(1, [0, 1])


def test_a_refused_reservation_takes_nothing_though_part_of_it_would_fit():
    buf = buffer(tokens=16, seqs=8)
    with pytest.raises(BufferFullError):
        buf.reserve([8, 12], [0, 0])
    assert buf.stats.used["tokens"] == 0
    buf.reserve([8, 8], [0, 0])


def test_storage_goes_round_any_number_of_times_without_growing():
    buf = buffer(tokens=24, seqs=3)
    fill(buf, [0], [3])
    buf.pop(groups=1).release()
    with buf.assert_zero_growth():
        for i in range(100):
            lengths = [1 + i % 7, (i * 5) % 9]
            fill(buf, [i, i], lengths, limit=9)
            with buf.pop(groups=1) as batch:
                assert batch["token"].tolist() == [100 * r + t for r, n in enumerate(lengths) for t in range(n)]
    balanced(buf.stats)
    assert buf.stats.high_water == {"tokens": 24, "seqs": 2, "groups": 1}


def test_growth_is_noticed():
    buf = buffer()
    with pytest.raises(AssertionError, match=r"storage moved: field\.token"), buf.assert_zero_growth():
        buf._pages.tokens["token"] = buf.tensors()["field.token"].clone()


def test_memory_that_the_device_allocates_meanwhile_is_noticed(monkeypatch):
    held = iter([1000, 1512])
    buf = buffer()
    counting = SimpleNamespace(memory_allocated=lambda device: next(held))
    monkeypatch.setattr(torch, "get_device_module", lambda device: counting)
    with pytest.raises(AssertionError, match="the device holds 512 bytes more"), buf.assert_zero_growth():
        pass


def test_what_a_finished_sequence_did_not_use_is_free_at_once():
    buf = buffer(tokens=16, seqs=4)
    fill(buf, [0], [1], limit=16)
    assert buf.stats.used["tokens"] == 4
    buf.reserve(12, [1])


def test_tokens_beyond_the_limit_are_counted_as_dropped():
    buf = buffer()
    slots = buf.reserve([2, 5], [0, 0])
    for t in range(4):
        buf.append(slots, tokens(t, 10 + t))
    buf.finish(slots)
    assert buf.stats.dropped == {"over the limit": 2}
    assert buf.pop(groups=1)["token"].tolist() == [0, 1, 10, 11, 12, 13]
    balanced(buf.stats)


def test_slots_that_were_finished_or_taken_again_write_nothing():
    buf = buffer(seqs=1)
    old = fill(buf, [0], [2])
    buf.append(old, tokens(9))
    buf.pop(groups=1).release()
    new = buf.reserve(4, [1])
    assert new.ids.tolist() == old.ids.tolist()
    buf.append(old, tokens(9))
    buf.append(new, tokens(1))
    buf.append(Slots(torch.tensor([77]), new.stamps), tokens(9))
    for slots in (old, fill(buffer(), [3], [1])):
        with pytest.raises(ArgumentError, match="no open sequence"):
            buf.finish(slots)
    buf.finish(new)
    assert buf.stats.dropped == {"stale": 3}
    assert buf.pop(groups=1)["token"].tolist() == [1]
    balanced(buf.stats)


def test_dead_rows_change_nothing_whatever_they_hold():
    buf = buffer(fields={"x": Field("float32", (2,))})
    slots = buf.reserve(3, [0, 0])
    poison = Slots(torch.tensor([slots.ids[0].item(), -(2**40)]), slots.stamps)
    buf.append(poison, {"x": torch.tensor([[1.0, 2.0], [math.nan, math.inf]])}, alive=torch.tensor([True, False]))
    assert (buf.stats.appended, buf.stats.stored) == (1, 1)
    buf.finish(slots)
    assert buf.pop(groups=1)["x"].tolist() == [[1.0, 2.0]]


def test_rows_beyond_a_packed_append_are_ignored():
    buf = buffer()
    slots = buf.reserve(6, [0, 0])
    buf.append(slots, tokens(1, 2, 3, 99, 99), cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32))
    buf.append(slots, tokens(4, 5), cu_seqlens=torch.tensor([0, 0, 2]), alive=torch.tensor([False, True]))
    buf.append(slots, tokens(), cu_seqlens=torch.tensor([0, 0, 0]))
    buf.finish(slots)
    assert buf.pop(groups=1)["token"].tolist() == [1, 2, 3, 4, 5]
    assert buf.stats.appended == 5


def test_append_can_be_captured_and_replayed():
    buf = buffer()
    step = capture(
        lambda slots, token, alive: buf.append(slots, {"token": token}, alive=alive),
        (Slots(torch.tensor([-1, -1]), torch.tensor([0, 0])), tokens(0, 0)["token"], torch.tensor([False, False])),
        mutates=(buf.tensors(),),
        rng="forbid",
        verify="always",
    )
    for _ in range(3):
        slots = buf.reserve(8, [0, 0])
        for t in range(6):
            step(slots, tokens(t, 10 + t)["token"], torch.tensor([True, t < 3]))
        buf.finish(slots)
        with buf.pop(groups=1) as batch:
            assert batch["token"].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12]
    assert (step.stats.captures, step.stats.replays) == (1, 18)
    balanced(buf.stats)


def test_a_batch_is_full_or_there_is_none_and_leftovers_stay():
    buf = buffer()
    for g, n in ((0, 3), (1, 5), (2, 2), (3, 4)):
        fill(buf, [g], [n])
    assert buf.pop(groups=5) is None
    assert buf.pop(tokens=20) is None
    batch = buf.pop(tokens=9)
    assert batch.group_ids.tolist() == [0, 1]
    batch.release()
    assert buf.pop(tokens=6).group_ids.tolist() == [2, 3]
    assert buf.stats.stored_seqs == 0


def test_longest_first_takes_the_longest_groups():
    buf = buffer()
    for g, n in ((0, 3), (1, 5), (2, 2)):
        fill(buf, [g], [n])
    assert buf.pop(groups=2, order="longest_first").group_ids.tolist() == [1, 0]


def test_one_batch_at_a_time_and_none_after_release():
    buf = buffer()
    fill(buf, [0], [3])
    fill(buf, [1], [2])
    batch = buf.pop(groups=1)
    with pytest.raises(BufferFullError, match="not released"):
        buf.pop(groups=1)
    token = batch["token"].data_ptr()
    batch.release()
    for use in (batch.release, lambda: batch["token"], *(lambda n=n: getattr(batch, n) for n in ("reward", "valid"))):
        with pytest.raises(StaleBatchError, match="was released"):
            use()
    newer = buf.pop(groups=1)
    assert newer["token"].data_ptr() == token
    with pytest.raises(StaleBatchError):
        _ = batch.cu_seqlens
    with pytest.raises(UnknownNameError, match="tokne"):
        newer["tokne"]


def test_a_batch_larger_than_its_storage_is_refused_and_stays():
    buf = buffer(max_batch_tokens=4)
    fill(buf, [0], [5])
    with pytest.raises(BufferFullError, match="max_batch_tokens=4"):
        buf.pop(groups=1)
    with pytest.raises(ArgumentError, match="less than the 5 tokens of group 0"):
        buf.pop(tokens=4)
    assert buf.stats.stored == 5


def test_the_oldest_finished_groups_make_room_and_are_counted():
    buf = buffer(tokens=16, seqs=4, on_full="drop_oldest")
    writing = buf.reserve(4, [0])
    fill(buf, [1], [3])
    fill(buf, [2], [4])
    buf.reserve(4, [3])
    buf.reserve(4, [4])
    stats = buf.stats
    assert [g.id for g in buf.groups()] == [0, 2, 3, 4]
    assert (stats.dropped, stats.dropped_seqs) == ({"oldest": 3}, {"oldest": 1})
    before = buf.stats
    with pytest.raises(BufferFullError):
        buf.reserve(12, [5])  # only group 2 could go
    assert buf.stats == before
    buf.append(writing, tokens(1))
    balanced(buf.stats)


def test_a_group_that_is_being_joined_is_not_dropped_to_make_room():
    buf = buffer(tokens=8, seqs=2, on_full="drop_oldest")
    fill(buf, [0], [4])
    fill(buf, [1], [4])
    buf.reserve(4, [0])
    assert [g.id for g in buf.groups()] == [0]


def test_discard_drops_open_groups_too():
    buf = buffer()
    slots = buf.reserve(4, [0, 1])
    buf.append(slots, tokens(1, 2))
    buf.discard([0], "client left")
    assert buf.stats.dropped == {"client left": 1}
    with pytest.raises(UnknownNameError):
        buf.discard([1, 0])
    assert buf.stats.stored_seqs == 1


def test_staleness_is_counted_at_pop():
    buf = buffer()
    for version in (1, 3, 3):
        fill(buf, [version], [1], version=version)
    buf.pop(groups=2, version=5)
    assert buf.stats.staleness == {4: 1, 2: 2}


def test_a_loaded_buffer_pops_what_the_saved_one_would(tmp_path):
    path = str(tmp_path / "rollouts.pt")
    buf = buffer()
    fill(buf, [0, 0], [5, 2], reward=[1.0, 0.0], version=3)
    open_slots = buf.reserve(4, [1])
    buf.append(open_slots, tokens(8))
    buf.save(path)
    other = buffer()
    fill(other, [9], [7])
    stale = other.pop(groups=1)
    with other.assert_zero_growth():
        other.load(path)
    assert other.stats == buf.stats
    with pytest.raises(StaleBatchError):
        _ = stale.reward
    for b in (buf, other):
        b.append(open_slots, tokens(9))
        b.finish(open_slots)
        assert b.pop(groups=2)["token"].tolist() == [0, 1, 2, 3, 4, 100, 101, 8, 9]
    with pytest.raises(ArgumentError, match="another max_seqs"):
        buffer(seqs=9).load(path)
    saved = torch.load(path) | {"schema": 99}
    torch.save(saved, path)
    with pytest.raises(ArgumentError, match="schema 99"):
        buf.load(path)
