"""Stock TRL beside TRL with rlkernel inside, on one GPU: time, peak memory, losses. No network, nothing installed.

    PYTHONPATH=.:registry:benchmarks:backends/triton:backends/cuda OUT=/tmp/out python benchmarks/gpu_trl.py
    DEVICE=cpu SIZE=toy OUT=/tmp/out python benchmarks/gpu_trl.py
    python benchmarks/gpu_trl.py plot benchmarks/results/h200/trl.json    # bars of time and memory beside the file

Needs trl 1.16, transformers, accelerate and what they import, but for datasets and pandas: TRL names their classes when
it is imported and what is run here uses none, so empty modules stand for them where they are not installed.

`head`: the tiled head alone (log-probability and entropy), held against float64 on some rows first. `step`: a GRPO step
of a random Qwen2 through `add_fused_lm_head` as TRL's trainers call it, forward and backward, with the loss of
`loss_type="dapo"` written as in TRL for stock, and `policy_loss` with the preset for ours; `ours_fused` is head and
loss in one, as in `grpo_trainer(fused=True)`. Sections run in processes of their own; what has ended stands in
$OUT/trl.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "."))
DEVICE = os.environ.get("DEVICE", "cuda")
TOY = os.environ.get("SIZE") == "toy"
BUDGET_S = float(os.environ.get("BUDGET_S", "80"))
HEADS = [(70, 32, 301)] if TOY else [(8192, 1536, 151936), (8192, 4096, 128256)]  # N, D, V
# Qwen2.5-1.5B; B sequences of prompt + completion
MODEL = (
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 301}
    if TOY
    else {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "vocab_size": 151936,
    }
)
BATCH, PROMPT, COMPLETION = (4, 5, 11) if TOY else (8, 256, 1024)
ROUNDS = 2 if TOY else 5


def prepare() -> None:
    """Stand-ins for what is named and not used, and metadata by which backends of the clone are found."""
    from gpu_all import distributions

    named = {"datasets": ("Dataset", "IterableDataset", "IterableDatasetDict", "DatasetDict"), "pandas": ("DataFrame",)}
    for name, names in named.items():
        if importlib.util.find_spec(name) is None:
            empty = types.ModuleType(name)
            empty.__spec__ = ModuleSpec(name, None)
            for inside in names:
                setattr(empty, inside, type(inside, (), {}))
            sys.modules[name] = empty
    site = Path(tempfile.mkdtemp())
    distributions(site)
    sys.path.append(str(site))


def measured(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Median milliseconds, and the most memory above what was held before, of each call in turn."""
    import torch

    gpu = DEVICE == "cuda"
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks = dict.fromkeys(calls, 0)
    for i in range(rounds + 1):  # the first is not counted
        for name, call in calls.items():
            held = 0
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            start = time.perf_counter()
            call()
            if gpu:
                torch.cuda.synchronize()
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - held)
            if i:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {n: {"ms": round(statistics.median(t), 3), "peak_gib": round(peaks[n] / 2**30, 3)} for n, t in times.items()}


@contextmanager
def inside(which: str) -> Iterator[None]:
    """Stock, or ours by the fastest backend, or by the portable one."""
    import rlkernel as rlk
    from rlkernel.integrations import trl

    order = {"stock": None, "ours_portable": ("triton", "reference")}.get(which, ("auto",))
    with trl.enabled() if order else nullcontext(), rlk.use(*order) if order else nullcontext():
        yield


VARIANTS = ("stock", "ours", "ours_portable") if DEVICE == "cuda" else ("stock", "ours")
STEPS = (*VARIANTS, "ours_fused")


def head() -> dict[str, Any]:
    """The head alone, size by size."""
    return {f"{N}x{D}x{V}": head_of(N, D, V) for N, D, V in HEADS}


def head_of(N: int, D: int, V: int) -> dict[str, Any]:
    """N tokens, D hidden, V vocabulary."""
    import torch
    from trl.trainer import utils

    import rlkernel as rlk

    torch.manual_seed(0)
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    hidden, weight = torch.randn(N, D, **kind), torch.randn(V, D, **kind) * (2 / D**0.5)
    ids = torch.randint(0, V, (N,), device=DEVICE)
    z = hidden[:64].double() @ weight.double().T / 0.8
    true = z.log_softmax(-1).gather(-1, ids[:64, None])[:, 0]
    del z
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def run(which: str, backward: bool) -> Any:
        with inside(which), nullcontext() if backward else torch.no_grad():
            apply, chunk = utils._ChunkedLogProbFunction.apply, utils._CHUNKED_LOGPROB_CHUNK_SIZE
            out = apply(*leaves, None, ids, 0.8, chunk, None, 1.0, ("log_probs", "entropy"))
        if backward:
            return torch.autograd.grad(out[0].mean() + 0.01 * out[1].mean(), leaves)
        return out[0]

    row: dict[str, Any] = {"error": {}, "kernel": {}}
    for which in VARIANTS:
        row["error"][which] = (run(which, False)[:64] - true).abs().max().item()
        ran = rlk.last_decision("linear_logprob")
        row["kernel"][which] = ran.target if ran is not None and which != "stock" else "TRL"
    row["forward"] = measured({w: lambda w=w: run(w, False) for w in VARIANTS})
    row["forward_backward"] = measured({w: lambda w=w: run(w, True) for w in VARIANTS})
    return row


def step() -> dict[str, Any]:
    """A GRPO step of a model: the same weights and batch, the gradients compared, then timed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    import rlkernel as rlk
    from rlkernel.integrations import trl
    from rlkernel.integrations.trl_head import Wanted

    torch.manual_seed(0)
    with torch.device(DEVICE):
        config = Qwen2Config(**MODEL, num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="sdpa")
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        ids = torch.randint(0, MODEL["vocab_size"], (BATCH, PROMPT + COMPLETION))
        lengths = torch.randint(COMPLETION // 2, COMPLETION + 1, (BATCH, 1))
        mask = torch.arange(COMPLETION)[None] < lengths  # [B, T]
        adv = torch.randn(BATCH)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    labels[:, PROMPT:][~mask] = -100
    with torch.no_grad():
        old = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs[:, -COMPLETION:]
        old = old + 0.1 * torch.randn_like(old)

    def stock_loss(logprob: Any) -> Any:
        ratio = torch.exp(logprob - old)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        each = -torch.min(ratio * adv[:, None], clipped * adv[:, None])
        return (each * mask).sum() / mask.sum()

    preset = rlk.policy_loss_preset("trl_dapo")

    def our_loss(logprob: Any) -> Any:
        return rlk.policy_loss(logprob, old, adv, mask=mask, **preset).loss

    def fused_loss() -> Any:
        wanted = Wanted(mask, mask, {"old_logprob": old, "advantages": adv}, preset, packed=DEVICE == "cuda")
        with trl.HEAD.find().fusing(wanted):
            model(input_ids=ids, labels=labels, fused_lm_head=True)
        return wanted.result.loss

    losses: dict[str, float] = {}

    def run(which: str) -> None:
        model.zero_grad(set_to_none=True)
        with inside(which):
            if which == "ours_fused":
                loss = fused_loss()
            else:
                out = model(input_ids=ids, labels=labels, fused_lm_head=True)
                loss = (stock_loss if which == "stock" else our_loss)(out.log_probs[:, -COMPLETION:])
            loss.backward()
        losses[which] = loss.item()

    gradients = {}
    for which in STEPS:
        run(which)
        gradients[which] = model.lm_head.weight.grad.float()
    reference = gradients["stock"]
    apart = {w: ((g - reference).norm() / reference.norm()).item() for w, g in gradients.items()}
    del gradients, reference
    return {
        "model": {**MODEL, "batch": BATCH, "prompt": PROMPT, "completion": COMPLETION, "scored": int(mask.sum())},
        "loss": losses,
        "head_gradient_apart_from_stock": apart,
        "step": measured({w: lambda w=w: run(w) for w in STEPS}),
        "decisions": [str(r) for r in rlk.status()],
    }


def draw(path: Path) -> None:
    """Time and peak memory of head and step, forward and backward: a panel each, beside the file."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    told = json.loads(path.read_text(encoding="utf-8"))
    rows = {f"head {name}": at["forward_backward"] for name, at in told["head"].items()}
    rows["GRPO step"] = told["step"]["step"]
    figure, panels = plt.subplots(2, len(rows), figsize=(4 * len(rows), 4), layout="constrained")
    for column, (name, by) in zip(panels.T, rows.items(), strict=True):
        for panel, unit in zip(column, ("ms", "peak_gib"), strict=True):
            colours = ["0.75" if which == "stock" else "tab:blue" for which in by]
            panel.barh(list(by), [row[unit] for row in by.values()], color=colours)
            panel.set(title=f"{name}, {'ms' if unit == 'ms' else 'GiB at the peak'}")
            panel.invert_yaxis()
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})


def sections(script: str, names: Iterable[str], file: Path, found: dict[str, Any]) -> None:
    """Run `script NAME` for every name, each in a process of its own, and write what was found after each."""
    begun = time.monotonic()
    for name in names:
        left = BUDGET_S - (time.monotonic() - begun)
        try:
            done = subprocess.run(
                [sys.executable, script, name], capture_output=True, text=True, check=False, timeout=max(left, 1)
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found[name] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.stderr[-3000:]}
        except subprocess.TimeoutExpired as late:
            found[name] = {"failed": f"out of time after {left:.0f} s", "stderr": str(late.stderr)[-1500:]}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {json.dumps(found[name])[:1500]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["plot"]:
        draw(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        prepare()
        print(json.dumps({"head": head, "step": step}[sys.argv[1]]()))
    else:
        sections(__file__, ("head", "step"), OUT / "trl.json", {})
