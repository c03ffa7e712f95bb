"""The tree drawn at the top of errors.py is the tree."""

import inspect
import re

from foretoken import errors


def error_classes() -> dict[str, type[errors.ForetokenError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, errors.ForetokenError)
        and not name.startswith("_")
    }


def test_every_class_is_drawn_with_its_codes() -> None:
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.search(r"(\w+Error) +exit (\d+) +HTTP (\d+)", line)
        if match:
            drawn[match[1]] = (int(match[2]), int(match[3]))
    actual = {name: (c.exit_code, c.http_status) for name, c in error_classes().items()}
    assert drawn == actual


def test_every_class_is_explained() -> None:
    for name, error in error_classes().items():
        assert error.__doc__, name


def test_a_user_mistake_names_field_given_and_allowed() -> None:
    error = errors.ConfigError("num_speculative_tokens", 0, "an integer >= 1")
    assert str(error) == "num_speculative_tokens: got 0; allowed: an integer >= 1"
    assert (error.field, error.given, error.allowed) == (
        "num_speculative_tokens",
        0,
        "an integer >= 1",
    )


def test_long_values_are_cut() -> None:
    message = str(errors.PromptError("prompt", "x" * 10_000, "a shorter one"))
    assert len(message) < 300
    assert "allowed: a shorter one" in message


def test_the_nearest_word_of_a_list_is_named() -> None:
    error = errors.ConfigError("method", "meduza", "medusa, ngram")
    assert str(error) == "method: got 'meduza'; allowed: medusa, ngram; did you mean 'medusa'?"
    prose = errors.ConfigError("model", "folder", "a folder, or a hub id")
    assert "did you mean" not in str(prose)
