"""The compiled lane inside what else torch offers: autocast, export, checkpoints, process groups, inference mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rlkernel as rlk
from tests.compiled_calls import HIDDEN, IDS, WEIGHT, Graphs

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("untraced")]


def score(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return rlk.linear_logprob(hidden, weight, ids).logprob


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def gradient(run, *arguments: Tensor) -> Tensor:
    hidden = HIDDEN.clone().requires_grad_()
    return torch.autograd.grad(run(hidden, *arguments).sum(), hidden)[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast_reaches_the_kernel_as_in_eager_mode(backend) -> None:
    def inside(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return score(hidden, weight, ids)

    compiled = torch.compile(inside, backend=backend, fullgraph=True)
    assert torch.equal(inside(HIDDEN, WEIGHT, IDS), compiled(HIDDEN, WEIGHT, IDS))
    assert torch.equal(gradient(inside, WEIGHT, IDS), gradient(compiled, WEIGHT, IDS))
    run = torch.compile(score, backend=backend, fullgraph=True)
    plain = run(HIDDEN, WEIGHT, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(HIDDEN, WEIGHT, IDS), run(HIDDEN, WEIGHT, IDS))
    assert torch.equal(plain, run(HIDDEN, WEIGHT, IDS))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_node(strict) -> None:
    class Scorer(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
            return score(hidden, weight, ids)

    program = torch.export.export(Scorer(), (HIDDEN, WEIGHT, IDS), strict=strict)
    assert [n for n in program.graph.nodes if "rlkernel.linear_logprob" in str(n.target)] != []
    assert torch.equal(score(HIDDEN, WEIGHT, IDS), program.module()(HIDDEN, WEIGHT, IDS))


def test_checkpointed_calls_give_the_same_gradient() -> None:
    def checkpointed(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(score, hidden, weight, ids, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    assert torch.equal(gradient(score, WEIGHT, IDS), gradient(compiled, WEIGHT, IDS))


def test_inference_mode_needs_no_gradient() -> None:
    run = torch.compile(score, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(score(HIDDEN, WEIGHT, IDS), run(HIDDEN.clone().requires_grad_(), WEIGHT, IDS))
    assert {r.decision.call.grad for r in rlk.status()} == {False}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_process_group_travels_by_name(one_rank, backend) -> None:
    def sharded(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return rlk.linear_logprob(hidden, weight, ids, group=one_rank).logprob

    graphs = Graphs(backend)
    run = graphs.compiled(sharded)
    assert torch.equal(sharded(HIDDEN, WEIGHT, IDS), run(HIDDEN, WEIGHT, IDS))
    (node,) = graphs.operator_nodes()
    assert f'"group": {{"group": "{one_rank.group_name}"}}' in node.args[4]
