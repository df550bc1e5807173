"""Builds of the wheel: it carries the bundle for Jetson Orin and Thor, compiled here where it is not there yet.

Compiling needs torch, Triton and rlkernel-triton in the environment that builds (`python -m build --no-isolation`), and
no GPU. An editable install carries none: `rlkernel aot build` makes one where it is looked for.
"""

from __future__ import annotations

import json
import zipfile
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
            RuntimeError: it cannot be compiled here, or the one that lies there is not for both chips; the message
                says what is missing.
        """
        if version == "editable":
            return
        path = Path(self.root) / BUNDLE
        line = f"rlkernel aot build --target {' --target '.join(TARGETS)} --out {path}"
        again = f"Make it again with Triton 3.7 or newer: {line}"
        if not path.exists():
            try:
                from rlkernel_triton.aot.command import build
            except ImportError as error:
                raise RuntimeError(
                    f"the wheel carries compiled kernels, and {error.name} is missing to compile them: install torch, "
                    "triton and rlkernel-triton, and build with --no-isolation; or put a bundle at "
                    f"{path}: {line}"
                ) from error
            build(TARGETS, out=str(path))
        try:
            with zipfile.ZipFile(path) as bundle:
                there = json.loads(bundle.read("bundle.json"))["targets"]
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise RuntimeError(f"{path} is no bundle ({error}). {again}") from error
        if lacking := [target for target in TARGETS if target not in there]:
            raise RuntimeError(f"{path} has {', '.join(there)}, and the wheel is for {', '.join(lacking)} too. {again}")
        build_data["artifacts"].append(str(BUNDLE))
