"""A decoder's forward over keys and values in pages: the prompts of all rows, and the step that is captured.

Legend: B rows · N tokens of a step, of all rows · G keys of a page · P pages of a row · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.integrations import peft_lora
from rlkernel.integrations.transformers_pages import cache_argument, paged_cache
from rlkernel.nn.linear import QuantLinear
from rlkernel.nn.page_plan import PagePlan
from rlkernel.policy import current
from rlkernel_core.errors import HostError
from rlkernel_core.spec.sampling import Status

STATING: Final = ("batch_invariant", "trainer_bits")  # what such a draw needs
SCORES: Final = {"linear_logprob": "lm_head_sample", "logprob": "sample"}  # what scores -> what draws


class Draws(NamedTuple):
    """How tokens are drawn and scored."""

    score: str  # one of SCORES
    temperature: float | Tensor  # one, or one a row [B]
    filters: Mapping[str, Any]  # top_k, top_p, min_p: those that are given
    stop_ids: tuple[int, ...]
    pad_id: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph bakes in: numbers, and of tensors the dtype alone."""
        baked = {n: x.dtype if isinstance(x, Tensor) else x for n, x in self.params.items()}
        return self.score, tuple(baked.items()), self.stop_ids, self.pad_id

    @property
    def alike(self) -> bool:
        """Whether all rows draw by one law that is not greedy."""
        per_row = any(isinstance(x, Tensor) for x in self.filters.values())
        return not per_row and not isinstance(self.temperature, Tensor) and self.temperature != 0

    @property
    def params(self) -> dict[str, Any]:
        """What sampling operators call them."""
        return {"temperature": self.temperature, **self.filters}


class Runs(NamedTuple):
    """What runs."""

    draws: str | None  # target of the operator that draws
    scores: str | None  # of the one that scores
    stated: bool  # a draw states the bits of the score (`trainer_bits`), so that nothing is scored


class Decoder:
    """Pages, the state of each row, and one captured step; made once and used again for calls that fit."""

    def __init__(self, model: Any, draws: Draws, ran: Runs, rows: int, pages: int, width: int, page: int) -> None:
        device = model.device
        self.model, self.draws, self.page, self.pages = model, draws, page, pages
        self.place, self.ran = (model.device, model.dtype, *adapters(model)), ran
        self.cache_argument = cache_argument()
        self.cache = paged_cache(model.config.get_text_config().num_hidden_layers, pages, page)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.one_each = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stop = torch.tensor(draws.stop_ids, dtype=torch.int64, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)  # the last one drawn
        self.used = torch.zeros(rows, dtype=torch.int32, device=device)  # keys in pages
        self.drawn = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens drawn
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self.params = {n: x.to(device, copy=True) if isinstance(x, Tensor) else x for n, x in draws.params.items()}
        self.step: Any = None

    def fits(self, model: Any, draws: Draws, ran: Runs, plan: PagePlan, page: int) -> bool:
        """Whether a call can use these pages, and the graph."""
        mine = self.draws.key, self.ran, self.page, self.table.shape[0], self.place
        theirs = draws.key, ran, page, len(plan.table), (model.device, model.dtype, *adapters(model))
        return mine == theirs and self.pages >= plan.pages and self.table.shape[1] >= plan.width

    def start(self, prompts: Sequence[tuple[int, ...]], plan: PagePlan, draws: Draws, seed: Tensor) -> list[Tensor]:
        """Compute the prompts, each once, and draw the first token of each row: as `decode`."""
        for name, given in draws.params.items():
            if isinstance(given, Tensor):
                self.params[name].copy_(given)
        self.seed.copy_(seed)
        table = [[*row, *[0] * (self.table.shape[1] - len(row))] for row in plan.table]
        self.table.copy_(torch.tensor(table, device="cpu"))
        self.used.copy_(torch.tensor([len(ids) for ids in prompts], device="cpu"))
        self.drawn.zero_()
        self.alive.fill_(True)
        packed = [prompts[row] for row in plan.first]
        ends = [0, *accumulate(len(ids) for ids in packed)]
        G, at = self.page, [i for ids in packed for i in range(len(ids))]
        slots = [plan.table[row][i // G] * G + i % G for row in plan.first for i in range(len(prompts[row]))]
        places = {
            "cu_seq_lens_q": self._tensor(ends).int(),
            "page_table": self.table[self._tensor(plan.first)],
            "seqused_k": self._tensor([len(ids) for ids in packed]).int(),
            "max_k": max(len(ids) for ids in packed),
        }
        ids = self._tensor([i for ids in packed for i in ids])
        last = self._tensor([ends[i + 1] - 1 for i in plan.prompt])
        drawn = self._draw(ids, self._tensor(at), self._tensor(slots), places, last)
        if plan.copies:
            self.cache.copy(*self._tensor(plan.copies).unbind(1))
        return drawn

    def decode(self) -> list[Tensor]:
        """One token more of each row: its id [B], its log-probability [B], and with filters the mass kept [B]."""
        at, G = self.used.long(), self.page
        slots = self.table.gather(1, (at // G)[:, None])[:, 0].long() * G + at % G
        places = {
            "cu_seq_lens_q": self.one_each,
            "page_table": self.table,
            "seqused_k": self.used + 1,
            "max_k": self.table.shape[1] * G,
        }
        self.used.add_(1)  # a row that has stopped goes on writing into its own pages, which nobody reads
        return self._draw(self.token, at, slots, places, self.one_each[:-1])

    def _draw(self, ids: Tensor, at: Tensor, slots: Tensor, places: Mapping[str, Any], last: Tensor) -> list[Tensor]:
        """The model over ids [N] at positions [N], whose keys go to slots [N], and draws from its rows `last` [B]."""
        self.cache.step.slots = slots
        told = {"input_ids": ids[None], "position_ids": at[None], self.cache_argument: self.cache, "use_cache": True}
        given: tuple[Tensor, ...]
        if self.draws.score == "linear_logprob":
            hidden = self.model.base_model(**told, **places).last_hidden_state[0].index_select(0, last)
            weight, law = head_of(self.model, hidden.dtype)
            given = hidden, weight
        else:
            given, law = (self.model(**told, **places, logits_to_keep=last).logits[0],), {}
        # What has keys now stands before the token: its place in the sequence, as in every host.
        op = SCORES[self.draws.score]
        with stating(op) if self.ran.stated else nullcontext():
            draw = getattr(rlk, op)(*given, **law, **self.params, seed=self.seed, step=self.used)
        if self.ran.stated:
            sound = (draw.status & ~Status.FALLBACK) == 0  # beside NaN and +inf a score is NaN
            logprob = torch.where(sound, draw.logprob + draw.log_kept_mass, torch.nan)
        else:
            temperature = scored_at(self.params["temperature"])
            logprob = getattr(rlk, self.draws.score)(*given, draw.token, **law, temperature=temperature).logprob
        self.token.copy_(torch.where(self.alive, draw.token, self.draws.pad_id))
        found = [self.token, *(torch.where(self.alive, x, 0) for x in (logprob, draw.log_kept_mass))]
        self.drawn.add_(self.alive)
        self.alive.logical_and_((self.token[:, None] != self.stop).all(1))
        return found if self.draws.filters else found[:2]

    def _tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.table.device)

    def captured(self) -> Any:
        """The step as a graph, recorded where there is none, and again where what it reads has moved."""
        if self.step is None:
            state = [self.token, self.used, self.drawn, self.alive]
            # The first tensor says where, as nothing is passed. What `mutates` names is copied. Pages need not be: what
            # warm-up writes, the first replay writes too.
            self.step = rlk.capture(
                self.decode, (), static=[self.table, self.model, self._static], mutates=state, warmup=1
            )
        self.step.check_static()
        return self.step

    def _static(self) -> list[Any]:
        """What the step reads in place beside the model's parameters."""
        quantized = [m.weight for m in self.model.modules() if isinstance(m, QuantLinear)]
        pages = [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
        params = [x for x in self.params.values() if isinstance(x, Tensor)]
        return [*quantized, *pages, *params, self.one_each, self.seed, self.stop]

    def close(self) -> None:
        """Let go of the graph, which holds this, and so the pages."""
        if self.step is not None:
            self.step.close()
        self.step = None


def adapters(model: Any) -> Iterator[Any]:
    """What a graph bakes in of a model's adapters beside tensors: where there are some, and their scales."""
    for path, module in model.named_modules():
        if isinstance(module, QuantLinear) and module.lora is not None:
            yield path, module.lora_scale
    yield from peft_lora.baked(model)


def head_of(model: Any, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """A model's head [V, D] as it multiplies hidden states of a dtype, and what else it does to logits."""
    head = model.get_output_embeddings()
    if peft_lora.is_layer(head) or (isinstance(head, QuantLinear) and head.lora is not None):
        raise HostError("the head has LoRA, which neither the draw nor the score by its weight would see; merge it")
    weight = rlk.dequantize(head.weight, dtype=dtype) if isinstance(head, QuantLinear) else head.weight
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return weight, {"bias": getattr(head, "bias", None), "softcap": softcap}


def stating(op: str) -> AbstractContextManager[Any]:
    """The scope in which an operator draws by what states the bits of the score, and whatever else is needed."""
    need = {*current().policy.of(op).need, *STATING}
    return rlk.use(**{op: {"need": sorted(need)}})


def scored_at(temperature: float | Tensor) -> float | Tensor:
    """The temperature of the law that tokens are scored under: 1 where the draw is greedy, whose law has one token."""
    if isinstance(temperature, Tensor):
        return torch.where(temperature > 0, temperature, 1)
    return temperature if temperature > 0 else 1.0
