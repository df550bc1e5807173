"""The decode chain of `suites.rollout` under other people's graphs, and with other people's draws.

The chain is the same code in all of them: products, norms and head do not differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_bench.peers import Peer, plain
from rlkernel_bench.suites import rollout
from rlkernel_bench.work import Call, Inputs, Outputs, Work
from rlkernel_core.quant import QuantTensor, dequantize
from rlkernel_core.tree import flatten


def chain(work: Work, sampler: rollout.Sampler, wrap: Any, pack: Any = rollout.packed) -> Call:
    """Tokens by a sampler, each step as `wrap` has it; made at the first call, for those weights."""
    held: dict[int, tuple[Inputs, rollout.Step]] = {}

    def run(given: Inputs) -> Outputs:
        if id(given) not in held:
            ready = pack(given)
            held[id(given)] = given, wrap(rollout.step_of(ready, work.sizes, sampler), ready)
        return rollout.generate(held[id(given)][1], given, work.sizes["T"])

    return run


def eager(work: Work) -> Call:
    """Products of torch, with quantised weights unpacked before, and the draw that one writes without a library."""
    return chain(work, _plain_draw(work), lambda step, _: step, dense)


def compiled(work: Work, *, in_place: bool = False) -> Call:
    """torch.compile with graphs of its own (mode reduce-overhead) over the chain with our draw.

    Its graphs copy weights that are no parameters of a module at every step, unless they are told to stay in place.
    """

    def wrap(step: rollout.Step, ready: Inputs) -> rollout.Step:
        if not in_place:
            torch.compiler.reset()
        weights = flatten([ready["embedding"], ready["layers"], ready["head"]])[0] if in_place else []
        for x in weights:
            if isinstance(x, Tensor):
                torch._dynamo.mark_static_address(x)  # noqa: SLF001 torch has no public name for it
        made = torch.compile(step, mode="reduce-overhead", dynamic=False)

        def once(token: Tensor, at: Tensor) -> tuple[Tensor, ...]:
            torch.compiler.cudagraph_mark_step_begin()
            return tuple(x.clone() for x in made(token, at))  # whose memory the next step takes

        return once

    return chain(work, rollout.ours, wrap)


def flashinfer(work: Work) -> Call:
    """Our graph around the chain with FlashInfer's fastest draw, which gives a token alone.

    Its seed is a number, so that every replay draws with the same noise: good for its time and nothing else.
    """
    import flashinfer as fi

    def draw(x: Tensor, _seed: Tensor, _at: Tensor) -> tuple[Tensor, ...]:
        rows = len(x)
        most = torch.full((rows,), int(rollout.LAW["top_k"]), dtype=torch.int32, device=x.device)
        mass = torch.full((rows,), float(rollout.LAW["top_p"]), device=x.device)
        law = fi.sampling.softmax(x.float())
        token = fi.cake_top_k_top_p_sampling_from_probs(law, most, mass, top_k_max=64, philox_seed=1, philox_offset=0)
        return (token.long(),)

    return chain(work, draw, rollout.graphed)


def dense(given: Inputs) -> Inputs:
    """Weights in the dtype of the model."""
    dtype = given["head"].dtype

    def whole(w: Any) -> Tensor:
        return dequantize(w, dtype=dtype) if isinstance(w, QuantTensor) else w

    return {**given, "layers": [{name: whole(w) for name, w in layer.items()} for layer in given["layers"]]}


def _plain_draw(work: Work) -> rollout.Sampler:
    law = Work("", "sample", {"B": work.sizes["B"], "V": work.sizes["V"]}, options=rollout.LAW)
    draw = plain.sample(law)
    return lambda x, _seed, _at: (draw({"logits": x})["token"],)


PEERS = (
    Peer(
        "reduce-overhead",
        "torch",
        ("torch", "triton"),
        {"rollout": compiled},
        "torch.compile's documentation",
        ran="H200, torch 2.11",
    ),
    Peer(
        "reduce-overhead in place",
        "torch",
        ("torch", "triton"),
        {"rollout": partial(compiled, in_place=True)},
        "torch.compile's documentation, torch/_dynamo/decorators.py",
        ran="H200, torch 2.11",
    ),
    Peer(
        "flashinfer's draw",
        "flashinfer-python",
        ("flashinfer",),
        {"rollout": flashinfer},
        "flashinfer-python 0.7.2.post1, sampling.py",
        ran="H200, flashinfer-python 0.7.2.post1",
    ),
)
