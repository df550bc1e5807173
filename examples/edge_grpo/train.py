"""GRPO within 8 GB that CPU and GPU share: 4-bit weights once, an adapter on them, and the plan before anything else.

python examples/edge_grpo/train.py --plan qwen3-1.7b        # what a model of that size would take; runs nothing
python examples/edge_grpo/train.py --size toy --steps 20    # a CPU runs this in a minute
python examples/edge_grpo/train.py --device cuda            # on a board, or on any GPU

A small model is fitted to careless arithmetic in fp32 and saved; in practice that file is your checkpoint. Then it is
read back one layer at a time into int4, and only a LoRA is trained, on answers that the same int4 weights gave.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from plan import MODELS, Run, demo, plan, show
from rollout import Engine
from torch import Tensor

import rlkernel as rlk
from rlkernel import nn
from rlkernel.demo import task
from rlkernel.demo.model import Policy, Shape
from rlkernel.demo.rollout import Rollouts
from rlkernel.demo.train import Recipe, fit
from rlkernel_core.files import whole
from rlkernel_core.host.memory import memory

CONTEXT = task.PROMPT + task.ANSWER
# size -> hidden, layers, heads, steps of fitting, problems an update
SIZES = {"toy": (96, 2, 4, 300, 16), "edge": (512, 8, 8, 300, 64)}
GROUP = 8  # answers a problem
FORMAT = "int4_g32"
RANK = 8
RATE = 5e-3


def base(shape: Shape, steps: int, path: Path, device: str) -> None:
    """Fit the model in fp32 and write it to a file. It takes less than the run: a batch half as large, no cache."""
    from safetensors.torch import save_file

    policy = Policy(shape).to(device)
    for loss in fit(policy, Recipe(fit_steps=steps), torch.Generator().manual_seed(0)):
        last = loss
    print(f"fitted: loss {last:.3f}, {sum(p.numel() for p in policy.parameters())} parameters")
    with whole(path) as draft:
        save_file(policy.state_dict(), draft)


def packed(shape: Shape, path: Path, device: str) -> Policy:
    """The model from its file, each layer quantized as it is read, refused where it would swap."""
    with torch.device("meta"):
        policy = Policy(shape)
    how = nn.QuantPolicy(FORMAT, skip=("head",), lora_rank=RANK, lora_alpha=RANK, lora_dtype=torch.float32)
    report = nn.load_quantized(policy, path, how, place=device, within=memory())
    print(f"packed: {len(report.formats)} layers in {FORMAT}, {report.bytes / 2**20:.2f} MiB in all")
    return policy


def logprob(policy: Policy, prompts: Tensor, rollouts: Rollouts) -> Tensor:  # -> [B, A]
    """Log-probability of every answer token, without ever making the logits."""
    ids = torch.cat([prompts, rollouts.tokens], 1)
    hidden = policy(ids[:, :-1])[:, task.PROMPT - 1 :]
    flat = hidden.reshape(-1, hidden.shape[-1])
    tokens, mask = rollouts.tokens, rollouts.mask
    out = rlk.linear_logprob(flat, policy.head.weight, tokens.reshape(-1), mask=mask.reshape(-1))
    return out.logprob.view(tokens.shape)


def improve(policy: Policy, problems: int, steps: int) -> float:
    """GRPO on the adapter alone; prints every update and returns the mean reward of the last five."""
    device = policy.head.weight.device
    generator, batch = torch.Generator().manual_seed(1), problems * GROUP
    engine = Engine(policy, batch, temperature=1.0)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    rewards = []
    for step in range(steps):
        start = time.perf_counter()
        given = task.problems(problems, generator)
        prompts, answers = (x.repeat_interleave(GROUP, 0).to(device) for x in (given.prompts, given.answers))
        rollouts = engine.answer(prompts, step * batch + torch.arange(batch, device=device))
        reward = task.rewards(rollouts.tokens, answers)
        advantages = rlk.advantage(reward, kind="grpo", group=GROUP).advantages
        now = logprob(policy, prompts, rollouts)
        gap = (now.detach() - rollouts.logprob)[rollouts.mask].abs().max().item()
        loss = rlk.policy_loss(
            now, rollouts.logprob, advantages, mask=rollouts.mask, kind="grpo", clip=(0.2, 0.28)
        ).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        with engine.step.weight_update():
            optimizer.step()
        rewards.append(reward.mean().item())
        took = time.perf_counter() - start
        print(f"update {step + 1:3}/{steps}  reward {rewards[-1]:.3f}  drift {gap:.1e}  {took:.2f} s", flush=True)
    return sum(rewards[-5:]) / len(rewards[-5:])


def main() -> None:
    """Plan, pack, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=[*MODELS], help="print the plan of a model of that size and stop")
    parser.add_argument("--size", choices=[*SIZES], default="edge")
    parser.add_argument("--fit", type=int, help="steps of fitting the base; by size unless given")
    parser.add_argument("--steps", type=int, default=60, help="GRPO updates")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    if asked.plan:
        print(show(plan(MODELS[asked.plan], Run()), memory()))
        return
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU, and rlkernel doctor says why; a CPU runs --size toy")
    hidden, layers, heads, fits, problems = SIZES[asked.size]
    shape = Shape(len(task.ALPHABET), CONTEXT, hidden, layers, heads)
    runtime = 0 if asked.device == "cpu" else Run.runtime
    run = Run(FORMAT, RANK, problems * GROUP, CONTEXT, problems * GROUP, checkpointed=False, runtime=runtime)
    told = plan(demo(hidden, layers, vocab=shape.vocab, context=CONTEXT), run)
    room = memory()
    print(show(told, room), flush=True)
    if room is not None:
        told.require(room, "this run")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        base(shape, asked.fit or fits, Path(folder) / "base.safetensors", asked.device)
        policy = packed(shape, Path(folder) / "base.safetensors", asked.device)
        print(f"mean reward of the last updates: {improve(policy, problems, asked.steps):.3f}")


if __name__ == "__main__":
    main()
