"""Builds of the wheel: it carries the bundle for Jetson Orin and Thor, compiled here where it is not there yet.

Compiling needs torch, Triton and rlkernel-triton in the environment that builds (`python -m build --no-isolation`), and
no GPU. An editable install carries none: `rlkernel aot build` makes one where it is looked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGETS: Final = ("sm_87", "sm_110")
BUNDLE: Final = Path("rlkernel_jetson", "bundles", "jetson.zip")


class BundleHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Puts the bundle into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the bundle unless it lies there.

        Raises:
            RuntimeError: it cannot be compiled here; the message says what is missing.
        """
        if version == "editable":
            return
        path = Path(self.root) / BUNDLE
        if not path.exists():
            try:
                from rlkernel_triton.aot.command import build
            except ImportError as error:
                raise RuntimeError(
                    f"the wheel carries compiled kernels, and {error.name} is missing to compile them: install torch, "
                    "triton and rlkernel-triton, and build with --no-isolation; or put a bundle at "
                    f"{path}: rlkernel aot build --target {' --target '.join(TARGETS)} --out {path}"
                ) from error
            build(TARGETS, out=str(path))
        build_data["artifacts"].append(str(BUNDLE))
