"""What a run takes in memory, from its sizes alone: one copy of 4-bit weights, an adapter, a cache, one micro-batch.

Legend: D hidden · L layers · T tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlkernel.checkpoints.footprint import WORKSPACE, Footprint, packed_bytes
from rlkernel_core.host.memory import Memory, size
from rlkernel_core.quant import QuantSpec

_ADAM: Final = 3  # a gradient and two moments for each number of the adapter
# A Python with torch and a CUDA context: what Triebwerk's authors report of an Orin Nano, 2012 MB of runtime. On a CPU
# it is part of what the machine no longer has available.
RUNTIME: Final = 2012 << 20


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    layers: int
    linears: tuple[tuple[int, int], ...]  # [Nout, K] of a layer's matrices
    kv: int  # numbers that a token adds to the cache in a layer: keys and values
    hidden: int
    vocab: int
    dense: int  # numbers of embeddings, head and norms
    bytes: int = 2  # of a dense number and of an activation


def qwen3(hidden: int, layers: int, heads: int, ffn: int, *, vocab: int = 151936) -> Model:
    """Qwen3 with 8 heads of keys of 128, its head tied to its embedding."""
    q, kv = heads * 128, 8 * 128
    linears = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (ffn, hidden), (hidden, ffn))
    return Model(layers, linears, 2 * kv, hidden, vocab, vocab * hidden)


def demo(hidden: int, layers: int, *, vocab: int, context: int) -> Model:
    """The model of `rlkernel.demo`, in fp32."""
    linears = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    return Model(layers, linears, 2 * hidden, hidden, vocab, (2 * vocab + context) * hidden, 4)


# Sizes from the models' config.json.
MODELS: Final = {
    "qwen3-0.6b": qwen3(1024, 28, 16, 3072),
    "qwen3-1.7b": qwen3(2048, 28, 16, 6144),
    "qwen3-4b": qwen3(2560, 36, 32, 9728),
}


@dataclass(frozen=True)
class Run:
    """What is done with it."""

    format: str = "int4_g128"
    rank: int = 16
    rollouts: int = 16  # sequences that are drawn at a time
    context: int = 1024  # tokens of a sequence, prompt included
    micro: int = 2  # sequences of a training step at a time
    checkpointed: bool = True  # activations of one layer at a time, the others' inputs
    runtime: int = RUNTIME


def plan(model: Model, run: Run) -> Footprint:
    """Sizes by what they are for; what passes is one layer while the checkpoint is packed."""
    told, spec = Footprint(), QuantSpec.named(run.format)
    one_layer = sum(packed_bytes(spec, shape) for shape in model.linears)
    adapter = model.layers * sum(run.rank * (rows + columns) for rows, columns in model.linears)
    tokens = run.micro * run.context
    kept = sum(rows + columns for rows, columns in model.linears)  # what a layer's backward pass reads, per token
    held = kept + model.layers * model.hidden if run.checkpointed else model.layers * kept
    told.add("runtime: Python, torch, CUDA context", run.runtime)
    told.add(f"weights in {run.format}, once for rollout and trainer", model.layers * one_layer)
    told.add("embeddings and head", model.dense * model.bytes)
    told.add(f"LoRA of rank {run.rank}, gradients, Adam moments", adapter * 4 * (1 + _ADAM))
    told.add("KV cache", run.rollouts * run.context * model.kv * model.layers * model.bytes)
    told.add("activations of a micro-batch", 2 * tokens * held * model.bytes)  # and their gradients
    told.add("logits of a decode step", 2 * run.rollouts * model.vocab * 4)
    dense = max(rows * columns for rows, columns in model.linears) * model.bytes
    told.passing = dense + one_layer + WORKSPACE
    return told


def show(told: Footprint, memory: Memory | None) -> str:
    """The plan for people."""
    width = max(len(what) for what in told.parts) + 2
    rows = [*told.parts.items(), ("one layer, while packing", told.passing), ("at most", told.peak)]
    lines = [f"  {what:{width}}{size(nbytes):>12}" for what, nbytes in rows]
    room = f"{size(memory.budget)} may be taken: {memory.describe()}" if memory else "this system tells no memory"
    return "\n".join(["memory plan", *lines, room])
