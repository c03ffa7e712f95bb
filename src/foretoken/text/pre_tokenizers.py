"""How families of byte-level tokenizers cut a text into words, by the name that GGUF files have.

Within a word bytes are merged, never across words, so another cut means other ids. Patterns are
those of the families' own tokenizer.json files, in the syntax of the `tokenizers` library; where
no such file was at hand, those of llama.cpp. A name that is not here is refused, not guessed.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_GPT2, _DIGIT, _DIGITS, _PUNCTUATION = "gpt2", "digit", "digits", "punctuation"
_MADE: Final[Mapping[str, Callable[[], PreTokenizer]]] = {
    _GPT2: lambda: ByteLevel(add_prefix_space=False, use_regex=True),
    _DIGIT: lambda: Digits(individual_digits=True),
    _DIGITS: lambda: Digits(individual_digits=False),
    _PUNCTUATION: lambda: Punctuation(behavior="contiguous"),
}
"""Cuts that the library has by name; all others are patterns."""


class WordRule(NamedTuple):
    """How a text becomes words, and what else hangs on the family."""

    cuts: tuple[str, ...]
    """One after the other, each applied to the pieces of the one before."""
    nfc: bool = False
    """Whether a text is normalized (NFC) first."""
    whole: bool = False
    """Whether a word that is a token is taken as it is, whatever the merges say."""
    begins: bool = False
    """Whether a text begins with BOS where the file does not say."""

    def pre_tokenizer(self) -> PreTokenizer:
        """What cuts a text, and writes its bytes as letters."""
        steps = [_MADE[cut]() if cut in _MADE else _split(cut) for cut in self.cuts]
        if _GPT2 not in self.cuts:
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        return steps[0] if len(steps) == 1 else Sequence(steps)


def _split(pattern: str) -> PreTokenizer:
    return Split(Regex(pattern), behavior="isolated")


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ASCII_SIGNS = "!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~"


def _cased(after: str, digits: str) -> str:
    """Words that change case once at most; `after` may stand behind them."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_ONE_DIGIT = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_SIGNS}"
_THREE_DIGITS = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}"
_O200K = _cased(_SHORT + "?", r"\p{N}{1,3}")
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    f"[{_ASCII_SIGNS}][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_CASED_RANGES = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Letters with two cases, as DeepSeek's first tokenizer lists them."""


def _letters(ranges: str) -> str:
    ends = (one.split("-") for one in ranges.split())
    return "".join("-".join(chr(int(end, 16)) for end in one) for one in ends)


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_letters(_CASED_RANGES)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    _DIGIT,
)
_TABLE: Final[Mapping[str, WordRule]] = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum jais trillion granite-docling exaone4": WordRule((_GPT2,)),
    "mpt olmo": WordRule((_GPT2,), nfc=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": WordRule((_DIGIT, _GPT2)),
    "command-r": WordRule((_DIGIT, _GPT2), nfc=True),
    "falcon": WordRule((_PUNCTUATION, _GPT2, _DIGITS, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": WordRule(
        (_THREE_DIGITS,), whole=True, begins=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": WordRule((_THREE_DIGITS,)),
    "minicpm5": WordRule((r"\p{N}{1,3}", rf"{_SHORT}|{_LETTERS}|\p{{N}}+|{_SIGNS}"), whole=True),
    "qwen2 deepseek-r1-qwen megrez": WordRule((_ONE_DIGIT,), nfc=True),
    "stablelm2 hunyuan solar-open grok-2 kormo": WordRule((_ONE_DIGIT,)),
    "qwen35": WordRule(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "deepseek-llm": WordRule(_DEEPSEEK),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm": WordRule(_DEEPSEEK3),
    "tekken": WordRule((_cased("", r"\p{N}"),), whole=True, begins=True),
    "gpt-4o llama4 kanana2 minimax-m2": WordRule((_O200K,)),
    "bloom poro-chat gpt3-finnish": WordRule((_BLOOM,)),
    "viking": WordRule((_BLOOM, _DIGIT)),
    "bailingmoe bailingmoe2 llada-moe": WordRule(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": WordRule(
        (rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ),
    "exaone-moe": WordRule(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "ufakzeka": WordRule((rf"{_LETTERS}|\p{{N}}|{_SIGNS}",)),
    "superbpe": WordRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}


def _by_name(table: Mapping[str, WordRule]) -> dict[str, WordRule]:
    return {name: words for names, words in table.items() for name in names.split()}


WORD_RULES: Final[Mapping[str, WordRule]] = _by_name(_TABLE)
"""By `tokenizer.ggml.pre`."""
