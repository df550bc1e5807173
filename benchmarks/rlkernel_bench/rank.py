"""A rank of the suite `ranks`: all ways of one task, checked and timed; rank 0 prints a line of JSON.

python -m torch.distributed.run --standalone --nproc_per_node 2 -m rlkernel_bench.rank '{"task": …}'
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

import rlkernel as rlk
from rlkernel.discover import brief, guarded
from rlkernel.distributed import assert_same_install, sample_shard
from rlkernel_bench.suites.ranks import LAWS
from rlkernel_core.errors import CaptureError

ROUNDS: Final = {"cpu": 2, "cuda": 9}
CHECKED: Final = 128  # rows
EXACT: Final = {"float32": 1e-4, "bfloat16": 2e-3}  # of a log-probability against float64
COARSE: Final = 0.16  # of rounded logits
TIED: Final = 0.02  # share of rows whose two best noised scores may be within rounding
GROUP: Final = 8  # completions a prompt
SENT: Final = 128  # candidates that a rank sends
PATIENCE: Final = timedelta(seconds=40)  # of ranks with one another
Way = tuple[Callable[[], Any], float, float]  # a call, its error, and that over what is allowed


@dataclass(frozen=True)
class Rank:
    """One process of a world and the row that it is at."""

    device: str  # cpu or cuda
    name: str
    task: str
    sizes: Mapping[str, int]
    dtype: str
    law: str | None = None

    @property
    def which(self) -> int:
        """This rank."""
        return distributed.get_rank()

    @property
    def place(self) -> str:
        """This rank's own device."""
        return f"cuda:{os.environ['LOCAL_RANK']}" if self.device == "cuda" else "cpu"

    def normal(self, seed: int, *shape: int, std: float = 1.0, dtype: str = "") -> Tensor:
        """Normal values, in the task's dtype unless another is named."""
        made = torch.Generator(self.place).manual_seed(seed)
        x = std * torch.randn(shape, generator=made, device=self.place)
        return x.to(getattr(torch, dtype or self.dtype))

    def ids(self, seed: int, *shape: int) -> Tensor:
        """Tokens of the whole vocabulary."""
        made = torch.Generator(self.place).manual_seed(seed)
        return torch.randint(0, self.sizes["V"], shape, generator=made, device=self.place)

    def timed(self, call: Callable[[], Any]) -> dict[str, float]:
        """Median milliseconds of the slowest rank, and this rank's most memory above what was held before."""
        gpu = self.device == "cuda"
        call()
        held = torch.cuda.memory_allocated() if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        ready, times = torch.zeros(1, device=self.place), []
        for _ in range(ROUNDS[self.device]):
            distributed.barrier()
            if gpu:
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                distributed.all_reduce(ready)  # the devices start together, whatever their hosts do
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            else:
                begun = time.perf_counter()
                call()
                times.append((time.perf_counter() - begun) * 1e3)
        slowest = torch.tensor([statistics.median(times)], device=self.place)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        peak = torch.cuda.max_memory_allocated() - held if gpu else 0
        return {"milliseconds": slowest.item(), "peak_bytes": peak}


def collective(rank: Rank) -> Iterator[tuple[str, Way]]:
    """All-reduce of fp32 numbers; its sum is that of all ranks."""
    x = torch.full((rank.sizes["n"],), float(rank.which), device=rank.place)
    distributed.all_reduce(x)
    error = abs(x[0].item() - sum(range(rank.sizes["W"])))
    yield "torch", (lambda: distributed.all_reduce(x), error, error * torch.inf if error else 0.0)


def split_head(rank: Rank) -> Iterator[tuple[str, Way]]:
    """linear_logprob with the head split over the ranks."""
    hidden, ids, weight, first = operands(rank)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def ours(group: Any = distributed.group.WORLD) -> Tensor:
        return rlk.linear_logprob(hidden, weight, ids, group=group).logprob

    def theirs() -> Tensor:
        return Megatron.apply(hidden, weight, ids, first)

    true = defined(hidden, weight, ids, first)
    for name, call in {"ours": ours, "torch": theirs, "without a group": lambda: ours(None)}.items():
        error = over = 0.0
        if name != "without a group":  # which has another vocabulary
            error = float((call()[:CHECKED].detach().double() - true).abs().max())
            over = error / (EXACT[rank.dtype] if name == "ours" else COARSE)
        yield name, (differentiated(call, *leaves) if "backward" in rank.task else silent(call), error, over)


def operands(rank: Rank) -> tuple[Tensor, Tensor, Tensor, int]:
    """Hidden states [N, D] and ids [N], the same everywhere, this rank's part of the head, and its first id."""
    n, d, v, world = (rank.sizes[k] for k in "NDVW")
    first = v * rank.which // world
    rows = v * (rank.which + 1) // world - first
    return rank.normal(0, n, d), rank.ids(5, n), rank.normal(1 + rank.which, rows, d, std=d**-0.5), first


def defined(hidden: Tensor, weight: Tensor, ids: Tensor, first: int) -> Tensor:
    """Log-probabilities of some rows in float64."""
    with torch.no_grad():
        logits = hidden[:CHECKED].double() @ weight.double().T
        top = logits.amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX)
        mass, chosen = (logits - top[:, None]).exp().sum(-1), torch.zeros_like(top)
        inside = (ids[:CHECKED] >= first) & (ids[:CHECKED] < first + len(weight))
        chosen[inside] = logits[inside].gather(-1, (ids[:CHECKED][inside] - first)[:, None])[:, 0]
        distributed.all_reduce(mass)
        distributed.all_reduce(chosen)
        return chosen - top - mass.log()


class Megatron(torch.autograd.Function):
    """Log-probability of a split vocabulary in plain torch: stored logits, two all-reduces forward, one backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, first: int) -> Tensor:
        """Of every row."""
        z = (hidden @ weight.T).float()
        top = z.amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX)
        inside = (ids >= first) & (ids < first + len(weight))
        at = torch.where(inside, ids - first, 0)[:, None]
        z -= top[:, None]
        chosen = torch.where(inside, z.gather(-1, at)[:, 0], 0.0)
        z.exp_()
        both = torch.stack([z.sum(-1), chosen])
        distributed.all_reduce(both)
        z /= both[0][:, None]
        ctx.save_for_backward(hidden, weight, z.to(hidden.dtype), at, inside)
        return both[1] - both[0].log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        """Of hidden states, summed over the ranks, and of this rank's part of the head."""
        hidden, weight, p, at, inside = ctx.saved_tensors
        d = -p * grad[:, None].to(p.dtype)
        d.scatter_add_(-1, at, torch.where(inside, grad, 0.0)[:, None].to(p.dtype))
        dx = (d @ weight).float()
        distributed.all_reduce(dx)
        return dx.to(hidden.dtype), d.T @ hidden, None, None


def silent(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Without gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            return forward()

    return call


def differentiated(forward: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], Tensor]:
    """With gradients; the sum of what the forward gives."""

    def call() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        total = forward().sum()
        total.backward()
        return total.detach()

    return call


def split_loss(rank: Rank) -> Iterator[tuple[str, Way]]:
    """Log-probability with the head split over the ranks, then policy_loss; one loss on every rank."""
    hidden, ids, weight, _ = operands(rank)
    shape = (rows := max(rank.sizes["N"] // 1024, 2), rank.sizes["N"] // rows)
    gains, old = rank.normal(7, rows, dtype="float32"), logprobs(rank, shape)

    def loss() -> Tensor:
        scored = rlk.linear_logprob(hidden, weight, ids, group=distributed.group.WORLD).logprob
        return rlk.policy_loss(scored.view(shape), old, gains, kind="grpo").loss

    call = differentiated(loss, hidden.requires_grad_(), weight.requires_grad_())
    mine = call()
    every = [torch.zeros_like(mine) for _ in range(rank.sizes["W"])]
    distributed.all_gather(every, mine)
    error = float(torch.stack(every).sub(mine).abs().nan_to_num(nan=torch.inf).max())
    yield "ours", (call, error, error * torch.inf if error else 0.0)


def logprobs(rank: Rank, shape: tuple[int, ...]) -> Tensor:
    """Near those of a head of random weights: minus the logarithm of the vocabulary."""
    return torch.full(shape, -float(torch.tensor(float(rank.sizes["V"])).log()), device=rank.place)


def update(rank: Rank) -> Iterator[tuple[str, Way]]:
    """N / W tokens a rank, advantages over all ranks, the head's gradient summed; the same gradient on every rank."""
    mine = rank.sizes["N"] // rank.sizes["W"]
    shape = (rows := max(mine // 1024, 1), mine // rows)
    hidden = rank.normal(20 + rank.which, *shape, rank.sizes["D"]).requires_grad_()
    ids, old = rank.ids(40 + rank.which, *shape), logprobs(rank, shape)
    rewards = rank.normal(60 + rank.which, GROUP * rows, dtype="float32")
    head = rank.normal(1, rank.sizes["V"], rank.sizes["D"], std=rank.sizes["D"] ** -0.5).requires_grad_()

    def loss() -> Tensor:
        gains = rlk.advantage(
            rewards, kind="grpo", group=GROUP, scale="batch", process_group=distributed.group.WORLD
        ).advantages
        return rlk.linear_policy_loss(hidden, head, ids, old, gains[:rows], kind="grpo").loss

    local = differentiated(loss, hidden, head)

    def summed() -> None:
        local()
        distributed.all_reduce(head.grad)

    summed()
    most, least = head.grad.norm(), head.grad.norm()
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
    error = float(most - least) if most.isfinite() else torch.inf
    yield "ours", (summed, error, error * torch.inf if error else 0.0)
    yield "without the sum of gradients", (local, 0.0, 0.0)


def shard(rank: Rank, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits of the whole vocabulary, this rank's part of them, and the request."""
    rows, width = rank.sizes["B"], rank.sizes["V"] // rank.sizes["W"] * rank.sizes["W"]
    made = torch.Generator().manual_seed(seed)
    x = (4 * torch.randn(rows, width, generator=made)).to(rank.place)
    law = {**LAWS[rank.law or ""], "seed": torch.arange(rows, device=rank.place)}
    return x, x.chunk(rank.sizes["W"], 1)[rank.which].contiguous(), law


def draw(rank: Rank) -> Iterator[tuple[str, Way]]:
    """Draws from a split vocabulary: by candidates with the definition's tokens and law, gathered with its tokens."""
    x, mine, law = shard(rank, 0)
    sizes = tuple(part.shape[1] for part in x.chunk(rank.sizes["W"], 1))
    with rlk.use("reference", fallback="error"):
        want = rlk.sample(x, **law, step=3)
    for name, sent in {"gathered": 0, "candidates": SENT}.items():

        def call(sent: int = sent) -> Any:
            return sample_shard(mine, group=distributed.group.WORLD, sizes=sizes, candidates=sent, **law, step=3)

        found = call()
        if sent:
            pairs = [(a, b) for f in fields(want) if (a := getattr(want, f.name)) is not (b := getattr(found, f.name))]
            other = sum(not torch.equal(a, b) for a, b in pairs if not a.is_floating_point())
            error = max(float((a - b).nan_to_num().abs().max()) for a, b in pairs if a.is_floating_point())
            yield name, (call, error, torch.inf if other else error / EXACT["float32"])
        else:
            others = int((found.token != want.token).sum())
            yield name, (call, others / len(x), others / max(1.0, TIED * len(x)))


def graph(rank: Rank) -> Iterator[tuple[str, Way]]:
    """A draw in a graph, after an all-reduce in one was right and ranks of different sizes were refused."""

    def reduced(x: Tensor) -> Tensor:
        y = x * 2
        distributed.all_reduce(y)
        return y + 1

    world = rank.sizes["W"]
    x = torch.full((8,), rank.which + 1.0, device=rank.place)
    replay = rlk.capture(reduced, (x,), collectives=True)
    wrong = not bool((replay(x * 3) == 3 * world * (world + 1) + 1).all())
    if world > 1:
        try:
            rlk.capture(reduced, (torch.ones(8 + rank.which, device=rank.place),), collectives=True)
            wrong = True
        except CaptureError:
            pass
    logits, mine, law = shard(rank, 1)
    sizes = (mine.shape[1],) * world

    def drawn(part: Tensor, at: Tensor) -> Tensor:
        return sample_shard(part, group=distributed.group.WORLD, sizes=sizes, candidates=0, **law, step=at).token

    step = rlk.capture(drawn, (mine, torch.zeros_like(law["seed"])), collectives=True)
    at = torch.full_like(law["seed"], 5)
    others = int((step(mine, at) != rlk.sample(logits, **law, step=at).token).sum())
    yield "ours", (lambda: step(mine, at), float(others), torch.inf if wrong or others else 0.0)


TASKS: Final[Mapping[str, Callable[[Rank], Iterator[tuple[str, Way]]]]] = {
    "collective": collective,
    "split head forward": split_head,
    "split head forward+backward": split_head,
    "split loss": split_loss,
    "update": update,
    "draw": draw,
    "graph": graph,
}


def main(device: str, order: str, rows: str) -> None:
    """Join the world, make the calls of every row, tell."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    assert_same_install()
    for row in json.loads(rows):
        rank = Rank(device, **row)
        with rlk.use(*filter(None, order.split(","))):
            said, error = guarded(lambda rank=rank: of_row(rank))
        if rank.which == 0:
            told = {"name": rank.name, "said": {"failed": brief(error)} if error is not None else said}
            sys.stdout.write(f"{json.dumps(told)}\n")
            sys.stdout.flush()
        if device == "cuda":
            torch.cuda.empty_cache()
    os._exit(0)  # a communicator whose ranks disagreed would wait for them while it is taken down


def of_row(rank: Rank) -> dict[str, dict[str, float]]:
    """Each way's time, memory and error."""
    ways = TASKS[rank.task](rank)
    return {way: {**rank.timed(call), "error": error, "over": over} for way, (call, error, over) in ways}


if __name__ == "__main__":
    main(*sys.argv[1:])
