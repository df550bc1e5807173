"""torchtitan's RL losses with rlkernel inside against its own: values, metrics, gradients, split vocabularies."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import distributed

from rlkernel import HostError
from rlkernel.integrations import active, torchtitan
from rlkernel.integrations.host import KEPT
from tests.process_groups import in_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
V = 31


def host(name: str) -> ModuleType:
    """A module of torchtitan's RL; the package around it imports vLLM, and an empty one takes its place."""
    if torchtitan.HOST.installed is None:
        pytest.skip("torchtitan is not installed")
    outer = import_module("torchtitan.experiments")
    if "torchtitan.experiments.rl" not in sys.modules:
        found = PathFinder.find_spec("torchtitan.experiments.rl", outer.__path__)
        package = ModuleType("torchtitan.experiments.rl")
        package.__path__, package.__spec__ = [str(Path(found.origin).parent)], found
        sys.modules[package.__name__] = outer.rl = package
    return import_module(f"torchtitan.experiments.rl.{name}")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 6, V, generator=made) * 3, torch.randint(V, (2, 6), generator=made)
    labels[0, :2] = -100
    return logits, labels


@pytest.mark.parametrize("name", ["GRPOLoss", "DAPOLoss"])
def test_a_loss_built_from_its_configuration_learns_what_torchtitans_does(name) -> None:
    stock = getattr(host("losses"), name)
    ours = getattr(import_module("rlkernel.integrations.torchtitan_losses"), name)
    logits, labels = batch()
    sampled = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)) - 2
    sampled[1, 3] = torch.nan
    asked = {"generator_logprobs": sampled, "advantages": sampled.nan_to_num().sin(), "loss_mask": labels >= 0}
    found = []
    for built in (stock, ours):
        leaf = logits.clone().requires_grad_()
        loss, metrics = built.Config().build()(leaf, labels, 9.0, **asked)
        loss.backward()
        found.append([loss.detach(), leaf.grad, *(metrics[name] for name in sorted(metrics))])
    (entry,) = (entry for entry in active() if entry.host == "torchtitan")
    assert entry.calls["logprob"] >= 1
    KEPT.close()
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)
    assert issubclass(ours, stock)


def compared(index: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=index, world_size=2)
    dapo, utils = host("losses.dapo"), import_module("torchtitan.distributed.utils")
    spmd = import_module("torchtitan.distributed.spmd_types")
    mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, labels = batch()
    logits = torch.nn.functional.pad(logits, (0, 1), value=-30.0)
    law = logits.double().requires_grad_()
    whole = -torch.nn.functional.cross_entropy(law.flatten(0, 1), labels.flatten(), reduction="none").view(2, 6)
    whole.cos().sum().backward()
    mine = slice(index * 16, index * 16 + 16)
    for backend in ("partial_dtensor", "spmd_types"):
        utils.set_spmd_backend(backend)
        found = []
        for score in (dapo.compute_logprobs, torchtitan.compute_logprobs):
            leaf = logits[..., mine].clone().requires_grad_()
            if backend == "spmd_types":
                with spmd.set_current_spmd_mesh(mesh):
                    scored, entropy = score(leaf, labels, return_entropy=True)
            else:
                placed = distributed.tensor.DTensor.from_local(leaf, mesh, [distributed.tensor.Shard(2)])
                scored, entropy = score(placed, labels, return_entropy=True)
            scored.cos().sum().backward()
            assert not entropy.requires_grad
            found.append((scored.detach(), entropy, leaf.grad))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6)
        torch.testing.assert_close(found[1][2].double(), law.grad[..., mine], rtol=1e-5, atol=1e-6)
    distributed.destroy_process_group()


def test_a_vocabulary_split_over_ranks_is_scored_where_it_lies(tmp_path) -> None:
    host("losses.dapo")
    in_ranks(2, compared, str(tmp_path))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("partial", [False, True])
def test_logits_that_no_rank_holds_are_refused(partial) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp", "ep"))
    placed = [Partial(), Shard(0)] if partial else [Shard(2), Shard(2)]
    logits = DTensor.from_local(batch()[0], mesh, placed, run_check=False)
    with pytest.raises(HostError, match="split the vocabulary along one dimension"):
        torchtitan.compute_logprobs(logits, batch()[1])
