"""Runs every check over everything that a text holds, and gives launches back corrected.

A launch is checked for names as it was written, for all else in the names of today: what each
engine refuses or does otherwise than one would think, settings that are broken or exclude each
other.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foretoken.config import EngineConfig
from foretoken.config.auto import AUTO, auto_drafters
from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.config.other_engines import find_other
from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import BY_LOAD
from foretoken.lab.launch.launch import JSON_OPTIONS, Expression, Launch, in_json, is_unsaid, number
from foretoken.lab.launch.read import TEXT_CHECKS, LintSource
from foretoken.lab.launch.write import written
from foretoken.lab.lint.fit import PAIR_CHECKS, Machine, check_pair
from foretoken.lab.lint.names import (
    NAME_CHECKS,
    engine_table,
    gone_value,
    json_part,
    method_in,
    todays,
)

OWN_CHECKS = (
    *(*NAME_CHECKS, "unread_config", "broken_config", "draft_ranks", "draft_rule"),
    *("parallel_drafting", "batch_schedule", "incompatible", "monitoring", "llama_types"),
    *("llama_defaults", "n_min_discards", "llama_other", "sglang_shape", "foretoken_settings"),
    *TEXT_CHECKS,
)
NAMES = (*OWN_CHECKS, *PAIR_CHECKS)

_MOST, _FEWEST = "spec-draft-n-max", "spec-draft-n-min"
_LENGTH, _RANKS = "num_speculative_tokens", "draft_tensor_parallel_size"
_UNPADDED = "disable_padded_drafter_batch"
_STEPS, _ROWS, _TOP_K = (
    f"speculative-{name}" for name in ("num-steps", "num-draft-tokens", "eagle-topk")
)
_WHO = {"method", "model", "drafters"}
_LEFT_OUT = ("leave it out", "left out")
_OURS = re.compile(r"""(?:--speculative-config '\{|speculative_config=\{)?("\w+": .+?)(?:\}'?)?""")
"""How errors say a key of ours, in place of a word of another engine."""
OwnParser = Callable[[tuple[str, ...]], list[Finding]]
_SETTINGS_FILES = ("config", "extra-llm-api-options")
"""Options of vLLM, SGLang and TensorRT-LLM that name a file with more settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVerdict:
    """What there is to say about one launch."""

    launch: Launch
    findings: tuple[Finding, ...]
    corrected: str = ""
    """The whole launch as it should be, ready to paste; empty where it needs no change, or where
    nobody can tell what was meant."""
    remaining: tuple[Finding, ...] = ()
    """Errors that the corrected one still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """What there is to say about one text."""

    launches: tuple[LaunchVerdict, ...]
    others: tuple[Finding, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*(f for verdict in self.launches for f in verdict.findings), *self.others)


def lint(source: LintSource, machine: Machine, own: OwnParser | None = None) -> LintResult:
    verdicts = tuple(judge(launch, machine, own) for launch in source.launches)
    return LintResult(launches=verdicts, others=source.findings)


def judge(launch: Launch, machine: Machine, own: OwnParser | None = None) -> LaunchVerdict:
    """Everything about one launch, and how it should be."""
    if launch.engine == "foretoken" and launch.form == "python":
        return _judge_own(launch, lambda one: list(check_foretoken(one)))
    if launch.engine == "foretoken" and launch.form != "settings" and own is not None:
        return _judge_own(launch, lambda one: own(one.words))

    def meaning(one: Launch) -> list[Finding]:
        check = _CHECKS.get(one.engine)
        return [*(check(one) if check else ()), *check_pair(one, machine)]

    today, found = todays(launch)
    found += meaning(today)
    if not today.speculates and not found and launch.engine != "foretoken":
        where, message, remedy = "", "speculation is off", ""
        files = (part for part in launch.parts if part.name in _SETTINGS_FILES)
        for part in [part for part in files if isinstance(part.value, str)][:1]:
            message = f"whether it speculates stands in {part.value}, which was not read"
            where, remedy = part.written, f"foretoken lab lint {part.value}"
        found.append(Finding("speculation", "note", where, message, remedy))
    if launch.broken:
        return LaunchVerdict(launch=launch, findings=tuple(found))
    right = _MENDED.get(launch.engine, lambda one: one)(today)
    for part in right.parts:
        gone = gone_value(launch.engine, part.name, part.value)
        if gone is not None and gone.now:
            right = right.with_value(part.name, gone.now)
    left = (*todays(right)[1], *meaning(right))
    return LaunchVerdict(
        launch=launch,
        findings=tuple(found),
        corrected="" if right == launch else written(right),
        remaining=tuple(finding for finding in left if finding.level == "error"),
    )


def _judge_own(launch: Launch, ask: Callable[[Launch], list[Finding]]) -> LaunchVerdict:
    """What Foretoken itself says of its launch; corrected where options only have to go, or where
    words of other engines have to be ours."""

    def first_error(found: Iterable[Finding]) -> Finding | None:
        return next((finding for finding in found if finding.level == "error"), None)

    findings = left = ask(launch)
    kept = launch
    while (error := first_error(left)) is not None:
        name = error.where.removeprefix("LLM.").lstrip("-").replace("_", "-")
        better = kept.without(name) if error.remedy.startswith(_LEFT_OUT) else kept
        if pair := _OURS.fullmatch(error.remedy):
            config = {**kept.speculation, **json.loads("{" + pair[1] + "}")}
            if error.where.startswith("speculative_config."):
                config.pop(error.where.partition(".")[2], None)
            config = config if config.keys() & _WHO else {"method": AUTO, **config}
            rest = (one for one in kept.parts if not in_json(one.name) and one.name != name)
            better = kept.having((*rest, json_part(kept, config)))
        if better == kept:
            break
        kept, left = better, ask(better)
        findings = [*findings, *(finding for finding in left if finding.level == "error")]
    corrected = written(kept) if kept != launch and first_error(left) is None else ""
    return LaunchVerdict(launch=launch, findings=tuple(findings), corrected=corrected)


def check_vllm(launch: Launch) -> Iterator[Finding]:
    if launch.unread:
        part = next(p for p in launch.parts if p.name in JSON_OPTIONS and is_unsaid(p.value))
        message = f"the text does not say what {part.value} is, so it was not checked"
        remedy = "the value in its place, or the line that sets it"
        yield Finding("unread_config", "note", "speculative_config", message, remedy)
    if launch.broken:
        remedy = """quote it for the shell: '{"method": "ngram", "num_speculative_tokens": 5}'"""
        message = f"not a JSON object: {launch.broken}"
        yield Finding("broken_config", "error", "speculative_config", message, remedy)
    if launch.speculation:
        yield from _length_and_ranks(launch, launch.speculation)
        yield from _draft_rule(launch.speculation)
        yield from _batch_schedule(launch)
        yield from _beside(launch)


def mended_vllm(launch: Launch) -> Launch:
    """The launch with what vLLM refuses put right, where there is one obvious answer."""
    config, method = dict(launch.speculation), method_in(launch.speculation)
    for key, value in launch.speculation.items():
        gone = gone_value("vllm", key, value)
        if gone is not None:
            config[key] = gone.now
    ranks = config.get(_RANKS)
    alone = number(ranks) == 1 and config.get("method") != "draft_model"
    if _RANKS in config and launch.ranks_are_said and not is_unsaid(ranks) and not alone:
        config[_RANKS] = launch.ranks
    if config.get(_UNPADDED) is True and not _reads_features(config):
        del config[_UNPADDED]
    if config and _LENGTH not in config and _needs_length(method):
        config[_LENGTH] = method.default_drafts if method else 5
    if config == launch.speculation:
        return launch
    return launch.having(
        replace(part, value=config, raw="") if in_json(part.name) else part for part in launch.parts
    )


def _needs_length(method: DraftingMethod | None) -> bool:
    """Whether vLLM wants num_speculative_tokens with a method."""
    return method is None or method.name not in engine_table("vllm")["methods_with_a_length"]


def _reads_features(config: Mapping[str, Any]) -> bool:
    """Whether an EAGLE head drafts."""
    method = method_in(config)
    return method is not None and method.drafts_with == "head" and method.own_kv


def _of(check: str, level: str, key: str, message: str, remedy: str = "") -> Finding:
    return Finding(check, level, f"speculative_config.{key}", message, remedy)


def _length_and_ranks(launch: Launch, config: Mapping[str, Any]) -> Iterator[Finding]:
    count, method = config.get(_LENGTH), method_in(config)
    if count is None and _needs_length(method):
        yield _of("broken_config", "error", _LENGTH, "it is required for this method")
    elif not (count is None or is_unsaid(count)) and not 1 <= (number(count) or 0) <= 128:
        yield _of("broken_config", "error", _LENGTH, f"{count!r} is not within 1 and 128")
    ranks, target = number(config.get(_RANKS)), launch.ranks
    if ranks is not None and ranks != target and launch.ranks_are_said:
        level, message = "error", f"it must be {'1 or ' if target > 1 else ''}the target's {target}"
        if ranks == 1 and config.get("method") == "draft_model":
            message = (
                f"a draft model must be split over the target's {target} ranks; on one rank its "
                "weights count double, for all ranks keep pools of one size"
            )
        elif ranks == 1:
            level = "warning"
            message = "its weights count double: all ranks keep pools of one size"
        yield _of("draft_ranks", level, _RANKS, message, f'"{_RANKS}": {target}')
    check = "parallel_drafting"
    if config.get(check) is True:
        message = "needs a model trained for it (PARD, P-EAGLE); others draft nonsense"
        yield _of(check, "warning", check, message)
    if config.get(_UNPADDED) is True and not _reads_features(config):
        yield _of(check, "error", _UNPADDED, "only for EAGLE heads")


def _draft_rule(config: Mapping[str, Any]) -> Iterator[Finding]:
    method, sampled = method_in(config), config.get("draft_sample_method")
    said = partial(_of, "draft_rule")
    drawn = sampled == "probabilistic"
    if drawn and method and method.drafts_with == "text":
        yield said("error", "draft_sample_method", "looked-up drafts have no distribution")
    known = (None, *engine_table("vllm")["draft_sample_methods"])
    if sampled not in known and not is_unsaid(sampled):
        yield said("error", "draft_sample_method", f"{sampled!r} is unknown")
    key = "rejection_sample_method"
    if config.get(key) == "fly":
        yield said("warning", key, "fly is lossy: outputs change")
    if config.get(key) == "synthetic":
        yield said("warning", key, "synthetic writes garbage: only to measure")
        lengths = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
        if sum(config.get(name) is not None for name in lengths) != 1:
            yield said("error", key, "needs exactly one of the synthetic_acceptance_ keys")
    key = "use_heterogeneous_vocab"
    if config.get(key) and config.get("method") != "draft_model":
        yield said("error", key, "only for draft_model")
    if config.get(key) and drawn:
        yield said("error", key, "only with greedy drafts")


def _batch_schedule(launch: Launch) -> Iterator[Finding]:
    ranges = launch.speculation.get(BY_LOAD)
    if ranges is None:
        return
    level, message = "error", _schedule_problem(ranges)
    if not message and (number(launch.options.get("data-parallel-size")) or 1) > 1:
        level, message = "warning", "turned off under data parallelism"
    elif not message:
        level = "note"
        message = (
            "prefills count towards the batch size, and an aggregate-throughput collapse at the "
            "threshold has been reported: confirm the schedule with an A/B"
        )
    yield _of("batch_schedule", level, BY_LOAD, message)


def _schedule_problem(ranges: object) -> str:
    if not isinstance(ranges, list) or not ranges:
        return "not a list of [first, last, k]"
    end = 0
    for part in ranges:
        if isinstance(part, list) and len(part) == 3 and any(map(is_unsaid, part)):
            return ""  # only running tells whether they rise
        if not isinstance(part, list) or len(part) != 3 or not all(type(n) is int for n in part):
            return f"{part!r} is not [first, last, k]"
        first, last, k = part
        if first <= end or last < first or k < 0 or (end == 0 and first != 1):
            return f"{part!r}: ranges start at 1, rise, do not overlap, and k is at least 0"
        end = last
    return ""


def _beside(launch: Launch) -> Iterator[Finding]:
    """Options of the server that do not go with drafting, and whether anybody sees acceptance."""
    config, options, said = launch.speculation, launch.options, partial(Finding, "incompatible")
    if "logits-processors" in options:
        message = "custom logits processors are refused at start-up, except with Model Runner V2's "
        yield said("error", "--logits-processors", f"{message}interface")
    if (number(options.get("pipeline-parallel-size", options.get("pp"))) or 1) > 1:
        message = "works for few models, on Model Runner V2 only"
        yield said("warning", "--pipeline-parallel-size", message)
    rows, seqs = (number(options.get(n)) for n in ("max-num-batched-tokens", "max-num-seqs"))
    wanted = (seqs or 0) * ((number(config.get(_LENGTH)) or 0) + 1)
    if rows and rows < wanted:
        level = "error" if options.get("enable-lora") else "warning"
        message = f"{seqs} requests verify up to {wanted} rows in a step, {rows} are allowed"
        yield said(level, "--max-num-batched-tokens", message)
    limit, own = number(config.get("max_model_len")), number(options.get("max-model-len"))
    if limit and own and limit > own:
        message = f"{limit} is beyond the target's {own}"
        yield said("error", "speculative_config.max_model_len", message)
    off, said = "disable-log-stats", partial(Finding, "monitoring")
    if options.get(off) in (True, "true", "True"):
        message = "no acceptance counters: nobody will notice when speculation stops paying"
        yield said("warning", f"--{off}", message)
    elif launch.form == "python" and off not in options:
        message = "LLM keeps no counters unless it is False: get_metrics() is refused"
        yield said("note", "disable_log_stats", message, "disable_log_stats=False")
    elif launch.form != "python" and "per-request-spec-decode-metrics" not in options:
        message = "acceptance per request is off; averages over tokens hide the requests that lose"
        yield said("note", "", message, "--per-request-spec-decode-metrics detailed")


def check_llama_cpp(launch: Launch) -> Iterator[Finding]:
    options, drafts, table = launch.options, launch.speculates, engine_table("llama.cpp")
    drafting = [name for name in options if name.startswith("spec-draft-")]
    if drafting and not drafts:
        message = "nothing drafts: neither a draft model nor --spec-type is given"
        yield Finding("llama_types", "warning", f"--{drafting[0]}", message)
    sampling, known = options.get("spec-draft-sampling"), table["samplings"]
    if sampling is not None and sampling not in known:
        message = f"{sampling!r} is unknown"
        yield Finding("llama_types", "error", "--spec-draft-sampling", message, ", ".join(known))
    default, most = int(table["defaults"][_MOST]), number(options.get(_MOST))
    if drafts and most is not None and most >= 4 * default:
        message = (
            f"{most} was the default once; today it is {default}. Rows beyond what is accepted are "
            "wasted"
        )
        yield Finding("llama_defaults", "note", f"--{_MOST}", message)
    fewest = number(options.get(_FEWEST))
    if fewest:
        level = "error" if fewest > (most or default) else "warning"
        message = (
            f"drafts shorter than {fewest} are thrown away after they were paid for; it does not "
            "make drafts longer"
        )
        if level == "error":
            message = f"it is above --{_MOST} ({most or default}): no draft is ever used"
        yield Finding("n_min_discards", level, f"--{_FEWEST}", message, f"--{_FEWEST} 0")
    said = partial(Finding, "llama_other")
    for name in [name for name in options if name.startswith("spec-synth-")][:1]:
        yield said("warning", f"--{name}", "forced acceptance writes garbage: only to measure")
    if "spec-draft-conf-min" in options:
        yield said("warning", "--spec-draft-conf-min", "documented, but builds do not parse it")
    if "mmproj" in options and drafts:
        yield said("warning", "--mmproj", "requests with images fail while a draft is in use")
    if drafts and "metrics" not in options:
        yield said("note", "--metrics", "without --metrics nobody sees the acceptance")


def mended_llama_cpp(launch: Launch) -> Launch:
    """llama.cpp's launch without a least length, which only throws drafts away."""
    return launch.without(_FEWEST) if number(launch.options.get(_FEWEST)) else launch


def check_sglang(launch: Launch) -> Iterator[Finding]:
    options, said = launch.options, partial(Finding, "sglang_shape")
    name, right = _shape_of_sglang(launch)
    if name == _STEPS:
        message = "a block comes of one pass: SGLang takes 1, whatever is given"
        yield said("warning", f"--{name}", message, "leave it out")
    elif name:
        message = f"along a chain SGLang takes steps + 1 ({right}), whatever is given"
        yield said("warning", f"--{name}", message, right)
    if not launch.speculates:
        for name in [name for name in options if name.startswith("speculative-")][:1]:
            message = "nothing drafts: no algorithm is given"
            yield said("warning", f"--{name}", message, "--speculative-algorithm EAGLE3")
        return
    for name in ("accept-threshold-single", "accept-threshold-acc"):
        threshold = options.get(f"speculative-{name}", "1")
        if isinstance(threshold, str) and threshold.replace(".", "", 1).isdigit():
            if float(threshold) < 1:
                message = "below 1 it is lossy: outputs change"
                yield said("warning", f"--speculative-{name}", message, "1.0")
    if "max-running-requests" not in options:
        message = "speculation sets it to 48 where it is not given"
        yield said("note", "--max-running-requests", message)


def mended_sglang(launch: Launch) -> Launch:
    """SGLang's launch with the number of rows that a chain has, and without steps of blocks."""
    name, right = _shape_of_sglang(launch)
    if right:
        return launch.with_value(name, right)
    return launch.without(name) if name else launch


def _shape_of_sglang(launch: Launch) -> tuple[str, str]:
    """The option in place of which SGLang takes another value, and that value, empty for none:
    the steps of a drafter of whole blocks, or the rows of a chain; empty: there is none."""
    steps, rows, top_k = (number(launch.options.get(name)) for name in (_STEPS, _ROWS, _TOP_K))
    row = find_other("methods", launch.options.get("speculative-algorithm"), "sglang")
    if any(row and one.name == row.method and one.in_one_pass for one in known_methods()):
        return ("", "") if steps in (None, 1) else (_STEPS, "")
    is_chain = top_k == 1 and steps is not None and rows not in (None, steps + 1)
    return (_ROWS, f"{(steps or 0) + 1}") if is_chain else ("", "")


def check_foretoken(launch: Launch) -> Iterator[Finding]:
    """By Foretoken's own settings; commands by their own parser, where there is one (`lint`)."""
    if launch.broken:
        message = f"not a JSON object: {launch.broken}"
        yield Finding("foretoken_settings", "error", "speculative_config", message)
        return
    given = {p.written: p.value for p in launch.parts if p.name and not in_json(p.name)}
    if launch.form != "python" or any(isinstance(v, Expression) for v in given.values()):
        given = {}
    given |= {"model": launch.model or "demo", "speculative_config": launch.speculation or None}
    try:
        EngineConfig.from_kwargs(**given)
    except ConfigError as error:
        yield settings_finding(error)


def speculation_finding(config: EngineConfig, *, by_default: bool) -> Finding:
    """Whether a server with these settings speculates, and with what; `by_default`: nobody said
    anything about speculation."""
    spec = config.speculative_config
    drafters = spec.drafters if spec else auto_drafters(config.model) if by_default else ()
    named = ", ".join(f"{one.label} (up to {one.num_speculative_tokens})" for one in drafters)
    message = f"speculates with {named}" if named else "speculation is off"
    if by_default:
        message += ": all that there is for the model, where it never changes a token"
    return Finding("speculation", "note", "", message)


def settings_finding(error: ConfigError) -> Finding:
    """What a setting that Foretoken refuses says."""
    remedy = error.allowed.partition("; `foretoken lab lint")[0]
    message = f"got {error.given!r}"
    return Finding("foretoken_settings", "error", error.field, message, remedy)


_CHECKS = {
    "vllm": check_vllm,
    "llama.cpp": check_llama_cpp,
    "sglang": check_sglang,
    "foretoken": check_foretoken,
}
_MENDED = {"vllm": mended_vllm, "llama.cpp": mended_llama_cpp, "sglang": mended_sglang}
"""Engine -> its launch with mistakes put right that have one obvious answer."""
