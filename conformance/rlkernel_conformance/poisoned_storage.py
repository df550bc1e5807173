"""Fresh storage with chosen content: whatever a call does not write shows in its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
FRESH: Final = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


class Poisoned(TorchDispatchMode):
    """Within it, storage that is asked for without content holds NaN and the largest integers, or 1."""

    def __init__(self, *, high: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._high = high

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Fill what is fresh."""
        out = func(*args, **(kwargs or {}))
        if func in FRESH and out.layout is torch.strided and out.device.type != "meta":
            if out.dtype is torch.bool:
                out.fill_(self._high)
            elif out.is_floating_point() or out.is_complex():
                out.fill_(torch.nan if self._high else 1)
            else:
                out.fill_(torch.iinfo(out.dtype).max if self._high else 1)
        return out
