"""A decoder of transformers by operators whose bits do not depend on the batch: `rlkernel.exact(model)`.

    exact = rlkernel.exact(model)           # or: with rlkernel.exact(model): ...
    exact.generate(prompts, max_new_tokens=64, seed=0)      # token by token, the bits of the whole sequence at once
    exact.undo()

Linear layers, RMS norms and gated MLPs are replaced by modules that hold the same parameters; attention goes through
transformers' own registry. What remains transformers' are rows of an embedding, rotary angles, and additions and
products of single elements. Ranks may share the layers (`exact_split`).

A model is taken whole or refused, with the name of the first module that has no exact form. Then its logits are
compared with those of before, and the operators that ran with those that run where batch invariance is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import rlkernel as rlk
from rlkernel.integrations import peft_lora
from rlkernel.integrations.host import registered
from rlkernel.integrations.transformers_exact import HOST, NAME, attention_by, places
from rlkernel.nn.exact import ACTIVATIONS, ExactGatedMLP, ExactLinear, ExactQuantLinear, ExactRMSNorm, activation_of
from rlkernel.nn.exact_moe import EXPERTS, ROUTERS, ExactExperts, ExactRouter
from rlkernel.nn.exact_split import SplitLinear, split_layers
from rlkernel.nn.generate import Generated, rollout
from rlkernel.nn.generate_checks import check_decisions, check_elsewhere, ends_of, prompt_rows
from rlkernel.nn.linear import QuantLinear
from rlkernel.nn.paged_decoder import Decoder, Draws
from rlkernel.spread import group_of
from rlkernel_core.decision import Decision
from rlkernel_core.errors import ArgumentError, HostError

# Ends of the names of classes without parameters that compute nothing, or single elements.
HARMLESS: Final = (
    "ModuleList", "ModuleDict", "ParameterDict", "Sequential", "Identity", "Embedding", "Dropout", "RotaryEmbedding",
    "Attention", "DecoderLayer", "SparseMoeBlock", "Model", "ForCausalLM", *ACTIVATIONS,
)  # fmt: skip
OPERATORS_USED: Final = ("linear", "rms_norm", "glu", "attention")
OF_EXPERTS: Final = ("route", "grouped_linear")
APART: Final = {torch.float64: 1e-9, torch.float32: 1e-3}  # of logits before and after, relative; 16 bits: 0.1


@dataclass(eq=False)
class Exact:
    """A model that runs by operators whose bits do not depend on the batch."""

    model: Any
    replaced: Mapping[str, torch.nn.Module]  # path -> the module that stood there
    attention: str  # the implementation of before
    ran: dict[str, str] = field(default_factory=dict)  # operator -> what ran, in the comparison with what was
    decoder: Decoder | None = field(default=None, repr=False)  # pages and graph of the last `generate`
    group: Any = None  # the ranks that share the layers

    def generate(
        self,
        prompts: Sequence[Any] | Tensor,
        *,
        max_new_tokens: int,
        seed: int | Tensor,
        attention_mask: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        stop_ids: Sequence[int] | None = None,
        pad_id: int | None = None,
        score: str = "linear_logprob",
        page: int = 16,
        max_length: int | None = None,
        check_every: int = 32,
        **elsewhere: Any,
    ) -> Generated:
        """Draw tokens behind prompts, with log-probabilities of the trainer's bits.

        Prompts are computed in one forward, equal ones once; then one step for all rows is captured and replayed. Keys
        and values are in pages that are made once: later calls of as many rows that need no more pages, with the same
        numbers, use pages and graph again and read weights as they are then. Nothing waits for the device but one look
        in `check_every` steps, whether all rows have stopped.

        Args:
            prompts: ids of each row, lists or tensors [S], or padded on either side, [B, S] integer.
            max_new_tokens: M, the most that is drawn for a row.
            seed: of the noise, below 2^31; row b draws from `2^32 seed + b`. Or what each row draws from, [B] integer:
                a row draws the same tokens in any batch. Give another one in each call, and to equal prompts in one.
            attention_mask: [B, S], 0 where a padded prompt has no token; with a tensor of prompts alone.
            temperature: of the law; 0 is greedy. A number, or one a row, [B].
            top_k: as in `rlkernel.sample`, a number or [B].
            top_p: likewise, a number or [B].
            min_p: likewise, a number or [B].
            stop_ids: a row ends with any of these. None: `eos_token_id` of the model's generation_config; (): none.
            pad_id: the id that fills a row after its end. None: `pad_token_id` of the generation_config, or else 0.
            score: the operator that the trainer calls: "linear_logprob" of hidden states and the head (tokens are drawn
                by `lm_head_sample`), or "logprob" of the model's logits (by `sample`).
            page: keys of a page; changes no bit.
            max_length: most tokens of a row, prompt included. Give it where the length of prompts varies from call to
                call: pages are then made for it. None: for this call.
            check_every: after how many steps to look whether all rows have stopped.
            elsewhere: arguments of transformers' generate, each refused with what to do.

        Returns:
            Ids, lengths and log-probabilities, these of softmax(logits / temperature) over the whole vocabulary: with
            filters the law drawn from is `logprob - log_kept_mass`. Where temperature is 0 they are of softmax(logits).

        Raises:
            ArgumentError: a parameter is out of its range, prompts are no ids, or the mask is no padding.
            HostError: undo() was called, the model is on several devices or ranks, or an operator runs whose bits may
                depend on the batch. No page is allocated before.
        """
        if self.group is not None:
            raise HostError(
                "generate() runs on one rank: draw there with exact(model, split=True), which has the bits of all ranks"
            )
        check_elsewhere(elsewhere)
        rows = prompt_rows(prompts, attention_mask, self.model.get_input_embeddings().weight.shape[0])
        given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        filters = {name: value for name, value in given.items() if value is not None}
        draws = Draws(score, temperature, filters, *ends_of(self.model, stop_ids, pad_id))
        return rollout(
            self, rows, draws, seed=seed, max_new_tokens=max_new_tokens, max_length=max_length, page=page,
            check_every=check_every,
        )  # fmt: skip

    def release(self) -> None:
        """Free pages and graph of `generate`; the next call makes new ones."""
        if self.decoder is not None:
            self.decoder.close()
        self.decoder = None

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names of the model's parameters and their values, whole where ranks share them; each rank gets all of them.

        For a rollout's copy of the model, or a checkpoint: what is shared is gathered as it is asked for, so every rank
        goes through all of it, and holds one whole weight at a time.

        Returns:
            Name and value, of the shape that the parameter has in the whole model, say [V, D] of a head; no gradient.
        """
        for name, parameter in self.model.named_parameters():
            path, _, last = name.rpartition(".")
            module = self.model.get_submodule(path)
            shared = self.group is not None and isinstance(module, SplitLinear)
            yield name, module.whole(last) if shared else parameter.detach()

    def undo(self) -> None:
        """Put back what was replaced; the second time nothing is left to do.

        Where ranks share layers, every rank calls it, and the shares are gathered.
        """
        self.release()
        now = {path: self.model.get_submodule(path) for path in self.replaced}
        for path, module in self.replaced.items():
            if isinstance(shared := now[path], SplitLinear) and module.weight is None:
                shared.give_back(module)
            _put(self.model, path, module)
        if self.replaced:
            self.model.set_attn_implementation(self.attention)
        self.replaced = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def exact(model: Any, *, group: ProcessGroup | None = None, split: bool = False, force: bool = False) -> Exact:
    """Compute a decoder of transformers (Llama, Qwen, Mistral, Gemma classes) by operators of exact bits.

    Args:
        model: a causal language model of transformers; quantized layers of `rlkernel.nn` may be in it, where ranks do
            not share them.
        group: ranks (or a DeviceMesh of one dimension) that share the layers, 2, 4 or 8, each with the same model. A
            rank keeps its heads and its part of the MLP and of the head, and the whole weights are freed.
            `model.lm_head.weight` is a share of the vocabulary, for `linear_logprob(group=)`; logits are gathered.
            `whole_parameters()` gathers weights.
        split: add in the order of ranks that share the layers, without any: a rollout on one rank beside a trainer on
            several has the same bits. A group implies it.
        force: take a version of transformers outside the window, too, if its symbols are what they were.

    Returns:
        What undoes it, by `undo()` or as a context manager.

    Raises:
        HostError: transformers is absent, of another version, or has changed; a module has no exact form, an operator
            is chosen whose bits may depend on the batch, the model does not compute what it did, or ranks cannot share
            it. Nothing is changed then.
        ArgumentError: `model` is no model of transformers.
    """
    found = HOST.require(force=force)
    utils, masks = (import_module(f"transformers.{n}") for n in ("modeling_utils", "masking_utils"))
    if not isinstance(model, utils.PreTrainedModel):
        fix = "Pass what AutoModelForCausalLM.from_pretrained gives; of PEFT's model, get_base_model()."
        raise ArgumentError("model", type(model).__name__, "is no model of transformers", fix)
    if model.config._attn_implementation == NAME:  # noqa: SLF001 it has no other name
        raise HostError(f"{type(model).__name__} is exact already; undo() what exact() returned before")
    entry = registered(HOST, found, "AttentionInterface: rlkernel", "modules of a model")
    utils.AttentionInterface.register(NAME, attention_by(entry.calls))
    masks.AttentionMaskInterface.register(NAME, places)
    made = dict(_replacements(model, force=force))
    group = group_of(group)
    if split or group is not None:
        made |= dict(split_layers(model, made, group))
    before = _logits(model)
    attention = model.config._attn_implementation  # noqa: SLF001 it has no other name
    done = Exact(model, {path: model.get_submodule(path) for path in made}, attention, group=group)
    with ExitStack() as undoing:
        undoing.callback(done.undo)
        for path, module in made.items():
            _put(model, path, module)
        model.set_attn_implementation(NAME)
        _judge(done, before)
        undoing.pop_all()
    for path in made if group is not None else ():
        if isinstance(shared := model.get_submodule(path), SplitLinear):
            shared.take(done.replaced[path])
    return done


def _put(model: Any, path: str, module: torch.nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _logits(model: Any, *, graded: bool = False) -> Tensor:
    """Of a few tokens, [1, 7, V]."""
    ids = torch.arange(7, device=model.device)[None] % model.config.get_text_config().vocab_size
    training = model.training
    try:
        with torch.set_grad_enabled(graded):
            found: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        model.train(training)
    return found.detach()


def _targets(model: Any, *, graded: bool = False) -> dict[str, Decision]:
    """What takes the calls of each operator."""
    _logits(model, graded=graded)
    experts = any(isinstance(module, ExactExperts) for module in model.modules())
    found = {op: rlk.last_decision(op) for op in (*OPERATORS_USED, *(OF_EXPERTS if experts else ()))}
    missing = [op for op, decision in found.items() if decision is None]
    if missing:
        raise HostError(f"{type(model).__name__} never calls {missing[0]}: exact() knows no such decoder")
    return {op: decision for op, decision in found.items() if decision is not None}


def _judge(done: Exact, before: Tensor) -> None:
    """Logits mean what they meant, and every operator that ran is one whose bits do not depend on the batch."""
    name = type(done.model).__name__
    apart, limit = _apart(_logits(done.model), before), APART.get(before.dtype, 0.1)
    if not apart <= limit:
        raise HostError(
            f"logits of {name} are {apart:.2g} apart from what they were, and {limit:.2g} is the most that roundings "
            "explain: something in the model is not what it was taken for. Nothing was changed"
        )
    rollout, trainer = _targets(done.model), _targets(done.model, graded=True)
    with rlk.use(need=["batch_invariant"]):
        proper = _targets(done.model)
    for op, decision in rollout.items():
        check_decisions(op, decision, proper[op], trainer[op])
        done.ran[op] = decision.target or ""


def _apart(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative."""
    want = expected.double()
    return float((found.double() - want).norm() / want.norm())


def _replacements(model: Any, *, force: bool) -> Iterator[tuple[str, torch.nn.Module]]:
    """Paths, and the module that replaces the one there; a module comes before those within it."""
    for path, module in model.named_modules():
        _refuse(path, module, force=force)
        name, made = type(module).__name__, _replacement(path, module)
        if made is not None:
            yield path, made
        elif peft_lora.is_layer(module):
            continue  # it stays: its products are layers within it
        elif not name.endswith(HARMLESS) or (_has_parameters(module) and not isinstance(module, torch.nn.Embedding)):
            raise HostError(
                f"{path} is a {name}, which has no exact form: exact() takes decoders of the Llama, Qwen, Mistral and "
                "Gemma classes, and experts of Qwen3-MoE and Mixtral. Nothing was changed"
            )


def _refuse(path: str, module: Any, *, force: bool) -> None:
    """Raise HostError for a module that computes, or may in training, what depends on more than its token."""
    if peft_lora.is_layer(module):
        peft_lora.check(path, module, force=force)
    if any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope")):
        raise HostError(
            f"{path} has rotary angles of kind {module.rope_type}, which depend on the longest sequence of a "
            "batch. Nothing was changed"
        )
    if getattr(module, "jitter_noise", None):
        raise HostError(
            f"{path}.jitter_noise is {module.jitter_noise}, which in training changes what a rollout saw: set "
            "router_jitter_noise of the configuration to 0. Nothing was changed"
        )


def _replacement(path: str, module: Any) -> torch.nn.Module | None:
    """The exact form of a module that has one of its own."""
    name = type(module).__name__
    if type(module) is torch.nn.Linear:
        return ExactLinear(module)
    if isinstance(module, QuantLinear):
        return ExactQuantLinear(module)
    if all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return ExactGatedMLP(module, activation_of(f"{path}.act_fn", module.act_fn))
    if name in ROUTERS:
        return ExactRouter.of(module)
    if name in EXPERTS:
        return ExactExperts(module, activation_of(f"{path}.act_fn", module.act_fn))
    return _norm(path, module) if name.endswith("RMSNorm") else None


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


@torch.no_grad()
def _norm(path: str, module: Any) -> ExactRMSNorm:
    """With the offset that gives what the module gives: 0, or 1 in Gemma's."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    if weight is not None and eps is not None:
        x = torch.linspace(-2, 3, 3 * weight.shape[0], device=weight.device).view(3, -1).to(weight.dtype)
        want = module(x)
        for offset in (0.0, 1.0):
            norm = ExactRMSNorm(weight, eps, offset)
            if _apart(norm(x), want) <= APART.get(want.dtype, 0.02):
                return norm
    raise HostError(f"{path} is a {type(module).__name__} that is not the norm rms_norm computes. Nothing was changed")
