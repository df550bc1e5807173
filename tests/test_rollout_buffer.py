"""rollout_buffer by the plain-torch backend: growth that is noticed, batches, discards, staleness, files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlkernel_core.errors import ArgumentError, BufferFullError, StaleBatchError, UnknownNameError
from tests.rollouts import buffer, fill, tokens


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
