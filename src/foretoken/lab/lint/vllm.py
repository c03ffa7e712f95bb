"""Checks of a vLLM launch: settings that are broken or exclude each other."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import JSON_OPTIONS, Launch, in_json
from foretoken.lab.launch.values import is_unsaid, number
from foretoken.lab.lint.names import engine_table, gone_value, method_in

VLLM_CHECKS = (
    *("unread_config", "broken_config", "draft_ranks", "draft_rule", "parallel_drafting"),
    *("batch_schedule", "incompatible", "monitoring"),
)


def check_vllm(launch: Launch) -> Iterator[Finding]:
    """Everything about a vLLM launch in today's names."""
    if launch.unread:
        part = next(p for p in launch.parts if p.name in JSON_OPTIONS and is_unsaid(p.value))
        message = f"the text does not say what {part.value} is, so it was not checked"
        remedy = "the value in its place, or the line that sets it"
        yield Finding.of("unread_config", "note", "speculative_config", message, remedy)
    if launch.broken:
        remedy = """quote it for the shell: '{"method": "ngram", "num_speculative_tokens": 5}'"""
        message = f"not a JSON object: {launch.broken}"
        yield Finding.of("broken_config", "error", "speculative_config", message, remedy)
    if launch.speculation:
        yield from _length(launch.speculation)
        yield from _draft_ranks(launch)
        yield from _draft_rule(launch.speculation)
        yield from _parallel_drafting(launch.speculation)
        yield from _batch_schedule(launch)
        yield from _incompatible(launch)
        yield from _monitoring(launch)


def mended(launch: Launch) -> Launch:
    """The launch with what vLLM refuses put right, where there is one obvious answer."""
    config = dict(_mended(launch, launch.speculation)) if launch.speculation else {}
    if config == launch.speculation:
        return launch
    return launch.having(
        replace(part, value=config, raw="") if in_json(part.name) else part for part in launch.parts
    )


def _mended(launch: Launch, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    method = method_in(config)
    for key, value in config.items():
        if key == "draft_tensor_parallel_size":
            one = number(value) == 1 and config.get("method") != "draft_model"
            said = launch.ranks_are_said and not is_unsaid(value)
            value = value if one or not said else launch.ranks
        elif (gone := gone_value("vllm", key, value)) is not None:
            value = gone.now
        elif key == "disable_padded_drafter_batch" and value is True:
            if method is None or method.drafts_with != "head" or not method.own_kv:
                continue
        yield key, value
    if "num_speculative_tokens" not in config and (method is None or method.vllm_needs_length):
        yield "num_speculative_tokens", method.default_drafts if method else 5


def _of(check: str, level: str, key: str, message: str, remedy: str = "") -> Finding:
    return Finding.of(check, level, f"speculative_config.{key}", message, remedy)


def _length(config: Mapping[str, Any]) -> Iterator[Finding]:
    key = "num_speculative_tokens"
    count, method = config.get(key), method_in(config)
    if count is None and (method is None or method.vllm_needs_length):
        yield _of("broken_config", "error", key, "it is required for this method")
    elif not (count is None or is_unsaid(count)) and not 1 <= (number(count) or 0) <= 128:
        yield _of("broken_config", "error", key, f"{count!r} is not within 1 and 128")


def _draft_ranks(launch: Launch) -> Iterator[Finding]:
    key, target = "draft_tensor_parallel_size", launch.ranks
    ranks = number(launch.speculation.get(key))
    if ranks is None or ranks == target or not launch.ranks_are_said:
        return
    level, message = "error", f"it must be {'1 or ' if target > 1 else ''}the target's {target}"
    if ranks == 1 and launch.speculation.get("method") == "draft_model":
        message = (
            f"a draft model must be split over the target's {target} ranks; on one rank its "
            "weights count double, for all ranks keep pools of one size"
        )
    elif ranks == 1:
        level = "warning"
        message = "its weights count double: all ranks keep pools of one size"
    yield _of("draft_ranks", level, key, message, f'"{key}": {target}')


def _draft_rule(config: Mapping[str, Any]) -> Iterator[Finding]:
    method, sampled = method_in(config), config.get("draft_sample_method")
    rule = config.get("rejection_sample_method")

    def said(level: str, key: str, message: str) -> Finding:
        return _of("draft_rule", level, key, message)

    drawn = sampled == "probabilistic"
    if drawn and method and method.drafts_with == "text":
        yield said("error", "draft_sample_method", "looked-up drafts have no distribution")
    known = (None, *engine_table("vllm")["draft_sample_methods"])
    if sampled not in known and not is_unsaid(sampled):
        yield said("error", "draft_sample_method", f"{sampled!r} is unknown")
    key = "rejection_sample_method"
    if rule == "fly":
        yield said("warning", key, "fly is lossy: outputs change")
    if rule == "synthetic":
        yield said("warning", key, "synthetic writes garbage: only to measure")
        lengths = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
        if sum(config.get(name) is not None for name in lengths) != 1:
            yield said("error", key, "needs exactly one of the synthetic_acceptance_ keys")
    key = "use_heterogeneous_vocab"
    if config.get(key) and config.get("method") != "draft_model":
        yield said("error", key, "only for draft_model")
    if config.get(key) and drawn:
        yield said("error", key, "only with greedy drafts")


def _parallel_drafting(config: Mapping[str, Any]) -> Iterator[Finding]:
    check, method = "parallel_drafting", method_in(config)
    if config.get("parallel_drafting") is True:
        message = "needs a model trained for it (PARD, P-EAGLE); others draft nonsense"
        yield _of(check, "warning", "parallel_drafting", message)
    reads_features = method is not None and method.drafts_with == "head" and method.own_kv
    if config.get("disable_padded_drafter_batch") is True and not reads_features:
        yield _of(check, "error", "disable_padded_drafter_batch", "only for EAGLE heads")


def _batch_schedule(launch: Launch) -> Iterator[Finding]:
    key = "num_speculative_tokens_per_batch_size"
    ranges = launch.speculation.get(key)
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
    yield _of("batch_schedule", level, key, message)


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


def _incompatible(launch: Launch) -> Iterator[Finding]:
    config, options = launch.speculation, launch.options

    def said(level: str, where: str, message: str) -> Finding:
        return Finding.of("incompatible", level, where, message)

    if "logits-processors" in options:
        message = "custom logits processors are refused at start-up, except with Model Runner V2's "
        yield said("error", "--logits-processors", f"{message}interface")
    if (number(options.get("pipeline-parallel-size", options.get("pp"))) or 1) > 1:
        message = "works for few models, on Model Runner V2 only"
        yield said("warning", "--pipeline-parallel-size", message)
    rows, seqs = (number(options.get(n)) for n in ("max-num-batched-tokens", "max-num-seqs"))
    wanted = (seqs or 0) * ((number(config.get("num_speculative_tokens")) or 0) + 1)
    if rows and rows < wanted:
        level = "error" if options.get("enable-lora") else "warning"
        message = f"{seqs} requests verify up to {wanted} rows in a step, {rows} are allowed"
        yield said(level, "--max-num-batched-tokens", message)
    limit, own = number(config.get("max_model_len")), number(options.get("max-model-len"))
    if limit and own and limit > own:
        message = f"{limit} is beyond the target's {own}"
        yield said("error", "speculative_config.max_model_len", message)


def _monitoring(launch: Launch) -> Iterator[Finding]:
    off, options = "disable-log-stats", launch.options
    if options.get(off) in (True, "true", "True"):
        message = "no acceptance counters: nobody will notice when speculation stops paying"
        yield Finding.of("monitoring", "warning", f"--{off}", message)
    elif launch.form.kind == "python" and off not in options:
        message = "LLM keeps no counters unless it is False: get_metrics() is refused"
        remedy = "disable_log_stats=False"
        yield Finding.of("monitoring", "note", "disable_log_stats", message, remedy)
    elif launch.form.kind != "python" and "per-request-spec-decode-metrics" not in options:
        message = "acceptance per request is off; averages over tokens hide the requests that lose"
        remedy = "--per-request-spec-decode-metrics detailed"
        yield Finding.of("monitoring", "note", "", message, remedy)
