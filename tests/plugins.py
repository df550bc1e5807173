"""Installed plugins for tests: a distribution fabricated in a folder, found like any pip-installed one.

site = install(tmp_path, "acme", MANIFEST)          # put `site` on sys.path, or on PYTHONPATH of a subprocess
def test_x(plug): plug("acme", MANIFEST)            # the same for this process, undone after the test
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlkernel import policy, trial

# A manifest that claims `logprob@1` and a module-level function that serves it, for any device.
GOOD = """
from rlkernel_core import Backend, Impl, Requires


def logprob(call):
    raise RuntimeError("claims only")


backend = Backend(
    name="{name}",
    api=(2, 0),
    impls=(Impl(op="logprob@1", target="{module}:logprob", requires=Requires(device="*"), supports={{"entropy"}}),),
)
"""


def module_of(dist: str) -> str:
    """Import name of the module that `install` writes for a distribution."""
    return dist.replace("-", "_").lower() + "_plugin"


def good(name: str, dist: str | None = None) -> str:
    """Source of a manifest that is in order."""
    return GOOD.format(name=name, module=module_of(dist or name))


def install(
    tmp_path: Path,
    name: str,
    source: str,
    *,
    dist: str | None = None,
    version: str = "1.0",
    group: str = "rlkernel.backends",
    attr: str = "backend",
) -> Path:
    """Fabricate an installed distribution.

    Args:
        tmp_path: folder to install under.
        name: the entry point's name.
        source: source of the plugin's module.
        dist: distribution name; default `name`.
        version: distribution version.
        group: entry-point group.
        attr: attribute of the module that the entry point names.

    Returns:
        The folder to put on sys.path; all plugins of one `tmp_path` share it.
    """
    dist = dist or name
    module = module_of(dist)
    site = tmp_path / "site"
    info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attr}\n", encoding="utf-8")
    (site / f"{module}.py").write_text(source, encoding="utf-8")
    sys.modules.pop(module, None)  # an earlier test may have imported its own
    shutil.rmtree(site / "__pycache__", ignore_errors=True)  # its time stamps are in whole seconds
    importlib.invalidate_caches()
    return site


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins are imported here at once: their trial in a process of half a second is in test_hostile_plugins.py."""
    monkeypatch.setattr(trial, "tried", lambda *_, **__: trial.Tried(None, {}))


@pytest.fixture
def plug(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """`install` into this process for the time of a test; what a plugin does when imported is remembered for all."""
    sites: set[Path] = set()
    if "XDG_CACHE_HOME" not in os.environ:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))

    def plug(name: str, source: str, **options: str) -> Path:
        site = install(tmp_path, name, source, **options)
        if site not in sites:
            monkeypatch.syspath_prepend(str(site))
            sites.add(site)
        policy.refresh()
        return site

    yield plug
    monkeypatch.undo()
    policy.refresh()
