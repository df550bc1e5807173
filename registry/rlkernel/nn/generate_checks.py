"""What `Exact.generate` takes, and what it refuses before it allocates.

Legend: B rows · S padded ids of a prompt · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.integrations.transformers_exact import NAME
from rlkernel.nn.paged_decoder import SCORES, STATING, Draws, Runs, head_of, scored_at
from rlkernel_core import checks
from rlkernel_core.decision import Decision
from rlkernel_core.errors import ArgumentError, ArgumentTypeError, HostError

# What a head does beside a product, a bias and a softcap.
SHAPED: Final = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
# Arguments of transformers' generate that have no exact form, or another name here -> what to do.
ELSEWHERE: Final = {
    "num_beams": "Leave it out: rows are drawn, one sequence each.",
    "cache": "Leave it out: pages are the cache.",
    "past_key_values": "Leave it out: pages are the cache.",
    "cache_implementation": "Leave it out: pages are the cache.",
    "use_cache": "Leave it out: pages are the cache.",
    "do_sample": "Leave it out: temperature=0 is greedy.",
    "generation_config": "Pass max_new_tokens, temperature, top_k, top_p, min_p and stop_ids.",
    "num_return_sequences": "Repeat the prompts: what is equal is computed once.",
    "eos_token_id": "Pass stop_ids.",
    "pad_token_id": "Pass pad_id.",
    "inputs": "Pass it as prompts.",
    "input_ids": "Pass it as prompts.",
    "inputs_embeds": "Pass token ids as prompts.",
    "position_ids": "Leave it out: positions go by the padding.",
    "repetition_penalty": "Leave it out, or draw by rlkernel.sample in a loop of your own.",
    "logits_processor": "Leave it out, or draw by rlkernel.sample in a loop of your own.",
    "stopping_criteria": "Pass stop_ids.",
    "assistant_model": "Leave it out: rows are drawn token by token.",
}


def prompt_rows(prompts: Any, attention_mask: Tensor | None, vocab: int) -> list[tuple[int, ...]]:
    """Ids of each prompt, without padding.

    Raises:
        ArgumentError: no prompt, one without ids, an id outside the vocabulary, or a mask that is no padding.
    """
    if checks.is_tensor(prompts):
        checks.tensor("prompts", prompts, ndim=2, kind="integer")
        found = [tuple(ids) for ids in prompts.tolist()]
        if attention_mask is not None:
            checks.tensor("attention_mask", attention_mask)
            checks.shape("attention_mask", attention_mask, prompts.shape, "prompts")
            mask = attention_mask.bool()
            if bool((mask[:, 1:] & ~mask[:, :-1]).sum(1).add(mask[:, :1].sum(1)).gt(1).any()):
                raise ArgumentError(
                    "attention_mask", "zeros between ones", "is no padding", "Pad on one side, or on both."
                )
            found = [
                tuple(i for i, there in zip(ids, kept, strict=True) if there)
                for ids, kept in zip(found, mask.tolist(), strict=True)
            ]
    elif attention_mask is not None:
        fix = "Leave it out, or pass prompts [B, S]."
        raise ArgumentError("attention_mask", checks.describe(attention_mask), "belongs to padded prompts", fix)
    elif isinstance(prompts, Sequence) and not isinstance(prompts, str):
        found = [_ids(f"prompts[{i}]", x) for i, x in enumerate(prompts)]
    else:
        fix = "Pass a list of ids for each row, or a tensor [B, S] with attention_mask."
        raise ArgumentTypeError("prompts", checks.describe(prompts), "are no token ids", fix)
    if not found:
        raise ArgumentError("prompts", "none", "needs a row", "Pass a prompt at least.")
    for i, ids in enumerate(found):
        if not ids:
            raise ArgumentError(f"prompts[{i}]", "no ids", "needs an id", "Begin with bos_token_id.")
        if not (min(ids) >= 0 and max(ids) < vocab):
            fix = "Pass token ids, and padding with attention_mask."
            raise ArgumentError(f"prompts[{i}]", f"ids {min(ids)} to {max(ids)}", f"must be in [0, {vocab})", fix)
    return found


def _ids(name: str, given: Any) -> tuple[int, ...]:
    if checks.is_tensor(given):
        return tuple(checks.tensor(name, given, ndim=1, kind="integer").tolist())
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(checks.integer(name, i) for i in given)
    raise ArgumentTypeError(name, checks.describe(given), "is no list of ids", "Pass the ids of one prompt.")


def seeds_of(seed: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """One a row, [B] int64."""
    if isinstance(seed, Tensor):
        checks.tensor("seed", seed, ndim=1, kind="integer")
        checks.shape("seed", seed, (rows,), "the prompts")
        return seed.to(device, torch.int64)
    checks.integer("seed", seed, at_least=0, at_most=2**31 - 1)
    return torch.arange(rows, device=device) + (seed << 32)


def check_siblings(name: str, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
    """Refuse equal prompts with one seed: they would draw the same tokens, and equal answers teach nothing.

    Raises:
        ArgumentError: it names the first two rows.
    """
    first: dict[tuple[tuple[int, ...], int], int] = {}
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        other = first.setdefault((tuple(prompt), seed), row)
        if other != row:
            said = f"{seed} for rows {other} and {row}"
            fix = "Give each row of a group a seed of its own."
            raise ArgumentError(name, said, "would draw the same tokens from equal prompts", fix)


def ends_of(model: Any, stop_ids: Sequence[int] | None, pad_id: int | None) -> tuple[tuple[int, ...], int]:
    """Stop ids and padding, from the model's generation_config where they are not given."""
    config = getattr(model, "generation_config", None)
    if stop_ids is None:
        known = getattr(config, "eos_token_id", None)
        stop_ids = () if known is None else known if isinstance(known, (list, tuple)) else (known,)
    if pad_id is None:
        pad_id = getattr(config, "pad_token_id", None) or 0
    return tuple(checks.integer("stop_ids", i, at_least=0) for i in stop_ids), checks.integer("pad_id", pad_id)


def check_elsewhere(given: Mapping[str, Any]) -> None:
    """Refuse arguments of transformers' generate.

    Raises:
        ArgumentError: any is given.
    """
    for name, value in given.items():
        if name not in ELSEWHERE:
            fix = f"It has max_new_tokens, seed and others; of transformers' it knows {', '.join(ELSEWHERE)} by name."
            raise ArgumentError(name, checks.describe(value), "is no argument of generate", fix)
        raise ArgumentError(name, checks.describe(value), "is no part of an exact rollout", ELSEWHERE[name])


def check_draws(model: Any, draws: Draws, seeds: Tensor) -> Runs:
    """Parameters that the operators take, and operators whose bits do not depend on the batch, for draws and scores.

    Returns:
        What runs.

    Raises:
        ArgumentError: a parameter means nothing, or the head does what `linear_logprob` does not.
        HostError: the model is not exact any more or on several devices, or an operator runs whose bits may depend on
            the batch.
    """
    if model.config._attn_implementation != NAME:  # noqa: SLF001 it has no other name
        raise HostError("the model is not exact any more: undo() was called; call rlkernel.exact(model)")
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise HostError(
            f"the model is on {', '.join(devices)}; generate() takes one device: load it without device_map"
        )
    checks.choice("score", draws.score, SCORES)
    head, rows = model.get_output_embeddings(), seeds.shape[0]
    V, D = head.weight.shape
    text = model.config.get_text_config()
    shaped = [n for n in SHAPED if getattr(text, n, None) not in {None, 1.0}]
    if shaped and draws.score == "linear_logprob":
        fix = 'Pass score="logprob", which takes the logits of the model.'
        raise ArgumentError("score", draws.score, f"knows nothing of {shaped[0]} in the model's head", fix)
    given: tuple[Tensor, ...]
    if draws.score == "linear_logprob":
        weight, law = head_of(model, model.dtype)
        given = torch.empty(rows, D, device=seeds.device, dtype=weight.dtype), weight
    else:
        given, law = (torch.empty(rows, V, device=seeds.device, dtype=model.dtype),), {}
    temperature = scored_at(draws.temperature)
    drawing = {**law, **draws.params, "seed": seeds, "step": torch.zeros_like(seeds)}
    op = SCORES[draws.score]
    drawn = one_order(op, given, drawing)
    scored = one_order(draws.score, (*given, seeds), {**law, "temperature": temperature}, trainer=True)
    states = rlk.explain(op, *given, **drawing, need=STATING).decision
    # A greedy row has a law of one token, and is scored at temperature 1.
    hot = not isinstance(draws.temperature, Tensor) and draws.temperature > 0
    stated = hot and states.backend == drawn.backend == scored.backend
    return Runs(states.target if stated else drawn.target, scored.target, stated)


def one_order(op: str, given: tuple[Any, ...], more: Mapping[str, Any], *, trainer: bool = False) -> Decision:
    """What would run: as where batch invariance is needed and, for a trainer's operator, where gradients are wanted.

    Raises:
        HostError: it is not.
    """

    def runs(**wanted: Any) -> Decision:
        return rlk.explain(op, *given, **more, **wanted).decision

    rollout = runs()
    check_decisions(op, rollout, runs(need=["batch_invariant"]), runs(grad=True) if trainer else rollout)
    return rollout


def check_decisions(op: str, rollout: Decision, invariant: Decision, trainer: Decision) -> None:
    """One implementation runs: in a rollout, where batch invariance is needed, and where a trainer wants gradients.

    Raises:
        HostError: another one does.
    """
    if rollout.target != invariant.target:
        raise HostError(
            f"{op} runs {rollout.backend}, whose bits may depend on the batch. Nothing was changed. With "
            f'rlkernel.configure(need=["batch_invariant"]) {invariant.backend} runs'
        )
    if rollout.target != trainer.target:
        raise HostError(
            f"{op} runs {rollout.backend} in a rollout and {trainer.backend} where gradients are wanted. "
            f'Nothing was changed. Name one of them: rlkernel.configure({op}="{trainer.backend}")'
        )


def check_ran(exact: Any) -> None:
    """What ran last is what the trainer's forward runs: for as many rows, for keys in pages, under the policy in force.

    Raises:
        HostError: it is not.
    """
    for op, target in exact.ran.items():
        now = rlk.last_decision(op)
        if now is not None and now.target != target:
            raise HostError(
                f"{op} runs {now.target} in this rollout, and {target} ran in the forward that exact() looked at. "
                f"Call exact() and generate() under one policy, or name one that takes both calls: "
                f'rlkernel.configure({op}="torch")'
            )
