"""The operator's endpoints: a key of their own, effects from the next step on."""

import re
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Serving, post

BODY = {"prompt": "import os\n", "max_tokens": 30, "temperature": 0}


def put(server: Serving, body: dict[str, Any], key: str = "boss") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.put(server.url + "/admin/speculation", json=body, headers=headers)


def longest_draft(server: Serving) -> tuple[str, int]:
    answer = post(server, "/v1/completions", BODY).json()
    drafted = answer["metrics"]["speculative_decoding"]["per_step_drafted"]
    return answer["choices"][0]["text"], max(drafted, default=0)


@pytest.mark.slow
def test_speculation_is_changed_live(server: Serving) -> None:
    text, most = longest_draft(server)
    assert most == 5
    try:
        for policy, expected in (
            ({"num_speculative_tokens": 2}, 2),
            ({"enabled": False}, 0),
            ({"drafter": "draft_model"}, 5),
        ):
            answer = put(server, policy)
            assert answer.status_code == 200, answer.text
            assert longest_draft(server) == (text, expected)
    finally:
        reset = put(server, {}).json()
    assert reset["drafters"] == {"draft_model": 5}
    assert reset["last_minute"]["acceptance_length"] > 1
    assert longest_draft(server) == (text, 5)


@pytest.mark.slow
def test_what_control_does_is_said(server: Serving) -> None:
    metrics = post(server, "/v1/completions", BODY).json()["metrics"]
    assert re.match(r"draft_model served \d+ of \d+ steps with [\d.]+ drafts each", metrics["why"])
    headers = {"authorization": "Bearer boss"}
    found = httpx.get(server.url + "/admin/speculation", headers=headers).json()["control"]
    assert found["mode"] == "fixed" and found["step"]["measured_s"] > 0
    drafter = found["drafters"]["draft_model"]
    assert drafter["why"] == "drafts up to 5 in every step, as configured"
    assert drafter["draft_tokens"] > drafter["accepted_tokens"] > 0
    shown = httpx.get(server.url + "/control").json()
    assert shown["drafters"].keys() == found["drafters"].keys()
    for policy, because in (
        ({"speculation": {"enabled": False}}, "no step drafted: the request asked for none"),
        ({}, "no step drafted: the operator turned drafts off"),
    ):
        try:
            assert put(server, {} if policy else {"enabled": False}).status_code == 200
            answer = post(server, "/v1/completions", {**BODY, **policy}).json()
        finally:
            put(server, {})
        assert answer["metrics"]["why"] == because


def test_what_is_wrong_changes_nothing(server: Serving) -> None:
    for body in ({"drafter": "oracle"}, {"num_speculative_tokens": 99}, {"on": True}):
        assert put(server, body).status_code == 400, body
    headers = {"authorization": "Bearer boss"}
    now = httpx.get(server.url + "/admin/speculation", headers=headers).json()
    assert (now["enabled"], now["drafter"], now["num_speculative_tokens"]) == (True, None, None)


def test_it_has_a_key_of_its_own(server: Serving) -> None:
    assert put(server, {}, "wrong").status_code == 401
    assert httpx.get(server.url + "/admin/speculation").status_code == 401
