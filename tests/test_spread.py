"""Tensors that are spread over ranks are refused by name, whatever was called before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import rlkernel as rlk
from rlkernel import nn, policy
from rlkernel.context_parallel import next_ids
from rlkernel.distributed import sample_shard

HIDDEN, HEAD, LOGITS = torch.randn(3, 16), torch.randn(50, 16), torch.randn(3, 50)
IDS = torch.tensor([1, 2, 3])


@pytest.fixture(scope="module", autouse=True)
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapped", [lambda x: x, torch.nn.Parameter], ids=["tensor", "parameter"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_head_that_is_spread_is_refused_by_name_after_a_call_of_its_shape(mesh, placement, wrapped) -> None:
    want = rlk.linear_logprob(HIDDEN, HEAD, IDS).logprob
    head = wrapped(distribute_tensor(HEAD, mesh, [placement]))
    with pytest.raises(rlk.ArgumentTypeError, match=r"weight: must be a tensor of this rank; got a DTensor \[50, 16\]"):
        rlk.linear_logprob(HIDDEN, head, IDS)
    local = rlk.linear_logprob(HIDDEN, head.to_local(), IDS, group=head.device_mesh.get_group()).logprob
    whole = rlk.linear_logprob(HIDDEN, head.full_tensor(), IDS).logprob
    assert torch.equal(local, want)
    assert torch.equal(whole, want)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("logits", lambda x: rlk.logprob(x, IDS)),
        ("logits", lambda x: rlk.sample(x, seed=3, step=torch.arange(3))),
        ("logits", lambda x: rlk.logprob.bind(LOGITS, IDS)(x, IDS)),
    ],
    ids=["logprob", "sample", "bound"],
)
def test_logits_that_are_spread_are_refused_with_their_placements_and_the_remedy(mesh, name, call) -> None:
    with pytest.raises(rlk.ArgumentTypeError, match=rf"^{name}: .*over mesh \(tp\).*{name}\.to_local\(\) with group="):
        call(distribute_tensor(LOGITS, mesh, [Shard(1)]))


@pytest.mark.parametrize(
    "call",
    [
        lambda group: rlk.linear_logprob(HIDDEN, HEAD, IDS, group=group).logprob,
        lambda group: rlk.logprob.bind(LOGITS, IDS, group=group)(LOGITS, IDS, group=group).logprob,
        lambda group: rlk.whiten(LOGITS, process_group=group).y,
        lambda group: sample_shard(LOGITS, group=group, seed=3, step=torch.arange(3)).token,
        lambda group: next_ids(IDS, torch.tensor([0, 3]), layout="ring", group=group).labels,
    ],
    ids=["linear_logprob", "bound", "process_group", "sample_shard", "next_ids"],
)
def test_a_mesh_of_one_dimension_stands_for_its_group(mesh, call) -> None:
    assert torch.equal(call(mesh), call(mesh.get_group()))


def test_calls_with_a_mesh_share_the_plan_of_calls_with_its_group(mesh) -> None:
    rlk.logprob(LOGITS, IDS, group=mesh.get_group())
    made = policy.current().tables["logprob"].made
    rlk.logprob(LOGITS, IDS, group=mesh)
    assert policy.current().tables["logprob"].made == made


def test_a_mesh_of_two_dimensions_is_refused_with_each_of_them() -> None:
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(rlk.ArgumentTypeError, match=r"^group: .*one dimension.*Pass mesh\['dp'\] or mesh\['tp'\]\.$"):
        rlk.linear_logprob(HIDDEN, HEAD, IDS, group=both)
    want = rlk.linear_logprob(HIDDEN, HEAD, IDS).logprob
    assert torch.equal(rlk.linear_logprob(HIDDEN, HEAD, IDS, group=both["tp"]).logprob, want)


def test_a_weight_that_is_spread_has_no_delta_but_that_of_a_ranks_share(mesh) -> None:
    old, new = (distribute_tensor(x, mesh, [Shard(0)]) for x in (HEAD, HEAD + 1))
    with pytest.raises(rlk.ArgumentTypeError, match=r"^old: must be a tensor of this rank; .*old\.to_local\(\)"):
        nn.weight_delta(old, new)
    share = old.to_local().clone()
    delta = nn.weight_delta(share, new.to_local())
    with pytest.raises(rlk.ArgumentTypeError, match=r"^weight: must be a tensor of this rank"):
        nn.apply_delta_(old, delta)
    nn.apply_delta_(share, delta)
    assert torch.equal(HEAD + 1, share)
