"""The sampler's CUDA C++ on a CPU: compiled by g++ with coroutines for threads, against the reference, row by row.

What the sampler asks of the hardware is in one file of its sources, device.cuh; emulated/device_on_host.h takes its
place. Logic, barriers that not all threads come to, and results are tried here; races, speed and the hardware's own
rounding by test_gpu_sample.py.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.sample import SampleCall
from rlkernel_cuda import backend
from rlkernel_cuda.sample.kernel import PARAMS, SOURCE, TILE, Shape
from rlkernel_cuda.sample.launch import _given, prepare, shape_of
from rlkernel_torch.direct import sample as reference

HERE = Path(__file__).parent / "emulated"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
INF, NAN = torch.inf, torch.nan


def built(folder: Path, **macros: int) -> ctypes.CDLL:
    kernel = SOURCE.read_text().replace("extern __shared__ __align__(16) char memory[];", "")
    source = folder / "sampler.cpp"
    source.write_text(kernel + (HERE / "run_on_host.h").read_text())
    (folder / "sample").mkdir()  # found before the one of the package
    shutil.copy(HERE / "device_on_host.h", folder / "sample" / "device.cuh")
    shared = Shape(macros["NT"], macros["CLUSTER"], 1, macros.get("FINISHERS", 0)).shared
    macros = {"PER_SM": 1, "SHARED_BYTES": shared, "FINISHERS": 0, "AHEAD": 0, "GRID": 1} | macros
    flags = [*(f"-D{n}={v}" for n, v in macros.items()), f"-I{folder}", f"-I{SOURCE.parents[1]}"]
    command = ["g++", "-O1", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared", "-w", *flags]
    subprocess.run([*command, "-o", str(folder / "sampler.so"), str(source)], check=True)
    return ctypes.CDLL(str(folder / "sampler.so"))


@pytest.fixture(scope="module")
def filtered(tmp_path_factory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("filtered"), NT=64, CLUSTER=3, TYPE=0, PLAIN=0, AHEAD=1)


def run(library, logits, temperature=1.0, top_k=None, top_p=None, min_p=None, seed=0, step=0):
    """What the kernel answers, and what the reference does."""
    N, V = logits.shape
    ids, counts = torch.full((2, N), -7), torch.full((2, N), -7, dtype=torch.int32)
    reals = torch.full((4, N), -7.0)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "step": step}
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "step": 0}
    held = [_given(x, off[n], real=isinstance(off[n], float)) for n, x in options.items()]
    quads = int(logits.stride(0) % 4 == 0)
    params = PARAMS.pack(
        logits.data_ptr(), logits.stride(0), N, V, -(-V // TILE), quads + 2 * (quads and V % 4 == 0),
        *(v for _, values in held for v in values), 0, 0, 0, 0, 1, 0,
        *(x.data_ptr() for x in (*ids, *reals, *counts)),
    )  # fmt: skip
    stuck = library.run(params)
    assert stuck == 0, f"row {stuck - 1} waits for ever"
    names = ("token", "threshold_id", "logprob", "log_kept_mass", "threshold", "raw_logprob", "kept_count", "status")
    have = dict(zip(names, (*ids, *reals, *counts), strict=True))
    return have, reference(logits, **options, raw_logprob=True)


def same(library, logits, **options) -> torch.Tensor:
    """Every result as the reference's; returns which rows went the exact way."""
    have, want = run(library, logits, **options)
    for name in ("token", "kept_count", "threshold", "threshold_id"):
        assert have[name].tolist() == getattr(want, name).tolist(), name
    assert (have["status"] & ~32).tolist() == want.status.tolist()
    for name in ("logprob", "log_kept_mass", "raw_logprob"):
        torch.testing.assert_close(have[name], getattr(want, name), atol=2e-6, rtol=2e-6, equal_nan=True)
    return have["status"] & 32 != 0


def laws(n: int, V: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (n,), generator=g)]

    return {
        "temperature": pick(0.0, 0.3, 1.0, 1.0, 2.0),
        "top_k": pick(0, 0, 1, 5, 50, 50, 600, V, V + 5).int(),
        "top_p": pick(1.0, 0.95, 0.95, 0.5, 0.999, 0.0, 2.0, NAN),
        "min_p": pick(0.0, 0.0, 0.0, 0.01, 0.1, 2.0),
        "seed": torch.randint(0, 2**62, (n,), generator=g),
        "step": torch.randint(0, 2**40, (n,), generator=g),
    }


ROWS = {
    "one id": lambda x: x[:, :1] * 3,
    "sigma 0.1": lambda x: x * 0.1,
    "sigma 3": lambda x: x[:, :1025] * 3,
    "sigma 30": lambda x: x[:, :999] * 30,
    "ties": lambda x: x.mul(2).round(),
    "equal": lambda x: x * 0 + 1.25,
    "-inf": lambda x: x.where(x > 0, -INF).where(torch.arange(len(x))[:, None] != 3, -INF),
    "NaN": lambda x: x.where(x < 1, NAN).where(torch.arange(len(x))[:, None] != 3, NAN),
    "+inf": lambda x: x.where(x < 1.5, INF),
    "1e30": lambda x: x.where(x < 2, 1e30).where(x > 0, -1e30),
    "3e38": lambda x: (x * 3e38).clamp(-3.4e38, 3.4e38),
}


@pytest.fixture(scope="module")
def read_on(tmp_path_factory) -> ctypes.CDLL:
    """Three blocks that finish their rows while they read the next."""
    return built(tmp_path_factory.mktemp("read_on"), NT=128, CLUSTER=1, TYPE=0, PLAIN=0, FINISHERS=2, GRID=3)


@pytest.mark.parametrize("build", ["filtered", "read_on"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_mixed_parameters_answer_as_the_reference_does(name, build, request) -> None:
    g = torch.Generator().manual_seed(len(name))
    x = ROWS[name](torch.randn(12, 2600, generator=g)).contiguous()
    same(request.getfixturevalue(build), x, **laws(*x.shape, g))


def test_usual_rows_take_the_quick_way_and_flat_nuclei_the_exact_one(filtered) -> None:
    g = torch.Generator().manual_seed(3)
    seeds = {"seed": torch.arange(2), "step": 1}
    x = torch.randn(2, 20000, generator=g)
    popular = -2 * (torch.arange(20000) + 2.0).log() + 0.5 * x
    ways = [
        same(filtered, 3 * x, top_k=50, top_p=0.95, **seeds),
        same(filtered, popular, top_k=50, top_p=0.95, **seeds),
        same(filtered, popular, top_p=0.9, **seeds),
        same(filtered, 0.1 * x, top_p=0.95, **seeds),
        same(filtered, x * 0, top_k=5000, top_p=0.9, **seeds),
    ]
    assert [way.tolist() for way in ways] == [[False] * 2] * 3 + [[True] * 2] * 2


def test_a_nucleus_may_end_in_any_bin_whatever_the_threads(tmp_path) -> None:
    # 768 threads looked at 1536 of the 2048 bins of the exact search, and kept a row whole that ends behind them
    library = built(tmp_path, NT=768, CLUSTER=1, TYPE=0, PLAIN=0, FINISHERS=6, GRID=2)
    g = torch.Generator().manual_seed(4)
    x = 0.5 * torch.randn(3, 2600, generator=g) - 2 * (torch.arange(2600) + 2.0).log()
    assert same(library, x, seed=torch.arange(3), step=2, temperature=2.0, top_p=0.95).all()


@pytest.mark.parametrize("build", ["filtered", "read_on"])
def test_where_fewer_tokens_are_left_than_k_all_of_them_are_kept(build, request) -> None:
    g = torch.Generator().manual_seed(6)
    x = torch.randn(6, 2600, generator=g)
    x = x.where(x > torch.tensor([2.0, 2.2, 2.5, 3.0, 2.2, 2.2])[:, None], -INF)  # 50 tokens and fewer
    p = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9, 0.5])
    same(request.getfixturevalue(build), x, top_k=64, top_p=p, seed=torch.arange(6), step=0)


def test_rows_without_filters_in_a_build_without_them(tmp_path) -> None:
    plain = built(tmp_path, NT=128, CLUSTER=1, TYPE=1, PLAIN=1)
    g = torch.Generator().manual_seed(5)
    x = (torch.randn(24, 5000, generator=g) * torch.tensor([0.1, 3.0, 30.0]).repeat(8)[:, None]).bfloat16()
    x[3, ::2], x[4, 7], x[5] = -INF, NAN, 0
    same(plain, x, temperature=torch.linspace(0, 2, 24), seed=torch.arange(24), step=2**40)


@pytest.mark.parametrize("cluster", [1, 2])  # a race at the row's end, and a winner of every tile
def test_the_first_to_arrive_is_drawn_whatever_the_logits(cluster, tmp_path) -> None:
    plain = built(tmp_path, NT=64, CLUSTER=cluster, TYPE=0, PLAIN=1)
    g = torch.Generator().manual_seed(11)
    x = torch.randn(40, 5003, generator=g) * torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0]).repeat(8)[:, None]
    x[3, ::2], x[4, 7], x[5], x[6, 1:], x[7, 100:] = -INF, NAN, 0, -INF, -1e30
    x[8, 5], x[9, 9], x[10] = 1e30, INF, -INF
    x[11] = (x[11] * 1e38).clamp(-3e38, 3e38)
    x[12] += 1e4
    x[13, 4096:] += 40
    temperature = torch.tensor([1.0, 0.3, 2.0, 1e-3, 1.0, 0.0, 1e30, 1.0]).repeat(5)
    for step in range(3):
        same(plain, x, temperature=temperature, seed=torch.arange(40), step=step)


@pytest.mark.parametrize("plain", [0, 1])
def test_a_best_logit_whose_product_with_the_scale_is_rounded_by_127_has_its_mass(plain, tmp_path) -> None:
    library = built(tmp_path, NT=64, CLUSTER=1, TYPE=0, PLAIN=plain)
    top = 2e9 + 128 * torch.arange(4096, dtype=torch.float64)
    exact = top * torch.tensor(1.4426950408889634, dtype=torch.float32)
    rounded = exact - exact.float()
    some = torch.cat([top[(rounded > 126) & (rounded < 128)][:3], top[(rounded < -126) & (rounded > -128)][:3]])
    x = torch.randn(len(some), 1500, generator=torch.Generator().manual_seed(13))
    x[:, 700] = some
    same(library, x, seed=torch.arange(len(some)), step=0)


def test_the_word_0_of_a_token_that_is_not_in_the_race_does_not_stop_it(tmp_path) -> None:
    plain = built(tmp_path, NT=64, CLUSTER=1, TYPE=0, PLAIN=1)
    x = torch.randn(2, 2900, generator=torch.Generator().manual_seed(12))
    seed = torch.tensor([1343428, 2360573])  # whose ids 3 and 2760 have the word 0, and so a bound of 0
    same(plain, x, seed=seed, step=0)
    x[0, 3] = x[1, 2760] = -INF
    same(plain, x, seed=seed, step=0)


def test_only_many_fp32_rows_under_a_top_k_are_read_on() -> None:
    found = {
        (dtype, rows): shape_of(rows, dtype, plain=False, cut=True).finishers > 0
        for dtype in (torch.float32, torch.bfloat16)
        for rows in (1, 264, 396, 528, 529, 1024)
    }
    assert found == {(d, n): d is torch.float32 and n > 528 for d, n in found}
    assert not any(shape_of(1024, torch.float32, plain=p, cut=False).finishers for p in (True, False))


@pytest.mark.parametrize("V", [2308, 2310])
def test_the_last_tile_of_a_row_may_be_read_by_quads_or_token_by_token(V, tmp_path) -> None:
    library = built(tmp_path, NT=64, CLUSTER=1, TYPE=0, PLAIN=0)
    g = torch.Generator().manual_seed(8)
    padded = 3 * torch.randn(4, 2312, generator=g)
    padded[:, V:] = 100  # what lies behind a row would win
    x = padded[:, :V]
    same(library, x, top_k=40, top_p=0.95, seed=torch.arange(4), step=1)
    same(library, x, seed=torch.arange(4), step=1)


def test_logits_that_cannot_be_hashed_are_refused_by_name() -> None:
    with rlk.registered(backend), rlk.use("cuda"), pytest.raises(RLKernelError, match="logits"):
        rlk.sample([[1.0, 2.0]], seed=0, step=0)


def test_a_feature_that_is_not_claimed_is_refused_by_name_before_anything_is_compiled() -> None:
    call = SampleCall(torch.zeros(1, 8), seed=0, step=0, top_n=2, entropy=True)
    with pytest.raises(RLKernelError, match="does not claim entropy, top_n"):
        prepare(call)
