"""Every check and rule of the lab stands in docs/deciding.md by its name, once."""

import re
from collections import Counter
from pathlib import Path

from foretoken.lab.decide.rules import RULES
from foretoken.lab.lint.checks import OWN_CHECKS
from foretoken.lab.plan.checks import CHECKS

DOCUMENT = Path(__file__).parents[3] / "docs" / "deciding.md"


def test_the_document_lists_every_check_once() -> None:
    table = DOCUMENT.read_text("utf-8").split("## Every check by its name")[1]
    rows = re.findall(r"^\| ((?:plan|lint|policy): .+?) \|", table, re.MULTILINE)
    written = Counter(name for row in rows for name in row.split(", "))
    names = [f"plan: {check.__name__[1:]}" for check in CHECKS]
    names += [f"lint: {name}" for name in OWN_CHECKS]
    names += [f"policy: {name}" for name in RULES]
    assert written == Counter(names)
