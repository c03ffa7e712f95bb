"""What deploy/ names is there: every metric of the dashboard and the rules is exported."""

import json
import re
from pathlib import Path

import httpx
import yaml

from scripts import write_dashboard
from tests.e2e.serving import Serving, post

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\b(?:vllm|foretoken):\w+(?::\w+)?|\bprocess_\w+")


def exported(server: Serving) -> set[str]:
    post(server, "/v1/completions", {"prompt": "x", "max_tokens": 20, "temperature": 0})
    server.wait_idle()
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_the_dashboard_is_fresh_and_its_metrics_exist(server: Serving) -> None:
    text = (DEPLOY / "grafana-dashboard.json").read_text("utf-8")
    assert text == write_dashboard.render(), "run `make docs`"
    panels = json.loads(text)["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    named = {name for query in queries for name in NAME.findall(query)}
    assert len(named) > 20
    assert not named - exported(server)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)


def test_the_rules_metrics_exist(server: Serving) -> None:
    groups = yaml.safe_load((DEPLOY / "foretoken-rules.yml").read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    named = {name for rule in rules for name in NAME.findall(rule["expr"])}
    assert recorded < named | recorded and len(rules) > 8
    assert not named - recorded - exported(server)
    alerts = [rule for rule in rules if "alert" in rule]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)


def test_all_alerts_but_one_fire_for_vllm_too() -> None:
    """Its servers have the names that begin so, and no estimate of what they would do undrafted."""
    groups = yaml.safe_load((DEPLOY / "foretoken-rules.yml").read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    names = {
        rule["alert"]: NAME.findall(" ".join([rule["expr"], *(
            recorded[name] for name in NAME.findall(rule["expr"]) if name in recorded)]))
        for rule in rules
        if "alert" in rule
    }  # fmt: skip
    own = {
        alert
        for alert, found in names.items()
        if any(name.startswith("foretoken:") and name not in recorded for name in found)
    }
    assert own == {"SpeculationDoesNotPay"}
    assert {"AcceptanceTooShort", "AcceptanceDrifts", "NothingIsDrafted", "KVCacheSqueezed",
            "TokenTimesWiden", "ServerDown"} < names.keys()  # fmt: skip


def test_the_scrape_file_names_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])
