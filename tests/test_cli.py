"""The command line as a whole: help that teaches, clean errors, and nothing imported that is not needed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from rlkernel.cli import CODES, COMMANDS
from rlkernel_core import __version__
from tests.plugins import install

MODULES = {name: import_module(module) for name, (module, _) in COMMANDS.items() if name != "demo"}


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


def test_the_version_is_printed(cli) -> None:
    assert cli("--version").stdout == f"rlkernel {__version__}\n"


def test_the_help_groups_the_commands_and_shows_how_to_start(cli) -> None:
    said = cli("--help").stdout
    for text in ("Quick start:", "See what runs", "Settle what runs", *COMMANDS):
        assert text in said


@pytest.mark.parametrize("name", MODULES)
def test_the_help_of_a_command_shows_two_examples_and_the_exit_codes(cli, name) -> None:
    said = cli(name, "--help").stdout
    examples = [line for line, _ in MODULES[name].EXAMPLES]
    assert len(examples) >= 2
    assert all(f"  {line}" in said for line in examples)
    assert all(f"  {code}  {meaning}" in said for code, meaning in MODULES[name].EXITS.items())
    assert all(f"  {code}  " in said for code in CODES)


# Minutes each, or of files that are not here: tests of their own run them (test_demo.py, test_docs.py, test_judge_*.py,
# test_conformance_*.py).
LONG = {"demo", "conformance", "judge"}
EXAMPLES = [line for name, m in MODULES.items() if name not in LONG for line, _ in m.EXAMPLES if "runs/" not in line]


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_work(cli, line) -> None:
    if line == "rlkernel lock --check":
        assert cli("lock").exit_code == 0
    result = cli(*shlex.split(line.partition(" >")[0])[1:])
    assert (result.exit_code, result.exception) == (0, None), result.output


def test_an_exit_code_means_one_thing_which_help_and_page_say(cli) -> None:
    page = (Path(__file__).parents[1] / "docs" / "explain.md").read_text().partition("\n## Exit codes\n")[2]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page.partition("\n## ")[0], re.MULTILINE)
    assert {int(code): text for code, text in rows} == CODES
    said = " ".join(cli("--help").stdout.split())
    assert [text for code, text in CODES.items() if f"{code} {text}" not in said] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_command_says_what_its_yes_and_no_are_and_has_no_code_of_its_own(name) -> None:
    exits = MODULES[name].EXITS
    assert 0 in exits
    assert exits.keys() <= {0, 1}


@pytest.mark.parametrize(
    ("error", "code"), [("KeyError('slip')", 70), ("KeyboardInterrupt", 130), ("BrokenPipeError(32, 'closed')", 141)]
)
def test_what_a_command_raises_has_an_exit_code_of_its_own(error, code) -> None:
    done = python(
        "from rlkernel import cli; from rlkernel.cli import schema\n"
        f"def command(): raise {error}\n"
        "schema.command = command; cli.main(['schema'])"
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, code == 70)


@pytest.mark.parametrize("arguments", [["schema", "--jsn"], ["judge"], ["lock", "--graad"], ["explain", "--rows", "x"]])
def test_a_malformed_command_line_is_one_line(cli, arguments) -> None:
    result = cli(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.endswith(f" {arguments[0]} --help shows what there is\n")


def test_without_a_command_the_help_is_shown() -> None:
    done = python("from rlkernel.cli import main; main([])")
    assert (done.returncode, "Quick start:" in done.stdout, done.stderr) == (0, True, "")


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    done = python("from rlkernel.cli import main; main(['explian'])")
    assert (done.returncode, done.stderr) == (2, "error: unknown command 'explian'; did you mean 'explain'?\n")


def test_the_version_needs_no_command_to_be_imported() -> None:
    code = (
        "import sys; from rlkernel.cli import main\ntry: main(['--version'])\nfinally: print('pydantic' in sys.modules)"
    )
    assert python(code).stdout.splitlines() == [f"rlkernel {__version__}", "False"]


def test_an_unknown_name_is_one_clean_message(cli) -> None:
    result = cli("explain", "logprb")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: unknown operator 'logprb'; did you mean 'logprob' or 'linear_logprob'?\n"


@pytest.mark.parametrize("command", ["backends", "config", "explain", "status", "lock"])
def test_an_unknown_variable_is_an_error_for_every_command_that_needs_the_policy(cli, monkeypatch, command) -> None:
    monkeypatch.setenv("RLKERNEL_ORDR", "auto")
    result = cli(command)
    assert result.exit_code == 2
    assert "unknown environment variable 'RLKERNEL_ORDR'; did you mean 'RLKERNEL_ORDER'" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rlkernel\n", "not valid TOML"),
        ("[rlkernel]\nordr = ['auto']\n", "unknown key 'ordr'; did you mean 'order'?"),
        ("[rlkernel]\norder = ['toch']\n", "did you mean 'torch'?"),
        ("[rlkernel.ops.logprb]\norder = ['auto']\n", "did you mean 'logprob'"),
        ("[tool]\n", "unknown table 'tool'"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(cli, tmp_path, text, message) -> None:
    (tmp_path / "here" / "rlkernel.toml").write_text(text)
    result = cli("explain", "logprob")
    assert (result.exit_code, "rlkernel.toml" in result.stderr, message in result.stderr) == (2, True, True)


def test_only_the_command_that_is_asked_for_is_imported() -> None:
    code = "import sys; from rlkernel.cli import main\ntry: main(['schema', 'config'])\nfinally: print(*sys.modules)"
    modules = python(code).stdout.splitlines()[-1].split()
    assert {module for module, _ in COMMANDS.values()} & set(modules) == {"rlkernel.cli.schema"}


@pytest.mark.parametrize(
    "arguments", [["explain", "logprob", "--device", "cuda"], ["explain"], ["backends"], ["config"]]
)
def test_commands_about_the_choice_import_no_torch(arguments) -> None:
    done = python(
        f"import sys; from rlkernel.cli import main\ntry: main({arguments})\nfinally: print('torch' in sys.modules)"
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False")


def test_without_torch_status_says_who_cannot_be_imported() -> None:
    done = python("import sys; sys.modules['torch'] = None; from rlkernel.cli import main; main(['status'])")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "load/target-missing" in done.stdout


def test_a_broken_plugin_cannot_break_the_console(tmp_path) -> None:
    site = install(tmp_path, "acme", "raise SystemExit(3)")
    code = "from rlkernel.cli import main; main(['backends', '--load'])"
    done = python(f"import sys; sys.path.insert(0, {str(site)!r}); {code}", cwd=tmp_path)
    assert (done.returncode, "load/import-error" in done.stdout) == (0, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_whose_metavar_is_its_own_name_in_capitals_states_its_name(name) -> None:
    """Typer 0.27 takes such a metavar for the option's name: `--DEVICE` in place of `--device`."""
    command = import_module(COMMANDS[name][0]).command
    hints = get_type_hints(command, include_extras=True)
    found = [(p, m) for p, hint in hints.items() for m in getattr(hint, "__metadata__", ())]
    options = {p: m for p, m in found if type(m).__name__ == "OptionInfo"}
    alike = [p for p, m in options.items() if str(m.metavar).lower() == p]
    assert [p for p in alike if not str(options[p].default).startswith("--")] == []
