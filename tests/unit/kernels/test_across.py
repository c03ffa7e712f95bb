"""What `make check-arm` concludes. The guarded bugs: bits that differ and are not named, bits that
may differ and are, and missing tools that look like a failure."""

from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = util.spec_from_file_location("fuzz_kernels", ROOT / "scripts" / "fuzz_kernels.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    return module


def hashes(*levels: str) -> list[dict[str, str]]:
    """Of each level the three hashes, one letter each."""
    return [dict(zip(("whole", "fused", "pairs"), level, strict=True)) for level in levels]


def test_what_is_promised_is_compared(fuzz: ModuleType) -> None:
    x86 = hashes("abc", "ade", "axy")
    assert fuzz.differences(x86, hashes("abc", "ade", "ade", "adz")) == []
    (whole,) = fuzz.differences(x86, hashes("abc", "ade", "nde"))
    assert whole == "level 2 of aarch64: integer weights"
    (plain,) = fuzz.differences(x86, hashes("anc", "ade"))
    assert plain == "level 0 of aarch64 and 0 of this machine: fused"
    (newest,) = fuzz.differences(x86, hashes("abc", "ade", "ade", "anz"))
    assert newest == "level 3 of aarch64 and 1 of this machine: fused"
    (pairs,) = fuzz.differences(x86, hashes("abc", "ade", "adn", "adz"))
    assert pairs == "level 2 of aarch64 and 1 of this machine: pairs"


def test_another_machine_has_no_avx2_to_compare_with(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz.platform, "machine", lambda: "riscv64")
    assert fuzz.differences(hashes("abc", "axy"), hashes("abc", "ade")) == []
    assert len(fuzz.differences(hashes("abc", "axy"), hashes("nbc", "ade"))) == 1


def test_lines_of_the_program_are_read(fuzz: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "across"
    program.write_text("#!/bin/sh\necho across: level 0 whole 1a fused 2b pairs 3c\n")
    program.chmod(0o755)
    assert fuzz.hashes_of(program, []) == [{"whole": "1a", "fused": "2b", "pairs": "3c"}]


def test_missing_tools_are_a_skip_that_says_what_to_install(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "EMULATORS", ("an-emulator-that-is-not-there",))
    assert fuzz.emulated([]) == 0
    assert "skipped" in (said := capsys.readouterr().out)
    assert "gcc-aarch64-linux-gnu" in said and "qemu-user" in said
