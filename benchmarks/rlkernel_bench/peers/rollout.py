"""The decode chain of `suites.rollout` under other people's graphs, and with other people's draws.

Plain torch's own is in `plain`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rlkernel_bench.peers import Peer
from rlkernel_bench.peers.decode_chain import chain
from rlkernel_bench.suites import rollout
from rlkernel_bench.work import Call, Inputs, Work
from rlkernel_core.tree import flatten


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
