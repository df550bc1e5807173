"""A policy loss of a batch that is split over ranks, under the wrappers that average gradients over them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel as rlk
from rlkernel_conformance.ranks import _gloo
from rlkernel_core.errors import ArgumentError
from tests.process_groups import alone, in_ranks

__all__ = ["alone"]
B, T, D, V = 5, 4, 6, 11
SHARES = (slice(0, 1), slice(1, B))
MADE = torch.Generator().manual_seed(0)
HIDDEN, HEAD = torch.randn(B, T, D, generator=MADE), torch.randn(V, D, generator=MADE)
IDS, ADVANTAGES = torch.randint(0, V, (B, T), generator=MADE), torch.randn(B, generator=MADE)
MASK = torch.arange(T) < torch.tensor([[1], [4], [4], [3], [4]])
OLD = torch.full((B, T), -2.5)


def head() -> nn.Linear:
    made = nn.Linear(D, V, bias=False)
    made.load_state_dict({"weight": HEAD.clone()})
    return made


def step(model: nn.Module, rows: slice, **more) -> torch.Tensor:
    """Forward and backward of some sequences."""
    logprob = model(HIDDEN[rows]).log_softmax(-1).gather(-1, IDS[rows, :, None])[..., 0]
    out = rlk.policy_loss(logprob, OLD[rows], ADVANTAGES[rows], mask=MASK[rows], kind="dapo", **more)
    out.loss.backward()
    return out.loss.detach()


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the batch on one rank."""
    model = head()
    return step(model, slice(0, B)), model.weight.grad


def trained(index: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=60))
    group, (loss, gradient) = distributed.group.WORLD, whole()
    ddp, fsdp, summed, trap = DistributedDataParallel(head()), head(), head(), DistributedDataParallel(head())
    fully_shard(fsdp, mesh=init_device_mesh("cpu", (2,)))

    torch.testing.assert_close(step(ddp, SHARES[index], process_group=group), loss)
    torch.testing.assert_close(ddp.module.weight.grad, gradient)

    torch.testing.assert_close(step(fsdp, SHARES[index], process_group=group), loss)
    assert isinstance(fsdp.weight.grad, DTensor)
    torch.testing.assert_close(fsdp.weight.grad.full_tensor(), gradient)

    step(summed, SHARES[index], process_group=group)
    distributed.all_reduce(summed.weight.grad)
    torch.testing.assert_close(summed.weight.grad / group.size(), gradient)

    ranks = torch.stack([step(trap, SHARES[index])])  # the mean of the ranks' own means
    distributed.all_reduce(ranks)
    assert not torch.allclose(ranks / 2, loss)
    assert not torch.allclose(trap.module.weight.grad, gradient)

    micro, count = DistributedDataParallel(head()), float(MASK.sum())  # of all ranks and micro-batches
    rows = (slice(0, 1), slice(1, 2)) if index == 0 else (slice(2, 4), slice(4, 5))
    with micro.no_sync():
        first = step(micro, rows[0], process_group=group, denominator=count)
    second = step(micro, rows[1], process_group=group, denominator=count)
    torch.testing.assert_close(first + second, loss)
    torch.testing.assert_close(micro.module.weight.grad, gradient)
    distributed.destroy_process_group()


def pair() -> list[distributed.ProcessGroup]:
    """A group of two threads."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: _gloo(store, rank, 2), range(2)))


def test_batch_and_vocabulary_are_split_at_once() -> None:
    of_vocabulary, of_batch = ([pair(), pair()] for _ in range(2))
    ids, (want, gradient) = (slice(0, 4), slice(4, V)), whole()

    def rank(share: int, shard: int) -> torch.Tensor:
        rows, weight = SHARES[share], HEAD[ids[shard]].clone().requires_grad_()
        groups = {"group": of_vocabulary[share][shard], "process_group": of_batch[shard][share]}
        given = HIDDEN[rows], weight, IDS[rows], OLD[rows], ADVANTAGES[rows]
        loss = rlk.linear_policy_loss(*given, mask=MASK[rows], kind="dapo", **groups).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), want)
        return weight.grad

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(rank, (0, 0, 1, 1), (0, 1, 0, 1)))
    torch.testing.assert_close((parts[0] + parts[2]) / 2, gradient[ids[0]])
    torch.testing.assert_close((parts[1] + parts[3]) / 2, gradient[ids[1]])


def test_averaged_gradients_are_those_of_the_whole_batch(tmp_path) -> None:
    in_ranks(2, trained, str(tmp_path))


class NothingIsRead(TorchDispatchMode):
    """Numbers on the device stay there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean"])
def test_a_split_loss_reads_no_number_of_the_device(alone, aggregate) -> None:
    rule = {"rollout_logprob": OLD, "correction": rlk.Correction(normalize=True), "rejection": rlk.Rejection(high=2.0)}
    leaf = OLD.clone().requires_grad_()
    with NothingIsRead():
        rlk.policy_loss(
            leaf, OLD, ADVANTAGES, mask=MASK, kind="dapo", aggregate=aggregate, **rule, process_group=alone
        ).loss.backward()
    assert leaf.grad[MASK].all()


def test_what_is_per_sequence_is_refused_where_ranks_have_pieces_of_sequences(alone) -> None:
    piece = torch.zeros(3)
    assert rlk.policy_loss(piece, piece, piece, kind="dapo", process_group=alone).loss.item() == 0
    for more in ({"kind": "grpo"}, {"kind": "gspo"}, {"kind": "dapo", "level": "sequence"}):
        with pytest.raises(ArgumentError, match="works per sequence"):
            rlk.policy_loss(piece, piece, piece, **more, process_group=alone)


def test_a_device_mesh_of_one_dimension_is_its_process_group(alone) -> None:
    piece, mesh = torch.ones(3), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    by_group, by_mesh = (
        rlk.policy_loss(piece, piece, piece, kind="dapo", process_group=group).loss
        for group in (mesh.get_group("dp"), mesh)
    )
    assert torch.equal(by_mesh, by_group)


def test_a_split_batch_needs_a_horizon(alone) -> None:
    with pytest.raises(ArgumentError, match="padded to different lengths"):
        rlk.policy_loss(OLD, OLD, ADVANTAGES, kind="dr_grpo", process_group=alone)
