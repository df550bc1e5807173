"""vLLM's own linear layers, loader and table of methods on a CPU: a block of them filled from a packed checkpoint."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HIDDEN, INNER, HEAD = 256, 512, 32
SHAPES = {
    "q_proj": (256, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, 256),
    "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
}  # fmt: skip


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=made) / shape[1] ** 0.5).to(dtype) for name, shape in SHAPES.items()}


@contextmanager
def engine(rank: int = 0, world: int = 1, at: Path | None = None):
    """What vLLM's layers ask of their process."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    path = at or Path(tempfile.mkdtemp()) / "store"
    os.environ["VLLM_DIST_IDENT"] = path.parent.name  # CPU workers name the memory that their ranks share by it
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(world, rank, f"file://{path}", 0, backend="gloo")
        initialize_model_parallel(world)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def block(config: Any) -> torch.nn.Module:
    """The linear layers of a decoder block, as vLLM's Qwen2 makes them; `load_weights` is vLLM's."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.models.qwen2 import Qwen2Model
    from vllm.model_executor.models.utils import AutoWeightsLoader

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_config = config
            asked = {"bias": False, "quant_config": config}
            self.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, 8, 4, prefix="block.qkv_proj", **asked)
            self.o_proj = RowParallelLinear(256, HIDDEN, prefix="block.o_proj", **asked)
            self.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], prefix="block.gate_up_proj", **asked)
            self.down_proj = RowParallelLinear(INNER, HIDDEN, prefix="block.down_proj", **asked)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv, _ = self.qkv_proj(x)
            out, _ = self.o_proj(qkv[..., : self.qkv_proj.num_heads * HEAD].contiguous())
            gate, up = self.gate_up_proj(out)[0].chunk(2, -1)
            return self.down_proj(torch.nn.functional.silu(gate) * up)[0]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_config = config
            if config is not None:
                config.packed_modules_mapping = {
                    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
                    "gate_up_proj": ["gate_proj", "up_proj"],
                }
            self.block = Block()

        def load_weights(self, stream: Any) -> set[str]:
            return AutoWeightsLoader(self).load_weights(stream, mapper=Qwen2Model.hf_to_vllm_mapper)

    return Model()


def finish(model: torch.nn.Module) -> None:
    """What vLLM's loader does after it has read a model."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
