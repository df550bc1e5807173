"""Every word that a command takes, misspelt: exit code 2, one line that says so, nothing written, no traceback.

The words are read from the commands' own signatures: a new command, or a new option, that is in neither table below
fails the first test.
"""

from __future__ import annotations

import inspect
import typing
from importlib import import_module
from pathlib import Path

import pytest

from rlkernel.cli import COMMANDS

# What a word of this name is misspelt as, and what the answer must hold: the nearest right word, where there is one.
BAD: dict[str, tuple[tuple[str, str], ...]] = {
    "area": (("sandbx", "'sandbox'"),),
    "arch": (("h100", "sm90"), ("orin", "sm87"), ("sm999", "sm90"), ("gfx943", "gfx942"), ("banana", "sm90")),
    "backend": (("tirton", "'triton'"),),
    "baseline": (("compil", "'compile'"),),
    "clause": (("WH-99", "WH-"),),
    "config": (("here.tom", "here.toml"),),
    "configurations": (("here.tom", "here.toml"),),
    "device": (("banana", "cpu"), ("mi300", "--device cuda --arch gfx942"), ("H100", "--arch sm90"), ("rocm", "cuda")),
    "dtype": (("bf16", "bfloat16"), ("float61", "'float16'"), ("banana", "bfloat16")),
    "level": (("bit", "'bits'"),),
    "format": (("int4_g12", "'int4_g128'"),),
    "manifest": (("no.such:backend", "no.such"),),
    "need": (("entrpy", "'entropy'"),),
    "only": (("late_thred", "'late_thread'"),),
    "op": (("logprb", "'logprob'"),),
    "order": (("tirton", "'triton'"), (",", "--order auto")),
    "peers": (("lger", "'liger'"),),
    "profile": (("quik", "quick"),),
    "rollout": (("tirton", "'triton'"),),
    "sandbox": (("namespace", "namespaces"),),
    "scheme": (("gtpq", "'gptq'"),),
    "score": (("sampl", "sampler"), ("rlkernl", "rlkernel"), ("linear_logprb", "'linear_logprob'")),
    "size": (("toi", "'toy'"),),
    "suite": (("logprb", "'logprob'"),),
    "threshold": (("banana", "5%"),),
    "token_file": (("here.tom", "here.toml"),),
    "trainer": (("tirton", "'triton'"),),
    "waivers": (("here.tom", "here.toml"),),
}
# A command line that options are added to, so short that an option which is passed over would not take long.
BASE: dict[str, tuple[str, ...]] = {
    "agree": ("--tokens", "1", "--sequences", "1"),
    "aot": ("build", "--target", "sm90"),
    "bench": ("bits", "--suite", "logprob", "--work", "no-such-work"),
    "conformance": ("run", "torch", "--op", "whiten", "--clause", "WH-02"),
    "demo": ("--steps", "1"),
    "explain": ("logprob",),
    "judge": ("kernel.py", "--op", "whiten", "--clause", "WH-02", "--no-timing"),
    "new-backend": ("acme",),
    "quant": ("convert", "here.safetensors", "made.safetensors"),
    "verify-rollout": ("here.toml", "--model", "builtin"),
    "warmup": ("--op", "whiten", "--tokens", "8", "--length", "8"),
}
# Options of one action of a command.
OTHER: dict[tuple[str, str], tuple[str, ...]] = {
    ("bench", "peers"): ("run", "--suite", "logprob", "--work", "no-such-work"),
    ("conformance", "arch"): ("orders", "triton", "--op", "logprob"),
    ("conformance", "dtype"): ("orders", "triton", "--op", "logprob"),
    ("conformance", "level"): ("orders", "triton", "--op", "logprob"),
    ("bench", "threshold"): ("compare", "here.toml", "here.toml"),
    ("judge", "area"): ("attack",),
    ("judge", "only"): ("attack",),
    ("judge", "token_file"): ("serve", "--port", "0"),
}
# Words without a name of their own, and those that are files to read or to write: the whole line, and the answer.
LINES: dict[tuple[str, str], tuple[tuple[tuple[str, ...], str], ...]] = {
    ("agree", "model"): ((("here.tom",), "here.toml"),),
    ("agree", "ran"): ((("--ran", "here.toml"), "--record"),),
    ("agree", "record"): ((("--record", "here.tom"), "here.toml"),),
    ("agree", "output"): ((("--output", "here.toml"), "--force"), (("--output", "nowhere/made"), "nowhere")),
    ("aot", "action"): ((("biuld",), "'build'"),),
    ("aot", "file"): ((("list", "here.tom"), "here.toml"), (("list",), "FILE")),
    ("aot", "out"): ((("build", "--target", "sm90", "--out", "here.toml"), "--force"),),
    ("aot", "target"): (
        (("build", "--target", "h100"), "sm90"),
        (("build", "--target", "sm_999"), "sm90"),
        (("build",), "--target"),
    ),
    ("bench", "action"): ((("rum",), "'run'"),),
    ("bench", "out"): ((("bits", "--out", "here.toml"), "--force"),),
    ("bench", "words"): (
        (("report", "her"), "here"),
        (("compare", "her", "here.toml"), "here"),
        (("bits", "here.tom", "here.toml"), "here.toml"),
        (("evidence", "her"), "here"),
        (("compare",), "2"),
    ),
    ("conformance", "action"): ((("rum",), "'run'"),),
    ("conformance", "size"): (
        (("orders", "triton", "--op", "logprob", "--size", "8y"), "NxV"),
        (("orders", "triton", "--op", "logprob", "--size", "8x0"), "NxV"),
    ),
    ("conformance", "words"): (
        (("run", "tirton"), "'triton'"),
        (("parity", "torch", "tirton"), "'triton'"),
        (("report", "here.tom"), "here.toml"),
        (("compare", "here.tom", "here.toml"), "here.toml"),
        (("table", "here.tom"), "here.toml"),
        (("run",), "1"),
    ),
    ("explain", "op"): ((("logprb",), "'logprob'"),),
    ("judge", "files"): ((("kernl.py", "--op", "whiten"), "kernel.py"), (("kernel.py",), "--op")),
    ("lock", "output"): ((("--output", "here.toml"), "--force"), (("--output", "nowhere/made"), "nowhere")),
    ("lock", "run"): ((("--from", "here.tom"), "here.toml"),),
    ("memory", "file"): ((("here.safetensor",), "here.safetensors"),),
    ("new-backend", "into"): ((("acme", "--into", "full"), "exists"),),
    ("new-backend", "name"): ((("Acme!",), "'acme'"),),
    ("quant", "action"): ((("convret", "here.safetensors"), "'convert'"),),
    ("quant", "source"): ((("inspect", "here.safetensor"), "here.safetensors"),),
    ("quant", "target"): (
        (("convert", "here.safetensors", "kept.safetensors"), "--force"),
        (("convert", "here.safetensors", "full"), "is there already"),
        (("convert", "here.safetensors", "nowhere/made.safetensors"), "nowhere"),
        (("convert", "here.safetensors"), "target"),
    ),
    ("schema", "form"): ((("confg",), "'config'"),),
    ("status", "run"): ((("her",), "here"),),
    ("verify-rollout", "asked"): ((("here.toml", "--model", "builtin", "--asked", "here.tom"), "here.toml"),),
    ("verify-rollout", "file"): ((("here.tom", "--model", "builtin"), "here.toml"),),
    ("verify-rollout", "model"): ((("here.toml", "--model", "her"), "here"), (("here.toml",), "--model")),
}
# Words that this command does not misspell: a backend may name a device of its own.
OF_ANOTHER = {
    ("agree", "score", "rlkernl"), ("judge", "score", "sampl"), ("judge", "score", "linear_logprb"),
    ("verify-rollout", "score", "sampl"), ("verify-rollout", "score", "rlkernl"), ("new-backend", "device", "banana"),
}  # fmt: skip
# What may be any text: patterns, names of people and of weights, addresses, and folders that a run makes or adds to.
FREE = {
    ("bench", "work"), ("conformance", "report"), ("demo", "out"), ("judge", "host"), ("new-backend", "author"),
    ("quant", "skip"), ("verify-rollout", "weights"), ("agree", "weights"),
}  # fmt: skip


def words(command: str) -> list[str]:
    """The parameters of a command that take text or a path."""
    parameters = inspect.signature(import_module(COMMANDS[command][0]).command, eval_str=True).parameters
    kinds = {name: set(_kinds(p.annotation)) for name, p in parameters.items()}
    return [name for name, found in kinds.items() if found & {str, Path}]


def _kinds(annotation: object) -> typing.Iterator[object]:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        parts = parts[:1]
    yield annotation
    for part in parts:
        yield from _kinds(part)


ALL = [(command, word) for command in COMMANDS for word in words(command)]


def lines(command: str, word: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Command lines with this word misspelt, and what the answers must hold."""
    if (command, word) in LINES:
        return LINES[command, word]
    base, option = OTHER.get((command, word), BASE.get(command, ())), f"--{word.replace('_', '-')}"
    return tuple(
        ((*base, option, value), said) for value, said in BAD[word] if (command, word, value) not in OF_ANOTHER
    )


def test_every_word_of_every_command_is_misspelt_below_or_free() -> None:
    assert [(c, w) for c, w in ALL if (c, w) not in {*LINES, *FREE} and w not in BAD] == []


CASES = [(c, *line) for c, w in ALL if (c, w) not in FREE for line in lines(c, w)]


@pytest.mark.parametrize(
    ("command", "arguments", "said"), CASES, ids=[" ".join((c, *arguments)) for c, arguments, _ in CASES]
)
def test_a_misspelt_word_is_one_line_and_nothing_is_written(cli, command, arguments, said) -> None:
    from safetensors.torch import save_file
    from torch import zeros

    save_file({"a": zeros(2, 2)}, "here.safetensors")
    save_file({"a": zeros(2, 2)}, "kept.safetensors")
    Path("here.toml").touch()
    Path("here").mkdir()
    Path("full").mkdir()
    Path("full", "mine").touch()
    Path("kernel.py").write_text("def whiten(x, mask=None, **_):\n    return x\n")
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    result = cli(command, *arguments)
    assert (result.exit_code, result.stdout, type(result.exception)) == (2, "", SystemExit), result.output
    assert (result.stderr.count("\n"), result.stderr[:7]) == (1, "error: "), result.stderr
    assert said in result.stderr
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before
