"""How operators that other ranks take part in scale over the GPUs of one host, with NCCL. Nothing is installed.

    PYTHONPATH=.:registry:benchmarks:backends/triton:backends/cuda OUT=/tmp/out python benchmarks/gpu_scaling.py
    DEVICE=cpu SIZE=toy WORLDS=1,2 OUT=/tmp/out python benchmarks/gpu_scaling.py

Every world of WORLDS (1, 2, 4, 8) that the host has GPUs for runs in processes of its own, which end with it; on a
machine of one GPU that is a world of one rank, and its results say so. Sections, each written to $OUT/scaling.json:

    collectives        all-reduce and all-gather in the sizes below: GB/s a rank, for the model in docs/scale.md
    linear_logprob     the head split over the ranks: held against float64 on some rows, then timed forward and
                       backward, beside the same in plain torch as Megatron-style trainers write it, and without a group
    update             data parallel: group statistics over the ranks, loss of the rank's rows, sum of the gradients
                       of the head
    split_loss         linear_logprob with the head split over the ranks, and policy_loss

Times are medians over rounds of the slowest rank, from events of the device after a barrier.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "."))
DEVICE = os.environ.get("DEVICE", "cuda")
TOY = os.environ.get("SIZE") == "toy"
WORLDS = [int(w) for w in os.environ.get("WORLDS", "1,2,4,8").split(",")]
BUDGET_S = float(os.environ.get("BUDGET_S", "60"))  # of a world
N, D, V = (48, 32, 1000) if TOY else (8192, 4096, 128256)  # tokens, hidden, vocabulary
GROUP = 8  # completions a prompt
CHECKED = 16 if TOY else 128  # rows
ROUNDS = 2 if TOY else 9


def main() -> None:
    """Start every world in turn, and keep what it wrote."""
    import torch

    there = torch.cuda.device_count() if DEVICE == "cuda" else max(WORLDS)
    OUT.mkdir(parents=True, exist_ok=True)
    for world in (w for w in WORLDS if w <= there):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        try:
            subprocess.run([sys.executable, *launch, __file__, "rank"], check=False, timeout=BUDGET_S + 20)
        except subprocess.TimeoutExpired:
            print(f"world {world}: stopped after {BUDGET_S + 20:g} s", flush=True)


def rank() -> None:
    """One rank of a world: every section, written after each by rank 0."""
    from gpu_all import distributions

    site = Path(tempfile.mkdtemp())
    distributions(site)
    sys.path.append(str(site))
    import torch
    from torch import distributed

    from rlkernel.distributed import assert_same_install

    begun, here = time.monotonic(), int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(here)
    distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    world = distributed.get_world_size()
    said: dict[str, Any] = {"world": world, "shape": [N, D, V], "dtype": str(dtype()), "torch": torch.__version__}
    said["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    said["install"] = assert_same_install()
    if world == 1:
        said["note"] = "one rank: what a group costs beside none; nothing here was measured between GPUs"
    for section in (collectives, vocabulary_parallel, update, split_loss):
        late = torch.tensor([float(time.monotonic() - begun > BUDGET_S)], device=device())
        distributed.all_reduce(late)
        if late.item():  # the clocks of the ranks differ, and all of them leave together
            said[section.__name__] = "left out: no time"
            continue
        try:
            said[section.__name__] = section(world, distributed.get_rank())
        except Exception as error:  # the ranks meet in collectives: one that failed alone is ended by NCCL's time-out
            said[section.__name__] = f"{type(error).__name__}: {error}"[:1500]
        if distributed.get_rank() == 0:
            print(world, section.__name__, said[section.__name__], flush=True)
            write(said)
    distributed.destroy_process_group()


def write(said: dict[str, Any]) -> None:
    """Put a world's results into the file beside those of the others."""
    path = OUT / "scaling.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found[str(said["world"])] = said
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def device() -> str:
    """The device of this rank."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if DEVICE == "cuda" else "cpu"


def dtype() -> Any:
    """The dtype of hidden states and head."""
    import torch

    return torch.bfloat16 if DEVICE == "cuda" else torch.float32


def timed(call: Callable[[], Any], rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of the slowest rank, and this rank's most memory above what was held before, in GiB."""
    import torch
    from torch import distributed

    gpu = DEVICE == "cuda"
    call()
    held = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    meet = torch.zeros(1, device=device())
    for _ in range(rounds):
        distributed.barrier()
        if gpu:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            distributed.all_reduce(meet)  # the devices start together, whatever their hosts do
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
    slowest = torch.tensor([statistics.median(times)], device=device())
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if gpu else 0.0
    return {"ms": round(slowest.item(), 4), "peak_gib": round(peak, 3)}


def operands(world: int, which: int) -> tuple[Any, Any, Any, int]:
    """Hidden states [N, D] and ids [N], the same everywhere, this rank's shard of the head, and its first id."""
    import torch

    made = torch.Generator(device()).manual_seed(0)
    hidden = torch.randn(N, D, generator=made, device=device()).to(dtype())
    ids = torch.randint(0, V, (N,), generator=made, device=device())
    first = V * which // world
    rows = V * (which + 1) // world - first
    own = torch.Generator(device()).manual_seed(1 + which)
    weight = (torch.randn(rows, D, generator=own, device=device()) * D**-0.5).to(dtype())
    return hidden, ids, weight, first


def collectives(world: int, which: int) -> dict[str, Any]:  # noqa: ARG001  as the others
    """All-reduce of fp32 [N, D] (the gradient of hidden states) and of a head's gradient, all-gather of statistics."""
    import torch
    from torch import distributed

    found = {}
    for name, numbers, kind in (("dX", N * D, torch.float32), ("dW", V * D, dtype()), ("small", 8, torch.float32)):
        x = torch.zeros(numbers, dtype=kind, device=device())
        took = timed(lambda x=x: distributed.all_reduce(x))
        size = x.numel() * x.element_size()
        # Each rank sends and receives 2 (W - 1) / W of the bytes in a ring.
        moved = 2 * (world - 1) / world * size
        found[f"all_reduce {name}"] = took | {"bytes": size, "gb_per_s": round(moved / took["ms"] / 1e6, 2)}
    part = torch.zeros(4, N, device=device())
    every = torch.zeros(world, 4, N, device=device())
    took = timed(lambda: distributed.all_gather(list(every.unbind()), part))
    return found | {"all_gather statistics": took | {"bytes": part.numel() * 4}}


def vocabulary_parallel(world: int, which: int) -> dict[str, Any]:
    """linear_logprob with the head split over the ranks."""
    import torch
    from torch import distributed

    import rlkernel as rlk

    hidden, ids, weight, first = operands(world, which)
    hidden.requires_grad_()
    weight.requires_grad_()

    def ours(group: Any = distributed.group.WORLD) -> Any:
        return rlk.linear_logprob(hidden, weight, ids, group=group).logprob

    def theirs() -> Any:
        return megatron()(hidden, weight, ids, first)

    def both(forward: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            hidden.grad = weight.grad = None
            forward().sum().backward()

        return call

    with torch.no_grad():
        logits = hidden[:CHECKED].double() @ weight.double().T
        top = logits.amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX)
        mass, chosen = (logits - top[:, None]).exp().sum(-1), torch.zeros_like(top)
        inside = (ids[:CHECKED] >= first) & (ids[:CHECKED] < first + len(weight))
        chosen[inside] = logits[inside].gather(-1, (ids[:CHECKED][inside] - first)[:, None])[:, 0]
        distributed.all_reduce(mass)
        distributed.all_reduce(chosen)
        true = chosen - top - mass.log()
        del logits
        errors = {n: (f()[:CHECKED].double() - true).abs().max().item() for n, f in (("ours", ours), ("torch", theirs))}
    limit = 2e-3 if DEVICE == "cuda" else 1e-4
    if not errors["ours"] <= limit:
        return {"wrong": errors}
    found: dict[str, Any] = {"error": errors, "ran": str(rlk.last_decision("linear_logprob").target)}
    with torch.no_grad():
        found["ours forward"], found["torch forward"] = timed(ours), timed(theirs)
    found["ours"], found["torch"] = timed(both(ours)), timed(both(theirs))
    # The same kernel on this rank's shard alone, all ranks at once: what is left is what the group costs.
    with rlk.use(str(rlk.last_decision("linear_logprob").backend)):
        found["ours without a group"] = timed(both(lambda: ours(None)))
    if world == 1:
        found["ours as chosen without a group"] = timed(both(lambda: ours(None)))
        found["ran without a group"] = str(rlk.last_decision("linear_logprob").target)
    return found


def megatron() -> Any:
    """Log-probability of a split vocabulary in plain torch: stored logits, two all-reduces forward, one backward."""
    import torch
    from torch import distributed

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, ids: Any, first: int) -> Any:
            z = (hidden @ weight.T).float()
            top = z.amax(-1)
            distributed.all_reduce(top, op=distributed.ReduceOp.MAX)
            inside = (ids >= first) & (ids < first + len(weight))
            at = torch.where(inside, ids - first, 0)[:, None]
            z -= top[:, None]
            chosen = torch.where(inside, z.gather(-1, at)[:, 0], 0.0)
            z.exp_()
            mass = z.sum(-1)
            both = torch.stack([mass, chosen])
            distributed.all_reduce(both)
            z /= both[0][:, None]
            ctx.save_for_backward(hidden, weight, z.to(hidden.dtype), at, inside)
            return both[1] - both[0].log()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            hidden, weight, p, at, inside = ctx.saved_tensors
            d = -p * grad[:, None].to(p.dtype)
            d.scatter_add_(-1, at, torch.where(inside, grad, 0.0)[:, None].to(p.dtype))
            dx = (d @ weight).float()
            distributed.all_reduce(dx)
            return dx.to(hidden.dtype), d.T @ hidden, None, None

    return Split.apply


def split_loss(world: int, which: int) -> dict[str, Any]:
    """Log-probability with the head split over the ranks, then policy_loss, forward and backward."""
    import torch
    from torch import distributed

    import rlkernel as rlk

    hidden, ids, weight, _ = operands(world, which)
    hidden.requires_grad_()
    weight.requires_grad_()
    made = torch.Generator(device()).manual_seed(7)
    B = max(N // 1024, 2)
    shaped = (B, N // B)
    adv = torch.randn(B, generator=made, device=device())
    old = torch.full(shaped, -11.0 if not TOY else -7.0, device=device())

    def call() -> Any:
        hidden.grad = weight.grad = None
        scored = rlk.linear_logprob(hidden, weight, ids, group=distributed.group.WORLD).logprob.view(shaped)
        loss = rlk.policy_loss(scored, old, adv, kind="grpo").loss
        loss.backward()
        return loss

    loss = call().detach()
    every = [torch.zeros_like(loss) for _ in range(world)]
    distributed.all_gather(every, loss)
    if not loss.isfinite() or len({x.item() for x in every}) > 1:
        return {"wrong": [x.item() for x in every]}
    ran = [str(rlk.last_decision(op).target) for op in ("linear_logprob", "policy_loss")]
    return {"loss": loss.item(), "ours": timed(call), "ran": ran}


def update(world: int, which: int) -> dict[str, Any]:
    """A data-parallel update of the head: N / W tokens a rank, advantages over all, the head's gradient summed."""
    import torch
    from torch import distributed

    import rlkernel as rlk

    made = torch.Generator(device()).manual_seed(20 + which)
    rows = max(N // world // 1024, 1) * min(N // world, 1024)
    shaped = (max(rows // 1024, 1), min(rows, 1024))
    hidden = torch.randn(*shaped, D, generator=made, device=device()).to(dtype()).requires_grad_()
    ids = torch.randint(0, V, shaped, generator=made, device=device())
    old = torch.full(shaped, -11.0 if not TOY else -7.0, device=device())
    rewards = torch.rand(GROUP * shaped[0], generator=made, device=device())
    shared = torch.Generator(device()).manual_seed(1)
    head = (torch.randn(V, D, generator=shared, device=device()) * D**-0.5).to(dtype()).requires_grad_()
    whole = distributed.group.WORLD

    def local() -> None:
        hidden.grad = head.grad = None
        adv = rlk.advantage(rewards, kind="grpo", group=GROUP, scale="batch", process_group=whole).advantages
        rlk.linear_policy_loss(hidden, head, ids, old, adv[: shaped[0]], kind="grpo").loss.backward()

    def call() -> None:
        local()
        distributed.all_reduce(head.grad, op=distributed.ReduceOp.SUM)

    without, took = timed(local), timed(call)
    tokens = shaped[0] * shaped[1] * world
    return {
        "tokens": tokens,
        "without the sum of gradients": without,
        "ours": took,
        "tokens_per_s": round(tokens / took["ms"] * 1e3),
        "ran": [str(rlk.last_decision(op).target) for op in ("advantage", "linear_policy_loss")],
    }


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
