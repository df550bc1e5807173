"""Planted bugs in sample@1, most of them seen in released code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common import philox
from rlkernel_common.row_statistics import Sums, join, partial_softmax, softmax_stats
from rlkernel_common.shares import with_sum
from rlkernel_conformance.mutants import number_masks, plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import LogitBias, SampleResult, Status, TokenLists
from rlkernel_torch.sample import Best, sample

FILTERS: Final = ("top_k", "top_p", "min_p")
_DRAWS: Final = count(1)
_KEPT: Final[dict[tuple[int, int], tuple[SampleResult, Tensor, Any]]] = {}


def draws_by(best: Best) -> How:
    """Plain torch with another way to draw a token from scores, kept ids and random words."""
    return lambda right, call: sample(call, best)


def noised_by(gumbel: Callable[[Tensor], Tensor]) -> How:
    """Plain torch with other noise of the random words."""
    return draws_by(lambda score, keep, words: torch.where(keep, score + gumbel(words), -torch.inf).argmax(1))


def infinite_noise_on_all(score: Tensor, keep: Tensor, words: Tensor) -> Tensor:
    u = (words >> 8).double() * 2.0**-24
    return (torch.where(keep, score, -torch.inf) - torch.log(-torch.log1p(-u))).argmax(1)


def filtered(call: Any) -> bool:
    return any(getattr(call, name) is not None for name in FILTERS)


def without_filters(call: Any) -> Any:
    return replace(call, **dict.fromkeys(FILTERS))


def with_status(out: Any, status: Status) -> Tensor:
    """[N] bool: rows whose status has this bit."""
    return (out.status & status.value) != 0


def summed(width: int, *, start: int = 0) -> How:
    """The two shares by sums over tiles of a width, merged from one of them on, those before it last."""

    def run(right: Run, call: SampleCall) -> SampleResult:
        out, x = right(call), call.logits.float()
        if call.vocab_size is not None or call.slot is not None or not call.logits.isfinite().all():
            return out
        T = torch.as_tensor(call.temperature, dtype=x.dtype, device=x.device).expand(x.shape[0])
        part = partial_softmax(x, out.token, T, width, None, moment=False)
        sums = Sums(part.rest.top.roll(-start, -1), part.rest.total.roll(-start, -1), None)
        whole = softmax_stats(join(part._replace(rest=sums), T), T).logprob.to(out.logprob.dtype)
        shares = with_sum(out.logprob, out.log_kept_mass, whole, out.logprob == 0)
        sound = out.logprob.isfinite() & (T > 0) & whole.isfinite()
        logprob, mass = (
            torch.where(sound, a, b) for a, b in zip(shares, (out.logprob, out.log_kept_mass), strict=True)
        )
        return replace(out, logprob=logprob, log_kept_mass=mass)

    return run


def draws_before_it_filters(right: Run, call: SampleCall) -> SampleResult:
    return replace(right(call), token=right(without_filters(call)).token)


def raw_for_processed(right: Run, call: Any) -> Any:
    out = right(replace(call, raw_logprob=True))
    logprob = torch.where(out.logprob.isfinite(), out.raw_logprob, out.logprob)
    return replace(out, logprob=logprob, raw_logprob=out.raw_logprob if call.raw_logprob else None)


def almost_greedy(call: SampleCall) -> Tensor:
    T = torch.as_tensor(call.temperature, device=call.logits.device)
    return torch.where(T == 0, 1e-5, T)


def step_of_the_row(call: SampleCall) -> Any:
    rows = torch.arange(call.logits.shape[0], device=call.logits.device)
    return call.step + rows if call.slot is None else call.step


def crossing_token_dropped(right: Run, call: SampleCall) -> SampleResult:
    if call.top_p is None:
        return right(call)
    kept = right(call).kept_count.long()
    cut = (torch.as_tensor(call.top_p) < 1) & (kept > 1)
    return right(replace(call, top_k=torch.where(cut, kept - 1, kept.clamp(min=1)), top_p=None))


def min_p_before_the_temperature(call: SampleCall) -> Any:
    if call.min_p is None:
        return None
    T = torch.as_tensor(call.temperature)
    m = torch.as_tensor(call.min_p).broadcast_to(call.logits.shape[:1])
    return torch.where((m > 0) & (T > 0), m ** (1 / T), m)


def k_wraps_around(call: SampleCall) -> Any:
    if call.top_k is None:
        return None
    k = torch.as_tensor(call.top_k)
    return torch.where((k > 0) & (k < call.logits.shape[1]), (k - 1) % 8 + 1, k)


def first_parameters(right: Run, call: Any) -> Any:
    """The parameters of the first row for all rows."""
    given = {n: getattr(call, n) for n in ("temperature", *FILTERS)}
    return right(replace(call, **{n: x[:1] for n, x in given.items() if isinstance(x, Tensor)}))


def repetition_divides(call: SampleCall) -> Tensor:
    asked, logits = call.penalties, call.logits
    if asked is None or asked.repetition is None:
        return logits
    r = torch.as_tensor(asked.repetition, dtype=logits.dtype).reshape(-1, 1)
    return torch.where(logits < 0, logits / r / r, logits) if r.shape[0] in {1, logits.shape[0]} else logits


def prompt_is_present(call: SampleCall) -> Any:
    asked, N = call.penalties, call.logits.shape[0]
    if asked is None or asked.prompt_bits is None or asked.output_ids is None or call.slot is not None:
        return asked
    ids = torch.arange(call.logits.shape[1], device=call.logits.device)
    said = (asked.prompt_bits[:, ids >> 5] >> (ids & 31)) & 1
    counts = torch.ones_like(asked.output_ids) if asked.output_counts is None else asked.output_counts
    return replace(
        asked,
        output_ids=torch.cat((asked.output_ids, ids.expand(N, -1)), 1),
        output_counts=torch.cat((counts, said.to(counts.dtype)), 1),
    )


def bias_overwrites(call: SampleCall) -> LogitBias | None:
    if (bias := call.bias) is None:
        return None
    entry = torch.arange(bias.ids.shape[0], device=call.logits.device)
    row = torch.searchsorted(bias.offsets.long().contiguous(), entry, right=True)
    again = (bias.ids[:, None] == bias.ids) & (row[:, None] == row) & (entry[:, None] < entry)
    return LogitBias(bias.ids, torch.where(again.any(1), 0.0, bias.values), bias.offsets)


def wrapped_bans(call: SampleCall) -> TokenLists | None:
    banned = call.banned
    return None if banned is None else TokenLists(banned.ids % call.logits.shape[1], banned.offsets)


def bans_for_all(call: SampleCall) -> TokenLists | None:
    if call.banned is None:
        return None
    N, n = call.logits.shape[0], call.banned.ids.shape[0]
    return TokenLists(call.banned.ids.repeat(N), torch.arange(N + 1) * n)


def poison_spreads(call: SampleCall, out: SampleResult) -> Tensor:
    bad = with_status(out, Status.NAN).any()
    return torch.where(bad, -out.log_kept_mass - 1, out.log_kept_mass)


def any_temperature(T: Any) -> Any:
    return torch.where((T >= 0) & T.isfinite(), T, 1.0) if isinstance(T, Tensor) else T


def entropy_without_filters(right: Run, call: SampleCall) -> SampleResult:
    out = right(call)
    return out if out.entropy is None else replace(out, entropy=right(without_filters(call)).entropy)


def remembers_by_address(right: Run, call: SampleCall) -> SampleResult:
    key = (call.logits.data_ptr(), torch.as_tensor(call.seed).data_ptr())
    if key not in _KEPT:
        _KEPT[key] = right(call), call.logits, call.seed  # both live on, so no other has their address
    return _KEPT[key][0]


def with_a_shared_seed(call: SampleCall) -> SampleCall:
    seed = torch.as_tensor(call.seed).reshape(-1).expand(call.logits.shape[0])
    return replace(call, seed=seed) if call.slot is None else call


def draws_anew(seed: Any) -> Any:
    return seed ^ next(_DRAWS)


def ids_of_8_bits_are_signed(call: SampleCall) -> TokenLists | None:
    banned = call.banned
    if banned is None or banned.ids.dtype is not torch.uint8:
        return banned
    return TokenLists(banned.ids.to(torch.int8), banned.offsets)


BUGS: Final = {
    "draws_anew": Bug(
        "SA-39",
        "noise of a generator that runs on: the same request draws another token (vLLM without a seed)",
        plant.maps(seed=draws_anew),
    ),
    # what is drawn, and its log-probability
    "draws_before_it_filters": Bug(
        "SA-01", "the draw is made before the filters, of the whole vocabulary", draws_before_it_filters
    ),
    "another_generator": Bug(
        "SA-02",
        "a generator of its own: every law holds, no noise is that of the contract",
        plant.maps(seed=lambda s: s ^ 0x5DEECE66D),
    ),
    "fixed_seed": Bug(
        "SA-03",
        "fixed seed (WebGPU kernels): all requests draw alike",
        plant.maps(seed=lambda s: torch.full_like(torch.as_tensor(s), 42)),
    ),
    "shared_blocks": Bug(
        "SA-03",
        "two draws from one block of random words: neighboring steps are the same draw",
        plant.maps(step=lambda s: s >> 1),
    ),
    "short_counter": Bug("SA-03", "only the low word of the step is used", plant.maps(step=lambda s: s & 0xFFFFFFFF)),
    "noise_of_24_bits": Bug(
        "SA-04",
        "24-bit uniforms (vLLM #51367): no mass beyond 17 nats",
        noised_by(lambda words: -torch.log(-torch.log1p(-((words >> 8).double() + 0.5) * 2.0**-24))),
    ),
    "uniform_of_one": Bug(
        "SA-04",
        "u rounds to 1 in fp32: infinite noise (RL.cu, vLLM #43249)",
        noised_by(lambda words: -torch.log(-torch.log(philox.uniform(words).float())).double()),
    ),
    "noise_in_bfloat16": Bug(
        "SA-04",
        "noise in bfloat16 (Liger): tails in steps of 0.06 nats",
        noised_by(lambda words: philox.gumbel(words, torch.float64).bfloat16().double()),
    ),
    "raw_for_processed": Bug(
        "SA-05", "log p of the raw law for a truncated, tempered draw (vLLM's default)", raw_for_processed
    ),
    "half_precision": Bug(
        "SA-05",
        "z - lse in half precision",
        plant.returns(logprob=lambda c, o: o.logprob.bfloat16().to(o.logprob.dtype)),
    ),
    "no_kept_mass": Bug(
        "SA-06",
        "the kept mass forgotten: off by S for every token (trl #6789)",
        plant.returns(log_kept_mass=lambda c, o: torch.where(o.log_kept_mass.isfinite(), 0.0, o.log_kept_mass)),
    ),
    "greedy_is_almost_greedy": Bug(
        "SA-07", "T = 0 clamped to 1e-5: ties are drawn, log p is not 0", plant.given(temperature=almost_greedy)
    ),
    "stream_ignored": Bug(
        "SA-30", "stream accepted and ignored: drafts and acceptance share noise", plant.given(stream=0)
    ),
    "noise_of_the_row": Bug("SA-31", "the row number enters the noise (FlashInfer)", plant.given(step=step_of_the_row)),
    "noise_of_the_place": Bug(
        "SA-35",
        "noise by place in the sorted order, not by token id",
        plant.given(stream=lambda c: c.stream ^ (filtered(c) << 20)),
    ),
    # filters and edits
    "off_is_another_path": Bug(
        "SA-08",
        "another kernel as soon as a filter is passed, whatever its value",
        plant.returns(logprob=lambda c, o: o.logprob * (1 + 2**-22 * filtered(c))),
    ),
    "keeps_ties": Bug("SA-09", "everything tied with the k-th is kept (FlashInfer #3774)", plant.given(tie="keep_all")),
    "top_p_ignored": Bug("SA-10", "top-p accepted and ignored (RL-Kernel, AITER)", plant.ignores("top_p")),
    "crossing_token_dropped": Bug("SA-10", "the crossing token of the nucleus dropped", crossing_token_dropped),
    "min_p_before_the_temperature": Bug(
        "SA-11", "min-p on the law before the temperature", plant.given(min_p=min_p_before_the_temperature)
    ),
    "k_wraps_around": Bug("SA-12", "k counted modulo the width of a tile", plant.given(top_k=k_wraps_around)),
    "joint_is_not_joint": Bug(
        "SA-13", "one order of filters for all names", plant.maps(filter_order={"joint": "topk_topp"})
    ),
    "nucleus_never_first": Bug(
        "SA-14", "one order of filters for all names", plant.maps(filter_order={"topp_topk": "topk_topp"})
    ),
    "tie_ignored": Bug("SA-15", "tie='keep_all' accepted and ignored", plant.ignores("tie")),
    "first_rows_parameters": Bug(
        "SA-16",
        "the first row's parameters for all rows (RL.cu)",
        plant.where(lambda c: c.slot is None, first_parameters),
    ),
    "repetition_divides": Bug(
        "SA-17",
        "repetition divides negative logits, which makes repeats likelier",
        plant.given(logits=repetition_divides),
    ),
    "prompt_is_present": Bug(
        "SA-17", "tokens of the prompt count for the presence penalty", plant.given(penalties=prompt_is_present)
    ),
    "bias_overwrites": Bug(
        "SA-18", "a scatter that overwrites: of repeated ids the last counts", plant.given(bias=bias_overwrites)
    ),
    "masked_tokens_win": Bug(
        "SA-19", "infinite noise on -inf is NaN, and argmax loves NaN (SGLang #25106)", draws_by(infinite_noise_on_all)
    ),
    "sign_bits_lost": Bug(
        "SA-19", "words read as signed: bit 31 is lost", plant.maps(allowed=lambda words: words & 0x7FFFFFFF)
    ),
    "foreign_ids_wrap": Bug("SA-20", "negative ids index from the end", plant.given(banned=wrapped_bans)),
    "bans_for_all": Bug(
        "SA-20", "offsets ignored: the bans of all rows for every row", plant.given(banned=bans_for_all)
    ),
    # what comes beside the token, and how arguments are treated
    "reads_padding": Bug("SA-21", "padding columns read as logits (xgrammar #220)", plant.ignores("vocab_size")),
    "padding_draws": Bug(
        "SA-22", "padding rows of a graph draw as the first request", plant.maps(slot=lambda x: x.clamp(min=0))
    ),
    "poison_spreads": Bug(
        "SA-23", "one NaN poisons the batch (vLLM #20177)", plant.returns(log_kept_mass=poison_spreads)
    ),
    "empty_rows_give_the_last_id": Bug(
        "SA-23",
        "a row without a law gives the last id",
        plant.returns(token=lambda c, o: torch.where(with_status(o, Status.EMPTY), c.logits.shape[1] - 1, o.token)),
    ),
    "any_temperature_is_taken": Bug(
        "SA-24", "temperatures without meaning taken for 1", plant.maps(temperature=any_temperature)
    ),
    "raw_is_tempered": Bug(
        "SA-25",
        "the raw log p of processed logits",
        plant.returns(raw_logprob=lambda c, o: o.logprob + o.log_kept_mass),
    ),
    "top_n_always_processed": Bug(
        "SA-26", "top log-probabilities always of the processed law (SGLang)", plant.given(top_n_from="processed")
    ),
    "top_n_always_raw": Bug(
        "SA-27", "top log-probabilities always of the raw law (vLLM)", plant.given(top_n_from="raw")
    ),
    "entropy_without_filters": Bug("SA-28", "entropy of the law before the filters", entropy_without_filters),
    "capped_list_is_the_law": Bug(
        "SA-29",
        "log p normalized over the capped list (SGLang #34037)",
        plant.returns(
            logprob=lambda c, o: torch.where(with_status(o, Status.KEPT_OVERFLOW), o.logprob * 0.9, o.logprob)
        ),
    ),
    "sums_depend_on_the_batch": plant.batch_dependent(
        "SA-32", "logprob", "sums that depend on the batch, declared invariant", lambda c: c.logits.shape[0] > 100
    ),
    "sums_depend_on_the_batch_without_filters": plant.batch_dependent(
        "SA-32", "logprob", "the same on the way without filters", lambda c: c.logits.shape[0] > 1 and not filtered(c)
    ),
    "differs_from_call_to_call": plant.nondeterministic(
        "SA-33", "logprob", "floating atomics, declared deterministic (FlashInfer #4831)"
    ),
    "step_on_the_host": Bug(
        "SA-34",
        "the step is read on the host and baked into the graph (Megatron #5697)",
        plant.maps(step=lambda s: torch.tensor(s.tolist(), device=s.device) if isinstance(s, Tensor) else s),
    ),
    "remembers_by_address": Bug("SA-34", "results remembered by address (KernelBench)", remembers_by_address),
    "divides_in_place": Bug(
        "SA-36",
        "logits divided by the temperature in place (Triebwerk)",
        plant.writes(lambda c: c.logits.mul_(1.0 + 2**-6)),
    ),
    "moves_the_global_generator": Bug(
        "SA-36", "draws from the global generator beside its own (AITER)", plant.draws_from_the_global_generator
    ),
    "no_rows_fail": Bug("SA-37", "a launch of zero blocks", plant.fails_if(lambda c: c.logits.shape[0] == 0)),
    "shared_noise_is_taken": plant.lenient(
        "SA-38", "one seed for a batch is spread over it: all rows draw alike", with_a_shared_seed
    ),
    "anonymous_errors": plant.anonymous_errors("SA-38"),
    "sums_in_tiles_of_another_width": Bug("SA-40", "log p by sums over tiles of 512, logprob's have 1024", summed(512)),
    "tiles_merged_from_the_second_on": Bug(
        "SA-40", "the same tiles, merged with the first one last", summed(1024, start=1)
    ),
    "shares_rounded_each_by_itself": Bug(
        "SA-40",
        "log p and kept mass each right up to a rounding, and their sum off by one",
        plant.returns(logprob=lambda c, o: torch.nextafter(o.logprob, o.logprob.new_full((), -1.0))),
    ),
    "min_p_ignored_beside_penalties": Bug(
        "SA-97",
        "min-p ignored where rows are edited first",
        plant.where(lambda c: c.penalties is not None, plant.ignores("min_p")),
    ),
    "ids_of_8_bits_are_signed": Bug(
        "SA-98",
        "banned ids of uint8 read as int8: those above 127 are lost",
        plant.given(banned=ids_of_8_bits_are_signed),
    ),
    **number_masks.OF_DRAWS,
}
