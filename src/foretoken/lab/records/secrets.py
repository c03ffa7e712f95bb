"""The one place that takes secrets out of what is written down: keys, tokens, passwords."""

import re

_SECRETS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
    r"|(?i:\bbearer\s+[\w.~+/-]{16,}=*)"
    r"|(?i:\b(?:password|passwd|api[_-]?key|secret|token)\b\s*[:=]\s*)\S{6,}"
)
_WORDS = ("sk-", "hf_", "bearer ")
_OPTIONS = ("api-key=", "api_key=", "token=", "password=")
REDACTED = "[redacted]"


def redact_secrets(text: str) -> str:
    """A text of any length without what looks like a key or a password."""
    return _SECRETS.sub(REDACTED, text)


def redact_word(word: str) -> str:
    """A word of a command line; where an option or a prefix says secret, however short it is."""
    lowered = word.lower()
    if lowered.startswith(_WORDS):
        return REDACTED
    for name in _OPTIONS:
        if name in lowered:
            return word[: lowered.index(name) + len(name)] + REDACTED
    return redact_secrets(word)
