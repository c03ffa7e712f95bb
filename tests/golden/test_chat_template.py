"""Chat templates give the text that transformers gives, whatever a template uses of jinja2."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from foretoken.checkpoint import packaged_model
from foretoken.errors import PromptError
from foretoken.text.tokenizer import Tokenizer

PLAIN = (
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}[{% endif %}"
    "{{ m['role'] }}: {{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = (
    "{%- if tools %}\n{{- 'Tools:\\n' }}{% for tool in tools %}{{ tool | tojson }}\n"
    "{{ tool.function | tojson(indent=2, sort_keys=true) }}{% endfor %}{% endif %}"
    "{%- for m in messages -%}{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
    "{{ call.function.name }}({{ call.function.arguments }}){% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{%- endfor -%}"
)
STATE = (
    "{% set ns = namespace(last=0, seen=[]) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.last = loop.index %}"
    "{{ loop.index0 }}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}|{{ m.thinking }}>{% endif %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ ns.last }}"
    "{{ dict(a=1, b='x') | tojson }}{{ dict.fromkeys('ab', 1) | tojson }}"
)
SWITCH = (
    "{%- if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}"
    "{{ effort | default('medium') }}{{ messages[0].content }}{{ pad_token is defined }}"
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
)
REJECTS = "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}ok"
UNKNOWN = "{{ unk_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
HARD = (
    "{%- macro part(p, deep=0) -%}{{ '  ' * deep }}{{ p | string | upper | replace('A', 'b') }}"
    "{%- if deep < 3 %}{{ part(p, deep + 1) }}{% endif %}{%- endmacro -%}"
    "{% set ns = namespace(turns=[], self=1) %}{% for m in messages | rejectattr('role', 'equalto',"
    " 'tool') %}{% set ns.turns = ns.turns + [m.role] %}{{ loop.nextitem is defined }}"
    "{% endfor %}{{ ns.turns | join('>') }}{{ ns.turns[::-1] | list }}{{ part(messages[-1].role) }}"
    "{% for key, value in messages[0] | dictsort %}{{ key }}={{ value | tojson(indent=1) }};"
    "{% endfor %}{% set t %}<b>{{ messages[0].content }}</b>{% endset %}{{ t | length }}{{ t }}"
    "{{ tools | tojson(separators=(',', ':')) if tools else 'none' }}{{ documents is none }}"
    "{{ strftime_now('%') }}{{ 7 // 2 }}{{ 2 ** 70 }}{{ 1e3 }}{{ 0.1 + 0.2 }}{{ none }}{{ true }}"
    "{{ messages | selectattr('tool_calls', 'defined') | list | count }}{{ missing }}"
)
CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }}: "
    "{{ call.function.arguments | tojson }}{% for name, value in call.function.arguments | items %}"
    "<{{ name }}>{{ value }}{% endfor %}{% endfor %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% set content = m['content'] %}"
    "{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{% if item.type == 'text' %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {"plain": PLAIN, "tools": TOOLS, "state": STATE, "switch": SWITCH,
             "rejects": REJECTS, "unknown": UNKNOWN, "hard": HARD}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": "<\u00e9>&'"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  hi <b> \u00e9\u4e16 "}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a", "name": None},
     {"role": "assistant", "content": "<think>\nx</think>\n\nb", "reasoning": "why"},
     {"role": "user", "content": "c"}, {"role": "user", "content": "d"}],
    [{"role": "user", "content": "a"},
     {"role": "assistant", "content": None, "tool_calls": [TOOL | {"id": "1"}]}],
]  # fmt: skip
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": False, "effort": "high"},
                                   {"bos_token": "<<"}]  # fmt: skip


def folder_of(tmp_path: Path, template: Any, **changes: Any) -> Path:
    """A copy of the demo's tokenizer with another template."""
    source = packaged_model("demo")
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, **changes}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def both_of(folder: Path) -> tuple[Any, Tokenizer]:
    """A folder's tokenizer as transformers and we read it."""
    return AutoTokenizer.from_pretrained(folder), Tokenizer(folder)


def both(
    pair: tuple[Any, Tokenizer], chat: list[dict[str, Any]], **options: Any
) -> tuple[Any, Any]:
    """What transformers and we make of a conversation: ids, or None for a refusal."""
    theirs, own = pair
    ours: Any
    variables = options.pop("variables", {})
    options.setdefault("add_generation_prompt", True)
    try:
        ours = own.apply_chat_template(chat, variables=variables, **options)
    except PromptError:
        ours = None
    try:
        text = theirs.apply_chat_template(chat, tokenize=False, **options, **variables)
    except Exception:  # noqa: BLE001 - transformers has no error of its own for it
        return None, ours
    return theirs.encode(text, add_special_tokens=False), ours


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(tmp_path: Path, name: str) -> None:
    pair = both_of(folder_of(tmp_path, TEMPLATES[name]))
    answered = 0
    for chat in CHATS:
        for variables in VARIABLES:
            for tools in (None, [TOOL]):
                theirs, ours = both(
                    pair, chat, tools=tools, variables=variables, add_generation_prompt=True
                )
                assert ours == theirs, (chat, variables, tools)
                answered += ours is not None
    assert answered


def test_the_packaged_template() -> None:
    theirs, ours = both(both_of(packaged_model("demo")), CHATS[1])
    assert ours == theirs and ours


@pytest.mark.slow
def test_several_templates_and_files(tmp_path: Path) -> None:
    several = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
    folder = folder_of(tmp_path, several)
    pair = both_of(folder)
    for tools in (None, [TOOL]):
        theirs, ours = both(pair, CHATS[0], tools=tools)
        assert ours == theirs and ours
    (folder / "chat_template.jinja").write_text("file {{ eos_token }} {{ messages[0].content }}")
    tokens = {"eos_token": {"content": "<s>", "lstrip": False}, "bos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    theirs, ours = both(both_of(folder), CHATS[0])
    assert ours == theirs and ours


def test_arguments_are_objects_whether_they_come_as_json_or_not(tmp_path: Path) -> None:
    """transformers leaves it to its callers to read the JSON."""
    arguments = {"city": "R\u00f6m <b>", "days": [1, 2.5, None], "deep": {"a": True}}
    theirs, own = both_of(folder_of(tmp_path, CALLS))

    def chat(given: object) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": given}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    wanted = theirs.apply_chat_template(chat(arguments), tokenize=False)
    assert "<city>" in wanted
    for given in (arguments, json.dumps(arguments), json.dumps(arguments, indent=2)):
        assert own.chat_text(chat(given), add_generation_prompt=False) == wanted


def test_parts_are_left_to_a_template_that_goes_through_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "user", "content": "three"},
    ]
    theirs, own = both_of(folder_of(tmp_path, PARTS))
    text = theirs.apply_chat_template(chat, tokenize=False)
    assert own.chat_text(chat) == text == "[user]onetwo[user]three"


@pytest.mark.parametrize("content", ["m.content", "m['content'] | list", "c"])
def test_parts_are_found_to_be_gone_through(tmp_path: Path, content: str) -> None:
    template = (
        "{% for m in messages %}{% set c = m.content %}"
        f"{{% for p in {content} %}}<{{{{ p.text }}}}>{{% endfor %}}{{% endfor %}}"
    )
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert Tokenizer(folder_of(tmp_path, template)).chat_text(chat) == "<a>"


def test_a_folder_that_has_gone(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_of(tmp_path, PLAIN))
    shutil.rmtree(tmp_path)
    assert tokenizer.apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% if %}", {}),
        ("{{ messages.x.y }}", {}),
        ("{{ 1 / (n | length) }}", {"n": ""}),
        ("{% for i in range(n) %}x{% endfor %}", {"n": 10**30}),
        ("{{ messages.__class__.__mro__ }}", {}),
        ("{{ namespace(_x=1) }}", {}),
        ("x", {"messages": []}),
        ("x", {"tools": []}),
    ],
)
def test_what_cannot_be_rendered(tmp_path: Path, template: str, variables: dict[str, Any]) -> None:
    tokenizer = Tokenizer(folder_of(tmp_path, template))
    with pytest.raises(PromptError):
        tokenizer.apply_chat_template(CHATS[0], variables=variables)
