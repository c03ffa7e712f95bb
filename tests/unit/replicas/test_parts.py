"""The small parts of a front: marks, addresses, numbers of replicas, beginnings of prompts."""

import logging
import os
import random
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import placement
from foretoken.cli.serve import replicas_of
from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import ConfigError, MissingPackageError
from foretoken.replicas.board import FORGOTTEN_S, Board
from foretoken.replicas.front import MOST_NAMED, prompt_of
from foretoken.replicas.relaying import FrontMetrics
from foretoken.replicas.run import serve_replicas
from foretoken.replicas.scaling import LOAD, cores_of_each, policy, threads_of_each, wanted_replicas
from foretoken.replicas.settings import ReplicaConfig, ReplicaSpec
from foretoken.server.problems import Problem
from foretoken.server.replica_protocol.fingerprint import fingerprint_of
from foretoken.server.replica_protocol.origin import ORIGIN_HEADER, RequestOrigin
from foretoken.server.replica_protocol.pace import Paces, ServerPace
from foretoken.server.replica_protocol.progress import StreamProgress, mark, read_mark
from foretoken.server.schemas import ChatBody, CompletionBody
from foretoken.server.settings import Limits, ServerConfig
from foretoken.server.transport.connection_limit import most_connections
from foretoken.testing import write_tiny_llama
from foretoken.types import FinishReason, Output, Request, RequestMetrics, SamplingParams
from foretoken.types.fingerprint import Fingerprint


def test_a_mark_is_read_as_it_was_written() -> None:
    gained = [
        StreamProgress(0, (5, 6), None),
        StreamProgress(3, (), "stop"),
        StreamProgress(1, (7,), "length"),
    ]
    written = mark(gained)
    assert written.startswith(b":") and written.endswith(b"\n\n"), "a comment for others"
    assert read_mark(written.removesuffix(b"\n\n")) == gained
    assert read_mark(b'data: {"text":": progress [[0]]"}') is None
    for broken in (b": progress [[0", b": progress [[0]]", b": progress 5"):
        with pytest.raises(ValueError):
            read_mark(broken)


def test_an_origin_is_what_the_front_sent_or_nothing() -> None:
    origin = RequestOrigin(tenant="a", answer="0" * 32, created=1, noise=2**64 - 1)
    assert RequestOrigin.of({ORIGIN_HEADER: origin.model_dump_json()}) == origin
    assert RequestOrigin.of({}) is None
    for wrong in ("{", "{}", origin.model_dump_json().replace("000", "xyz")):
        with pytest.raises(Problem, match=ORIGIN_HEADER):
            RequestOrigin.of({ORIGIN_HEADER: wrong})
    assert origin.keys().random() == origin.keys().random() == random.Random(origin.noise).random()


def test_who_has_not_told_of_late_is_off_the_board() -> None:
    now = [0.0]
    board = Board(clock=lambda: now[0])
    board.tell("a", "http://a")
    now[0] = FORGOTTEN_S - 1
    board.tell("b", "http://b")
    assert board.read() == [("a", "http://a"), ("b", "http://b")]
    now[0] = FORGOTTEN_S
    assert board.read() == [("b", "http://b")]


@pytest.mark.parametrize(
    ("loads", "current", "wanted"),
    [
        ([], 3, 3), ([0.0, 0.0], 2, 1), ([0.7], 1, 1), ([0.71], 1, 2), ([3.5], 1, 5),
        ([1.4, 0.0], 2, 2), ([0.35, 0.35], 2, 1),
    ],
)  # fmt: skip
def test_how_many_replicas_there_should_be(loads: list[float], current: int, wanted: int) -> None:
    assert wanted_replicas(loads, current) == wanted
    told = {LOAD: dict(enumerate(loads))} if loads else {}
    context: Any = SimpleNamespace(target_num_replicas=current, aggregated_metrics=told)
    assert policy(context) == (wanted, {})


def test_without_numbers_nothing_changes() -> None:
    context: Any = SimpleNamespace(target_num_replicas=4, aggregated_metrics=None)
    assert policy(context) == (4, {})


@pytest.mark.parametrize(
    ("nodes", "replicas", "cores"),
    [
        ([2], 2, 1), ([2], 1, 2), ([2], 9, 1), ([], 2, 1), ([16], 3, 5), ([8, 8], 2, 8),
        ([8, 2], 3, 2),
    ],
)  # fmt: skip
def test_each_replica_finds_its_cores(nodes: list[int], replicas: int, cores: int) -> None:
    assert cores_of_each(nodes, replicas) == cores
    if cores > 1:
        assert sum(node // cores for node in nodes) >= replicas
        assert sum(node // (cores + 1) for node in nodes) < replicas


def test_fewer_at_most_than_at_the_start_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_replicas.*at least --replicas, which is 3"):
        ReplicaConfig(replicas=3, max_replicas=2)
    with pytest.raises(ConfigError, match="replicas"):
        ReplicaConfig(replicas=0)
    assert ReplicaConfig(replicas=2).most == 2 and ReplicaConfig(max_replicas=7).most == 7


def test_a_longer_conversation_begins_as_the_shorter() -> None:
    turns = [{"role": "user", "content": "tell me of the sea " * 20}]
    first = prompt_of(ChatBody.model_validate({"messages": turns}), "me")
    turns += [{"role": "assistant", "content": "it is wet"}, {"role": "user", "content": "and?"}]
    second = prompt_of(ChatBody.model_validate({"messages": turns}), "me")
    assert second.names[: len(first.names)] == first.names and first.names
    assert second.key == first.key and second.tokens > first.tokens
    for other, salt in ((turns, "you"), ([{"role": "system", "content": "x"}, *turns], "me")):
        assert prompt_of(ChatBody.model_validate({"messages": other}), salt).key != first.key


@pytest.mark.parametrize("prompt", ["", "x", "x" * 1000, [1, 2], ["x", "y"], [[1], [2]], []])
def test_every_prompt_has_a_beginning(prompt: Any) -> None:
    found = prompt_of(CompletionBody.model_validate({"prompt": prompt}), None)
    assert found.tokens == (250 if prompt == "x" * 1000 else 2 if prompt == [1, 2] else 1)


@pytest.mark.parametrize("prompt", ["a" * 4_000_000, [10**30, -1, *range(999_998)]])
def test_a_long_prompt_is_not_looked_at_to_its_end(prompt: Any) -> None:
    """Nor does an id that no model has break anything: whoever gets the request refuses it."""
    found = prompt_of(CompletionBody.model_validate({"prompt": prompt}), None)
    assert (found.tokens, len(found.names)) == (1_000_000, MOST_NAMED)


def test_pages_of_several_replicas_become_one() -> None:
    """Every family once, every sample with its replica: Prometheus refuses a page with a family
    that comes twice."""
    page = (
        "# HELP vllm:x_total Of things.\n# TYPE vllm:x_total counter\n"
        'vllm:x_total{{model_name="m"}} {count}\n'
        "# HELP vllm:y_seconds Of time.\n# TYPE vllm:y_seconds histogram\n"
        'vllm:y_seconds_bucket{{le="+Inf"}} {count}\n'
        "vllm:y_seconds_count {count}\nvllm:y_seconds_sum 0.5\n"
    )
    metrics = FrontMetrics("ours")
    text = metrics.render({"b": page.format(count=2.0), "a": page.format(count=1.0)}).decode()
    assert text.count("# TYPE vllm:x_total counter") == 1
    assert 'vllm:x_total{model_name="m",replica="a"} 1.0\n' in text
    assert 'vllm:x_total{model_name="m",replica="b"} 2.0\n' in text
    assert 'vllm:y_seconds_bucket{le="+Inf",replica="b"} 2.0\n' in text
    assert "ours:replicas 2.0\n" in text


def test_what_was_said_of_replicas_asks_for_them() -> None:
    assert replicas_of({"model": "demo", "port": 1}) is None
    assert replicas_of({"replicas": 1}) == ReplicaConfig(replicas=1)
    assert replicas_of({"replicas": "2"}) == ReplicaConfig(replicas=2)
    for wrong in ("two", "-1", "", "numa:0"):
        with pytest.raises(ConfigError, match="--replicas.*or numa"):
            replicas_of({"replicas": wrong})
    found = replicas_of({"ray_address": "auto", "max_replicas": 3})
    assert found == ReplicaConfig(ray_address="auto", max_replicas=3)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two NUMA nodes, of which four cores may be used."""
    for node, text in {0: "0-1,4-5\n", 1: "2-3,6-7\n"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    monkeypatch.setattr(placement, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


@pytest.mark.usefixtures("two_nodes")
def test_one_replica_on_each_node() -> None:
    found = replicas_of({"replicas": "numa"})
    assert found == ReplicaConfig(replicas=2, cores=((0, 1), (2, 3)))
    for beside in ({"max_replicas": 3}, {"ray_address": "auto"}):
        with pytest.raises(ConfigError, match="left out beside --replicas numa"):
            replicas_of({"replicas": "numa", **beside})
    config = EngineConfig.from_kwargs(model="./nothing", device="cuda")
    with pytest.raises(ConfigError, match="a number beside --device cuda"):
        serve_replicas(config, ServerConfig(port=0), found, print, "text")


def test_one_node_has_one_replica_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "NODES", tmp_path)
    with caplog.at_level(logging.INFO, "foretoken"):
        assert replicas_of({"replicas": "numa"}) == ReplicaConfig(replicas=1)
    assert "one replica, since there is one NUMA node" in caplog.text


@pytest.mark.parametrize(
    ("cores", "usable", "threads"),
    [([[0, 1], [2, 3]], 4, [2, 2]), ([[0, 1], [2, 3]], 3, [1, 1]), ([[0], [1, 2, 3]], 4, [1, 3]),
     ([[0], [1, 2, 3]], 1, [1, 1]), ([[0, 1]], 64, [2]), ([], 4, [])],
)  # fmt: skip
def test_threads_are_the_cores_or_a_share_of_the_container_s(
    cores: list[list[int]], usable: int, threads: list[int]
) -> None:
    assert threads_of_each(cores, usable) == threads


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is looked for: there is none of this name."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "foretoken.replicas.on_ray", raising=False)
    nowhere = EngineConfig.from_kwargs(model="./nothing")
    with pytest.raises(MissingPackageError, match=r'--replicas needs ray.*"foretoken\[ray\]"'):
        serve_replicas(nowhere, ServerConfig(port=0), ReplicaConfig(), print, "text")


def test_a_replica_has_room_for_the_front_beside_all_its_clients() -> None:
    engine = EngineConfig.from_kwargs(model="demo")
    for wanted in (None, 8):
        server = ServerConfig(limits=Limits(max_connections=wanted))
        own = ReplicaSpec.of(engine, server, "key").server.limits.max_connections
        assert own is not None and own > most_connections(wanted)


def test_a_replica_waits_longer_for_the_front_than_for_a_client() -> None:
    """Of which the front has many: it is late where they are."""
    engine = EngineConfig.from_kwargs(model="demo")
    server = ServerConfig(limits=Limits(client_timeout_s=1.0))
    own = ReplicaSpec.of(engine, server, "key").server.limits.client_timeout_s
    assert own >= 60.0 and own > server.limits.client_timeout_s


def test_a_front_counts_what_its_connections_open() -> None:
    alone, both = most_connections(None), most_connections(None, 2)
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 1024), hard))
        assert most_connections(None, 2) <= 512 < most_connections(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    assert both <= alone and most_connections(7, 2) == 7


def request(name: str, tokens: int) -> Request:
    return Request(
        request_id=name, prompt_token_ids=(1,) * tokens, params=SamplingParams(), seed=0,
        max_tokens=9,
    )  # fmt: skip


def queue_s(pace: ServerPace) -> float:
    return pace.backlog.seconds(pace.paces)


def token(name: str) -> Output:
    return Output(request_id=name, new_token_ids=(5,))


def end(name: str, queued: float, first: float, last: float, cached: int = 0) -> Output:
    times = RequestMetrics(
        queued_s=queued, first_token_s=first, finished_s=last, num_preemptions=0,
        num_cached_tokens=cached,
    )  # fmt: skip
    reason = FinishReason.LENGTH
    return Output(request_id=name, new_token_ids=(5,), finish_reason=reason, metrics=times)


def test_what_waits_is_counted() -> None:
    now = [0.0]
    pace = ServerPace(2, clock=lambda: now[0])
    assert pace.paces == Paces(0.0, 0.0, 0.0) and queue_s(pace) == 0.0
    pace.opened([request("a", 110)])
    now[0] = 5.0
    pace.observe([token("a")])
    now[0] = 5.5
    pace.observe([end("a", 1.0, 5.0, 5.5, cached=10)])
    assert pace.paces.prefill_token_s == pytest.approx(4.0 / 100)
    assert queue_s(pace) == 0.0, "nobody is there"
    pace.opened([request("b", 50)])
    assert queue_s(pace) == pytest.approx(0.5 + 50 * 0.04)
    now[0] = 100.0
    pace.observe([token("b")])
    assert queue_s(pace) == pytest.approx(0.5), "the time without requests is no step's"
    pace.opened([request("c", 25), request("d", 25)])
    # Two of four have to wait for others to end, of which two run at once.
    assert queue_s(pace) == pytest.approx(0.5 + 50 * 0.04 + 2 * 4.5 / 2)


def test_an_aborted_request_leaves_nothing() -> None:
    pace = ServerPace(1)
    pace.opened([request("a", 10)])
    pace.observe([Output(request_id="a", finish_reason=FinishReason.ABORT)])
    assert queue_s(pace) == 0.0 and not pace._open and not pace._unread
    pace.observe([token("a stranger")])


def fingerprint(folder: Path, **given: Any) -> Fingerprint:
    config = EngineConfig.from_kwargs(
        model=str(folder), **{"kv_cache_memory_bytes": 1 << 20, **given}
    )
    return fingerprint_of(build_engine(config).parts.config)


def test_what_changes_bits_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, seed in ((one, 1), (same, 1), (other, 2)):
        folder.mkdir()
        write_tiny_llama(folder, seed=seed)
    here = fingerprint(one)
    assert here == fingerprint(same), "its place on disk changes nothing"
    assert here == fingerprint(one, max_num_seqs=2, max_model_len=64, seed=5)
    assert fingerprint(other).precision != here.precision, "other weights of the same shape"
    assert fingerprint(one, kv_cache_dtype="int8").precision != here.precision
    assert fingerprint(one, dtype="bfloat16").precision != here.precision
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert fingerprint(one).kernels != here.kernels
