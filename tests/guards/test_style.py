"""Rules of the house that a linter does not know."""

import ast
import inspect
import re

from foretoken import errors
from tests.guards.sources import PACKAGE, ROOT, classes, last_name, modules

MUTABLE_DATACLASSES = {
    "control/adaptive/drafter.py:DrafterState": "what one drafter did of late",
    "control/adaptive/active_plan.py:ActivePlan": "a plan, and what its requests gain by it",
    "control/adaptive/tracked.py:TrackedRequest": "how far drafters have read a request",
    "kv/window_pages.py:InWindow": "what a sequence holds of layers with a window",
    "runtime/sequence.py:Sequence": "the one mutable state of a request",
    "training/loop.py:Progress": "what a training run resumes from",
}
ABSTRACT_BASES = {"ABC", "Protocol"}


def test_modules_say_what_they_own() -> None:
    silent = [m.path for m in modules() if not ast.get_docstring(m.tree)]
    assert not silent, f"open with what the module owns and does not know: {silent}"


def test_no_drawer_for_everything() -> None:
    drawers = re.compile(r"(^|/)(utils?|helpers?|common|misc)(\.py|/)")
    bad = [m.path for m in modules() if drawers.search(m.path)]
    assert not bad, f"name the module by what it owns: {bad}"


def test_no_globals() -> None:
    bad = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]
    assert not bad, f"pass it as an argument: {bad}"


def test_code_is_ascii() -> None:
    bad = [m.path for m in modules() if not m.text.isascii()]
    assert not bad, f"ASCII only in code: {bad}"


def test_todos_have_a_link() -> None:
    bad = [
        f"{module.path}:{number}"
        for module in modules()
        for number, line in enumerate(module.text.splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX)\b", line) and "http" not in line and "#" not in line
    ]
    assert not bad, f"link the issue: {bad}"


def test_dataclasses_are_frozen() -> None:
    """Private ones may hold a class's own running state."""
    problems = []
    for module, node in classes():
        place = f"{module.path}:{node.name}"
        for decorator in node.decorator_list:
            if last_name(decorator) != "dataclass":
                continue
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            options = {k.arg: ast.unparse(k.value) for k in keywords}
            public = not node.name.startswith("_") and place not in MUTABLE_DATACLASSES
            if public and options.get("frozen") != "True":
                problems.append(place)
    assert not problems, f"frozen=True, or a reason in MUTABLE_DATACLASSES: {problems}"


def test_classes_are_abstract_or_final() -> None:
    """No class of ours inherits from a concrete class of ours, exceptions apart."""
    concrete = set()
    for module, node in classes():
        abstract = ABSTRACT_BASES & {last_name(base) for base in node.bases}
        if module.path != "errors.py" and not abstract:
            concrete.add(node.name)
    problems = [
        f"{module.path}:{node.name} inherits from {last_name(base)}"
        for module, node in classes()
        for base in node.bases
        if last_name(base) in concrete and not (module.path == "v1/metrics/reader.py")
    ]
    assert not problems, f"wrap it or pass a function instead: {problems}"


def test_dataclass_inheritance_of_metrics_is_flat() -> None:
    """The metric kinds share name and labels through one base, as vLLM's reader shows them."""
    bases = {
        node.name: [last_name(b) for b in node.bases]
        for module, node in classes()
        if module.path == "v1/metrics/reader.py"
    }
    for name in ("Counter", "Gauge", "Vector"):
        assert bases.get(name) == ["Metric"], (name, bases.get(name))


def test_no_paths_of_a_machine() -> None:
    suspicious = re.compile(r"/(?:root|home)/|/tmp/\w")
    bad = []
    for folder in ("src", "docs", "examples", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".toml") and suspicious.search(
                path.read_text("utf-8")
            ):
                bad.append(path.relative_to(ROOT).as_posix())
    assert not bad, f"no machine's paths in the project: {bad}"


ASKS_FOR_A_DEVICE = {
    "backend.py": "the border",
    "engine/wiring.py": "how much memory a GPU has free",
    "cli/timed_runs.py": "names the GPU in reports",
    "kernels/triton/found.py": "whether Triton runs, which the border asks",
    "kv/lazy_zeros.py": "memory that the system hands out when it is touched",
    "quant/finite.py": "how large a sum PyTorch makes in the calling thread",
    "training/": "trains on PyTorch alone",
}
ASKS_FOR_THE_LIBRARY = {
    "backend.py": "the border",
    "distributed/": "processes wait for each other, whatever computes",
    "kernels/library.py": "its own description of itself",
}


def asking(pattern: str, allowed: dict[str, str]) -> list[str]:
    found = [module.path for module in modules() if re.search(pattern, module.text)]
    return [path for path in found if not path.startswith(tuple(allowed))]


def test_one_place_asks_which_device_there_is() -> None:
    found = asking(r"device\.type\b|\.is_cuda\b|\.is_cpu\b|cuda\.is_available", ASKS_FOR_A_DEVICE)
    assert not found, f"ask backend_for(device) for what depends on the device: {found}"


def test_one_place_looks_for_the_library() -> None:
    found = asking(r"\bfind_library\(", ASKS_FOR_THE_LIBRARY)
    assert not found, f"take the kernel from backend_for(device): {found}"


NATIVE, FUZZ = PACKAGE / "kernels" / "native", ROOT / "tests" / "fuzz"
THROUGH_OTHERS = {
    "ft_advise_huge": "a hint to the system",
    "ft_fetches_near": "a number",
    "ft_linear_dense": "what the layers of decoder.c and heads.c call",
    "ft_parallel": "what shares every call's work",
    "ft_read_memory": "of benchmarks",
    "ft_threads": "a number",
}


def test_every_foreign_function_is_fuzzed() -> None:
    declared = "".join(path.read_text("utf-8") for path in sorted(NATIVE.glob("*.[ch]")))
    exported = set(re.findall(r"FT_EXPORT\s[^;{(]*?\b(ft_\w+)\(", declared))
    assert len(exported) > 10, exported
    programs = "".join(path.read_text("utf-8") for path in sorted(FUZZ.rglob("*.c")))
    called = set(re.findall(r"\b(ft_\w+)\(", programs))
    missing = exported - called - THROUGH_OTHERS.keys()
    assert not missing, f"a program in tests/fuzz is to call {sorted(missing)}"
    assert THROUGH_OTHERS.keys() <= exported, "a name that is gone"


def error_classes() -> dict[str, type[errors.ForetokenError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, errors.ForetokenError)
        and not name.startswith("_")
    }


def test_every_class_is_drawn_with_its_codes() -> None:
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.search(r"(\w+Error) +exit (\d+) +HTTP (\d+)", line)
        if match:
            drawn[match[1]] = (int(match[2]), int(match[3]))
    actual = {name: (c.exit_code, c.http_status) for name, c in error_classes().items()}
    assert drawn == actual


def test_every_class_is_explained() -> None:
    for name, error in error_classes().items():
        assert error.__doc__, name


def test_a_user_mistake_names_field_given_and_allowed() -> None:
    error = errors.ConfigError("num_speculative_tokens", 0, "an integer >= 1")
    assert str(error) == "num_speculative_tokens: got 0; allowed: an integer >= 1"
    assert (error.field, error.given, error.allowed) == (
        "num_speculative_tokens",
        0,
        "an integer >= 1",
    )


def test_long_values_are_cut() -> None:
    message = str(errors.PromptError("prompt", "x" * 10_000, "a shorter one"))
    assert len(message) < 300
    assert "allowed: a shorter one" in message


def test_the_nearest_word_of_a_list_is_named() -> None:
    error = errors.ConfigError("method", "meduza", "medusa, ngram")
    assert str(error) == "method: got 'meduza'; allowed: medusa, ngram; did you mean 'medusa'?"
    prose = errors.ConfigError("model", "folder", "a folder, or a hub id")
    assert "did you mean" not in str(prose)
