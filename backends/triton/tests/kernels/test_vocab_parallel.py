"""A vocabulary split over two and four processes: gloo in the interpreter, NCCL and a GPU each elsewhere."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp

import rlkernel as rlk
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_triton.linear_logprob.launch import linear_logprob
from rlkernel_triton.linear_policy_loss.launch import linear_policy_loss
from rlkernel_triton.logprob import kernels
from rlkernel_triton.logprob.launch import logprob
from tests.interpreted import without_needless_work
from tests.process_groups import in_ranks

SHARDS = {1: (260,), 2: (180, 80), 4: (3, 150, 1, 106)}  # of unequal size; the first ids lie on few of them
SHARES = ("logits dX", "logits listed dX")  # gradients of which each rank has its columns
RESULTS = ("logprob", "lse", "entropy", "log_kept_mass")


def run(shard, group, device):
    """Results and gradients of one call, on the CPU."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(260, 8, generator=g)
    ids = torch.tensor([0, 1, 259, 258, 180, 179, 260, 5, 7])
    support = rlk.Support(torch.arange(45) * 5, torch.arange(10) * 5)
    mask = torch.arange(9) != 4
    hidden, weight, ids, mask = (x.to(device) for x in (hidden, weight[shard], ids, mask))
    support = rlk.Support(support.ids.to(device), support.offsets.to(device))
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    options = {"entropy": True, "mask": mask, "support": support, "temperature": 0.7, "softcap": 8.0}
    out = linear_logprob(LinearLogprobCall(h, w, ids, group=group, **options))
    weights = torch.linspace(-1, 1, 9, device=device)
    sum((getattr(out, n).nan_to_num() * weights * (i + 1)).sum() for i, n in enumerate(RESULTS)).backward()
    found = {n: getattr(out, n).detach().nan_to_num(nan=7e7) for n in RESULTS}
    found |= {"invalid": out.invalid, "dX": h.grad, "dW": w.grad}
    found |= listed(hidden.detach(), weight.detach(), ids, group, mask)
    found |= of_logits(shard, ids, {**options, "group": group}, device)
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    options = {"mask": mask, "temperature": 0.7, "aggregate": "token_mean"}
    call = LinearPolicyLossCall(h, w, ids.clamp_max(259), None, weights, group=group, **options)
    loss = linear_policy_loss(call).loss
    loss.backward()
    return {n: x.detach().cpu() for n, x in {**found, "loss": loss, "loss dX": h.grad, "loss dW": w.grad}.items()}


def listed(hidden, weight, ids, group, mask):
    """The same of three ids of each row: one is -1 in some, and one out of range; a repeated one."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    lists = torch.stack((ids, (ids + 100) % 270 - 1, ids), -1)
    out = linear_logprob(LinearLogprobCall(h, w, lists, group=group, mask=mask, softcap=8.0, temperature=0.7))
    weights = torch.linspace(-1, 1, lists.numel(), device=h.device).view(lists.shape)
    ((out.logprob.nan_to_num() * weights).sum() + out.lse.sum()).backward()
    value = out.logprob.detach().nan_to_num(nan=7e7)
    found = {"listed": value, "listed invalid": out.invalid, "listed dX": h.grad, "listed dW": w.grad}
    return found | ragged(hidden, weight, lists, group, mask)


def ragged(hidden, weight, lists, group, mask):
    """The same of none to three ids of each row; ranks leave dX as their parts, which add up."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    lengths = torch.arange(9, device=h.device) % 4
    ids = lists[torch.arange(3, device=h.device) < lengths[:, None]]
    each = rlk.TokenLists(ids, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    options = {"mask": mask, "softcap": 8.0, "temperature": 0.7, "partial_grad": group is not None}
    out = linear_logprob(LinearLogprobCall(h, w, each, group=group, **options))
    ((out.logprob.nan_to_num() * torch.linspace(-1, 1, len(ids), device=h.device)).sum() + out.lse.sum()).backward()
    if group is not None:
        dist.all_reduce(h.grad, group=group)
    value = out.logprob.detach().nan_to_num(nan=7e7)
    return {"ragged": value, "ragged invalid": out.invalid, "ragged dX": h.grad, "ragged dW": w.grad}


def of_logits(shard, ids, options, device):
    """The same of logits, whose sixth row is sure of its id; three ids of each row have no support beside them."""
    x = 3 * torch.randn(9, 260, generator=torch.Generator().manual_seed(1))
    x[5, 179] += 40
    lists = torch.stack((ids, (ids + 100) % 270 - 1, ids), -1)
    found = {}
    for name, given in (("", {"ids": ids}), ("listed ", {"ids": lists, "support": None})):
        leaf = x[:, shard].to(device).requires_grad_()
        out = logprob(LogprobCall(leaf, **{**options, **given}))
        results = [y for n in RESULTS if (y := getattr(out, n)) is not None]
        weights = [torch.linspace(-1, 1, y.numel(), device=device).view(y.shape) for y in results]
        sum((y.nan_to_num() * w).sum() for y, w in zip(results, weights, strict=True)).backward()
        found |= {f"logits {name}{i}": y.detach().nan_to_num(nan=7e7) for i, y in enumerate(results)}
        found |= {f"logits {name}invalid": out.invalid, f"logits {name}dX": leaf.grad}
    return found


def of_parts(group, device):
    """A row of more columns than one program reads."""
    x = torch.randn(1, kernels.PART + 3, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    out = logprob(LogprobCall(x, torch.tensor([kernels.PART + 1], device=device), entropy=True, group=group))
    (out.logprob + out.entropy).sum().backward()
    return {"logprob": out.logprob.detach(), "lse": out.lse.detach(), "entropy": out.entropy.detach(), "dX": x.grad}


def rank(index, world, folder, device):
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":
        device = f"{device}:{index}"
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=index, world_size=world, timeout=timedelta(seconds=60))
    first = sum(SHARDS[world][:index])
    alone = [dist.new_group([i]) for i in range(world)][index]
    shard = slice(first, first + SHARDS[world][index])
    with without_needless_work():
        found = {"shard": run(shard, dist.group.WORLD, device)}
        if index == 0:
            found["alone"], found["parts"] = run(slice(None), alone, device), of_parts(alone, device)
    torch.save(found, f"{folder}/{index}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=SHARDS)
def ranks(request, tmp_path_factory, device):
    """What each rank found; in the interpreter of the largest world alone, which has all that smaller ones have."""
    world = request.param
    if device == "cpu" and world < max(SHARDS):
        pytest.skip("four processes have shards of unequal size and groups of one, too")
    if device != "cpu" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    folder = tmp_path_factory.mktemp("ranks")
    if device == "cpu":
        in_ranks(world, rank, world, str(folder), device)
    else:
        mp.spawn(rank, args=(world, str(folder), device), nprocs=world)
    return [torch.load(f"{folder}/{i}.pt") for i in range(world)]


def test_ranks_agree_bit_by_bit(ranks) -> None:
    first = ranks[0]["shard"]
    names = [n for n in first if not n.endswith("dW") and n not in SHARES]
    assert [(n, i) for i, f in enumerate(ranks) for n in names if not same(f, first, n)] == []


def same(found, first, name) -> bool:
    return torch.equal(found["shard"][name], first[name])


def test_shards_equal_the_whole(ranks, device) -> None:
    want, got = run(slice(None), None, device), dict(ranks[0]["shard"])
    got |= {name: torch.cat([f["shard"][name] for f in ranks]) for name in ("dW", "loss dW", "listed dW", "ragged dW")}
    got |= {name: torch.cat([f["shard"][name] for f in ranks], 1) for name in SHARES}
    for name in (n for n in want if n != "invalid"):
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-5)


def test_a_group_of_one_gives_the_bits_of_the_plain_call(ranks, device) -> None:
    want = run(slice(None), None, device)
    want = {n: x for n, x in want.items() if not n.startswith("loss")}  # which has another way without a group
    assert [n for n in want if not torch.equal(ranks[0]["alone"][n], want[n])] == []


def test_parts_of_a_row_are_merged_before_the_ranks_are(ranks, device) -> None:
    want = of_parts(None, device)
    assert [n for n in want if not torch.equal(ranks[0]["parts"][n].cpu(), want[n].cpu())] == []
