"""Devices, architectures and dtypes as people write them: the name that is meant, or an error with the nearest one."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel import hardware, policy
from rlkernel_core import hardware as names
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.hardware import CHIPS, DEVICE_WORDS, DEVICES, DTYPE_WORDS, DTYPES
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from tests.plugins import good


def backend(**requires: object) -> Backend:
    """A third party's manifest with one claim."""
    impl = Impl(op="logprob@1", target="acme:logprob", requires=Requires(**requires))
    return Backend(name="acme", api=API_VERSION, impls=(impl,))


@pytest.mark.parametrize(
    ("written", "meant"),
    [("sm90", "sm90"), ("sm_87", "sm87"), ("SM_87", "sm87"), ("sm-80", "sm80"), ("SM90a", "sm90"), ("sm_100f", "sm100"),
     ("GFX90A", "gfx90a"), ("gfx942", "gfx942")],
)  # fmt: skip
def test_an_architecture_has_one_spelling(written, meant) -> None:
    assert hardware.architecture(written, "cuda", ()) == meant


def test_a_manifest_has_that_spelling_too() -> None:
    claim = Requires(device="cuda", arch=("sm_80+", "GFX942", "gfx9*"), arch_excluded=("SM_87",))
    assert (claim.arch, claim.arch_excluded) == (("sm80+", "gfx942", "gfx9*"), ("sm87",))


@pytest.mark.parametrize(("written", "nearest"), [("sm999", "'sm90'"), ("gfx943", "'gfx942'"), ("hopper", "sm90")])
def test_an_architecture_that_does_not_exist_is_an_error_with_the_nearest(written, nearest) -> None:
    with pytest.raises(UnknownNameError, match=nearest):
        hardware.architecture(written, "cuda", ())


@pytest.mark.parametrize(
    ("written", "meant"), [("cuda", "cuda"), ("cuda:1", "cuda:1"), ("CUDA", "cuda"), ("npu", "npu")]
)
def test_a_device_is_named_as_torch_names_it(written, meant) -> None:
    assert hardware.device(written, ()) == meant


@pytest.mark.parametrize("written", ["", "banana", "cuda:x", "cuda 1", "cude"])
def test_a_device_that_nobody_has_is_an_error_with_the_nearest(written) -> None:
    with pytest.raises(UnknownNameError, match="cuda"):
        hardware.device(written, ())


@pytest.mark.parametrize(("chip", "arch"), CHIPS.items())
def test_a_chip_is_an_error_with_the_words_for_it(chip, arch) -> None:
    assert arch in DEVICES["cuda"]
    with pytest.raises(ArgumentError, match=f"Say --device cuda --arch {arch}\\."):
        hardware.device(chip.upper(), ())
    with pytest.raises(ArgumentError, match=f"Say --arch {arch}\\."):
        hardware.architecture(chip, "cuda", ())


@pytest.mark.parametrize("word", ["sm_90", "gfx942", "x86_64"])
def test_an_architecture_in_place_of_a_device_is_an_error_with_the_words_for_it(word) -> None:
    with pytest.raises(ArgumentError, match=f"--arch {word.replace('_9', '9')}"):
        hardware.device(word, ())


@pytest.mark.parametrize("word", DEVICE_WORDS)
def test_the_word_of_a_vendor_is_an_error_with_the_device_type(word) -> None:
    with pytest.raises(ArgumentError, match="Say --device cuda;"):
        hardware.device(word, ())


def test_an_architecture_alone_says_which_device_it_is_of() -> None:
    found = [hardware.place(None, arch, ()) for arch in ("sm_90", "gfx942", "aarch64")]
    assert found == [("cuda", "sm90"), ("cuda", "gfx942"), ("cpu", "aarch64")]


@pytest.mark.parametrize(
    ("where", "arch", "remedy"), [("cpu", "sm90", "--device cuda"), ("cuda", "x86_64", "--device cpu")]
)
def test_an_architecture_of_another_device_is_an_error(where, arch, remedy) -> None:
    with pytest.raises(ArgumentError, match=remedy):
        hardware.place(where, arch, ())


def test_the_names_of_a_backend_are_names() -> None:
    asked = [backend(device=("acme", "cuda"), arch=("sm130", "acme2"))]
    assert hardware.place("acme:1", "anything", asked) == ("acme:1", "anything")
    assert hardware.place("cuda", "SM_130", asked) == ("cuda", "sm130")
    with pytest.raises(UnknownNameError, match="did you mean 'acme'"):
        hardware.device("acne", asked)


def test_a_backend_that_claims_any_device_takes_any_name() -> None:
    assert hardware.place("banana", None, [backend(device="*")]) == ("banana", None)


def test_plain_torch_runs_where_torch_does_and_nowhere_else() -> None:
    with rlk.use("torch"), pytest.raises(UnknownNameError):
        hardware.device("banana", hardware.in_order())


def test_only_the_backends_in_the_order_are_asked(plug) -> None:
    plug("acme", good("acme"))
    with pytest.raises(UnknownNameError):
        hardware.device("banana", hardware.in_order())
    for order in (rlk.use("acme", "auto"), rlk.use(logprob=["acme", "auto"])):
        with order:
            assert hardware.device("banana", hardware.in_order()) == "banana"


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_those_of_torch(name) -> None:
    assert isinstance(getattr(torch, name), torch.dtype)
    assert hardware.dtype(f"torch.{name}", ()) == name


@pytest.mark.parametrize(("word", "meant"), DTYPE_WORDS.items())
def test_another_word_for_a_dtype_is_an_error_with_that_of_torch(word, meant) -> None:
    assert meant in DTYPES
    with pytest.raises(ArgumentError, match=f"Say --dtype {meant}"):
        hardware.dtype(word, ())


def test_a_device_that_must_be_here_is() -> None:
    assert hardware.present("cpu") == "cpu"
    with pytest.raises(ArgumentError, match="torch sees no such device here, it sees cpu"):
        hardware.present("cuda:99")


def test_a_device_that_torch_does_not_know_is_left_to_the_backend_that_claims_it() -> None:
    assert hardware.present("acme:0", [backend(device="acme")]) == "acme:0"


def test_explain_takes_names_as_the_command_line_does() -> None:
    assert rlk.explain("logprob", device="CUDA", arch="sm_90", dtype="torch.bfloat16").decision.call.arch == "sm90"
    with pytest.raises(ArgumentError, match="Say device='cuda', arch='sm90'"):
        rlk.explain("logprob", device="h100")
    with pytest.raises(UnknownNameError, match="bfloat16"):
        rlk.explain("logprob", dtype="bfloat")


def test_what_torch_has_been_told_is_a_name(monkeypatch) -> None:
    monkeypatch.setattr(torch, "device", lambda kind: kind)
    assert hardware.device("acme", ()) == "acme"


def test_the_list_of_names_says_nothing_of_the_policy() -> None:
    assert names.architecture("acme_V2") == "acme_V2"
    assert policy.current().policy.default.order == ("auto",)
