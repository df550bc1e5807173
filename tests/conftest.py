"""Fixtures of the whole suite."""

from tests.command_line import cli
from tests.plugins import plug
from tests.process_groups import alone

__all__ = ["alone", "cli", "plug"]
