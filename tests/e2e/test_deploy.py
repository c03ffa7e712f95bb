"""What deploy/ names is there: every metric of the dashboard and the rules is exported."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import write_dashboard
import yaml

from foretoken.cli.app import app
from foretoken.cli.lab.lint import own_parser
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from foretoken.server.app import ROUTES
from foretoken.server.settings import Limits
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


ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy"
STARTING = ["Dockerfile", "compose.yml", "kubernetes.yaml"]
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "STOPSIGNAL",
                "HEALTHCHECK", "ENTRYPOINT", "CMD"}  # fmt: skip


def read(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text("utf-8"))


def launch_in(name: str) -> Launch:
    text = (FILES / name).read_text("utf-8").replace("${MODEL:-demo}", "demo")
    [found] = read_source(text).launches
    return found


@pytest.mark.parametrize("name", STARTING)
def test_the_command_is_one_that_our_parser_takes(name: str) -> None:
    text = (FILES / name).read_text("utf-8").replace("${MODEL:-demo}", "demo")
    root: Any = typer.main.get_command(app)
    [verdict] = lint(read_source(text), Machine(), own=own_parser(root)).launches
    assert verdict.launch.engine == "foretoken" and verdict.launch.model == "demo"
    assert [one for one in verdict.findings if one.level in ("error", "warning")] == []
    assert verdict.launch.options["host"] == "0.0.0.0", "else nobody outside reaches it"


@pytest.mark.parametrize("path", sorted(FILES.glob("*.y*ml")), ids=lambda path: path.name)
def test_yaml_is_read_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith("#") or path.name == "foretoken-rules.yml"
    assert all(isinstance(one, dict) for one in yaml.safe_load_all(text))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's lines, continued ones joined."""
    text = re.sub(r"\\\n", " ", (FILES / "Dockerfile").read_text("utf-8"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_dockerfile_copies_what_there_is_and_uses_what_it_declares() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    stages = [rest for name, rest in found if name == "FROM"]
    assert len(stages) == 2 and stages[0].endswith(" AS build")
    declared = {rest.partition("=")[0] for name, rest in found if name == "ARG"}
    text = "\n".join(rest for name, rest in found if name != "ARG")
    assert declared == {name for name in declared if f"${{{name}}}" in text}
    ignored = (FILES / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = [
        word
        for name, rest in found
        if name == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    assert sent == set(copied)
    assert all((ROOT / name).exists() for name in copied)
    assert [rest for name, rest in found if name == "USER"] == ["foretoken"], "not as root"


def test_the_image_is_built_of_what_the_build_needs() -> None:
    """Files that hatchling reads beside the sources."""
    build = (ROOT / "hatch_build.py").read_text("utf-8")
    needed = {"/".join(re.findall(r'"([^"]+)"', args)) for args in
              re.findall(r"Path\(self\.root, ([^)]+)\)", build)}  # fmt: skip
    copied = {line[1:] for line in (FILES / "Dockerfile.dockerignore").read_text().splitlines()
              if line.startswith("!")}  # fmt: skip
    assert needed and all(any(one.startswith(own) for own in copied) for one in needed)
    extras = dict(re.findall(r"^ARG (\w+)=(.+)$", (FILES / "Dockerfile").read_text(), re.M))
    known = re.findall(r"^(\w[\w-]*) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert set(extras["EXTRAS"].split(",")) <= set(known)


def test_compose_mounts_files_that_are_there_and_scrapes_the_server() -> None:
    services = read("compose.yml")["services"]
    volumes = set(read("compose.yml")["volumes"])
    for service in services.values():
        for mount in service.get("volumes", ()):
            source, _, _ = mount.partition(":")
            assert source in volumes or (FILES / source).is_file(), mount
        for other in service.get("depends_on", ()):
            assert other in services
    assert (FILES / services["foretoken"]["build"]["context"] / "deploy" / "Dockerfile").is_file()
    assert set(services["foretoken"]["build"]["args"]) <= {
        rest.partition("=")[0] for name, rest in instructions() if name == "ARG"
    }
    [job] = read("prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert services["prometheus"]["network_mode"] == "service:foretoken"
    assert target == "localhost:" + launch_in("compose.yml").options["port"]  # type: ignore[operator]
    [source] = read("grafana-datasource.yml")["datasources"]
    assert source["url"] == "http://foretoken:9090", "Prometheus shares the server's network"
    shown = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert any(shown in mount for mount in services["grafana"]["volumes"])
    [provider] = read("grafana-dashboards.yml")["providers"]
    assert shown.startswith(provider["options"]["path"])


def test_containers_are_given_the_time_to_drain() -> None:
    drains = float(str(launch_in("compose.yml").options["drain-s"]))
    assert drains == Limits().drain_s
    grace = read("compose.yml")["services"]["foretoken"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > drains
    pod = pods()["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > float(
        str(launch_in("kubernetes.yaml").options["drain-s"])
    )


def objects() -> dict[str, Any]:
    text = (FILES / "kubernetes.yaml").read_text("utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def pods() -> Any:
    return objects()["Deployment"]["spec"]


def test_kubernetes_selects_its_pods_and_probes_what_is_served() -> None:
    found = objects()
    labels = pods()["template"]["metadata"]["labels"]
    pool = found["InferencePool"]["spec"]
    for selector in (pods()["selector"]["matchLabels"], found["Service"]["spec"]["selector"],
                     pool["selector"]["matchLabels"]):  # fmt: skip
        assert selector.items() <= labels.items()
    [container] = pods()["template"]["spec"]["containers"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == launch_in("kubernetes.yaml").options["port"]
    assert pool["targetPorts"] == [{"number": port["containerPort"]}]
    served = {route.path for route in ROUTES}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe",
              "livenessProbe")]  # fmt: skip
    assert all(probe["path"] in served and probe["port"] == port["name"] for probe in probes)
    annotated = pods()["template"]["metadata"]["annotations"]
    assert annotated["prometheus.io/path"] in served


def test_the_health_check_asks_a_path_that_is_served() -> None:
    [check] = [rest for name, rest in instructions() if name == "HEALTHCHECK"]
    path = re.search(r"127\.0\.0\.1:(\d+)(/\w+)", shlex.join([check]))
    assert path is not None and path[2] in {route.path for route in ROUTES}
    assert path[1] in [rest for name, rest in instructions() if name == "EXPOSE"]


def test_ray_runs_the_front_on_the_head_and_replicas_on_workers() -> None:
    text = (FILES / "kuberay.yaml").read_text("utf-8")
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    job = found["RayJob"]["spec"]
    root: Any = typer.main.get_command(app)
    [verdict] = lint(read_source(job["entrypoint"]), Machine(), own=own_parser(root)).launches
    assert [one for one in verdict.findings if one.level in ("error", "warning")] == []
    options = verdict.launch.options
    assert options["ray-address"] == "auto" and options["host"] == "0.0.0.0"
    cluster = job["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0", "no replica beside the front"
    assert str(workers["minReplicas"]) == options["replicas"]
    assert str(workers["maxReplicas"]) == options["max-replicas"]
    [front] = head["template"]["spec"]["containers"]
    assert [str(port["containerPort"]) for port in front["ports"]] == [options["port"]]
    labels = head["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    for group in (head, workers):
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > float(str(options["drain-s"]))
    [extras] = re.findall(r"EXTRAS=(\S+)", text)
    known = re.findall(r"^(\w[\w-]*) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert set(extras.split(",")) <= set(known) and "ray" in extras
