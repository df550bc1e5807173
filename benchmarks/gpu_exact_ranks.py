"""A rollout on one GPU, a trainer on several that share every layer: do the log-probabilities have the same bits?

    python benchmarks/gpu_exact_ranks.py --toy --ranks 2                          # processes of this CPU, seconds
    python benchmarks/gpu_exact_ranks.py --ranks 2 --layers 4 --output ranks.json    # Qwen3-8B's layers, two GPUs

Rank 0 draws with `rlkernel.exact(model, split=True).generate`. All ranks train `rlkernel.exact(model, group=...)`: q,
k, v, gate and up are split by columns, o and down by rows, the head by vocabulary. A step of SGD on a clipped policy
loss follows, and rank 0's copy gets the gathered weights. Weights are random; options are those of gpu_exact_rollout.py
too.

Printed is JSON: log-probabilities whose bits differ between rollout and trainer, and seconds. The first update, which
compiles and captures, stands apart. Beside it the same trainer on one rank, on the last sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_exact_rollout as single
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

import rlkernel as rlk
from rlkernel_core.files import write_json


def arguments(words: list[str]) -> argparse.Namespace:
    """The number of ranks, and what gpu_exact_rollout.py takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    mine, rest = parser.parse_known_args(words)
    given = single.arguments(rest)
    given.ranks = mine.ranks
    return given


class Trainer:
    """The layers of a model that ranks share, or of one rank in the same order of sums."""

    def __init__(self, given: argparse.Namespace, group: Any) -> None:
        self.given, self.group, self.model = given, group, single.model_of(given)
        self.exact = rlk.exact(self.model, group=group, split=True, force=True)
        self.model.train()

    def step(self, ids: Tensor, said: Tensor, advantages: Tensor) -> Tensor:
        """One step of SGD; the log-probabilities before it."""
        found = []
        for some in torch.arange(len(ids), device=ids.device).split(self.given.micro):
            trained = single.scored(self.model, ids[some], self.given.prompt, self.given.temperature, self.group)
            ratio, a = (trained - said[some]).exp(), advantages[some]
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - single.CLIP, 1 + single.CLIP) * a).sum() / said.numel()
            loss.backward()
            found.append(trained.detach())
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(p.grad, alpha=-self.given.lr)
                p.grad = None
        return torch.cat(found)


def rank(rank: int, given: argparse.Namespace, folder: str) -> None:
    """What one process does."""
    cuda = given.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(rank)
        given.device = f"cuda:{rank}"
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=given.ranks
    )
    needed = ("linear", "rms_norm", "glu", "attention", "lm_head_sample", "linear_logprob")
    rlk.configure(*filter(None, given.order.split(",")), **{op: {"need": ["batch_invariant"]} for op in needed})
    trainer = Trainer(given, dist.group.WORLD)
    drawing = Trainer(given, None) if rank == 0 else None
    updates, B, S = [], given.rows, given.prompt + given.new
    for n in range(given.updates + 1):
        ids = torch.zeros(B, S, dtype=torch.int64, device=given.device)
        said = torch.zeros(B, given.new, device=given.device)
        rollout_s = 0.0
        if drawing is not None:
            generator = torch.Generator().manual_seed(1000 + n)
            vocab = drawing.model.config.vocab_size
            prompts = torch.randint(vocab, (B // given.group, given.prompt), generator=generator)
            prompts = prompts.repeat_interleave(given.group, 0).to(given.device)
            top_p = given.top_p if given.top_p < 1 else None

            def roll(seed: int = n, prompts: Tensor = prompts, top_p: float | None = top_p) -> Any:
                return drawing.exact.generate(
                    prompts, max_new_tokens=given.new, seed=seed, temperature=given.temperature, top_p=top_p,
                    stop_ids=(), page=given.page, max_length=S,
                )  # fmt: skip

            made, rollout_s = single.clocked(given.device, roll)
            ids.copy_(torch.cat([prompts, made.ids], 1))
            said.copy_(made.logprob)
        dist.broadcast(ids, 0)
        dist.broadcast(said, 0)
        advantages = torch.randn(B, 1, generator=torch.Generator().manual_seed(n)).to(given.device)
        found, trainer_s = single.clocked(given.device, lambda: trainer.step(ids, said, advantages))  # noqa: B023 - now

        def sync() -> None:
            mine = () if drawing is None else list(drawing.model.parameters())
            with torch.no_grad():
                for k, (_, whole) in enumerate(trainer.exact.whole_parameters()):
                    if mine:
                        mine[k].copy_(whole)

        _, sync_s = single.clocked(given.device, sync)
        differ = (found.float().view(torch.int32) != said.float().view(torch.int32)).sum()
        updates.append({
            "tokens": said.numel(), "differ": int(differ), "largest_difference": float((found - said).abs().max()),
            "rollout_s": rollout_s, "trainer_s": trainer_s, "sync_s": sync_s,
        })  # fmt: skip
        if rank == 0 and (n % 20 == 0 or n == given.updates):
            print(f"update {n}: {sum(u['differ'] for u in updates)} differ", file=sys.stderr, flush=True)
        write_json(Path(folder) / f"{rank}.json", result(given, trainer, updates))
    if drawing is not None:
        _, alone_s = single.clocked(given.device, lambda: drawing.step(ids, said, advantages))
        _, alone_s = single.clocked(given.device, lambda: drawing.step(ids, said, advantages))
        write_json(Path(folder) / "0.json", {**result(given, trainer, updates), "trainer_on_one_rank_s": alone_s})
    dist.barrier()
    dist.destroy_process_group()


def result(given: argparse.Namespace, trainer: Trainer, updates: list[dict[str, Any]]) -> dict[str, Any]:
    """What a rank has to say."""
    warm = updates[1:] or updates
    return {
        "ran": trainer.exact.ran,
        "parameters_of_a_rank": sum(p.numel() for p in trainer.model.parameters()),
        "head_of_a_rank": list(trainer.model.lm_head.weight.shape),
        "tokens": sum(u["tokens"] for u in updates),
        "differ": sum(u["differ"] for u in updates),
        "largest_difference": max(u["largest_difference"] for u in updates),
        **{name: statistics.median(u[name] for u in warm) for name in ("rollout_s", "trainer_s", "sync_s")},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if given.device.startswith("cuda") else None,
        "updates": updates,
    }


def main(words: list[str]) -> None:
    """All ranks, and what they say."""
    given = arguments(words)
    told = {n: x for n, x in vars(given).items() if n != "output"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        multiprocessing.start_processes(rank, (given, folder), given.ranks, start_method="spawn")
        found = [json.loads((Path(folder) / f"{r}.json").read_text(encoding="utf-8")) for r in range(given.ranks)]
    device = torch.cuda.get_device_name() if told["device"].startswith("cuda") else "cpu"
    whole = {"arguments": told, "device": device, "versions": {"torch": torch.__version__}, "ranks": found}
    print(json.dumps({**whole, "ranks": [{**f, "updates": len(f["updates"])} for f in found]}, indent=1))
    if given.output is not None:
        write_json(given.output, whole)


if __name__ == "__main__":
    main(sys.argv[1:])
