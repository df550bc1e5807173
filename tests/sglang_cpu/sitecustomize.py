"""Puts the stubs of SGLang's compiled parts into each process of an engine, where PYTHONPATH has this folder."""

from tests.sglang_stub import stub

stub()
