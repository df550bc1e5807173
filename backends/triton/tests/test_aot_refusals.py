"""What a bundle cannot be built of or for is refused before anything is compiled, and the refusal says what to do."""

import json
from types import SimpleNamespace

import pytest
import triton

from rlkernel_core.errors import ArgumentError, RLKernelError
from rlkernel_triton.aot import compiling
from rlkernel_triton.aot.command import build
from rlkernel_triton.aot.compiling import compiled, compiler
from rlkernel_triton.aot.configurations import Configuration
from tests.aot_calls import of_rows

SWEEP = next(b for b in of_rows() if b.kernel.endswith(":partial_softmax"))


def test_a_configuration_of_a_changed_kernel_is_refused_when_it_is_compiled() -> None:
    stale = Configuration(SWEEP.kernel, (*SWEEP.types, ("gone", "i32")), SWEEP.constants)
    with pytest.raises(Exception, match=r"has changed since it was recorded: gone\. Record the launch again"):
        list(compiled([stale], "sm_87"))


@pytest.mark.parametrize(
    ("targets", "options", "said"),
    [
        (["sm_87"], {"ptx": 87}, r"--ptx: PTX for sm_87 is 80 to 85.*; got 87\. Leave it out"),
        (["sm_87"], {"ptx": 60}, r"--ptx: PTX for sm_87 is 80 to 85.*; got 60\."),  # LLVM would end the process
        (["sm_87", "sm_90"], {"ptx": 85}, r"--ptx: sm_90 keeps no PTX"),
        (["sm_87"], {"jobs": -1}, r"--jobs: is no number of processes; got -1\. Leave it out"),
        (["sm_87"], {"out": "."}, r"--out: is a folder.*; got \.\. Name a file"),
        (["sm_87"], {"out": "file/x.zip"}, r"--out: its folder cannot be made.*Name another"),
        (
            ["sm_87"],
            {"configurations": "gone.jsonl"},
            r"--configurations: gone\.jsonl does not exist.*; got gone\.jsonl\. AOT_MISSING=FILE",
        ),
        (
            ["sm_87", "sm_90"],
            {"configurations": "orin.jsonl"},
            r"orin.jsonl has none for .* on sm_90: leave that target out",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_compiled(
    targets, options, said, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    one = {"op": "logprob", "target": "sm_87", **SWEEP.document()}
    (tmp_path / "orin.jsonl").write_text(json.dumps(one))
    with pytest.raises(RLKernelError, match=said):
        build(targets, **{"out": str(tmp_path / "x.zip")} | options)


@pytest.mark.parametrize(
    ("targets", "ops", "said"),
    [(["sm_88"], [], "unknown target 'sm_88'"), (["sm_87"], ["capture"], "unknown operator of bundles 'capture'")],
)
def test_unknown_words_are_refused(targets, ops, said, tmp_path) -> None:
    with pytest.raises(Exception, match=said):
        build(targets, ops, out=str(tmp_path / "x.zip"))


def test_a_target_that_the_compiler_does_not_know_is_named_before_anything_is_compiled(tmp_path, monkeypatch) -> None:
    old = tmp_path / "ptxas"  # knows no chip, as that of Triton 3.6 does not know Thor
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    tool = SimpleNamespace(path=str(old))
    monkeypatch.setattr(compiling.triton.knobs, "nvidia", SimpleNamespace(ptxas=tool, ptxas_blackwell=tool))
    compiling._assembled.cache_clear()
    with pytest.raises(
        ArgumentError, match=r"target: .*knows sm_110a: .*triton .*; got sm_110\. .*Triton 3\.7 or newer"
    ):
        build(["sm_110"], out=str(tmp_path / "x.zip"), keep_going=True)
    compiling._assembled.cache_clear()


def test_a_bundle_names_the_assembler_that_the_environment_named(tmp_path, monkeypatch) -> None:
    old = tmp_path / "ptxas"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n")
    old.chmod(0o755)
    monkeypatch.setattr(compiling, "_assemblers", lambda: {"ptxas": str(old)})
    assert compiler() == {"triton": triton.__version__, "ptxas": "12.6.85"}
