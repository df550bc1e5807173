"""Records of what engines drew with our draw: transformers' `generate`, `exact.generate`, vLLM, SGLang.

Each draws by `sample` with a request's seed and the place of a token in its sequence, so that the first step is the
length of the prompt.

Legend: B rows · M new tokens · S padded ids of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import rlkernel as rlk
from rlkernel.rollouts.record import Params, Record, Rollout
from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel.integrations.transformers import Drawing

# transformers' warper -> our parameter, in the order in which it applies them.
_WARPERS: Final[Mapping[str, str]] = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
# transformers' criteria that a record can state: the length, and the ids that end a sequence.
_ENDS: Final = frozenset({"MaxLengthCriteria", "EosTokenCriteria"})
# What SamplingParams of vLLM says where it edits no logits.
_UNEDITED: Final[Mapping[str, object]] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}

# What SGLang's sampling parameters say where they edit no logits and one sequence is drawn.
_PLAIN: Final[Mapping[str, object]] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "beam_width": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "custom_params": None,
    "watermark": None,
}


def from_drawing(drawing: Drawing, *, weights: str) -> Record:
    """The record of the last call of transformers' `generate` with `custom_generate=drawing`.

    Where texts, a time limit or a criterion of your own may end a sequence, its end is not stated, nor checked.

    Args:
        drawing: of `rlkernel.integrations.transformers.drawing`.
        weights: version of the model's weights.

    Raises:
        ArgumentError: nothing was drawn, or a processor changed the logits in a way that a record cannot state.
    """
    if drawing.tokens is None or drawing.logprob is None:
        raise ArgumentError("drawing", "no tokens", "has drawn nothing", "Call model.generate with it first.")
    params = _of_warpers(drawing.processors)
    if all(type(one).__name__ in _ENDS for one in drawing.criteria):
        ends = drawing.config.eos_token_id
        stop_ids = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        params = replace(params, stop_ids=stop_ids, max_new_tokens=drawing.most)
    if not drawing.config.do_sample:
        params = replace(params, temperature=0.0)
    rows = zip(drawing.prompts, drawing.seeds, drawing.lengths, drawing.tokens, drawing.logprob, strict=True)
    rollouts = []
    for prompt, seed, n, ids, logprob in rows:
        told = tuple(ids[:n].tolist()), tuple(logprob[:n].tolist()), None, _drawn_by(weights, n)
        rollouts.append(Rollout(tuple(prompt), seed % 2**64, len(prompt), params, *told))
    return Record(tuple(rollouts), "processed", rlk.decisions_hash())


def from_generated(
    prompts: Sequence[Sequence[int]],
    drawn: rlk.Generated,
    *,
    seed: int | Tensor,
    params: Params,
    weights: str,
) -> Record:
    """The record of `exact.generate(prompts, seed=seed, ...)`.

    Args:
        prompts: ids of each prompt, without padding.
        drawn: what it returned.
        seed: as it was given: one number, or [B].
        params: what it was given: temperature, top_k, top_p, min_p, stop_ids, max_new_tokens.
        weights: version of the model's weights.

    Raises:
        ArgumentError: not as many prompts or seeds as rows.
    """
    from rlkernel.nn.generate_checks import seeds_of

    B = drawn.ids.shape[0]
    if len(prompts) != B:
        raise ArgumentError("prompts", len(prompts), f"must be those of {B} rows", "Pass what generate() was given.")
    masses: list[Any] = [None] * B if drawn.log_kept_mass is None else drawn.log_kept_mass.tolist()
    rows = zip(prompts, seeds_of(seed, B, drawn.ids.device).tolist(), drawn.lengths.tolist(), strict=True)
    rollouts = []
    for i, (prompt, key, n) in enumerate(rows):
        ids, logprob = tuple(drawn.ids[i, :n].tolist()), tuple(drawn.logprob[i, :n].tolist())
        mass = None if masses[i] is None else tuple(masses[i][:n])
        told = ids, logprob, mass, _drawn_by(weights, n)
        rollouts.append(Rollout(tuple(prompt), key % 2**64, len(prompt), params, *told))
    return Record(tuple(rollouts), "tempered", rlk.decisions_hash())


def from_vllm(
    outputs: Sequence[Any],
    params: Any,
    *,
    weights: str,
    stop_ids: Sequence[int] = (),
    law: str = "raw",
    decisions: str = "",
) -> Record:
    """The record of what an engine of vLLM returned, whose workers draw by `rlkernel.integrations.vllm_worker:Draw`.

    Args:
        outputs: its RequestOutputs.
        params: its SamplingParams, or one for each output; they need a seed. Of n samples the i-th has seed + i.
        weights: version of the model's weights.
        stop_ids: ids that end a sequence besides those of `params`: the model's end of sequence.
        law: of the log-probabilities, as the engine's `logprobs_mode` has it: "raw" (vLLM's default) or "processed".
        decisions: hash of the decisions.json that its worker wrote, or "".

    Raises:
        ArgumentError: no seed, an edit of the logits, which a record cannot state, or params of other outputs.
    """
    each = list(params) if isinstance(params, Sequence) else [params] * len(outputs)
    if len(each) != len(outputs):
        raise ArgumentError("params", len(each), f"must be one, or one for each of {len(outputs)} outputs", "Align.")
    rollouts = []
    for output, asked in zip(outputs, each, strict=True):
        own = _of_vllm(asked, tuple(stop_ids))
        prompt = tuple(output.prompt_token_ids)
        for drawn in output.outputs:
            ids = tuple(drawn.token_ids)
            said = drawn.logprobs and tuple(row[i].logprob for row, i in zip(drawn.logprobs, ids, strict=True))
            told = ids, said or None, None, _drawn_by(weights, len(ids))
            rollouts.append(Rollout(prompt, (asked.seed + drawn.index) % 2**64, len(prompt), own, *told))
    return Record(tuple(rollouts), law, decisions)


def from_sglang(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    weights: str,
    stop_ids: Sequence[int] = (),
    law: str = "tempered",
    decisions: str = "",
) -> Record:
    """The record of what an engine of SGLang returned that was started with `--sampling-backend rlkernel`.

    Args:
        prompts: ids of each request, as `input_ids` of `generate`.
        outputs: what it returned; with `return_logprob=True` the record states log-probabilities, and with
            `return_sampling_mask=True` of all requests kept mass too.
        params: its `sampling_params`, or one for each request; they need a `sampling_seed`.
        weights: version of the model's weights.
        stop_ids: ids that end a sequence besides those of `params`: the model's end of sequence.
        law: of the log-probabilities: "tempered" (SGLang's default), or "raw" (SGLANG_RETURN_ORIGINAL_LOGPROB=1).
        decisions: hash of the decisions.json that the engine's process wrote, or "".

    Raises:
        ArgumentError: no seed, an edit of the logits, which a record cannot state, or params of other requests.
    """
    each = [params] * len(outputs) if isinstance(params, Mapping) else list(params)
    if not len(each) == len(outputs) == len(prompts):
        sizes = f"{len(prompts)} prompts, {len(outputs)} outputs, {len(each)} params"
        raise ArgumentError("params", sizes, "must be of the same requests", "Align.")
    rollouts = []
    for prompt, output, asked in zip(prompts, outputs, each, strict=True):
        own, ids = _of_sglang(asked, tuple(stop_ids)), tuple(output["output_ids"])
        rows = output["meta_info"].get("output_token_logprobs")
        logprob = tuple(row[0] for row in rows) if rows else None
        told = ids, logprob, _kept_mass(output["meta_info"], logprob, law), _drawn_by(weights, len(ids))
        rollouts.append(Rollout(tuple(prompt), asked["sampling_seed"] % 2**64, len(prompt), own, *told))
    return Record(tuple(rollouts), law, decisions)


def _kept_mass(said: Mapping[str, Any], tempered: tuple[float, ...] | None, law: str) -> tuple[float, ...] | None:
    """What the filters kept: SGLang returns a token's processed log-probability beside its sampling mask.

    None without it, or in SGLang's mode "support", which returns those of all kept ids.
    """
    processed = said.get("output_token_sampling_logprobs")
    if processed is None or tempered is None or law != "tempered" or any(isinstance(p, list) for p in processed):
        return None
    return tuple(min(t - p, 0.0) for t, p in zip(tempered, processed, strict=True))


def _drawn_by(weights: str, n: int) -> tuple[tuple[str, int], ...]:
    return ((weights, n),) if n else ()


def _of_warpers(processors: Sequence[Any]) -> Params:
    """The law of transformers' warpers, which keep ties and apply min-p last."""
    found: dict[str, Any] = {"tie": "keep_all"}
    for processor in processors:
        name = type(processor).__name__
        if name not in _WARPERS:
            fix = "Leave it away: temperature, top_k, top_p and min_p can be recorded."
            raise ArgumentError("drawing", name, "changes logits in a way that a record cannot state", fix)
        found[_WARPERS[name]] = getattr(processor, _WARPERS[name])
    params = Params(**found)
    if params.min_p > 0 and params.top_p < 1:  # theirs takes top-p before min-p
        if params.top_k > 0:
            fix = "Leave one of top_k, top_p and min_p away."
            raise ArgumentError("drawing", "all three filters", "are in an order that `sample` has not", fix)
        return replace(params, filter_order="joint")
    return params


def _of_vllm(asked: Any, stop_ids: tuple[int, ...]) -> Params:
    """The law and the end of vLLM's SamplingParams: min-p first, then top-k, then top-p, ties kept."""
    if asked.seed is None:
        raise ArgumentError("params", "seed=None", "names no seed, so that no draw can be repeated", "Pass seed=.")
    for name, off in _UNEDITED.items():
        if getattr(asked, name, off) not in (off, None, [], {}):
            fix = "Leave it away: temperature, top_k, top_p and min_p can be recorded."
            raise ArgumentError("params", f"{name}={getattr(asked, name)!r}", "edits logits", fix)
    if asked.stop:  # texts, which ids do not tell
        ends: dict[str, Any] = {}
    else:
        stops = (*(asked.stop_token_ids or ()), *(() if asked.ignore_eos else stop_ids))
        ends = {"stop_ids": tuple(dict.fromkeys(stops)), "max_new_tokens": asked.max_tokens}
    law = {"temperature": float(asked.temperature), "top_k": max(asked.top_k, 0), "top_p": float(asked.top_p)}
    return Params(**law, min_p=float(asked.min_p), tie="keep_all", **ends)


def _of_sglang(asked: Mapping[str, Any], stop_ids: tuple[int, ...]) -> Params:
    """The law and the end of SGLang's sampling parameters: filters intersected, greedy as top-k 1."""
    given = {name: value for name, value in asked.items() if value is not None}
    if "sampling_seed" not in given:
        fix = "Pass sampling_seed."
        raise ArgumentError("params", "no sampling_seed", "names no seed, so that no draw can be repeated", fix)
    for name, off in _PLAIN.items():
        if given.get(name, off) not in (off, [], {}, ""):
            fix = "Leave it away: temperature, top_k, top_p and min_p can be recorded, of one sequence a request."
            raise ArgumentError("params", f"{name}={given[name]!r}", "edits logits, or draws several sequences", fix)
    ends: dict[str, Any] = {}
    if not (given.get("stop") or given.get("stop_regex")):  # texts, which ids do not tell
        stops = () if given.get("ignore_eos") else (*given.get("stop_token_ids", ()), *stop_ids)  # both are ignored
        ends = {"stop_ids": tuple(dict.fromkeys(stops)), "max_new_tokens": asked.get("max_new_tokens", 128)}
    temperature, top_k = float(given.get("temperature", 1.0)), given.get("top_k", -1)
    if temperature < 1e-6:  # SGLang's own rule
        temperature, top_k = 1.0, 1
    law: dict[str, Any] = {"top_k": top_k if 0 < top_k < 1 << 30 else 0, "top_p": float(given.get("top_p", 1.0))}
    return Params(temperature, **law, min_p=float(given.get("min_p", 0.0)), filter_order="joint", **ends)
