"""Values are counted as JSON has them: what stands in strings is text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.server.problems import Problem
from foretoken.server.transport.json_size import MOST, JsonSize, check_json_size, json_size

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(alphabet='ab"\\,:[]{}é\n')),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(alphabet='a"\\:,'), inner, max_size=5)
    ),
    max_leaves=20,
)


def counted(value: Any) -> JsonSize:
    """The same, from the value that was read."""
    if isinstance(value, list | dict):
        inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
        members = len(value) if isinstance(value, dict) else 0
        own = JsonSize(max(0, len(value) - 1), members, 1)
        return JsonSize(*(sum(each) for each in zip(own, *inner, strict=True)))
    return JsonSize(0, 0, 0)


@given(VALUES, st.booleans())
def test_only_what_is_outside_of_strings_counts(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert json_size(raw) == counted(value)


@given(st.binary(max_size=200))
def test_anything_can_be_counted(raw: bytes) -> None:
    assert min(json_size(raw)) >= 0


@pytest.mark.parametrize(
    ("item", "count", "named"),
    [("1", MOST.values + 2, "values"), ("[]", MOST.nests + 2, "lists"),
     ('{"a":1}', MOST.nests + 2, "objects")],
)  # fmt: skip
def test_a_body_of_too_many_values_is_refused(item: str, count: int, named: str) -> None:
    raw = ("[" + ",".join([item] * count) + "]").encode()
    with pytest.raises(Problem, match=named):
        check_json_size(raw)
    check_json_size(json.dumps({"prompt": ("[" + item + "],") * count}).encode())
