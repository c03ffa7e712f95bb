"""Which of a repository's GGUF files a name means, and which names are never asked of the hub."""

from pathlib import Path

import pytest

from foretoken.checkpoint import _choose, _hub_id, _HubId, _type_of, find_model
from foretoken.errors import ModelNotFoundError

QWEN = [f"qwen2.5-coder-0.5b-instruct-{kind}.gguf" for kind in ("q2_k", "q4_k_m", "q8_0")]
DYNAMIC = ["m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-UD-Q4_K_M.gguf"]
SPLIT = [f"Q8_0/m-Q8_0-{i:05}-of-00003.gguf" for i in range(1, 4)]


@pytest.mark.parametrize(
    ("files", "wanted", "found"),
    [
        (QWEN, "Q4_K_M", QWEN[1]),
        (QWEN, None, QWEN[1]),
        (QWEN, QWEN[2], QWEN[2]),
        (DYNAMIC, "q4_k_m", "m-Q4_K_M.gguf"),
        (DYNAMIC, "ud-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        (DYNAMIC, "Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        (SPLIT, "Q8_0", SPLIT[0]),
        (["m.Q6_K.gguf", "mmproj-m-Q6_K.gguf"], "Q6_K", "m.Q6_K.gguf"),
        (["only.gguf", "m.imatrix.gguf"], None, "only.gguf"),
    ],
)
def test_the_file_that_is_meant(files: list[str], wanted: str | None, found: str) -> None:
    assert _choose(_HubId("org/repo", wanted), files) == found


@pytest.mark.parametrize(
    ("files", "wanted", "said"),
    [
        (QWEN, "Q4_K", "org/repo:Q4_K'.*org/repo:TYPE.*: Q2_K, Q4_K_M, Q8_0"),
        (DYNAMIC, "Q4_XS", "IQ4_XS, Q4_K_M, UD-Q4_K_XL, UD-Q4_K_M"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "one of its files: org/repo/a-Q8_0.gguf, org"),
        (["a-Q8_0.gguf", "b-Q6_K.gguf"], None, "'org/repo'; .*: Q8_0, Q6_K"),
        (SPLIT, SPLIT[1], f"'org/repo/{SPLIT[1]}'; allowed: org/repo:TYPE.*: Q8_0"),
        ([], "Q8_0", "GGUF files; org/repo has none"),
        ([], None, "safetensors, .bin or GGUF files; org/repo has none"),
    ],
)
def test_none_or_several(files: list[str], wanted: str | None, said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"(?i){said}"):
        _choose(_HubId("org/repo", wanted), files)


def test_types_that_names_say() -> None:
    named = {"m-UD-IQ2_XXS.gguf": "UD-IQ2_XXS", "m_f16.gguf": "f16", "x/BF16/m.gguf": "BF16"}
    assert {name: _type_of(name) for name in named} == named
    assert _type_of("qwen3-8b.gguf") is None


def test_what_a_name_asks_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert _hub_id("org/repo") == ("org/repo", None)
    assert _hub_id("org/repo:Q8_0") == ("org/repo", "Q8_0")
    assert _hub_id("org/repo/sub/m.gguf") == ("org/repo", "sub/m.gguf")
    for name in ("m.gguf", "models/m.gguf", "org/repo/folder", "org/repo:"):
        assert _hub_id(name) is None
        with pytest.raises(ModelNotFoundError, match="a GGUF file that is there|config.json"):
            find_model(name)
