"""`rlkernel bench`: measure, compare two measurements, turn one into a report; compare the bits of results."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel.cli.options import Force, Json, present, to_write
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel.installation import extras
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.files import write_text

EXAMPLES: Final = (
    ("rlkernel bench list", "the suites, how many workloads each, and which peers are here"),
    ("rlkernel bench run --suite logprob --size toy --peers torch", "one suite on this machine's CPU, in seconds"),
    ("rlkernel bench run --size full --device cuda --out runs/h200", "everything, on a GPU"),
    ("rlkernel bench run --size full --device cuda:0,cuda:1 --out runs/h200", "the same, suites shared by two GPUs"),
    ("rlkernel bench evidence runs/h200", "which results are of other sources than are here, and what renews them"),
    ("rlkernel bench compare runs/old runs/new --threshold 3%", "what got slower, larger or wrong"),
    ("rlkernel bench report runs/h200", "report.md, results.csv and pictures beside the results"),
    ("rlkernel bench bits --op whiten --out runs/before.json", "digests of every result, to compare after a change"),
    ("rlkernel bench bits runs/before.json runs/after.json", "which results have other bits"),
)
EXITS: Final = {
    0: "measured; nothing regressed; the same bits",
    1: "a backend is wrong or raised, a number is below its floor, something regressed, or bits differ",
}
# action -> how many words may follow
_ACTIONS: Final = {"run": (0,), "compare": (2,), "report": (1,), "list": (0,), "bits": (0, 2), "evidence": (0, 1)}


def command(
    action: Annotated[
        str, typer.Argument(help="run, compare OLD NEW, report FOLDER, evidence [FOLDER], list, bits [OLD NEW].")
    ],
    words: Annotated[list[str] | None, typer.Argument(help="Results: files or folders.")] = None,
    *,
    suite: Annotated[
        list[str] | None, typer.Option(help="Suite; may be given several times. All, unless given.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be given several times.")] = None,
    work: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only workloads with this in their name.")
    ] = None,
    size: Annotated[
        str, typer.Option(help="toy (a CPU runs it in a moment), full, or sweep: many sizes of a call.")
    ] = "toy",
    device: Annotated[
        str, typer.Option(help="torch device; for run several with commas, which share the suites.")
    ] = "cpu",
    backend: Annotated[str | None, typer.Option(help="Backends with commas. All installed ones, unless given.")] = None,
    manifest: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:ATTRIBUTE", help="A backend that is not installed; may be given several times."),
    ] = None,
    peers: Annotated[str | None, typer.Option(help="Peers with commas, or none. All, unless given.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="How long to measure a candidate, about.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json; the file, of bits.")] = None,
    threshold: Annotated[str, typer.Option(help="Difference that counts as one, such as 5%.")] = "5%",
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure operators beside their peers.

    Every result is held against its definition first: what is wrong gets
    no number. Ceilings of the machine are measured in the same run, and
    what is faster than they allow is reported as an error. `bits` writes
    digests of the results of the same workloads, or says how two such
    files differ.
    """
    if action not in _ACTIONS:
        raise UnknownNameError("action", action, _ACTIONS)
    given = words or []
    if len(given) not in _ACTIONS[action]:
        counts = " or ".join(map(str, _ACTIONS[action]))
        raise ConfigError(f"{action} takes {counts} more word(s), got {given}; see rlkernel bench --help")
    _need("torch", "numpy", "hypothesis")
    where = ",".join(map(present, device.split(",")))
    if action == "list":
        _list(json=json)
        return
    if action == "run":
        fine = _run(suite, op, work, size, where, backend, manifest, peers, seconds, out, json=json)
    elif action == "bits" and given:
        fine = _compare_bits(*map(Path, given), json=json)
    elif action == "bits":
        with ExitStack() as scope:
            _register(manifest or (), scope)
            to = to_write(out or Path("bits.json"), "--out", force=force)
            fine = _bits(suite, op, work, size, where, backend, to, json=json)
    elif action == "evidence":
        fine = _evidence(Path(given[0]) if given else None, json=json)
    elif action == "compare":
        fine = _compare(given[0], given[1], _share(threshold), json=json)
    else:
        fine = _report(Path(given[0]), json=json)
    if not fine:
        raise typer.Exit(1)


def _register(manifests: Iterable[str], scope: ExitStack) -> None:
    from rlkernel.policy import registered
    from rlkernel_conformance.manifests import load

    for manifest in manifests:
        scope.enter_context(registered(load(manifest)))


def _bits(
    suites: list[str] | None,
    ops: list[str] | None,
    only: list[str] | None,
    size: str,
    device: str,
    backend: str | None,
    out: Path,
    *,
    json: bool,
) -> bool:
    from rlkernel.policy import installed
    from rlkernel_bench.bits import record
    from rlkernel_bench.run import chosen
    from rlkernel_bench.suites import SUITES

    works = chosen(suites or list(SUITES), size, _operators(ops), only or ())
    for name in _names(backend) or ():
        installed()[name]  # raises where there is none
    counts = record(works, device, _names(backend) or (), out)
    if json:
        print_json({**counts, "file": str(out)})
    else:
        said = "{made} calls, {error} refused or failed, {unstable} with unstable outputs".format_map(counts)
        typer.echo(f"{said}: {out}")
    return True


def _compare_bits(old: Path, new: Path, *, json: bool) -> bool:
    from rlkernel_bench.bits import compare

    found = compare(old, new)
    if json:
        print_json(vars(found))
        return not found.lines
    if found.devices[0] != found.devices[1]:
        typer.echo(f"devices differ: {', '.join(found.devices)}")
    typer.echo("".join(f"{line}\n" for line in found.lines), nl=False)
    counts = f"{found.calls[0]} and {found.calls[1]} calls, {len(found.lines)} differences"
    typer.echo(f"{counts}; {found.unstable} calls with unstable outputs, left out")
    return not found.lines


def _need(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"rlkernel bench needs {', '.join(missing)}: {extras('cpu', 'bench')}")


def _share(text: str) -> float:
    """`5%` or `0.05`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ConfigError(f"--threshold {text!r} is no share; write 5% or 0.05")
    return value


def _list(*, json: bool) -> None:
    from rlkernel_bench.peers import PEERS
    from rlkernel_bench.suites import SIZES, SUITES, works

    counts = {name: {size: len(works([name], size)) for size in SIZES} for name in SUITES}
    here = {p.name: {"version": p.version(), "lacking": p.lacking("cuda"), "ran": p.ran} for p in PEERS.values()}
    if json:
        print_json({"suites": counts, "peers": here})
        return
    rows = [(name, *(str(n) for n in counts[name].values()), text) for name, text in SUITES.items()]
    print_table(("suite", *SIZES, "what it measures"), rows)
    seen = [(n, p["version"] or "", p["lacking"] or "here", p["ran"] or "never yet") for n, p in here.items()]
    print_table(("peer", "version", "on a GPU", "adapter seen working"), seen)


def _run(
    suites: list[str] | None,
    ops: list[str] | None,
    only: list[str] | None,
    size: str,
    device: str,
    backend: str | None,
    manifests: list[str] | None,
    peers: str | None,
    seconds: float | None,
    out: Path | None,
    *,
    json: bool,
) -> bool:
    from rlkernel_bench.measure import Effort
    from rlkernel_bench.results import write
    from rlkernel_bench.run import run
    from rlkernel_bench.shared import Shared
    from rlkernel_bench.suites import SUITES, module

    _operators(ops)
    for name in suites or ():
        module(name)  # raises where there is none
    asked = suites or list(SUITES)
    keep: Callable[[dict[str, Any]], Any] = (lambda so_far: write(so_far, out)) if out else (lambda _: None)
    if "," in device:
        several = {"--op": ops, "--work": only, "--manifest": manifests}
        once = {"--size": size, "--backend": backend, "--peers": peers, "--seconds": seconds}
        words = [word for name, values in several.items() for value in values or () for word in (name, value)]
        words += [word for name, value in once.items() if value is not None for word in (name, str(value))]
        content = Shared(asked, device.split(","), words, (lambda _: None) if json else typer.echo, keep).run()
        return _told(content, json=json)
    with ExitStack() as scope:
        _register(manifests or (), scope)
        content = run(
            asked,
            size=size,
            device=device,
            ops=_operators(ops),
            only=only or (),
            use=_names(backend) or (),
            against=[] if peers == "none" else _names(peers),
            effort=Effort(seconds, memory=size == "full") if seconds else None,
            watch=(lambda _: None) if json else show,
            keep=keep,
        )
    return _told(content, json=json)


def _told(content: dict[str, Any], *, json: bool) -> bool:
    from rlkernel_bench.run import fails

    wrong = fails(content)
    if json:
        print_json(content)
    else:
        counts = Counter(c["status"] for r in content["results"] for c in r["candidates"])
        typer.echo(", ".join(f"{n} {status}" for status, n in counts.items()))
        typer.echo("".join(f"{line}\n" for line in wrong), nl=False, err=True)
    return not wrong


def _operators(names: list[str] | None) -> list[str]:
    from rlkernel_core.spec import OPERATORS

    for name in names or ():
        if name not in OPERATORS:
            raise UnknownNameError("operator", name, OPERATORS)
    return names or []


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] if text else None


def show(result: dict[str, Any]) -> None:
    """One workload as a table."""
    from rlkernel_bench.results import best

    floor = result.get("floor", {}).get("us")
    title = f"{result['suite']}: {result['op']} {result['work']}"
    title += f"  (floor {floor:.4g} us)" if floor else f"  {result['message']}" if result.get("message") else ""
    rows = []
    for c in result["candidates"]:
        how, spread = best(c) or ("", {})
        share, ratio = c.get("percent_of_floor"), (c.get("times_ruler") or {}).get("median")
        rows.append(
            (
                c["name"],
                c["status"],
                f"{spread['median']:.4g}" if spread else "",
                f"{spread['low']:.4g} to {spread['high']:.4g}" if spread else "",
                how,
                f"{share:.3g} %" if share is not None else "",
                f"{ratio:.3g}" if ratio else "",
                f"{c['tokens_s']:,.0f}" if c.get("tokens_s") else "",
                ", ".join(
                    f"{g['number']:g} {g['unit']} {'met' if g['met'] else 'missed'}" for g in c.get("goals") or ()
                ),
                plain(c["message"]),
            )
        )
    ruler = f"x {result.get('ruler') or 'ruler'}"
    columns = ("", "status", "us", "quartiles", "how", "of the floor", ruler, "tokens/s", "goal", "")
    print_table(columns, rows, title=title)


def _compare(old: str, new: str, threshold: float, *, json: bool) -> bool:
    from rlkernel_bench.compare import compare
    from rlkernel_bench.results import read

    changes = compare(read(Path(old)), read(Path(new)), threshold)
    if json:
        print_json([{**vars(c), "regressed": c.regressed} for c in changes])
    else:
        told = [c for c in changes if c.verdict != "same"]
        rows = [(c.verdict, c.where, c.what, c.old, c.new, f"{c.ratio:.3f}" if c.ratio else "", c.older) for c in told]
        print_table(("", "workload", "figure", "old", "new", "new / old", "of older sources"), rows)
        typer.echo(f"{len(changes)} compared, {sum(c.regressed for c in changes)} regressed")
    return not any(c.regressed for c in changes)


def _evidence(folder: Path | None, *, json: bool) -> bool:
    from rlkernel_bench.evidence import RESULTS, evidence

    found = list(evidence(folder or RESULTS))
    if json:
        print_json([vars(e) for e in found])
        return True
    due = [e for e in found if e.state == "older"]
    title = f"{len(due)} of {len(found)} to renew"
    cells = [(e.results, e.suite, e.backend, e.op) for e in due]
    print_table(("results", "suite", "backend", "operator"), cells, title=title)
    typer.echo("".join(f"{command}\n" for command in dict.fromkeys(e.command for e in due)), nl=False)
    return True


def _report(folder: Path, *, json: bool) -> bool:
    from rlkernel_bench.plots import draw
    from rlkernel_bench.report import as_csv, markdown, summary
    from rlkernel_bench.results import read_all

    contents: list[Any] = read_all(folder)
    plots: list[str] = []
    if importlib.util.find_spec("matplotlib") is not None:
        plots = draw(contents, folder)
    write_text(folder / "report.md", markdown(contents, plots))
    write_text(folder / "results.csv", as_csv(contents))
    if json:
        print_json({"summary": summary(contents), "files": ["report.md", "results.csv", *plots]})
    else:
        typer.echo(f"wrote {', '.join(['report.md', 'results.csv', *plots])} in {folder}")
    return True
