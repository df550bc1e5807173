"""transformers: `generate` that draws with `rlkernel.sample`, and a model's loss by `rlkernel.logprob`.

    from rlkernel.integrations import transformers

    drawing = transformers.drawing(seeds=[1, 2, 3])
    model.generate(**inputs, do_sample=True, top_p=0.9, custom_generate=drawing)
    drawing.logprob  # [B, T] under the law it drew from

    model.loss_function = transformers.causal_lm_loss()
    model(**inputs, labels=labels).loss

Both are handed to a call or a model by transformers' own means, so that nothing is patched. Processors and warpers are
those of `generate`, and so is the law; what differs is the draw. Noise is keyed by a request's seed and the place of
its token in the sequence, the prompt included and padding left out: a request draws the same whoever else is in the
batch, wherever it stands, and what it draws in vLLM.

Legend: B requests · T tokens drawn · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, registered
from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

_MIXIN: Final = "transformers.generation.utils"
HOST: Final = Host(
    name="transformers",
    distribution="transformers",
    versions=">=5.15,<5.25",
    tested="5.24.0",
    does="sample in generate, by custom_generate; logprob as a model's loss function",
    symbols=(
        Symbol(
            _MIXIN,
            "GenerationMixin._prefill",
            "self, input_ids, generation_config, model_kwargs, is_first_iteration",
        ),
        Symbol(
            _MIXIN,
            "GenerationMixin._update_model_kwargs_for_generation",
            "self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens",
        ),
        Symbol(_MIXIN, "GenerationMixin.prepare_inputs_for_generation"),
        Symbol(
            "transformers.loss.loss_utils",
            "ForCausalLMLoss",
            "logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, kwargs",
        ),
        Symbol("transformers.modeling_utils", "PreTrainedModel.loss_function"),
    ),
)


class Drawing:
    """What `custom_generate` takes; `logprob` and `tokens` are those of the last call."""

    def __init__(self, seeds: Sequence[int], entry: Active) -> None:
        self.seeds, self.entry = tuple(seeds), entry
        self.tokens: Tensor | None = None  # [B, T] int64, the pad token after the end
        self.logprob: Tensor | None = None  # [B, T] fp32 under the processed law; 0 after the end
        self.lengths: list[int] = []  # [B] tokens of each row, the last one included
        self.prompts: list[list[int]] = []  # [B] ids of each prompt, without padding
        self.processors: tuple[Any, ...] = ()  # what changed the logits before a draw
        self.criteria: tuple[Any, ...] = ()  # what could end a row
        self.most: int | None = None  # new tokens that a row may have
        self.config: Any = None  # the generation_config of the call

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,  # [B, P]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        """The decoding loop of `generate`.

        Raises:
            ArgumentError: not one seed a row, or equal prompts that would draw the same tokens.
        """
        import torch

        import rlkernel as rlk
        from rlkernel.nn.generate_checks import check_siblings

        B, device = input_ids.shape[0], input_ids.device
        if len(self.seeds) != B:
            raise ArgumentError("seeds", len(self.seeds), f"must be one for each of {B} rows", "Pass a seed a request.")
        seeds = torch.tensor(self.seeds, dtype=torch.int64, device=device)
        greedy = 0.0 if not generation_config.do_sample else 1.0
        pad = generation_config._pad_token_tensor
        going = torch.ones(B, dtype=torch.bool, device=device)
        lengths = torch.zeros_like(seeds)
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        if generation_config.do_sample:
            check_siblings("seeds", prompts, self.seeds)
        longest = generation_config.max_length  # padding counts
        most = None if longest is None else longest - input_ids.shape[1]
        tokens: list[Tensor] = []
        said: list[Tensor] = []
        place = torch.tensor([len(ids) for ids in prompts], device=device)
        with torch.no_grad():
            outputs = model._prefill(input_ids, generation_config, model_kwargs)
            while True:
                model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
                scores = logits_processor(input_ids, outputs.logits[:, -1].float())
                draw = rlk.sample(scores, temperature=greedy, seed=seeds, step=place + len(tokens))
                self.entry.calls["sample"] += 1
                token = draw.token if pad is None else torch.where(going, draw.token, pad)
                tokens.append(token)
                lengths += going
                said.append(torch.where(going, draw.logprob, 0.0))
                input_ids = torch.cat([input_ids, token[:, None]], dim=-1)
                going = going & ~stopping_criteria(input_ids, None)
                if not going.any():
                    break
                length = 1 if model_kwargs["use_cache"] else None
                inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=length, **model_kwargs)
                outputs = model(**inputs, return_dict=True)
        self.tokens, self.logprob = torch.stack(tokens, 1), torch.stack(said, 1)
        self.lengths, self.prompts = lengths.tolist(), prompts
        self.processors, self.criteria = tuple(logits_processor), tuple(stopping_criteria)
        self.most, self.config = most, generation_config
        return input_ids


def _prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Ids of each row of [B, P], without padding; a mask of another form than [B, P] has none."""
    rows: list[list[int]] = input_ids.tolist()
    if mask is None or mask.shape != input_ids.shape:
        return rows
    return [[i for i, kept in zip(*row, strict=True) if kept] for row in zip(rows, mask.tolist(), strict=True)]


def drawing(seeds: Sequence[int], *, force: bool = False) -> Drawing:
    """A decoding loop for `model.generate(custom_generate=...)`.

    Args:
        seeds: of the requests, one a row.
        force: take a version outside the window, too, if its symbols are what they were.

    Raises:
        HostError: transformers is absent, of a version that this was not made for, or has changed.
    """
    return Drawing(seeds, registered(HOST, HOST.require(force=force), "generate(custom_generate=drawing)"))


def causal_lm_loss(*, force: bool = False) -> Callable[..., Tensor]:
    """What `model.loss_function` takes, in place of `ForCausalLMLoss`: the mean of -log p over the labels that count.

    Logits of 16 bits are read as they are and summed in fp32; no copy of them in fp32 is made.

    Raises:
        HostError: as `drawing`.
    """
    entry = registered(HOST, HOST.require(force=force), "model.loss_function = causal_lm_loss()")

    def loss(
        logits: Tensor,  # [B, T, V]
        labels: Tensor | None,  # [B, T]
        vocab_size: int,  # noqa: ARG001  theirs
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,  # [B, T]
        **_: Any,
    ) -> Tensor:
        import torch

        import rlkernel as rlk

        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
        ids = shift_labels.to(logits.device)
        counts = ids != ignore_index
        total = -rlk.logprob(logits.view(*ids.shape, -1), ids, mask=counts).logprob.sum()
        entry.calls["logprob"] += 1
        if num_items_in_batch is None:
            return total / counts.sum()
        return total / torch.as_tensor(num_items_in_batch, device=total.device)

    return loss
