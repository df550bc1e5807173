"""Ranks that run different kernels are found out."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch import multiprocessing as mp

import rlkernel as rlk
from rlkernel.distributed import assert_same_decisions, assert_same_install
from rlkernel_core.errors import ResolutionError
from tests.implementations import acme

LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])


def rank(index: int, folder: str, mode: str) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=60))
    rlk.logprob(LOGITS, IDS)
    if mode == "extra" and index == 1:
        rlk.logprob(LOGITS, IDS, entropy=True)
    if mode == "differ" and index == 1:
        rlk.refresh()
        with rlk.registered(acme()), rlk.use("acme"):
            rlk.logprob(LOGITS, IDS)
            with pytest.raises(ResolutionError, match=r"rank 0: rlkernel_core.*rank 1: tests\.implementations"):
                assert_same_decisions()
    elif mode == "order":  # both ranks run both, one the other way round
        with rlk.registered(acme()):
            for name in ("acme", "reference") if index else ("reference", "acme"):
                with rlk.use(name):
                    rlk.logprob(LOGITS, IDS)
            assert assert_same_decisions() == 1
    elif mode == "differ":
        with pytest.raises(ResolutionError, match="ranks run different kernels"):
            assert_same_decisions()
    else:
        assert assert_same_decisions() == 1
    distributed.destroy_process_group()


@pytest.mark.parametrize("mode", ["same", "extra", "differ", "order"])
def test_ranks_are_compared(tmp_path, mode) -> None:
    mp.spawn(rank, args=(str(tmp_path), mode), nprocs=2)


def troubled(index: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=60))
    assert assert_same_install()["rlkernel"] == rlk.__version__
    if index == 0:
        rlk.logprob(LOGITS, IDS)
    assert [assert_same_decisions() for _ in range(2)] == [0, 0]  # a rank without work; and the question again
    if index == 1:
        rlk.configure("reference", fallback="error")
    with pytest.raises(ResolutionError, match=r"policy order: rank 0: auto; rank 1: reference"):
        assert_same_install()
    if index == 0:  # and the other has left
        with pytest.raises(rlk.RankError, match=r"rank 1 of 2 did not answer within 1 s when decisions") as caught:
            assert_same_decisions(timeout=1.0)
        assert caught.value.ranks == (1,)
    distributed.destroy_process_group()


def test_a_rank_in_trouble_is_named_and_nobody_hangs(tmp_path) -> None:
    mp.spawn(troubled, args=(str(tmp_path),), nprocs=2)
