"""Mutants by machine: what is changed, what is drawn, and how each that is drawn is judged."""

from __future__ import annotations

import ast
import json

import pytest

from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.source_mutants.draws import drawn, sites
from rlkernel_conformance.source_mutants.kinds import KINDS
from rlkernel_conformance.source_mutants.mutations import mutations_of
from rlkernel_conformance.source_mutants.plugin_copy import PACKAGES, PluginCopy, files, source_of
from rlkernel_conformance.source_mutants.processes import Trial, carried_out
from rlkernel_conformance.source_mutants.run import Drawn, Findings, SourceMutant, attacked, originals, run
from rlkernel_conformance.source_mutants.trials import ClauseRun, executed_lines
from rlkernel_core.errors import UnknownNameError

EFFORT = Profile("test", 2, 60)
CLAUSES = frozenset(("GF-01", "GF-06"))
FILTERING = "copied_torch/advantage/filtering.py"


def choices(kind: str, source: str) -> list[str]:
    """A source with each change of a kind."""
    found = mutations_of(source.encode(), {"threshold": (0.0,)})
    return [m.applied(source.encode()).decode() for m in found if m.kind == kind]


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("comparison", "y = a < b", ["y = (a <= b)"]),
        ("arithmetic", "y = a * b", ["y = (a / b)"]),
        ("term", "y = a + b", ["y = a", "y = b"]),
        ("constant", "y = 3", ["y = 4", "y = 2"]),
        ("constant", "y = 1e-6", ["y = 2e-06", "y = 0.0"]),
        ("index", "y = x[1:]", ["y = x[:]", "y = x[2:]"]),
        ("condition", "if a:\n    f()\nelse:\n    g()", ["if (not a):\n    f()\nelse:\n    g()"]),
        ("statement", "y += 1", ["pass"]),
        ("dtype", "y = x.to(torch.float32)", ["y = x", "y = x.to(torch.bfloat16)"]),
        ("dimension", "y = x.sum(1)", ["y = x.sum()", "y = x.sum(0)"]),
        ("shape", "y = x.expand(3, -1)", ["y = x"]),
        ("swap", "y = a - b", ["y = (b - a)"]),
        ("function", "y = x.amax()", ["y = x.amin()"]),
        ("detach", "y = x.detach()", ["y = x"]),
        ("copy", "y = x.clone()", ["y = x"]),
        ("keepdim", "y = x.sum(1, keepdim=True)", ["y = x.sum(1)"]),
        ("argument", "y = f(call.threshold, low=a)", ["y = f(call.threshold)", "y = f(0.0, low=a)"]),
        ("gradient", "def backward(x):\n    return dx, None", ["def backward(x):\n    return None, None"]),
    ],
)
def test_a_kind_of_change(kind, source, expected) -> None:
    assert choices(kind, source) == expected


def test_every_kind_of_change_is_drawn_somewhere() -> None:
    common = [file for file in files() if file.startswith("copied_torch/") and "sharded" not in file]
    kinds = {m.kind for file in common for m in mutations_of(source_of(file), {"threshold": (0.0,)})}
    assert set(KINDS) - kinds == set()


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 1 + 1."""',
        "x: tuple[int, ...]",
        "raise ValueError(1 + 1)",
        "from a import b",
        "y = f'{1 + 1}'",
        "if TYPE_CHECKING:\n    f(1)",
    ],
)
def test_what_computes_nothing_is_not_changed(source) -> None:
    assert mutations_of(source.encode(), {}) == []


def test_a_changed_file_differs_in_what_is_replaced_alone() -> None:
    source = "π = 1\ny = π + 2  # why\n".encode()
    [change] = [m for m in mutations_of(source, {}) if m.kind == "arithmetic"]
    assert change.applied(source).decode() == "π = 1\ny = (π - 2)  # why\n"
    assert change.diff(source) == "- y = π + 2  # why\n+ y = (π - 2)  # why"


def test_draws_depend_on_the_seed_and_begin_alike() -> None:
    lines = frozenset(range(1, source_of(FILTERING).count(b"\n") + 1))
    found = sites([ClauseRun("GF-01", True, 1.0, "", {FILTERING: lines})])

    def first(number: int, seed: int, op: str = "group_filter") -> list:
        order = drawn(found, seed, op)
        return [next(order) for _ in range(number)]

    assert first(10, 1) == first(20, 1)[:10]
    assert first(10, 1) != first(10, 2)
    assert first(10, 1) != first(10, 1, "whiten")
    kinds = {site.mutation.kind for site in found}
    assert {site.mutation.kind for site in first(len(kinds), 1)} == kinds


def test_a_change_in_a_table_matters_where_the_table_is_used() -> None:
    file = "copied_torch/loss_surrogates.py"
    given, *uses = [i for i, line in enumerate(source_of(file).splitlines(), 1) if b"_LOG_FLOOR" in line]
    found = sites([ClauseRun("PL-01", True, 1.0, "", {file: frozenset(uses)})])
    assert given in {site.mutation.line for site in found}


def test_the_copy_shares_the_contract_alone(tmp_path) -> None:
    copy = PluginCopy.written(tmp_path / "copy")
    allowed = {"rlkernel_common.graphs.audit": ["recording"]}
    allowed |= {f"rlkernel_core.quant.{name}": None for name in ("spec", "tensor", "slicing", "stacking")}
    for file in sorted(copy.folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(tuple(PACKAGES)):
                assert node.module in allowed, (file, node.module)
                assert allowed[node.module] in (None, [alias.name for alias in node.names]), (file, node.module)


def test_the_copy_decodes_by_codecs_of_its_own(tmp_path) -> None:
    copy = PluginCopy.written(tmp_path / "copy")
    (run,) = originals(copy, ("dequantize",), EFFORT, clauses=frozenset(("DQ-01",)))["dequantize"]
    codecs = {"grid", "nf4", "mx"}
    assert (run.held, {f"copied_quant/{codec}.py" for codec in codecs} - run.lines.keys()) == (True, set())


OPERATORS = """
def helper():
    return 1

def other():
    return helper()

def own():
    return helper() + other()
"""


@pytest.mark.parametrize(("called", "expected"), [("helper", {2, 3}), ("other", set()), ("own", {2, 3, 5, 6, 8, 9})])
def test_lines_count_that_the_operator_runs_but_no_other_does(tmp_path, called, expected) -> None:
    file = tmp_path / "operators.py"
    file.write_text(OPERATORS)
    namespace: dict = {}
    exec(compile(OPERATORS, str(file), "exec"), namespace)
    named = {name: frozenset({("operators.py", name)}) for name in ("own", "other")}
    with executed_lines(tmp_path, named["own"], named["other"]) as lines:
        namespace[called]()
    assert lines.get("operators.py", set()) == expected


def test_lines_do_not_count_that_run_as_a_module_is_imported(tmp_path) -> None:
    text = "TABLE = tuple(2 * x for x in (1, 2))\nclass Of:\n    most = max(x for x in TABLE)\n"
    with executed_lines(tmp_path) as lines:
        exec(compile(text, str(tmp_path / "tables.py"), "exec"), {})
    assert dict(lines) == {}


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, SourceMutant]:
    """Changes of group_filter whose effect is known, by the text that is replaced."""
    wanted = {
        "groups is doubled": "(head | group_keep)",
        "another rule": "(not call.rule == 'std')",
        "gradients of what is detached": "torch.enable_grad()",
        "a name for a number": "Groups.of(columns.shape[0], call.group, columns.device)",
    }
    folder = tmp_path_factory.mktemp("mutants")
    copy = PluginCopy.written(folder / "original")
    runs = originals(copy, ("group_filter",), EFFORT, clauses=CLAUSES)["group_filter"]
    assert {r.clause: r.held for r in runs} == dict.fromkeys(CLAUSES, True)
    found = {site.mutation.new: site for site in sites(runs) if site.file == FILTERING}
    todo = [Drawn("group_filter", found[new], runs) for new in wanted.values()]
    return dict(zip(wanted, attacked(copy, folder, todo, EFFORT, calls=40), strict=True))


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("groups is doubled", "killed"),
        ("another rule", "killed"),
        ("gradients of what is detached", "equivalent"),
        ("a name for a number", "trivial"),
    ],
)
def test_a_mutant_is_judged(judged, name, status) -> None:
    assert judged[name].status == status
    assert bool(judged[name].clause) == (status == "killed")
    assert judged[name].why


def test_clauses_are_named_as_they_are() -> None:
    with pytest.raises(UnknownNameError, match="GF-99"):
        run(["group_filter"], 1, 1, EFFORT, clauses=["GF-99"])


def endless(send) -> None:
    send("a step", None)
    while True:
        pass


def fails(send) -> None:
    raise ValueError(f"{send} is not called")


def test_a_trial_that_does_not_end_is_ended() -> None:
    due = [Trial("endless", endless, (), {"a step": 0.3}), Trial("fails", fails, ())]
    found = {trial.name: (answer.step, answer.ended.partition(":")[0]) for trial, answer in carried_out(due, jobs=2)}
    assert found == {"endless": ("a step", "timeout"), "fails": ("", "ValueError")}


def test_equivalent_and_trivial_mutants_are_not_in_the_share() -> None:
    statuses = ("killed", "killed", "timeout", "survived", "equivalent", "trivial")
    mutants = tuple(SourceMutant("whiten", "term", "a.py", 1, "", status, "", "") for status in statuses)
    found = Findings(1, "quick", mutants, {}, {})
    assert (found.share, found.by("op")["whiten"]["killed"]) == (0.75, 2)
    assert json.loads(json.dumps(found.content()))["of"] == 4
