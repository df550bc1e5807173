"""Planted bugs in lm_head_sample@1: of tiles, of the head, of what reaches the draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.shares import with_sum
from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_conformance.mutants.linear_logprob import decoded_to_16_bits
from rlkernel_conformance.mutants.sample import FILTERS, draws_anew, with_status
from rlkernel_core.spec.linear_logprob import stored_head
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import LogitBias, SampleResult, Status
from rlkernel_torch.sample import Trainer, best_noised, sample, tempered
from rlkernel_torch.trainer_sums import piece_of, tempered_in_pieces

TILE: Final = 1024


def logits_of(call: LmHeadSampleCall) -> Tensor:
    """[N, V] all logits, made at once."""
    V = call.vocab_size or call.weight.shape[0]
    dtype = torch.promote_types(call.hidden.dtype, torch.float32)
    logits = call.hidden.to(dtype) @ stored_head(call)[:V].to(dtype).T
    if call.bias is not None:
        logits = logits + call.bias[:V]
    logits = logits * call.logit_scale
    return logits if call.softcap is None else call.softcap * torch.tanh(logits / call.softcap)


def noise_of_the_tile(right: Run, call: LmHeadSampleCall) -> SampleResult:
    def best(score: Tensor, keep: Tensor, words: Tensor) -> Tensor:
        return best_noised(score, keep, words[:, torch.arange(words.shape[1], device=words.device) % TILE])

    return sample(SampleCall.of(call, logits=logits_of(call), bias=call.logit_bias, vocab_size=None), best)


def logits_in_bfloat16(right: Run, call: LmHeadSampleCall) -> SampleResult:
    logits = logits_of(call)
    rounded = logits.bfloat16().to(logits.dtype)
    return sample(SampleCall.of(call, logits=rounded, bias=call.logit_bias, vocab_size=None))


def last_sum(call: LmHeadSampleCall, out: SampleResult) -> Tensor:
    off = 1e-2 * (call.weight.shape[0] > TILE)
    return torch.where(out.logprob < 0, out.logprob + off, out.logprob)


def stores_the_logits(right: Run, call: LmHeadSampleCall) -> SampleResult:
    if call.hidden.dtype == call.weight.dtype:
        _ = call.hidden.detach() @ call.weight.detach().T
    return right(call)


def later_tiles_lose(call: LmHeadSampleCall) -> Tensor:
    V, of = call.weight.shape[0], call.weight
    bias = torch.zeros(V, dtype=of.dtype, device=of.device) if call.bias is None else call.bias
    return torch.where(torch.arange(V, device=of.device) >= TILE, bias - 1.0, bias)


def first_words(allowed: Tensor) -> Tensor:
    return allowed[:, torch.arange(allowed.shape[1], device=allowed.device) % 32]


def capped_bias(call: LmHeadSampleCall) -> LogitBias | None:
    bias, cap = call.logit_bias, call.softcap
    if bias is None or cap is None:
        return bias
    return replace(bias, values=torch.where(bias.values > 0, bias.values.clamp(max=cap), bias.values))


def hot_cap(call: LmHeadSampleCall) -> float | None:
    if call.softcap is None:
        return None
    return call.softcap * float(torch.as_tensor(call.temperature).max().clamp(min=0.1))


def step_of_the_row(call: LmHeadSampleCall) -> Any:
    rows = torch.arange(call.hidden.shape[0], device=call.hidden.device)
    return call.step + rows if call.slot is None else call.step


def stated(call: LmHeadSampleCall, out: SampleResult, trainer: Trainer) -> SampleResult:
    """The two shares of another number for the same tokens; rows that are greedy or degenerate stay."""
    if call.vocab_size is not None or call.slot is not None or call.lora is not None:
        return out
    x = logits_of(call)
    T = torch.as_tensor(call.temperature, dtype=x.dtype, device=x.device).expand(x.shape[0])
    whole = trainer(x, out.token, T)
    shares = with_sum(out.logprob, out.log_kept_mass, whole, out.logprob == 0)
    sound = out.logprob.isfinite() & (T > 0) & whole.isfinite()
    logprob, mass = (torch.where(sound, a, b) for a, b in zip(shares, (out.logprob, out.log_kept_mass), strict=True))
    return replace(out, logprob=logprob, log_kept_mass=mass)


def without_pieces(right: Run, call: LmHeadSampleCall) -> SampleResult:
    return stated(call, right(call), tempered)


def first_piece_last(right: Run, call: LmHeadSampleCall) -> SampleResult:
    def trainer(x: Tensor, ids: Tensor, T: Tensor) -> Tensor:
        first = piece_of(x.shape[1])
        return tempered_in_pieces(torch.cat((x[:, first:], x[:, :first]), 1), (ids - first) % x.shape[1], T)

    return stated(call, right(call), trainer)


def with_the_chosen_id(right: Run, call: LmHeadSampleCall) -> SampleResult:
    return stated(
        call, right(call), lambda x, ids, T: torch.log_softmax(x / T[:, None], 1).gather(1, ids[:, None])[:, 0]
    )


BUGS: Final = {
    "noise_starts_anew_in_every_tile": Bug(
        "LH-01", "noise of the place in the tile, not of the token id", noise_of_the_tile
    ),
    "logits_in_bfloat16": Bug("LH-01", "logits rounded to bfloat16 on the way to the draw", logits_in_bfloat16),
    "filters_ignored": Bug(
        "LH-01", "filters accepted and ignored by the streamed kernel (RL.cu)", plant.ignores(*FILTERS)
    ),
    "sums_restart": Bug("LH-02", "the sum of the last tile alone", plant.returns(logprob=last_sum)),
    "raw_is_tempered": Bug(
        "LH-02", "raw log p of the tempered logits", plant.returns(raw_logprob=lambda c, o: o.logprob + o.log_kept_mass)
    ),
    "stores_the_logits": Bug("LH-03", "all logits are made and kept", stores_the_logits),
    "later_tiles_lose": Bug(
        "LH-04", "a later tile must win by a margin to replace the winner so far", plant.given(bias=later_tiles_lose)
    ),
    "nan_is_the_best": Bug(
        "LH-05",
        "NaN taken for the largest logit, as argmax does",
        plant.returns(token=lambda c, o: torch.where(with_status(o, Status.NAN), 0, o.token)),
    ),
    "empty_rows_give_the_last_id": Bug(
        "LH-05",
        "a tile of -inf alone leaves an invalid id (vLLM #42259)",
        plant.returns(token=lambda c, o: torch.where(with_status(o, Status.EMPTY), c.weight.shape[0] - 1, o.token)),
    ),
    "masks_start_anew_in_every_tile": Bug(
        "LH-06", "the bitmask read from its first word in every tile", plant.maps(allowed=first_words)
    ),
    "head_bias_ignored": Bug("LH-07", "the bias of the head accepted and ignored", plant.ignores("bias")),
    "bias_after_the_scale": Bug(
        "LH-07",
        "the bias added after the scale",
        plant.given(bias=lambda c: None if c.bias is None else c.bias / c.logit_scale),
    ),
    "row_bias_before_the_cap": Bug(
        "LH-08", "the bias of a row added before the cap", plant.given(logit_bias=capped_bias)
    ),
    "divides_by_the_scale": Bug("LH-09", "divides by the scale", plant.maps(logit_scale=lambda s: 1.0 / s)),
    "caps_last": Bug("LH-10", "the cap after the temperature", plant.given(softcap=hot_cap)),
    "reads_the_padding": Bug("LH-11", "a padded head read to its end", plant.ignores("vocab_size")),
    "rounds_the_hidden_states": Bug(
        "LH-12",
        "fp32 hidden states rounded to the dtype of the head",
        plant.given(hidden=lambda c: c.hidden.to(c.weight.dtype)),
    ),
    "noise_of_the_row": Bug("LH-13", "the row number enters the noise (FlashInfer)", plant.given(step=step_of_the_row)),
    "sums_depend_on_the_batch": plant.batch_dependent(
        "LH-19", "logprob", "split sums for large batches, declared invariant", lambda c: c.hidden.shape[0] > 100
    ),
    "threshold_of_the_batch": Bug(
        "LH-19",
        "where logits are infinite, the id at the threshold is the largest of the batch",
        plant.returns(
            threshold_id=lambda call, out: torch.where(
                out.threshold.isposinf(), out.threshold_id.max(), out.threshold_id
            )
        ),
    ),
    "scales_the_head_in_place": Bug(
        "LH-14", "the scale folded into the head, in place", plant.writes(lambda c: c.weight.mul_(1.0 + 2**-6))
    ),
    "no_rows_fail": Bug("LH-15", "a launch of zero blocks", plant.fails_if(lambda c: c.hidden.shape[0] == 0)),
    "scale_zero_is_taken": plant.lenient("LH-16", "a scale of 0 taken for none", logit_scale=lambda s: s or 1.0),
    "anonymous_errors": plant.anonymous_errors("LH-16"),
    "ranks_from_one": Bug("LH-18", "ranks counted from 1", plant.returns(rank=lambda c, o: o.rank + 1)),
    "differs_from_call_to_call": plant.nondeterministic("LH-20", "logprob"),
    "padding_rows_draw": Bug(
        "LH-21",
        "padding rows draw token 0",
        plant.returns(token=lambda c, o: o.token if c.slot is None else torch.where(c.slot < 0, 0, o.token)),
    ),
    "draws_anew": Bug("LH-22", "noise of a generator that runs on", plant.maps(seed=draws_anew)),
    "lora_ignored": Bug("LH-23", "an adapter of the head accepted and ignored", plant.ignores("lora")),
    "lora_after_the_scale": Bug(
        "LH-23",
        "an adapter added after the scale",
        plant.given(lora=lambda c: c.lora and replace(c.lora, scale=c.lora.scale / c.logit_scale)),
    ),
    "quantized_head_rounded": Bug(
        "LH-24", "a quantized head decoded to 16 bits", plant.maps(weight=decoded_to_16_bits)
    ),
    "tiles_without_pieces": Bug(
        "LH-25", "tiles side by side as logprob's, where linear_logprob has pieces", without_pieces
    ),
    "first_piece_last": Bug("LH-25", "the same pieces, the first one last", first_piece_last),
    "chosen_id_in_the_sum": Bug("LH-25", "log p by the sum over all ids, the chosen one too", with_the_chosen_id),
    "shares_rounded_each_by_itself": Bug(
        "LH-25",
        "log p and kept mass each right up to a rounding, and their sum off by one",
        plant.where(
            lambda c: not (c.top_k is c.top_p is c.min_p is None),
            plant.returns(logprob=lambda c, o: torch.nextafter(o.logprob, o.logprob.new_full((), -1.0))),
        ),
    ),
    "raw_off_by_a_rounding": Bug(
        "LH-25",
        "raw log p right up to a rounding",
        plant.returns(raw_logprob=lambda c, o: torch.nextafter(o.raw_logprob, o.raw_logprob.new_full((), -1.0))),
    ),
    "asks_the_host": plant.reads_a_value("LH-17", lambda c: c.hidden),
}
