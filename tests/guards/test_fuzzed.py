"""Every foreign function of the kernels takes part in a program under sanitizers."""

import re

from tests.guards.sources import PACKAGE, ROOT

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
