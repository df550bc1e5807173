"""Candidates for the judge: right ones, wrong ones, and those that cheat or do harm, as source text."""

from __future__ import annotations

from typing import Final

IMPORTS: Final = "import torch\nfrom torch.nn.functional import softplus\n"

# The plain call of logprob in float64, with its refusals: what an honest beginner hands in.
BODY: Final = """
    z = logits.double() / temperature
    bad = (ids < 0) | (ids >= z.shape[-1])
    at = ids.masked_fill(bad, 0).long()[..., None]
    chosen = z.gather(-1, at).squeeze(-1)
    rest = z.scatter(-1, at, -torch.inf)
    alone = (rest == -torch.inf).all(-1)
    others = rest.masked_fill(alone[..., None], 0.0).logsumexp(-1).masked_fill(alone, -torch.inf)
    lawless = z.isnan().any(-1) | (z == torch.inf).any(-1) | (z == -torch.inf).all(-1)
    lp = torch.where(chosen == -torch.inf, chosen, -softplus(others - chosen, threshold=700.0))
    lp = lp.masked_fill(bad | lawless, torch.nan).float()
    lse = z.logsumexp(-1).masked_fill(lawless, torch.nan).float()
"""
RESULT: Final = '    return {"logprob": lp, "lse": lse, "invalid": bad}\n'
HEAD: Final = "def logprob(logits, ids, *, temperature=1.0):"

RIGHT: Final = f"{IMPORTS}\n{HEAD}{BODY}{RESULT}"
OF_A_RECORD: Final = f"""{IMPORTS}
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult

def logprob(call: LogprobCall) -> LogprobResult:
    logits, ids, temperature = call.logits, call.ids, call.temperature
{BODY}    return LogprobResult(logprob=lp, lse=lse, invalid=bad)
"""
DIFFERENTIABLE: Final = RIGHT.replace(HEAD, f'CLAIMS = {{"grad"}}\n\n{HEAD}')
WRONG_TEMPERATURE: Final = RIGHT.replace("/ temperature", "/ temperature / temperature")


def before(text: str) -> str:
    """The right candidate with lines before its work; they may use `work`, which does it."""
    return f"{IMPORTS}\ndef work(logits, ids, temperature=1.0):{BODY}{RESULT}\n{text}"


# Cheats: right once, or on other inputs than these, by the probe that must catch them.
CHEATS: Final = {
    "not cached by shape": before(f"""
KEPT = {{}}
{HEAD}
    key = tuple(logits.shape)
    if key not in KEPT:
        KEPT[key] = work(logits, ids, temperature)
    return KEPT[key]
"""),
    "not cached by address": before(f"""
KEPT = {{}}
{HEAD}
    key = (logits.data_ptr(), logits._version)
    if key not in KEPT:
        KEPT[key] = work(logits, ids, temperature)
    return KEPT[key]
"""),
    "not cached by fingerprint": before(f"""
KEPT = {{}}
{HEAD}
    key = (float(logits[0, 0]), float(logits[-1, -1]), int(ids[0]))
    if key not in KEPT:
        KEPT[key] = work(logits, ids, temperature)
    return KEPT[key]
"""),
    "nothing replaced": before(f"""
import time
time.perf_counter = lambda: 0.0
{HEAD}
    return work(logits, ids, temperature)
"""),
    "nothing borrowed": f"""
from rlkernel_torch.direct import logprob as theirs
{HEAD}
    return theirs(logits, ids, temperature=temperature)
""",
}

# Results of all calls on one buffer: the first is gone once the second came.
ONE_BUFFER: Final = before(f"""
OUT = {{}}
{HEAD}
    for name, x in work(logits, ids, temperature).items():
        OUT.setdefault((name, x.shape), x.clone()).copy_(x)
    return {{name: OUT[name, ids.shape] for name in ("logprob", "lse", "invalid")}}
""")
ALIAS: Final = "def shape_rewards(rewards):\n    return {'rewards': rewards}\n"
LAZY: Final = before(f"""
class Lazy(torch.Tensor):
    pass
{HEAD}
    return {{name: x.as_subclass(Lazy) for name, x in work(logits, ids, temperature).items()}}
""")
WRITES_INPUT: Final = before(f"""
{HEAD}
    made = work(logits, ids, temperature)
    logits.zero_()
    return made
""")
UNWRITTEN: Final = before(f"""
{HEAD}
    made = work(logits, ids, temperature)
    late = torch.empty_like(made["logprob"])
    late[:-1] = made["logprob"][:-1]
    return {{**made, "logprob": late}}
""")
SLOW: Final = before(f"""
import time
{HEAD}
    time.sleep(0.01)
    return work(logits, ids, temperature)
""")
LATER: Final = before(f"""
from threading import Timer
def fill(out, *given):
    made = work(*given)
    for name, x in out.items():
        x.copy_(made[name])
{HEAD}
    like = torch.zeros(ids.shape)
    out = {{"logprob": like, "lse": like.clone(), "invalid": torch.zeros(ids.shape, dtype=torch.bool)}}
    if logits.numel() < 10**4:
        return work(logits, ids, temperature)
    Timer(0.3, fill, (out, logits, ids, temperature)).start()  # surely after the clock
    return out
""")

THREAD: Final = before(f"""
import _thread, time
{HEAD}
    _thread.start_new_thread(time.sleep, (3,))
    return work(logits, ids, temperature)
""")
BORROWS_OR_NOT: Final = before(f"""
try:
    from rlkernel_torch.direct import logprob as theirs
except ImportError:
    theirs = None
{HEAD}
    return work(logits, ids, temperature)
""")

# Harm: how the judged process ends, or does not.
HARM: Final = {
    "protocol_error": f"import os\n{HEAD}\n    os._exit(0)\n",
    "segfault": f"import ctypes\n{HEAD}\n    ctypes.string_at(0)\n",
    "abort": f"import os\n{HEAD}\n    os.abort()\n",
    "timeout": f"{HEAD}\n    while True:\n        pass\n",
}
