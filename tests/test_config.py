"""Where a policy's values come from, and what happens to bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkernel.config import ambient, merge, read_file, validated
from rlkernel_core.decision import OpPolicy
from rlkernel_core.errors import ConfigError

BACKENDS = ("torch", "acme")


def layer(**values):
    return validated(values, "test", BACKENDS)


def test_without_any_layer_the_order_is_auto_and_fallbacks_warn() -> None:
    assert merge([]).default == OpPolicy(("auto",), "warn", frozenset())


def test_a_higher_layer_wins_and_the_source_says_which() -> None:
    policy = merge([("use()", layer(order="acme")), ("file", layer(order="torch", fallback="error"))])
    assert (policy.default.order, policy.default.fallback) == (("acme",), "error")
    assert (policy.source["order"], policy.source["fallback"], policy.source["probe"]) == ("use()", "file", "default")


def test_an_operators_own_value_beats_the_general_one_of_its_layer() -> None:
    policy = merge([("file", layer(order="torch", ops={"logprob": {"order": ["acme", "auto"]}}))])
    assert (policy.of("logprob@1").order, policy.of("sample").order) == (("acme", "auto"), ("torch",))


def test_a_general_value_of_a_higher_layer_beats_an_operators_value_of_a_lower_one() -> None:
    policy = merge([("use()", layer(order="torch")), ("file", layer(ops={"logprob": {"order": "acme"}}))])
    assert policy.of("logprob").order == ("torch",)


@pytest.mark.parametrize(
    "values, culprit, remedy",
    [
        ({"order": ["acm"]}, "order", "did you mean 'acme'"),
        ({"order": []}, "order", 'order = ["auto"]'),
        ({"fallback": "silent"}, "fallback", "'warn' or 'error'"),
        ({"oder": ["acme"]}, "oder", "did you mean 'order'"),
        ({"ops": {"logprb": {"order": ["acme"]}}}, "logprb", "did you mean 'logprob'"),
        ({"ops": {"logprob": {"oder": ["acme"]}}}, "ops.logprob.oder", "did you mean 'order'"),
        ({"need": ["batch_invariance"]}, "need", "did you mean 'batch_invariant'"),
        ({"ops": {"logprob": {"need": ["format:nf4"]}}}, "ops.logprob.need", "unknown feature"),
        ({"order": 3}, "order", "tuple"),
    ],
)
def test_bad_values_name_the_culprit_and_the_remedy(values, culprit, remedy) -> None:
    with pytest.raises(ConfigError) as raised:
        layer(**values)
    assert culprit in str(raised.value)
    assert remedy in str(raised.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_is_read_with_its_operators(tmp_path) -> None:
    text = (
        '[rlkernel]\norder = ["auto"]\n[rlkernel.ops.logprob]\norder = ["acme", "auto"]\nneed = ["batch_invariant"]\n'
    )
    settings = read_file(write(tmp_path / "rlkernel.toml", text), BACKENDS)
    assert merge([("f", settings)]).of("logprob") == OpPolicy(("acme", "auto"), "warn", frozenset({"batch_invariant"}))


@pytest.mark.parametrize(
    "text, said",
    [
        ("[rlkernel\n", "not valid TOML"),
        ("[rlkernle]\n", "did you mean 'rlkernel'"),
        ("rlkernel = 3\n", "write [rlkernel]"),
        ('[rlkernel]\nfallback = "silent"\n', "fallback"),
        ("\xff\xfe", "not UTF-8"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(tmp_path, text, said) -> None:
    path = tmp_path / "rlkernel.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        read_file(path, BACKENDS)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)


def test_the_nearest_file_upwards_is_found(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "rlkernel.toml", '[rlkernel]\norder = ["acme"]\n')
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert [name for name, _ in ambient(BACKENDS, {})] == [str(path)]


def test_a_lock_in_the_file_is_relative_to_the_file(tmp_path) -> None:
    path = write(tmp_path / "rlkernel.toml", '[rlkernel]\nlock = "pins.lock"\n')
    assert read_file(path, BACKENDS).lock == str(tmp_path / "pins.lock")


def test_a_lock_file_in_the_working_folder_is_in_force(tmp_path, monkeypatch) -> None:
    write(tmp_path / "rlkernel.lock", "{}")
    monkeypatch.chdir(tmp_path)
    assert merge(ambient(BACKENDS, {})).lock == str(tmp_path / "rlkernel.lock")


def test_the_environment_beats_the_file(tmp_path, monkeypatch) -> None:
    write(tmp_path / "rlkernel.toml", '[rlkernel]\norder = ["acme"]\nfallback = "error"\n')
    monkeypatch.chdir(tmp_path)
    policy = merge(ambient(BACKENDS, {"RLKERNEL_ORDER": "reference, auto"}))
    assert (policy.default.order, policy.default.fallback) == (("torch", "auto"), "error")
    assert policy.source["order"] == "RLKERNEL_ORDER"


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"RLKERNEL_ODER.*did you mean 'RLKERNEL_ORDER'"):
        ambient(BACKENDS, {"RLKERNEL_ODER": "acme"})


def test_a_variable_that_bears_a_backends_name_is_that_backends() -> None:
    assert ambient(BACKENDS, {f"RLKERNEL_{BACKENDS[0].upper()}_CACHE": "/var/cache"}) == ambient(BACKENDS, {})


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="RLKERNEL_FALLBACK"):
        ambient(BACKENDS, {"RLKERNEL_FALLBACK": "quiet"})


def test_a_configuration_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="RLKERNEL_CONFIG: /nowhere"):
        ambient(BACKENDS, {"RLKERNEL_CONFIG": "/nowhere.toml"})


def test_an_order_without_an_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="order: .*a set has none"):
        layer(order={"torch", "acme"})
    assert layer(need={"deterministic"}).need == ("deterministic",)


@pytest.mark.parametrize("value", [True, 1, b"acme", ["acme", None], {"acme": 1}, Path("acme")])
def test_what_is_no_name_is_refused(value) -> None:
    with pytest.raises(ConfigError, match="order"):
        layer(order=value)


def test_a_variable_without_a_name_permits_nothing_and_says_so() -> None:
    with pytest.raises(ConfigError, match="RLKERNEL_ORDER: order: .*an empty order permits nothing"):
        ambient(BACKENDS, {"RLKERNEL_ORDER": " , "})
    with pytest.raises(ConfigError, match="RLKERNEL_ORDER: order: unknown backend 'acm'; did you mean 'acme'"):
        ambient(BACKENDS, {"RLKERNEL_ORDER": "reference,acm"})


def test_a_lock_is_found_again_from_another_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf" / "run.toml", '[rlkernel]\nlock = "pins.lock"\n')
    monkeypatch.chdir(tmp_path)
    said = (merge(ambient(BACKENDS, {"RLKERNEL_CONFIG": "conf/run.toml"})).lock, layer(lock="here.lock").lock)
    assert said == (str(tmp_path / "conf" / "pins.lock"), str(tmp_path / "here.lock"))


@pytest.mark.parametrize("read", [read_file, lambda path, _: ambient(BACKENDS, {"RLKERNEL_CONFIG": str(path)})])
def test_a_file_that_may_not_be_read_is_an_error_that_names_it(tmp_path, monkeypatch, read) -> None:
    path = write(tmp_path / "rlkernel.toml", "")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"rlkernel\.toml.*Permission denied"):
        read(path, BACKENDS)


def test_a_folder_is_no_configuration(tmp_path, monkeypatch) -> None:
    (tmp_path / "rlkernel.toml").mkdir()
    (tmp_path / "rlkernel.lock").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ambient(BACKENDS, {}) == []
    with pytest.raises(ConfigError, match="RLKERNEL_CONFIG: .*is no file"):
        ambient(BACKENDS, {"RLKERNEL_CONFIG": str(tmp_path / "rlkernel.toml")})


def test_folders_above_that_may_not_be_looked_into_hold_no_configuration(tmp_path, monkeypatch) -> None:
    def stat(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "stat", stat)
    assert ambient(BACKENDS, {}) == []


def test_a_working_folder_that_is_gone_holds_no_configuration(tmp_path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert ambient(BACKENDS, {}) == []
    named = write(tmp_path / "named.toml", '[rlkernel]\norder = ["acme"]\n')
    assert merge(ambient(BACKENDS, {"RLKERNEL_CONFIG": str(named)})).default.order == ("acme",)


def test_unicode_is_no_trouble(tmp_path) -> None:
    path = write(tmp_path / "rlkernel.toml", '[rlkernel]\norder = ["törch"]\n')
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        read_file(path, BACKENDS)
