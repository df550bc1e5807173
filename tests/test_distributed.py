"""Ranks that run different kernels are found out."""

from __future__ import annotations

import importlib.util
import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import distributed

import rlkernel as rlk
from rlkernel.distributed import assert_same_decisions, assert_same_install
from rlkernel_core.errors import ResolutionError
from tests.implementations import acme
from tests.process_groups import alone, in_ranks

__all__ = ["alone"]
ROOT = Path(__file__).parents[1]
LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])


def joined(index: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=60))


def example() -> ModuleType:
    """examples/ranks/train.py."""
    spec = importlib.util.spec_from_file_location("ranks_train", ROOT / "examples" / "ranks" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(index: int, folder: str, loss: float) -> None:
    joined(index, folder)
    assert example().update(index, 2, "cpu") == pytest.approx(loss, rel=1e-6)
    rlk.refresh()
    rlk.logprob(LOGITS, IDS)
    assert assert_same_decisions() == 1
    if index == 1:
        rlk.logprob(LOGITS, IDS, entropy=True)
    assert assert_same_decisions() == 1  # a kind of call that one rank alone has made
    with rlk.registered(acme()):
        for name in ("acme", "torch") if index else ("torch", "acme"):  # both, one the other way round
            with rlk.use(name):
                rlk.logprob(LOGITS, IDS)
        assert assert_same_decisions() == 1
        rlk.refresh()
        with rlk.use("acme" if index else "torch"):
            rlk.logprob(LOGITS, IDS)
        with pytest.raises(ResolutionError, match=r"rank 0: rlkernel_torch.*rank 1: tests\.implementations"):
            assert_same_decisions()
    distributed.destroy_process_group()


def test_ranks_are_compared_and_two_have_the_loss_of_one(tmp_path, alone) -> None:
    in_ranks(2, compared, str(tmp_path), example().update(0, 1, "cpu"))


def orphaned(index: int, port: int) -> None:
    place = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=place, rank=index, world_size=2, timeout=timedelta(seconds=60))
    distributed.barrier()
    if index == 0:
        os._exit(0)  # and the store with it
    with pytest.raises(rlk.RankError, match=r"rank 0 of 2 did not answer|store of the process group is gone") as caught:
        assert_same_install(timeout=5.0)
    assert caught.value.ranks == (0,)
    os._exit(0)  # there is nobody to take leave of


def test_the_death_of_the_rank_that_holds_the_store_is_told_as_such() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_ranks(2, orphaned, port)


def troubled(index: int, folder: str) -> None:
    joined(index, folder)
    assert assert_same_install()["rlkernel"] == rlk.__version__
    if index == 0:
        rlk.logprob(LOGITS, IDS)
    assert [assert_same_decisions() for _ in range(2)] == [0, 0]  # a rank without work; and the question again
    if index == 1:
        rlk.configure("torch", fallback="error")
    with pytest.raises(ResolutionError, match=r"policy order: rank 0: auto; rank 1: torch"):
        assert_same_install()
    with rlk.registered(acme()) if index else nullcontext():
        there = r"backend acme: rank 0: not there; rank 1: .*Install the same on all"
        with pytest.raises(ResolutionError, match=f"(?s){there}"):
            assert_same_install()
    if index == 0:  # and the other has left
        with pytest.raises(rlk.RankError, match=r"rank 1 of 2 did not answer within 1 s when decisions") as caught:
            assert_same_decisions(timeout=1.0)
        assert caught.value.ranks == (1,)
    distributed.destroy_process_group()


def test_a_rank_in_trouble_is_named_and_nobody_hangs(tmp_path) -> None:
    in_ranks(2, troubled, str(tmp_path))
