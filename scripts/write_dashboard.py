"""Write deploy/grafana-dashboard.json from the table of panels below. Part of `make docs`."""

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "grafana-dashboard.json"
BY = 'model_name=~"$model"'


def quantiles(histogram: str, *shares: float) -> list[tuple[str, str]]:
    """Queries of a histogram's quantiles."""
    return [
        (
            f"histogram_quantile({share}, sum by (le) "
            f"(rate({histogram}_bucket{{{BY}}}[$__rate_interval])))",
            f"P{share * 100:g}",
        )
        for share in shares
    ]


def rate(counter: str) -> str:
    """The rate of a counter, over all engines."""
    return f"sum(rate({counter}{{{BY}}}[$__rate_interval]))"


def gauge(name: str) -> str:
    """A gauge, over all engines."""
    return f"sum({name}{{{BY}}})"


SPEC = "vllm:spec_decode_num_"
SPEEDUP = (
    f"{rate('foretoken:plain_decoding_seconds_estimate_total')} / "
    f"{rate('foretoken:decoding_seconds_total')}"
)
SHARE_DRAFTING = (
    f"{rate('foretoken:drafting_seconds_total')} / ({rate('foretoken:drafting_seconds_total')} + "
    f"{rate('foretoken:verifying_seconds_total')})"
)
POSITION = (
    f"sum by (position) (rate({SPEC}accepted_tokens_per_pos_total{{{BY}}}[$__rate_interval])) / "
    f"on() group_left {rate(SPEC + 'drafts_total')}"
)
BY_DRAFTER = (
    f"sum by (drafter) (rate(foretoken:drafter_accepted_tokens_total{{{BY}}}[$__rate_interval])) / "
    f"sum by (drafter) (rate(foretoken:drafter_draft_tokens_total{{{BY}}}[$__rate_interval]))"
)
QUANTILE = f"foretoken:acceptance_length_quantile{{{BY}}}"

ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "What clients see",
        [
            ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds", 0.5, 0.99)),
            (
                "Time per output token",
                "s",
                quantiles("vllm:request_time_per_output_token_seconds", 0.5, 0.99),
            ),
            ("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.99)),
            (
                "Requests ended",
                "reqps",
                [
                    (
                        "sum by (finished_reason) "
                        f"(rate(vllm:request_success_total{{{BY}}}[$__rate_interval]))",
                        "{{finished_reason}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Speculation",
        [
            (
                "Speed against plain decoding (estimated; below 1 it does not pay)",
                "none",
                [(SPEEDUP, "times plain decoding")],
            ),
            (
                "Acceptance length",
                "none",
                [
                    (
                        f"1 + {rate(SPEC + 'accepted_tokens_total')} / "
                        f"{rate(SPEC + 'drafts_total')}",
                        "tokens per verification",
                    ),
                    (gauge("foretoken:recent_draft_length"), "drafted"),
                ],
            ),
            ("Acceptance by position", "percentunit", [(POSITION, "{{position}}")]),
            ("Acceptance by drafter", "percentunit", [(BY_DRAFTER, "{{drafter}}")]),
            (
                "Acceptance length by temperature, last 1000 requests of each",
                "none",
                [(QUANTILE, "T <= {{temperature}}, P{{quantile}}")],
            ),
            ("Share of time spent drafting", "percentunit", [(SHARE_DRAFTING, "drafting")]),
            (
                "Draft tokens",
                "none",
                [
                    (rate(SPEC + "draft_tokens_total"), "checked/s"),
                    (rate("foretoken:wasted_draft_tokens_total"), "wasted/s"),
                ],
            ),
        ],
    ),
    (
        "Load",
        [
            (
                "Tokens",
                "none",
                [
                    (rate("vllm:generation_tokens_total"), "written/s"),
                    (rate("vllm:prompt_tokens_total"), "read/s"),
                ],
            ),
            (
                "Requests",
                "none",
                [
                    (gauge("vllm:num_requests_running"), "running"),
                    (gauge("vllm:num_requests_waiting"), "waiting"),
                    (rate("vllm:num_preemptions_total"), "preempted/s"),
                ],
            ),
            ("KV cache in use", "percentunit", [(gauge("vllm:kv_cache_usage_perc"), "pages")]),
            (
                "Prompt tokens found in the prefix cache",
                "percentunit",
                [
                    (
                        f"{rate('vllm:prefix_cache_hits_total')} / "
                        f"{rate('vllm:prefix_cache_queries_total')}",
                        "hits",
                    )
                ],
            ),
            ("Time in the queue", "s", quantiles("vllm:request_queue_time_seconds", 0.5, 0.99)),
            (
                "Memory",
                "bytes",
                [
                    (gauge("foretoken:device_memory_bytes"), "device"),
                    ("process_resident_memory_bytes", "process"),
                ],
            ),
        ],
    ),
]


def panel(number: int, place: tuple[int, int], spec: tuple[str, str, Any]) -> dict[str, Any]:
    """One chart."""
    title, unit, queries = spec
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": place[0], "y": place[1], "w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole document, in Grafana's schema."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        y += 1
        for index, spec in enumerate(charts):
            where = (8 * (index % 3), y + 7 * (index // 3))
            panels.append(panel(len(panels) + 1, where, spec))
        y += 7 * -(-len(charts) // 3)
    model = {
        "name": "model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(vllm:num_requests_running, model_name)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
    }
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Foretoken",
        "uid": "foretoken",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["llm", "speculative decoding"],
        "templating": {"list": [source, model]},
        "panels": panels,
    }


def render() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), "utf-8")
    print(f"wrote {TARGET}")
