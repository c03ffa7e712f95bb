"""Checks of a vLLM launch: settings that are broken or exclude each other."""

from collections.abc import Iterator, Mapping
from typing import Any

from foretoken.config.methods import DraftingMethod
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import JSON_OPTIONS, Launch, LaunchCheck, engine_table, number
from foretoken.lab.lint.translate import method_in
from foretoken.lab.launch.values import is_unsaid

_VLLM = ("vllm",)


def _method(launch: Launch) -> DraftingMethod | None:
    """What is known of the launch's method; None if nothing."""
    return method_in(_speculation(launch))


def _speculation(launch: Launch) -> Mapping[str, Any]:
    return launch.speculation or {}


def _unread_config(launch: Launch) -> Iterator[Finding]:
    if launch.unread:
        part = next(p for p in launch.parts if p.name in JSON_OPTIONS and is_unsaid(p.value))
        yield Finding(
            check="unread_config",
            level="note",
            where="speculative_config",
            message=f"the text does not say what {part.value} is, so it was not checked",
            remedy="the value in its place, or the line that sets it",
        )


def _broken_config(launch: Launch) -> Iterator[Finding]:
    if launch.broken:
        yield Finding(
            check="broken_config",
            level="error",
            where="speculative_config",
            message=f"not a JSON object: {launch.broken}",
            remedy="""quote it for the shell: '{"method": "ngram", "num_speculative_tokens": 5}'""",
        )
    speculation = _speculation(launch)
    if not speculation:
        return
    count = speculation.get("num_speculative_tokens")
    method = _method(launch)
    if count is None and (method is None or method.vllm_needs_length):
        yield Finding(
            check="broken_config",
            level="error",
            where="speculative_config.num_speculative_tokens",
            message="it is required for this method",
        )
    elif not (count is None or is_unsaid(count)) and not 1 <= (number(count) or 0) <= 128:
        yield Finding(
            check="broken_config",
            level="error",
            where="speculative_config.num_speculative_tokens",
            message=f"{count!r} is not within 1 and 128",
        )


def _draft_ranks(launch: Launch) -> Iterator[Finding]:
    speculation = _speculation(launch)
    ranks = number(speculation.get("draft_tensor_parallel_size"))
    target = launch.ranks
    if ranks is None or ranks == target or not launch.ranks_are_said:
        return
    if ranks != 1:
        level, message = "error", f"it must be {'1 or ' if target > 1 else ''}the target's {target}"
    elif speculation.get("method") == "draft_model":
        level = "error"
        message = (
            f"a draft model must be split over the target's {target} ranks; on one rank its "
            "weights count double, for all ranks keep pools of one size"
        )
    else:
        level, message = "warning", "its weights count double: all ranks keep pools of one size"
    yield Finding(
        check="draft_ranks",
        level=level,
        where="speculative_config.draft_tensor_parallel_size",
        message=message,
        remedy=f'"draft_tensor_parallel_size": {target}',
    )


def _draft_rule(launch: Launch) -> Iterator[Finding]:
    speculation = _speculation(launch)
    method, sampled = speculation.get("method"), speculation.get("draft_sample_method")
    rule = speculation.get("rejection_sample_method")
    known = engine_table("vllm")
    known_method = _method(launch)
    if sampled == "probabilistic" and known_method and known_method.drafts_with == "text":
        yield _rule("error", "draft_sample_method", "looked-up drafts have no distribution")
    if not (sampled is None or is_unsaid(sampled)) and sampled not in known["draft_sample_methods"]:
        yield _rule("error", "draft_sample_method", f"{sampled!r} is unknown")
    if rule == "fly":
        yield _rule("warning", "rejection_sample_method", "fly is lossy: outputs change")
    if rule == "synthetic":
        yield _rule(
            "warning", "rejection_sample_method", "synthetic writes garbage: only to measure"
        )
        given = [k for k in ("synthetic_acceptance_rates", "synthetic_acceptance_length")
                 if speculation.get(k) is not None]  # fmt: skip
        if len(given) != 1:
            yield _rule("error", "rejection_sample_method", "needs exactly one of the "
                        "synthetic_acceptance_ keys")  # fmt: skip
    if speculation.get("use_heterogeneous_vocab"):
        if method != "draft_model":
            yield _rule("error", "use_heterogeneous_vocab", "only for draft_model")
        if sampled == "probabilistic":
            yield _rule("error", "use_heterogeneous_vocab", "only with greedy drafts")


def _rule(level: str, key: str, message: str) -> Finding:
    return Finding(
        check="draft_rule", level=level, where=f"speculative_config.{key}", message=message
    )


def _parallel_drafting(launch: Launch) -> Iterator[Finding]:
    speculation = _speculation(launch)
    if speculation.get("parallel_drafting") is True:
        yield Finding(
            check="parallel_drafting",
            level="warning",
            where="speculative_config.parallel_drafting",
            message="needs a model trained for it (PARD, P-EAGLE); others draft nonsense",
        )
    method = _method(launch)
    reads_features = method is not None and method.drafts_with == "head" and method.own_kv
    if speculation.get("disable_padded_drafter_batch") is True and not reads_features:
        yield Finding(
            check="parallel_drafting",
            level="error",
            where="speculative_config.disable_padded_drafter_batch",
            message="only for EAGLE heads",
        )


def _batch_schedule(launch: Launch) -> Iterator[Finding]:
    ranges = _speculation(launch).get("num_speculative_tokens_per_batch_size")
    if ranges is None:
        return
    problem = _schedule_problem(ranges)
    if problem:
        yield _schedule("error", problem)
    elif (number(launch.options.get("data-parallel-size")) or 1) > 1:
        yield _schedule("warning", "turned off under data parallelism")
    else:
        yield _schedule(
            "note",
            "prefills count towards the batch size, and an aggregate-throughput collapse at the "
            "threshold has been reported: confirm the schedule with an A/B",
        )


def _schedule(level: str, message: str) -> Finding:
    return Finding(
        check="batch_schedule",
        level=level,
        where="speculative_config.num_speculative_tokens_per_batch_size",
        message=message,
    )


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
    speculation, options = _speculation(launch), launch.options
    if not speculation:
        return
    if "logits-processors" in options:
        yield _clash("error", "--logits-processors", "custom logits processors are refused at "
                     "start-up, except with Model Runner V2's interface")  # fmt: skip
    if (number(options.get("pipeline-parallel-size", options.get("pp"))) or 1) > 1:
        yield _clash("warning", "--pipeline-parallel-size", "works for few models, on Model "
                     "Runner V2 only")  # fmt: skip
    k = number(speculation.get("num_speculative_tokens")) or 0
    rows, seqs = (number(options.get(n)) for n in ("max-num-batched-tokens", "max-num-seqs"))
    if rows and seqs and rows < seqs * (k + 1):
        level = "error" if options.get("enable-lora") else "warning"
        yield _clash(level, "--max-num-batched-tokens", f"{seqs} requests verify up to "
                     f"{seqs * (k + 1)} rows in a step, {rows} are allowed")  # fmt: skip
    limit, own = number(speculation.get("max_model_len")), number(options.get("max-model-len"))
    if limit and own and limit > own:
        yield _clash("error", "speculative_config.max_model_len", f"{limit} is beyond the "
                     f"target's {own}")  # fmt: skip


def _clash(level: str, where: str, message: str) -> Finding:
    return Finding(check="incompatible", level=level, where=where, message=message)


def _monitoring(launch: Launch) -> Iterator[Finding]:
    if not launch.speculation:
        return
    if launch.options.get("disable-log-stats") in (True, "true", "True"):
        yield Finding(
            check="monitoring",
            level="warning",
            where="--disable-log-stats",
            message="no acceptance counters: nobody will notice when speculation stops paying",
        )
    elif launch.form.kind == "python":
        if "disable-log-stats" not in launch.options:
            yield Finding(
                check="monitoring",
                level="note",
                where="disable_log_stats",
                message="LLM keeps no counters unless it is False: get_metrics() is refused",
                remedy="disable_log_stats=False",
            )
    elif "per-request-spec-decode-metrics" not in launch.options:
        yield Finding(
            check="monitoring",
            level="note",
            message="acceptance per request is off; averages over tokens hide the requests that "
            "lose",
            remedy="--per-request-spec-decode-metrics detailed",
        )


VLLM_CHECKS = (
    LaunchCheck("unread_config", _VLLM, _unread_config),
    LaunchCheck("broken_config", _VLLM, _broken_config),
    LaunchCheck("draft_ranks", _VLLM, _draft_ranks),
    LaunchCheck("draft_rule", _VLLM, _draft_rule),
    LaunchCheck("parallel_drafting", _VLLM, _parallel_drafting),
    LaunchCheck("batch_schedule", _VLLM, _batch_schedule),
    LaunchCheck("incompatible", _VLLM, _incompatible),
    LaunchCheck("monitoring", _VLLM, _monitoring),
)
