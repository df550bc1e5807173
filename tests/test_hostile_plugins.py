"""Plugins that would take their caller down, keep it waiting or rewrite its terminal: each is a reason, no more.

Every kind is a distribution as pip would install it, named in the order, and imported by a process of its own first.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from pathlib import Path

import pytest

import rlkernel as rlk
from rlkernel import child, outcomes, policy, trial
from rlkernel.discover import brief, described, guarded
from rlkernel.doctor.finding import note
from rlkernel.doctor.machine import Machine, _packages
from rlkernel.doctor.plugins import backends
from rlkernel_core.errors import FallbackWarning, PluginWarning
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS
from rlkernel_core.visible import visible
from tests.command_line import answer
from tests.plugins import good, install, module_of

MANIFEST = "from rlkernel_core import Backend, Impl, Requires\n"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\u202e\u2066\u200f\u2028\u00a0\ud800"
# kind -> what its module does when it is imported, the reason's code, and a word of its text
KINDS: dict[str, tuple[str, str, str]] = {
    "segfaults": ("import ctypes; ctypes.string_at(0)", "import-crashed", "SIGSEGV"),
    "aborts": ("import os; os.abort()", "import-crashed", "SIGABRT"),
    "leaves with success": ("import os; os._exit(0)", "import-crashed", "status 0"),
    "leaves with a status": ("import os; os._exit(7)", "import-crashed", "status 7"),
    "exits": ("import sys; sys.exit()", "import-error", "SystemExit"),
    "quits in words": ("raise SystemExit('bye')", "import-error", "SystemExit: bye"),
    "raises what is no Exception": ("class Odd(BaseException): pass\nraise Odd('x')", "import-error", "Odd: x"),
    "interrupts": ("raise KeyboardInterrupt", "import-crashed", "KeyboardInterrupt"),
    "closes generators": ("raise GeneratorExit", "import-error", "GeneratorExit"),
    "kills itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "import-crashed", "SIGKILL"),
    "kills its group": ("import os, signal; os.killpg(0, signal.SIGTERM)", "import-crashed", "SIGTERM"),
    "recurses": ("def f(): f()\nf()", "import-error", "RecursionError"),
    "takes all memory": (
        "import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 1 << 32, flags=mmap.MAP_PRIVATE))",
        "import-error",
        "Cannot allocate memory",
    ),
    "closes every file": ("import os; os.closerange(0, 1000)", "import-crashed", "status 1"),
    "forks": ("import os; os.fork()\n", "import-crashed", "it forked"),
    "writes its own verdict": (
        "import os, sys; os.write(int(sys.argv[1]), b'{\"verdict\": [1]}\\n'); os._exit(0)",
        "import-crashed",
        "status 0",
    ),
    "answers any name with an error": ("def __getattr__(name): raise BaseException(name)", "import-error", "backend"),
    "raises what cannot be printed": (
        "class Mute(BaseException):\n    def __str__(self): raise SystemExit\nraise Mute",
        "import-error",
        "Mute",
    ),
    "raises a text that lies about itself": (
        (
            "class Text(str):\n    def strip(self): raise SystemExit\n"
            "class Odd(Exception):\n    def __str__(self): return Text('said')\nraise Odd"
        ),
        "import-error",
        "Odd: said",
    ),
    "raises a long text": ("raise ValueError('y' * 10**7)", "import-error", "yyy"),
    "names itself in colors": ("raise type('\\x1b[31mRed', (Exception,), {})", "import-error", r"\x1b[31mRed"),
    "is for another API behind the back": (
        f"{MANIFEST}backend = Backend.model_construct(name='acme', api=(9, 9), impls=())",
        "too-new",
        "9.9",
    ),
    "has a version of many digits": (
        (
            f"{MANIFEST}impl = Impl(op='logprob@' + '9' * 5000, target='a:b', requires=Requires(device='cpu'))\n"
            "backend = Backend(name='acme', api=(2, 0), impls=(impl,))"
        ),
        "invalid-manifest",
        "ValueError",
    ),
    "has a name that equals everything": (
        (
            f"{MANIFEST}class Name(str):\n    def __ne__(self, other): return False\n    __hash__ = str.__hash__\n"
            "backend = Backend.model_construct(name=Name('torch'), api=(2, 0), impls=())"
        ),
        "invalid-manifest",
        "'torch'",
    ),
}
ENDLESS = {
    "loops": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
    "waits for another thread's call": (
        "import threading\nfrom rlkernel import policy\nthread = threading.Thread(target=policy.base)\n"
        "thread.start()\nthread.join()\n" + good("acme")
    ),
    "claims without end": (
        f"{MANIFEST}import itertools\nrequires = Requires(device='cpu')\n"
        "impl = Impl.model_construct(op='logprob@1', target='a:b', requires=requires, supports=itertools.count())\n"
        "backend = Backend.model_construct(name='acme', api=(2, 0), impls=(impl,))"
    ),
}


def clean(text: str) -> bool:
    """Whether a terminal prints a text as it is: no control or format character but the line's end."""
    return all(c == "\n" or unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_plugin_is_a_reason_and_is_not_imported_here(plug, kind) -> None:
    source, code, said = KINDS[kind]
    plug("acme", source)
    found = policy.installed()["acme"]
    assert (found.manifest, found.reason.code, said in found.reason.text) == (None, code, True), found.reason
    assert (clean(str(found.reason)), len(found.reason.text) < 1000) == (True, True)
    assert (module_of("acme") in sys.modules, bool(found.reason.fix)) == (False, True)


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_plugin_that_never_returns_is_ended(plug, monkeypatch, kind) -> None:
    monkeypatch.setattr(trial, "TIMEOUT_S", 1.5)
    plug("acme", ENDLESS[kind])
    assert policy.installed()["acme"].reason.slug == "load/import-timeout"


def test_every_command_tells_it_and_goes_on(cli, plug) -> None:
    plug("acme", KINDS["segfaults"][0])
    said = [cli("explain", "logprob", "--order", "acme,auto"), cli("backends", "--load")]
    assert [("load/import-crashed" in r.stdout, r.exit_code) for r in said] == [(True, 0)] * 2
    (finding,) = backends(Machine(candidates=(policy.installed()["acme"],)))
    assert (finding.severity, "SIGSEGV" in finding.text) == ("note", True)
    refused = cli("explain", "logprob", "--order", "acme")
    assert (refused.exit_code, "SIGSEGV" in refused.stdout) == (1, True)


def test_an_error_and_a_warning_tell_it_and_the_next_backend_answers(plug) -> None:
    import torch

    plug("acme", KINDS["segfaults"][0])
    logits, ids = torch.zeros(2, 3), torch.tensor([0, 1])
    with rlk.use("acme"), pytest.warns(PluginWarning), pytest.raises(rlk.ResolutionError, match="SIGSEGV"):
        rlk.logprob(logits, ids)
    policy.PROCESS.warned.clear()
    with rlk.use("acme", "auto"), pytest.warns(PluginWarning, match="SIGSEGV"), pytest.warns(FallbackWarning):
        assert rlk.logprob(logits, ids).logprob.shape == (2,)


def test_a_hostile_observer_is_a_warning(tmp_path, monkeypatch, plug) -> None:
    import torch

    plug("acme", good("acme"))
    install(tmp_path, "odd", KINDS["segfaults"][0], group="rlkernel.hooks")
    policy.refresh()
    with pytest.warns(PluginWarning, match="hook plugin 'odd': .*SIGSEGV"):
        rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]))


# -- functions that a manifest names ---------------------------------------------------------------------------------
FUNCTIONS = """
from rlkernel_core import Backend, Impl, Requires

def fits(call): pass
def two(call, other): pass
async def late(call): pass
def lazy(call): yield call
number = 3
class Callable:
    def __call__(self, call): pass
made = Callable()

backend = Backend(name="acme", api=(2, 0), impls=(
    {impls},
))
"""
# what an implementation says of its functions -> the reason against it
NAMED: dict[str, str | None] = {
    "target='acme_plugin:fits', prepared=True": None,
    "target='acme_plugin:made', check='acme_plugin:fits', workspace='acme_plugin:fits'": None,
    "target='acme_plugin:gone'": "load/target-missing",
    "target='acme_gone:fits'": "load/target-missing",
    "target='acme_plugin:number'": "load/target-missing",
    "target='acme_plugin:two', prepared=True": "load/target-signature",
    "target='acme_plugin:late'": "load/target-signature",
    "target='acme_plugin:lazy'": "load/target-signature",
    "target='acme_plugin:fits', check='acme_plugin:two'": "load/target-signature",
    "target='acme_plugin:fits', workspace='acme_plugin:gone'": "load/target-missing",
    "target='acme_plugin:fits', gradient='acme_plugin:gone'": "load/target-missing",
    "target='acme_bad:kernel'": "load/import-crashed",
    "target='acme_plugin:fits', check='acme_worse:kernel'": "load/import-crashed",
}


def test_explain_looks_functions_up_before_it_says_yes(plug) -> None:
    given = dict(zip(OPERATORS, NAMED, strict=False))
    assert len(given) == len(NAMED)
    every = {op: f"requires=Requires(device='*'), supports={set(OPERATORS[op].feature_names)}" for op in given}
    impls = [f"Impl(op='{OPERATORS[op].id}', {said}, {every[op]})" for op, said in given.items()]
    site = plug("acme", FUNCTIONS.format(impls=",\n    ".join(impls)))
    (site / "acme_bad.py").write_text("import os; os.abort()")
    (site / "acme_worse.py").write_text("import os; os._exit(0)")
    with rlk.use("acme", "auto"):
        decisions = {said: rlk.explain(op).decision for op, said in given.items()}
    refused = {said: [r.reason.slug for r in d.rejected if r.backend == "acme"] for said, d in decisions.items()}
    assert refused == {said: [slug] if slug else [] for said, slug in NAMED.items()}
    assert {said for said, d in decisions.items() if d.backend == "acme"} == {s for s in NAMED if NAMED[s] is None}
    assert {"acme_bad", "acme_worse"} & set(sys.modules) == set()


def test_explain_looks_up_the_functions_of_a_backend_of_this_process() -> None:
    from tests.implementations import acme

    with rlk.registered(acme("gone")), rlk.use("acme", "auto"):
        decision = rlk.explain("logprob").decision
    assert (decision.backend, decision.rejected[0].reason.slug) == ("torch", "load/target-missing")


def test_a_function_whose_import_never_ends_costs_the_time_once(monkeypatch, tmp_path) -> None:
    lines = [{"at": ""}, {"verdict": None}, {"names": ["a:b", "c:d", "e:f"]}, {"at": "a:b"}, {"verdict": None}]
    said = "\n".join(map(json.dumps, [*lines, {"at": "c:d"}])).encode()
    runs = []
    monkeypatch.setattr(child, "run", lambda *_: runs.append(1) or child.Ended(said, "killed", timed_out=True))
    tried = trial.tried(trial.Plugin("g", "acme", "acme:b", "acme", "1"), cache=tmp_path)
    assert (tried.reason, {n: r.slug for n, r in tried.broken.items()}, len(runs)) == (
        None,
        {"c:d": "load/import-timeout", "e:f": "load/import-timeout"},
        1,
    )


# -- what is remembered ------------------------------------------------------------------------------------------------
def test_a_good_outcome_is_paid_for_once_an_installed_version(plug, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = []
    said = b'{"at": ""}\n{"verdict": null}\n{"end": true}\n'
    monkeypatch.setattr(child, "run", lambda *_: runs.append(1) or child.Ended(said, "", timed_out=False))

    def loads(source: str, version: str = "1.0") -> int:
        before = len(runs)
        plug("acme", source, version=version)
        assert policy.installed()["acme"].reason is None
        return len(runs) - before

    first = good("acme")
    assert [loads(first), loads(first), loads(first + "\n# edited"), loads(first)] == [1, 0, 1, 0]
    assert [loads(first, "1.1"), loads(first, "1.1")] == [1, 0]  # both versions' folders are there
    install(tmp_path, "other", "")  # what is installed beside it may be what it imports
    assert [loads(first), loads(first)] == [1, 0]


@pytest.mark.parametrize(
    ("verdict", "timed_out", "believed"),
    [(["load", "import-error", "raised", ""], False, False), (None, True, True), (None, False, True)],
)
def test_what_crashed_is_believed_for_an_hour_and_what_raised_is_asked_again(
    monkeypatch, tmp_path, verdict, timed_out, believed
) -> None:
    lines = [{"at": ""}, *([{"verdict": verdict}, {"end": True}] if verdict else [])]
    ended = child.Ended("\n".join(map(json.dumps, lines)).encode(), "gone", timed_out)
    runs = []
    monkeypatch.setattr(child, "run", lambda *_: runs.append(1) or ended)
    plugin = trial.Plugin("g", "acme", "acme:b", "acme", "1")
    reasons = [trial.tried(plugin, cache=tmp_path).reason for _ in range(2)]
    assert (reasons[0] == reasons[1], len(runs)) == (True, 1 if believed else 2)
    for file in tmp_path.glob("plugin-*.json"):
        os.utime(file, (0, 0))
    trial.tried(plugin, cache=tmp_path)
    assert len(runs) == (2 if believed else 3)
    assert trial.forget(tmp_path) == int(believed)


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"verdicts": 3}', '{"verdicts": {"a:b": null}}', "[" * 10**5])
def test_a_damaged_memory_of_an_outcome_is_not_believed(tmp_path, damage) -> None:
    file = tmp_path / "plugin-x.json"
    file.write_text(damage)
    assert trial._recall(file) is None


def test_where_no_process_can_be_started_the_plugin_is_imported_at_once(plug, monkeypatch) -> None:
    def none(*_) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(child, "run", none)
    plug("acme", good("acme") + "\n# here")
    assert policy.installed()["acme"].reason is None


def test_an_unreadable_list_of_outcomes_is_none(tmp_path) -> None:
    assert outcomes.recall(tmp_path / "none") == (None, 0.0)
    assert guarded(lambda: outcomes.remember(Path("/dev/null/x"), {}))[1] is None


# -- entry points that lead nowhere ----------------------------------------------------------------------------------
def entry_points(site: Path, dist: str, text: str, version: str = "1.0") -> None:
    info = site / f"{dist}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("lines", "name", "slug"),
    [
        ("Acme! = acme_plugin:backend", "Acme!", "load/malformed-entry-point"),
        (f"a\x1b[31m\u202e = {module_of('acme')}:backend", r"a\x1b[31m\u202e", "load/malformed-entry-point"),
        ("acme = acme_plugin:backend\nacme = acme_plugin:other", "acme", "load/duplicate-name"),
        ("cuda = acme_plugin:backend", "cuda", "load/reserved-name"),
        ("acme = ", "acme", "load/malformed-entry-point"),
    ],
)
def test_an_entry_point_that_cannot_be_meant_is_a_reason(cli, plug, lines, name, slug) -> None:
    site = plug("acme", good("acme"))
    entry_points(site, "acme", f"[rlkernel.backends]\n{lines}\n", version="1.0\x1b[0m")
    policy.refresh()
    assert policy.installed()[name].reason.slug == slug
    (row,) = [r for r in answer(cli("backends", "--load", "--json")) if r["name"] == name]
    assert (row["state"], row["version"]) == (slug, r"1.0\x1b[0m")
    assert clean(cli("backends", "--load").stdout)


def test_a_name_of_ours_that_another_distribution_uses_runs_nowhere(plug) -> None:
    plug("cuda", good("cuda", "acme"), dist="acme")
    with rlk.use("cuda", "auto"):
        decision = rlk.explain("logprob").decision
    assert (decision.backend, decision.rejected[0].reason.slug) == ("torch", "load/reserved-name")


def test_the_doctor_reads_past_metadata_that_cannot_be_read(plug) -> None:
    site = plug("acme", good("acme"))
    (site / "acme-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\xfe\nVersion: \xff\n")
    assert {"rlkernel", "torch"} <= set(_packages())


# -- what is printed -------------------------------------------------------------------------------------------------
def test_text_of_others_is_printed_as_it_is_or_escaped() -> None:
    assert visible("Kernel für Ω, 核") == "Kernel für Ω, 核"
    assert visible(ESCAPES) == r"\x1b[2J\x1b]0;owned\x07\r\u202e\u2066\u200f\u2028\xa0\ud800"
    assert visible("x" * 10, 4) == "xxx…"


def test_reasons_errors_and_findings_hold_no_control_characters() -> None:
    texts = [str(Reason("shape", "unsupported", ESCAPES)), brief(ValueError(ESCAPES)), note("a", ESCAPES).text]
    texts += [described(type("Odd", (), {"__repr__": lambda self: ESCAPES})())]
    assert [clean(text) for text in texts] == [True] * 4
    assert described(type("Mute", (), {"__repr__": lambda self: 1 / 0})()) == "a Mute"


def test_a_check_that_answers_in_colors_or_in_a_reason_of_its_own_is_told_plainly(monkeypatch) -> None:
    import torch

    from tests import implementations

    class Mine(Reason):
        slug = "shape/" + ESCAPES

    answers = {"colors": Reason("shape", "unsupported", ESCAPES, ESCAPES), "own": Mine("shape", "unsupported", "x")}
    for name, said in answers.items():
        monkeypatch.setattr(implementations, name, lambda call, said=said: said, raising=False)
        with rlk.registered(implementations.acme(check=name)), rlk.use("acme", "auto"):
            text = rlk.explain("logprob", torch.zeros(2, 3), torch.tensor([0, 1]))
        assert clean(text)
        assert ("shape/check-failed" in text) == (name == "own")
