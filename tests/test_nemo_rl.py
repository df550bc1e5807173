"""NeMo-RL's own functions with rlkernel under them against themselves: vocabularies and sequences split over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard

from rlkernel.integrations import nemo_rl
from tests.process_groups import in_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
B, S, V = 2, 8, 32  # of all ranks
ZIGZAG = [[0, 1, 6, 7], [2, 3, 4, 5]]  # the tokens of each rank of a context


def padded(host, mesh, logits, ids, **asked):
    tp, cp = mesh["tp"], mesh["cp"]
    first = tp.get_local_rank() * logits.shape[-1]
    groups = {"tp_group": tp.get_group(), "cp_group": cp.get_group()}
    return host.from_parallel_logits_to_logprobs(logits, ids, first, first + logits.shape[-1], **groups, **asked)


def packed(host, mesh, logits, ids, **asked):
    tp, cp = mesh["tp"], mesh["cp"]
    first = tp.get_local_rank() * logits.shape[-1]
    bounds = torch.tensor([0, S, 2 * S])
    groups = {"group": tp.get_group(), "cp_group": cp.get_group()}
    return host.from_parallel_logits_to_logprobs_packed_sequences(
        logits.view(1, -1, logits.shape[-1]), ids.view(1, -1), bounds, S, first, first + logits.shape[-1],
        **groups, **asked,
    )  # fmt: skip


def placed(host, mesh, logits, ids, inference_only=False, **asked):
    order = torch.tensor(ZIGZAG).flatten()
    split = DTensor.from_local(logits, mesh, [Shard(1), Shard(2)])
    mine = DTensor.from_local(ids[:, ZIGZAG[mesh["cp"].get_local_rank()]], mesh["cp"], [Shard(1)])
    with torch.no_grad() if inference_only else nullcontext():
        return host.get_logprobs_from_vocab_parallel_logits(split, mine, seq_index=order, **asked)


def on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """The gradient of NeMo-RL's context parallelism copies two numbers from pinned memory to a GPU."""
    made = torch.tensor
    patch.setattr(torch, "tensor", lambda data, device, pin_memory: made(data, device=device))
    patch.setattr(torch.Tensor, "cuda", lambda self, **_: self)


def compared(index: int, folder: str) -> None:
    distributed.init_process_group("gloo", store=distributed.FileStore(f"{folder}/store", 4), rank=index, world_size=4)
    host = import_module(nemo_rl.MODULE)
    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    made = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(B, S, V, generator=made) * 3, torch.randint(V, (B, S), generator=made)
    law = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    cut = mesh["tp"].get_local_rank() * (V // 2)
    mine = logits[:, ZIGZAG[mesh["cp"].get_local_rank()], cut : cut + V // 2]
    for function in (padded, packed, placed):
        for chunk in (None, 3):
            found = []
            for patched in (False, True):
                leaf = mine.clone().requires_grad_()
                with nemo_rl.enabled() if patched else nullcontext() as entry:
                    before = entry.calls.total() if patched else 0
                    scored = function(host, mesh, leaf, ids, chunk_size=chunk)
                    quiet = function(host, mesh, leaf, ids, chunk_size=chunk, inference_only=True)
                    with pytest.MonkeyPatch.context() as patch:
                        on_a_cpu(patch)
                        scored.cos().sum().backward()
                    assert not patched or entry.calls.total() == before + 2
                assert torch.equal(scored, quiet)
                found.append((scored.detach(), leaf.grad))
            (theirs, their_grad), (ours, our_grad) = found
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(ours, law, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(our_grad, their_grad, rtol=5e-6, atol=2e-6)
    distributed.destroy_process_group()


def test_its_functions_score_with_logprob_under_them_what_they_score_by_themselves(tmp_path) -> None:
    if nemo_rl.HOST.installed is None:
        pytest.skip("NeMo-RL is not installed")
    in_ranks(4, compared, str(tmp_path))
