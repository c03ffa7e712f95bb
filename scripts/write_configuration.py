"""Write docs/configuration.md from the config classes: one table per class.

The convention it reads: frozen dataclasses whose fields have a docstring under them. A field
without one is an error.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from foretoken.config import DrafterConfig, EngineConfig, SpeculativeConfig
from foretoken.config.drafter import StopConfig, TreeConfig, VocabularyConfig
from foretoken.config.method_registry import known_methods
from foretoken.config.other_engines import other_names, other_values
from foretoken.config.speculative import LoadConfig, RuleConfig
from foretoken.training.schedule import Stage
from foretoken.training.settings import (
    DataSettings,
    HeadSettings,
    LlamaShape,
    Settings,
    StateSettings,
)
from foretoken.types import SamplingParams

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"

HEADER = """\
# Configuration

Written by `make docs` from the classes themselves; do not edit. Names, defaults and meaning are
vLLM's where vLLM has them. Unknown keys are errors that list the known ones. Keys of vLLM whose
part is not built yet are accepted at their neutral value and are an error at any other.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One class and how a user reaches it; with no introduction, what the class says of itself."""

    title: str
    introduction: str
    source: type


SECTIONS = (
    Section("`LLM(...)`", "Keyword arguments, most of them optional.", EngineConfig),
    Section(
        "`speculative_config`",
        "A dictionary given to `LLM`, or as JSON to `--speculative-config`. Its keys stand side by "
        "side, as in vLLM. With `drafters`, the keys of one drafter go into its entries, and "
        "`num_speculative_tokens` outside holds for entries that have none.",
        SpeculativeConfig,
    ),
    Section("Keys of `speculative_config`: how drafts are checked", "", RuleConfig),
    Section("Keys of `speculative_config`: how far at which load", "", LoadConfig),
    Section(
        "Keys of one drafter", "In `speculative_config` or an entry of `drafters`.", DrafterConfig
    ),
    Section("Keys of one drafter: where chains end", "", StopConfig),
    Section("Keys of one drafter: trees", "", TreeConfig),
    Section("Keys of one drafter: another tokenizer", "", VocabularyConfig),
    *(
        Section(f"Keys of one drafter: method `{method.name}`", "", method.settings)
        for method in known_methods()
        if method.settings is not None
    ),
    Section("`SamplingParams(...)`", "Given with each request.", SamplingParams),
    Section(
        "`foretoken train CONFIG`",
        "The keys of a training config, a TOML file ([training.md](training.md)); tables follow.",
        Settings,
    ),
    Section("`[head]` of a training config", "What is trained for a target.", HeadSettings),
    Section("`[data]` of a training config", "Prompts and text of one's own.", DataSettings),
    Section("`[states]` of a training config", "Hidden states on disk.", StateSettings),
    Section("`[[stages]]` of a training config", "One table a stage, in order.", Stage),
    Section("`[shape]` of a training config", "Sizes of a Llama.", LlamaShape),
)


def field_docstrings(source: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for node, follower in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = follower.value if isinstance(follower, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[node.target.id] = " ".join(value.value.split())
    return found


class _PlainTypes(ast.NodeTransformer):
    """Types without what is said about their values, which stands in their meaning."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`T` for `Annotated[T, ...]`."""
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            assert isinstance(node.slice, ast.Tuple)
            found: ast.AST = self.visit(node.slice.elts[0])
            return found
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """`str` for the words of keys and values."""
        named = {"KVCacheDtype": "str", "Quantization": "str | None"}
        return ast.parse(named[node.id], mode="eval").body if node.id in named else node


def type_names(source: type) -> dict[str, str]:
    """Annotation of each field as written in the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        node.target.id: ast.unparse(_PlainTypes().visit(node.annotation))
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def render_section(section: Section) -> str:
    """A heading, the class's own prose, and a table of its fields.

    Raises:
        ValueError: a field has no docstring.
    """
    documented, types = field_docstrings(section.source), type_names(section.source)
    introduction = section.introduction or (inspect.getdoc(section.source) or "").splitlines()[0]
    lines = [f"## {section.title}", "", introduction, ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields(section.source):
        if "flat" in field.metadata or field.name == "own":
            continue
        if field.name not in documented:
            raise ValueError(f"{section.source.__name__}.{field.name} has no docstring under it")
        default = "required" if field.default is MISSING else f"`{field.default!r}`"
        cells = (f"`{field.name}`", f"`{types[field.name]}`", default, documented[field.name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


NAMES_HEADER = """
## Names of other engines

The names here are ours and those of vLLM's current release; `spec_method`, `spec_model` and
`spec_tokens` may stand beside `model=` in `LLM(...)`, too. Other names about speculation that vLLM,
SGLang, llama.cpp and TensorRT-LLM have or had are errors that say what to write instead.
`foretoken lab lint` and `foretoken lab export foretoken` translate whole commands.

| there | here |
|---|---|
"""


def render_names() -> str:
    """The table of our keys and methods with the names that others have for them."""
    lines: dict[str, list[str]] = defaultdict(list)
    not_built = {method.name for method in known_methods() if method.code is None}
    for row in other_names():
        taken = row.method if row.kind == "methods" else row.key
        if not taken or taken in not_built:
            continue
        names = [f"`{row.name}`"] if row.name != taken else []
        values = {**(other_values(row.key) if row.key else {}), **row.values}
        names += [f"value `{given}` for `{ours}`" for given, ours in values.items()]
        lines[taken] += [name for name in names if name not in lines[taken]]
    told = sorted((taken, names) for taken, names in lines.items() if names)
    rows = (f"| {', '.join(names)} | `{taken}` |\n" for taken, names in told)
    return NAMES_HEADER + "".join(rows)


def render() -> str:
    """The whole document."""
    sections = "".join("\n" + render_section(section) for section in SECTIONS)
    return HEADER + sections + render_names()


if __name__ == "__main__":
    TARGET.write_text(render(), "utf-8")
    print(f"wrote {TARGET}")
