"""Logits of a model for `verify`: hidden states of a sequence at once, the head over a few rows at a time.

The head's products are fp32 sums, as of `lm_head_sample` and `linear_logprob`; score "logprob" takes the model's own.

Legend: T tokens · n rows of a block · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel.agree import decoder
from rlkernel.agree import pretrained as folders
from rlkernel_core import checks
from rlkernel_core.errors import ConfigError

ROWS: Final = 64  # of a block: 40 MB of fp32 logits at V = 150,000
SCORES: Final = ("linear_logprob", "logprob")  # of `Exact.generate`
BUILTIN: Final = "builtin"  # names `rlkernel.agree.builtin()`, whose weights are random and always the same


class ModelLogits:
    """A causal language model of transformers as `verify` takes it.

    Args:
        model: on one device.
        name: for messages.
        score: see `pretrained`.

    Raises:
        ConfigError: a head that does more than a product and a bias.
        ArgumentError: an unknown score.
    """

    def __init__(self, model: Any, name: str = "model", score: str = "linear_logprob") -> None:
        checks.choice("score", score, SCORES)
        text = model.config.get_text_config()
        shaped = [one for one in folders.SHAPED if getattr(text, one, None) not in {None, 1.0}]
        if shaped:
            raise ConfigError(f"{name}: {', '.join(shaped)} in the configuration; pass verify() a callback of your own")
        self.model = folders.Pretrained(name, model)
        self.name, self.vocab = name, self.model.vocab
        own, bias = score == "logprob", self.model.bias
        self.weight = None if own else self.model.head.detach().float()  # [V, D]
        self.bias = None if own or bias is None else bias.detach().float()  # [V]

    @torch.no_grad()
    def __call__(self, ids: Tensor, first: int) -> Iterator[Tensor]:
        """Logits [n, V] in fp32 of the rows from `first` on, for ids [T]."""
        head: Any = self.model.model.get_output_embeddings()
        hidden = self.model.full(ids[None].to(self.model.head.device))[0, first:]
        for rows in hidden.split(ROWS):
            if self.weight is None:
                yield head(rows[None])[0].float()
            else:
                yield torch.nn.functional.linear(rows.float(), self.weight, self.bias)


class Builtin:
    """The built-in decoder as `verify` takes it, to try the check without a model of one's own."""

    def __init__(self, **more: Any) -> None:
        self.model = decoder.builtin(**more)
        self.name, self.vocab = self.model.name, self.model.vocab

    @torch.no_grad()
    def __call__(self, ids: Tensor, first: int) -> Iterator[Tensor]:
        """Logits [n, V] in fp32 of the rows from `first` on, for ids [T].

        Raises:
            ArgumentError: longer than its context.
        """
        hidden = self.model.full(ids[None].to(self.model.head.device))[0, first:]
        yield (hidden @ self.model.head.T).float()


def pretrained(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    exact: bool = False,
    score: str = "linear_logprob",
) -> ModelLogits:
    """A model of a local folder with its weights.

    Args:
        path: folder of `save_pretrained`.
        dtype: of weights and hidden states; fp32 by default, so that errors are those of the rollout alone.
        device: where it runs; draws run on the CPU.
        exact: by `rlkernel.exact`, for rollouts that were drawn so, with the same dtype and kernels.
        score: as `exact.generate` was given it; "logprob" draws from the model's own logits, rounded to its dtype.

    Raises:
        HostError: transformers is not installed; or as `rlkernel.exact`.
        ConfigError: no weights there, or a head that does more than a product and a bias.
        ArgumentError: an unknown score.
    """
    checks.choice("score", score, SCORES)
    if not (path.is_dir() and any(found for kind in folders.WEIGHTS for found in path.glob(kind))):
        raise ConfigError(f"{path}: no weights there; give a folder of save_pretrained")
    found = folders.pretrained(path, dtype=dtype, device=device, exact=exact)
    return ModelLogits(found.model, found.name, score)
