"""A cache of transformers that keeps keys and values in pages: made once, written in place, read by `attention`.

What a decoder's forward needs beside it are keyword arguments that transformers hands to every layer's attention:
`page_table`, `seqused_k`, `max_k` and `cu_seq_lens_q`.

Legend: N pages · G keys of a page · T tokens of a step, of all rows · H heads of keys · D width.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def cache_argument() -> str:
    """The argument of a model's forward, and of `generate`, that takes a cache: `cache`, or what it was before 5.24.

    `forward` takes what `prepare_inputs_for_generation` hands it, so that one signature says it for every model.
    """
    mixin = import_module("transformers.generation.utils").GenerationMixin
    names = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


def paged_cache(layers: int, pages: int, page: int) -> Any:
    """A `transformers.Cache` of N `pages` of `page` keys for each layer, which the first step makes.

    A step is one batch entry with the tokens of all rows, [1, H, T, D], and `cache.step.slots` [T] int64 says where
    each of them goes: row `slot % G` of page `slot // G`. What attention gets are the pages, [N, G, H, D].
    """
    utils = import_module("transformers.cache_utils")  # imported where it is used, so the classes are made here
    kind = type("PagedLayer", (_Layer, utils.CacheLayerMixin), {})
    cache: Any = type("PagedCache", (_Pages, utils.Cache), {})(layers=[kind() for _ in range(layers)])
    cache.step = Step()
    for layer in cache.layers:
        layer.sizes, layer.step = (pages, page), cache.step
    return cache


class Step:
    """What layers know of the step that runs."""

    slots: Tensor  # [T] int64


class _Layer:
    """Keys and values of a layer."""

    keys: Tensor  # [N, G, H, D]
    values: Tensor  # [N, G, H, D]
    is_initialized: bool
    sizes: tuple[int, int]  # N, G
    step: Step

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeros of the heads, width, dtype and device of what comes."""
        for name, x in (("keys", key_states), ("values", value_states)):
            setattr(self, name, x.new_zeros(*self.sizes, x.shape[1], x.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [1, H, T, D] each, and give all pages."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.flatten(0, 1).index_copy_(0, self.step.slots, new[0].transpose(0, 1))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is read: the table says whose keys are whose."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Rows have lengths of their own; positions are given."""
        return 0

    def get_max_length(self) -> int:
        """What all pages hold."""
        return self.sizes[0] * self.sizes[1]


class _Pages:
    """All layers."""

    layers: list[Any]
    step: Step

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Whole pages [n] of indices `source` into those of `target`."""
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                held.index_copy_(0, target, held.index_select(0, source))
