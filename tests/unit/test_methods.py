"""The table of drafting methods: what it knows, what can be added, and what a mistake answers."""

import importlib.util
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import foretoken
from foretoken.config import EngineConfig, method_registry
from foretoken.config.method_registry import (
    DraftingMethod,
    Marks,
    built_methods,
    find_method,
    known_methods,
    register_method,
)
from foretoken.config.published import method_of_config, method_of_tensors
from foretoken.errors import ConfigError, NotYetError
from foretoken.proposers.drafter_factory import find_drafters

TOY = DraftingMethod(
    name="toy",
    summary="repeats the last token",
    source="this test",
    drafts_with="head",
    code="nowhere.toy",
    aliases={"plaything": {}},
    marks=Marks(keys=("toy_width",)),
)


@pytest.fixture(autouse=True)
def table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten."""
    monkeypatch.setattr(method_registry, "_table", dict(method_registry._table))
    yield
    method_registry._plugins.cache_clear()
    method_registry._record_of.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Pretend that a package names a method."""
    points = (EntryPoint(name=name, value=value, group=method_registry.ENTRY_POINTS),)
    method_registry._plugins.cache_clear()
    monkeypatch.setattr(method_registry, "entry_points", lambda group: points)


@pytest.mark.parametrize("method", built_methods(), ids=lambda method: str(method.name))
def test_the_code_of_every_method_is_there(method: DraftingMethod) -> None:
    assert method.code is not None and importlib.util.find_spec(method.code) is not None


def test_words_and_other_words_are_used_once() -> None:
    words = [word for row in known_methods() for word in (row.name, *row.aliases)]
    assert len(set(words)) == len(words)


def test_a_registered_method_is_known_everywhere() -> None:
    foretoken.register_method(TOY)
    assert find_method("toy") is TOY
    assert method_of_config({"toy_width": 3}) is TOY
    config = EngineConfig.from_kwargs(
        model="demo", speculative_config={"method": "plaything", "model": "somewhere"}
    ).speculative_config
    assert config is not None and config.drafters[0].method == "toy"
    target: Any = None
    with pytest.raises(ConfigError, match="an importable module as the code of toy"):
        find_drafters(config, target)


def test_registering_twice_is_harmless_and_taking_a_word_is_not() -> None:
    register_method(TOY)
    register_method(TOY)
    for name in ("eagle3", "pard", "drafters", "two words"):
        with pytest.raises(ConfigError, match="a word"):
            register_method(DraftingMethod(name=name, summary="", source="", drafts_with="text"))


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("num_speculative_tokens", "speculative_config itself"),
        ("drafters", "speculative_config itself"),
        ("max_draft_len", "speculative_config itself"),
        ("draft_tensor_parallel_size", "speculative_config itself"),
        ("prompt_lookup_max", "method ngram"),
    ],
)
def test_keys_of_its_own_hide_no_others(
    key: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of every drafter, of all drafters, of other engines, and of another method."""
    settings = make_dataclass("Settings", [("toy_size", int, 3), (key, int, 3)], frozen=True)
    clash = replace(TOY, settings=settings)
    with pytest.raises(ConfigError, match=rf"settings: got '{key} \(of {owner}\)'.*toy_size"):
        register_method(clash)
    monkeypatch.setitem(globals(), "CLASH", clash)
    install(monkeypatch, "toy", f"{__name__}:CLASH")
    assert "toy" not in [method.name for method in known_methods()]
    with pytest.raises(ConfigError, match=f"'toy' of an installed package.*{key}"):
        find_method("toy")


def test_methods_may_share_the_settings_of_one_class() -> None:
    register_method(replace(TOY, settings=find_method("ngram").settings))
    assert "prompt_lookup_max" in find_method("toy").keys


def test_a_method_of_an_installed_package_is_loaded_when_its_word_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "toy", f"{__name__}:TOY")
    assert find_method("ngram").name == "ngram" and "toy" not in method_registry._table
    assert find_method("toy") is TOY


@pytest.mark.parametrize("value", ["no_such_module:TOY", f"{__name__}:TOYS", f"{__name__}:install"])
def test_a_broken_package_is_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install(monkeypatch, "toy", value)
    assert "toy" not in [method.name for method in known_methods()]
    with pytest.raises(ConfigError, match="the method 'toy' of an installed package"):
        find_method("toy")


def test_unknown_words_and_methods_that_are_not_built() -> None:
    with pytest.raises(ConfigError, match="did you mean 'medusa'"):
        find_method("meduza")
    with pytest.raises(NotYetError, match="'mtp' is not yet built"):
        find_method("mtp")
    assert "mtp" not in [method.name for method in built_methods()]


@pytest.mark.parametrize(
    ("names", "method"),
    [
        ({"fc.weight", "layers.0.norm.weight"}, "eagle"),
        ({"fc.weight", "d2t"}, "eagle3"),
        ({"fc.weight", "norm.weight", "lm_head.weight"}, "eagle3"),
        ({"norm.weight", "lm_head.weight"}, None),
    ],
)
def test_heads_are_told_by_their_tensors(names: set[str], method: str | None) -> None:
    found = method_of_tensors(names.__contains__)
    assert (None if found is None else found.name) == method


def test_code_without_a_function_load_spec() -> None:
    register_method(replace(TOY, code="json"))
    config = EngineConfig.from_kwargs(
        model="demo", speculative_config={"method": "toy", "model": "somewhere"}
    ).speculative_config
    target: Any = None
    with pytest.raises(ConfigError, match=r"\(json\) has a function load_spec\(config, target\)"):
        find_drafters(config, target)
