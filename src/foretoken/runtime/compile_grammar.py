"""From a schema, expression, list or grammar to llguidance's automaton.

Owns the bounds of size and work per token. Knows no requests and no tensors, and imports no torch:
`foretoken.runtime.compile_apart` runs it in a process of its own. How long compiling takes is not
bounded here.
"""

from typing import Any

from foretoken.errors import ParameterError

_MOST_ITEMS_IN_ROW = 10_000
"""Ways to go on at one place, about four per property of an object: a thousand properties are fine,
three thousand are refused."""


def compile_grammar(kind: str, source: str, compact: bool, tokenizer: Any) -> Any:
    """An llguidance matcher at the start of what `source` describes.

    Args:
        kind: one of `foretoken.types.structure.KINDS`.
        source: its schema, expression, choices (as JSON) or grammar.
        compact: JSON without whitespace between its parts.
        tokenizer: an `llguidance.LLTokenizer`.

    Raises:
        ParameterError: it does not compile, or is too large.
    """
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=_MOST_ITEMS_IN_ROW)
    try:
        text = _grammar_text(kind, source, compact)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    except (ValueError, RecursionError) as error:
        raise refused(kind, source, str(error)) from None
    if matcher.is_error():
        raise refused(kind, source, reason_of(matcher))
    return matcher


def refused(kind: str, source: str, reason: str) -> ParameterError:
    """What to raise about a structure that cannot be had."""
    allowed = reason if len(reason) <= 300 else reason[:297] + "..."
    return ParameterError(f"structured_outputs.{kind}", source, allowed)


def reason_of(matcher: Any) -> str:
    """Why a matcher is in error, in llguidance's words."""
    said = matcher.get_error().removesuffix("\n<non-verbose/>")
    return f"what llguidance can follow: {said}"


def _grammar_text(kind: Any, source: str, compact: bool) -> str:
    """The grammar in llguidance's own form."""
    import llguidance

    if kind in ("json", "json_object"):
        options: Any = {"whitespace_flexible": not compact}
        return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=options)
    return llguidance.grammar_from(kind, source)
