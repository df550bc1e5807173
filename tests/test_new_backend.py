"""`rlkernel new-backend`: what it writes, under which names, and what it says of what is yet to be written."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import rlkernel as rlk
from rlkernel import plugin_template
from rlkernel.plugin_template import READY, Plugin, files
from rlkernel_conformance.example_calls import base
from rlkernel_core.errors import ArgumentError, NotWrittenError, UnknownNameError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from tests.command_line import answer
from tests.plugins import install

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "backends" / "template"
TO_WRITE = [op for op in OPERATORS if op not in READY]


def run_source(source: str) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "written"}
    exec(compile(source, "<written>", "exec"), namespace)
    return namespace


def test_the_template_in_the_repository_is_what_the_command_writes() -> None:
    """After a change of the texts: remove backends/template and let the command write it anew."""
    listing = ["git", "ls-files", "--cached"]  # others come and go while tests run beside this one
    listed = subprocess.run(listing, cwd=TEMPLATE, capture_output=True, text=True, check=True).stdout.split()
    written = files(Plugin("template", author="The rlkernel authors"))
    assert {path: (TEMPLATE / path).read_text() for path in listed} == written


def test_its_licence_is_that_of_the_project() -> None:
    assert files(Plugin("acme"))["LICENSE"] == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("op", READY)
def test_an_operator_alone_brings_what_it_needs(tmp_path, monkeypatch, op) -> None:
    plugin_template.write(Plugin("acme", (op,)), tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import_module("rlkernel_acme.self_test").self_test("cpu")
    for module in [name for name in sys.modules if name.startswith("rlkernel_acme")]:
        del sys.modules[module]


def test_its_manifest_claims_what_was_asked_for_on_the_devices_asked_for() -> None:
    written = files(Plugin("acme", ("whiten", "logprob", "verify"), ("acme", "cuda")))
    manifest = run_source(written["rlkernel_acme/__init__.py"])["backend"]
    assert [(i.op, i.requires.device) for i in manifest.impls] == [
        ("whiten@1", ("acme", "cuda")),
        ("logprob@1", ("acme", "cuda")),
    ]


@pytest.mark.parametrize("op", TO_WRITE)
class TestAnOperatorWithoutAnImplementation:
    def test_is_a_function_of_its_record(self, op) -> None:
        module = run_source(files(Plugin("acme", (op,)))[f"rlkernel_acme/{op}.py"])
        (parameter,) = inspect.signature(module[op]).parameters.values()
        returns = inspect.signature(module[op]).return_annotation
        assert (module[parameter.annotation], returns) == (
            OPERATORS[op].record,
            OPERATORS[op].signature.return_annotation,
        )
        assert returns in module

    def test_says_what_to_write_when_it_is_called(self, op) -> None:
        module = run_source(files(Plugin("acme", (op,)))[f"rlkernel_acme/{op}.py"])
        with pytest.raises(NotWrittenError, match=f"write rlkernel_acme/{op}.py, claim it in rlkernel_acme/__init__"):
            module[op](OPERATORS[op].call(**base(op)))

    def test_is_not_claimed(self, op) -> None:
        assert run_source(files(Plugin("acme", (op,)))["rlkernel_acme/__init__.py"])["backend"].impls == ()

    def test_has_its_claim_ready_in_the_manifest(self, op) -> None:
        manifest = files(Plugin("acme", (op,)))["rlkernel_acme/__init__.py"].replace("import Backend\n", "import *\n")
        claimed = re.sub(r"^( *)# (?!rlkernel_acme)", r"\1", manifest, flags=re.MULTILINE)
        (impl,) = run_source("from rlkernel_core import Impl, Requires\n" + claimed)["backend"].impls
        assert (impl.op, impl.target) == (OPERATORS[op].id, f"rlkernel_acme.{op}:{op}")

    def test_names_every_feature_that_may_be_claimed(self, op) -> None:
        source = files(Plugin("acme", (op,)))[f"rlkernel_acme/{op}.py"]
        assert [f for f in OPERATORS[op].feature_names if f"    {f}: " not in source] == []


def test_bad_arguments_of_an_unwritten_operator_are_named_all_the_same(monkeypatch) -> None:
    written = files(Plugin("acme", ("sample",)))
    module = ModuleType("rlkernel_acme.sample")
    exec(compile(written["rlkernel_acme/sample.py"], "<written>", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "rlkernel_acme.sample", module)
    impl = Impl(op="sample@1", target="rlkernel_acme.sample:sample", requires=Requires(device="cpu"))
    with rlk.registered(Backend(name="acme", api=API_VERSION, impls=(impl,))), rlk.use("acme"):
        with pytest.raises(ArgumentError, match="temperature: must be"):
            rlk.sample(**{**base("sample"), "temperature": -1.0})
        with pytest.raises(NotWrittenError, match="write rlkernel_acme/sample.py"):
            rlk.sample(**base("sample"))


def test_what_is_not_claimed_is_refused_as_absent(cli, tmp_path) -> None:
    written = files(Plugin("acme", ("sample",)))
    install(tmp_path, "acme", written["rlkernel_acme/__init__.py"])
    (tmp_path / "site" / "rlkernel_acme.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "site"))
        result = cli("explain", "sample", "--order", "acme", "--json")
        proof = cli("conformance", "run", "acme", "--op", "sample")
    reasons = [
        f"{r['reason']['stage']}/{r['reason']['code']}" for r in answer(result)["rejected"] if r["backend"] == "acme"
    ]
    assert reasons == ["operator/absent"]
    assert (proof.exit_code, "acme implements none of sample on cpu" in proof.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "must be lower-case"),
        ("Acme", "must be lower-case letters.* Say 'acme'"),
        ("9lives", "must be lower-case letters.* Say 'lives'"),
        ("acme.ai", "Say 'acme-ai'"),
        ("acme--ai", "Say 'acme-ai'"),
        ("acme-", "Say 'acme'"),
        ("../acme", "Say 'acme'"),
        ("ä" * 3, "Say 'acme'"),
        ("a" * 41, "40 at most"),
        ("rlkernel-acme", "is given without 'rlkernel-'.* Say 'acme'"),
        ("auto", "rlkernel's own"),
        ("core", "rlkernel's own"),
        ("conformance", "rlkernel's own"),
        ("torch", "rlkernel's own"),
        ("triton", "rlkernel's own"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_with_one_that_can(name, problem) -> None:
    with pytest.raises(ArgumentError, match=problem):
        Plugin(name)


def test_the_name_of_an_installed_backend_is_refused(plug) -> None:
    plug("acme_ai", "", dist="some-wheel")
    with pytest.raises(ArgumentError, match="is the name of an installed backend; got 'acme-ai'"):
        Plugin("acme-ai")


def test_the_name_of_an_installed_distribution_is_refused(plug) -> None:
    plug("other", "", dist="rlkernel-acme")
    with pytest.raises(ArgumentError, match="rlkernel-acme is installed already"):
        Plugin("acme")


def test_the_name_of_a_package_that_can_be_imported_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "rlkernel_acme.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArgumentError, match="would hide the package rlkernel_acme"):
        Plugin("acme")


def test_an_unknown_operator_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'logprob'"):
        Plugin("acme", ("logprb",))


def test_a_device_is_a_type_without_an_index() -> None:
    with pytest.raises(ArgumentError, match="without an index; got 'cuda:0'. Say 'cuda'"):
        Plugin("acme", devices=("cuda:0",))


@pytest.mark.parametrize("author", ["  ", "Ann\n<ann@acme.org>", "\x1b[31m"])
def test_an_author_is_one_line(author) -> None:
    with pytest.raises(ArgumentError, match="one line of text"):
        Plugin("acme", author=author)


@pytest.mark.parametrize(
    ("author", "expected"),
    [
        ("Ann <ann@acme.org>", {"name": "Ann", "email": "ann@acme.org"}),
        ('Ann "the" \\ Ünï', {"name": 'Ann "the" \\ Ünï'}),
        ("Ann <no mail>", {"name": "Ann <no mail>"}),
        ("", {"name": "The rlkernel-acme authors"}),
    ],
)
def test_the_author_stands_in_the_metadata_whatever_it_is(author, expected) -> None:
    import tomllib

    assert tomllib.loads(files(Plugin("acme", author=author))["pyproject.toml"])["project"]["authors"] == [expected]


@pytest.mark.parametrize("existing", ["file", "folder"])
def test_nothing_that_exists_is_overwritten(cli, existing) -> None:
    mine = Path("mine") / "keep" if existing == "folder" else Path("mine")
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    result = cli("new-backend", "acme", "--into", "mine")
    assert (result.exit_code, result.stdout, mine.read_text()) == (2, "", "mine")
    assert "--into: exists already; got mine. Name a folder that does not exist yet." in result.stderr


def test_a_folder_that_cannot_be_made_is_named(cli) -> None:
    Path("file").write_text("")
    result = cli("new-backend", "acme", "--into", "file/acme")
    assert (result.exit_code, "file/acme: cannot be written" in result.stderr) == (2, True)


def test_an_empty_folder_is_filled(cli) -> None:
    Path("mine").mkdir()
    assert cli("new-backend", "acme", "--into", "mine").exit_code == 0
    assert Path("mine/rlkernel_acme/__init__.py").exists()


def test_it_says_what_comes_next(cli) -> None:
    said = cli("new-backend", "acme", "--op", "logprob", "--op", "sample").stdout.splitlines()
    assert said[1:] == [
        "  sample is not claimed: write rlkernel_acme/sample.py, then claim it in the manifest",
        "Next:",
        "  cd rlkernel-acme",
        "  pip install -e '.[test]'",
        "  rlkernel backends --load",
        "  pytest",
        "  rlkernel conformance run acme --device cpu",
    ]


def test_its_json_lists_what_it_wrote(cli) -> None:
    said = answer(cli("new-backend", "acme", "--op", "whiten", "--op", "verify", "--into", "here", "--json"))
    there = sorted(str(p.relative_to("here")) for p in Path("here").rglob("*") if p.is_file())
    assert (sorted(said["files"]), said["claimed"], said["to_write"]) == (there, ["whiten"], ["verify"])


def test_it_imports_no_torch(tmp_path) -> None:
    code = (
        "import sys; from rlkernel.cli import main\n"
        "try: main(['new-backend', 'acme', '--op', 'capture', '--json'])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    *said, torch_is_there = done.stdout.splitlines()
    assert (json.loads("\n".join(said))["to_write"], torch_is_there) == (["capture"], "False")


def test_its_manifest_is_one_of_ours() -> None:
    assert isinstance(run_source(files(Plugin("acme"))["rlkernel_acme/__init__.py"])["backend"], Backend)
    assert rlk.NotWrittenError is NotWrittenError
