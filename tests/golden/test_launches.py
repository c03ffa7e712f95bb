"""What `lint`, `export`, `plan` and `tune` make of servers' commands, word by word: launches.yaml.

`python -m tests.golden.test_launches` writes the answers of today into it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.lab.findings import LEVELS, Finding
from foretoken.lab.launch.engines import DraftingSetup
from foretoken.lab.launch.read import read_source
from foretoken.lab.launch.write import export
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings
from foretoken.lab.tune.server_command import ServerCommand
from foretoken.lab.tune.settings import OFF, Setting

FILE = Path(__file__).with_name("launches.yaml")
GIVEN = yaml.safe_load(FILE.read_text("utf-8"))
LINTED = [(title, case) for title, cases in GIVEN["lint"].items() for case in cases]
LOADS = (1, 8, 64)
DRAFTERS = ("ngram", "draft_model:org/small-1b", "eagle3:org/head", "mtp")


def in_words(finding: Finding) -> str:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return " ".join(filter(None, [finding.level, finding.check, finding.where])) + remedy


def linted(case: dict[str, Any], engine: str = "auto") -> dict[str, Any]:
    found = lint(read_source(case["text"], engine), Machine(device=case.get("device"), count=2))
    ordered = sorted(found.findings, key=lambda one: (LEVELS.index(one.level), in_words(one)))
    answer: dict[str, Any] = {"says": [in_words(one) for one in ordered]}
    texts = [one.corrected for one in found.launches if one.corrected]
    answer |= {"corrected": "\n\n".join(texts)} if texts else {}
    left = [in_words(finding) for one in found.launches for finding in one.remaining]
    return answer | ({"remaining": left} if left else {})


def exported(case: dict[str, Any]) -> dict[str, Any]:
    config = case.get("config")
    try:
        read = None if config is None else SpeculativeConfig.from_dict(config)
        return {"written": export(case["to"], case["settings"], read).commented}
    except ConfigError as error:
        return {"refused": error.allowed}


def planned(case: dict[str, Any]) -> dict[str, Any]:
    return {"commands": dict(build_plan(PlanSettings(**case["settings"])).commands)}


def tuned(case: dict[str, Any]) -> dict[str, Any]:
    command = ServerCommand.parse(case["command"])
    drafters = {one.name: one for one in map(DraftingSetup.parse, DRAFTERS)}
    settings = [OFF, *(Setting(name, (5, 3, 0)) for name in drafters), Setting("ngram", (2,))]
    settings += [Setting("auto")] if command.engine == "foretoken" else []
    given = {"given": command.given.name} if command.given else {}
    lines = {}
    for one in settings:
        try:
            lines[one.name] = command.line(one, drafters, LOADS)
        except ConfigError as error:
            lines[one.name] = f"refused: {error.allowed}"
    return {**given, "lines": lines}


def asked(case: dict[str, Any]) -> dict[str, Any]:
    return {key: case[key] for key in ("text", "device", "to", "config", "settings", "command")
            if key in case}  # fmt: skip


@pytest.mark.parametrize(("title", "case"), LINTED, ids=[title for title, _ in LINTED])
def test_lint(title: str, case: dict[str, Any]) -> None:
    assert asked(case) | linted(case) == case
    if case.get("corrected") and not case.get("remaining"):
        again = linted(
            {**case, "text": case["corrected"]}, read_source(case["text"]).launches[0].engine
        )
        assert not [one for one in again["says"] if one.startswith("error")], "it is right now"
        assert "corrected" not in again


@pytest.mark.parametrize("case", GIVEN["export"], ids=json.dumps)
def test_export(case: dict[str, Any]) -> None:
    assert asked(case) | exported(case) == case


@pytest.mark.parametrize("case", GIVEN["plan"], ids=lambda case: json.dumps(case["settings"]))
def test_plan(case: dict[str, Any]) -> None:
    assert asked(case) | planned(case) == case
    for engine, command in case["commands"].items():
        if command.startswith("# ") and "\n" not in command:
            continue
        source = read_source(command)
        assert [one.engine for one in source.launches] == [engine]
        wrong = [one for one in lint(source, Machine()).findings if one.level == "error"]
        unknown = engine == "foretoken" and "TRAINED-FOR" in command  # whose file it looks for
        assert unknown or not wrong, (command, wrong)


@pytest.mark.parametrize("case", GIVEN["tune"], ids=lambda case: case["command"])
def test_tune(case: dict[str, Any]) -> None:
    assert asked(case) | tuned(case) == case


class _Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text and text == "\n".join(map(str.rstrip, text.split("\n"))) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


if __name__ == "__main__":
    _Blocks.add_representer(str, _text)
    answers: dict[str, Any] = {
        "lint": {title: [asked(one) | linted(one) for one in cases]
                 for title, cases in GIVEN["lint"].items()},
        "export": [asked(one) | exported(one) for one in GIVEN["export"]],
        "plan": [asked(one) | planned(one) for one in GIVEN["plan"]],
        "tune": [asked(one) | tuned(one) for one in GIVEN["tune"]],
    }  # fmt: skip
    dumped = yaml.dump(answers, Dumper=_Blocks, width=100_000, sort_keys=False, allow_unicode=True)
    FILE.write_text(dumped, "utf-8")
