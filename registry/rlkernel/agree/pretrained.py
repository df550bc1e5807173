"""A transformers model as both sides run it: from a local folder, or from a configuration with random weights.

Legend: B sequences · T tokens · D hidden.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.integrations.transformers_pages import cache_argument
from rlkernel_core.errors import ConfigError, HostError
from rlkernel_core.paths import missing

WEIGHTS: Final = ("*.safetensors", "*.bin")
# What a head does beside a product and a bias; the sides would have to be told.
SHAPED: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


class Pretrained:
    """A causal language model with its own KV cache."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model, self.cache_argument = name, model.eval(), cache_argument()
        head = model.get_output_embeddings()
        self.vocab, self.head, self.bias = head.weight.shape[0], head.weight, getattr(head, "bias", None)

    def start(self, sequences: int, length: int) -> None:  # noqa: ARG002 the cache grows by itself
        """An empty cache."""
        self.cache: Any = None

    @torch.no_grad()
    def step(self, ids: Tensor, at: int) -> Tensor:  # noqa: ARG002 the cache knows where it is
        """Hidden states [B, D] after one token a sequence."""
        out = self.model.base_model(input_ids=ids[:, None], use_cache=True, **{self.cache_argument: self.cache})
        self.cache = out[self.cache_argument]
        hidden: Tensor = out.last_hidden_state[:, -1]
        return hidden

    @torch.no_grad()
    def full(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, D]."""
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden


def pretrained(
    path: Path, *, seed: int = 0, dtype: torch.dtype | None = None, device: str = "cpu", exact: bool = False
) -> Pretrained:
    """A model of a local folder; with random weights where the folder has none, or where `path` is a config.json.

    With `exact` it runs by `rlkernel.exact`.

    Raises:
        HostError: transformers is not installed; or as `rlkernel.exact`.
        ConfigError: no configuration there, or a head that does more than a product and a bias.
    """
    if not path.exists():
        raise ConfigError(f"{missing(path)}; give a folder of save_pretrained, or a config.json")
    if find_spec("transformers") is None:
        raise HostError(
            "a model of your own needs transformers; pip install transformers, or leave MODEL away for the built-in one"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: no config.json there; give a folder of save_pretrained, or a config.json")
    transformers = import_module("transformers")
    auto, config = transformers.AutoModelForCausalLM, transformers.AutoConfig.from_pretrained(file)
    shaped = [name for name in SHAPED if getattr(config.get_text_config(), name, None) not in {None, 1.0}]
    if shaped:
        raise ConfigError(f"{path}: {', '.join(shaped)} in the configuration; such heads are not measured yet")
    if path.is_dir() and any(found for kind in WEIGHTS for found in path.glob(kind)):
        model, name = auto.from_pretrained(path, local_files_only=True, dtype=dtype or torch.float32), str(path)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(config, dtype=dtype or torch.float32)
        name = f"{path}, random weights"
    model = model.to(device)
    if exact:
        rlk.exact(model)
    return Pretrained(f"{name}, exact" if exact else name, model)
