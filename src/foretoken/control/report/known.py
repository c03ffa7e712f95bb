"""What control has learnt, as plain JSON for operators: costs, acceptance, account and ledger.

Reads the models and changes none. Knows no step and no sentence. Invariant: a class is named
without the salt of its requests, which may be somebody's secret.
"""

import hashlib
from typing import Any

from foretoken.control.adaptive.planner import Planner

_MOST_CLASSES = 16
"""Of a drafter's classes those are told that showed most."""


def describe_models(planner: Planner) -> dict[str, Any]:
    """Everything that plans are made of, times in seconds. From any thread."""
    account, ledger = planner.account, planner.ledger
    return {
        **planner.times.describe(),
        "acceptance": _acceptance(planner),
        "account": {"balance_s": account.balance_s, "spent_s": account.spent_s},
        "ledger": ledger.describe(),
    }


def _acceptance(planner: Planner) -> dict[str, Any]:
    """By drafter and class, those with most trials first."""
    told = {}
    for name, classes in planner.acceptance.describe().items():
        most = sorted(classes.items(), key=lambda item: -sum(item[1]["trials"]))[:_MOST_CLASSES]
        told[name] = {_public(key): one for key, one in most}
    return told


def _public(class_key: str) -> str:
    """A class key with eight digits in place of its salt, the same ones for the same salt."""
    temperature, _, rest = class_key.partition("/")
    salt, _, grammar = rest.rpartition("/")
    shown = hashlib.sha256(salt.encode()).hexdigest()[:8] if salt else ""
    return f"{temperature}/{shown}/{grammar}"
