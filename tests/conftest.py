"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

import rlkernel as rlk
from rlkernel import installation
from tests.command_line import cli
from tests.plugins import plug, untried
from tests.process_groups import alone

__all__ = ["alone", "cli", "plug", "untried"]


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that install something are those of a released version, wherever the tests run."""
    monkeypatch.setattr(installation, "clone", lambda: None)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The test starts, and the next one too, without decisions, warnings given or configuration."""
    rlk.refresh()
    yield
    rlk.configure()
    rlk.refresh()


@pytest.fixture
def untraced(fresh: None) -> None:
    """And without graphs of torch.compile."""
    import torch

    torch._dynamo.reset()
