"""linear_policy_loss over a vocabulary that is split unevenly between two ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlkernel_torch.direct import linear_policy_loss
from tests.linear_loss_cases import HEAD, Case, V
from tests.policy_batches import same

SPLIT = (0, 400, V)
KINDS = {"one pass": {"kind": "grpo"}, "two operators": {"kind": "gspo"}}


def rank_loss(case, options, group=None, ids=slice(None)):
    """Loss and gradients with the rows `ids` of the head."""
    hidden = case.hidden.detach().clone().requires_grad_()
    weight, bias = (x.detach()[ids].clone().requires_grad_() for x in (case.weight, case.bias))
    args, kwargs = case.arguments(entropy=True, entropy_coef=0.1, ref=True, kl_coef=0.1, **options)
    result = linear_policy_loss(hidden, weight, case.ids, *args, bias=bias, group=group, **HEAD, **kwargs)
    result.loss.backward()
    return {"loss": result.loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    shard = slice(SPLIT[rank], SPLIT[rank + 1])
    found = {name: rank_loss(Case(1), options, dist.group.WORLD, shard) for name, options in KINDS.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, args=(str(folder),), nprocs=2, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", KINDS)
def test_shards_equal_the_whole(ranks, way):
    whole = rank_loss(Case(1), KINDS[way])
    for rank in ranks:
        same(rank[way]["loss"], whole["loss"], rtol=1e-10)
        same(rank[way]["hidden"], whole["hidden"], rtol=1e-9, atol=1e-12)
    for name in ("weight", "bias"):
        same(torch.cat([rank[way][name] for rank in ranks]), whole[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", KINDS)
def test_ranks_agree_bit_for_bit(ranks, way):
    for name in ("loss", "hidden"):
        assert torch.equal(ranks[0][way][name], ranks[1][way][name])
