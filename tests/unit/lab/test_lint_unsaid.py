"""Values that a text does not say are not judged, and stand where they stood in what comes back."""

import json
import os
import shlex
import subprocess

import pytest

from tests.unit.lab.test_lint_corrects import judged

SCRIPT = """from vllm import LLM
llm = LLM(model="m", tensor_parallel_size=args.tp, speculative_config={
    "model": args.draft, "num_speculative_tokens": args.k, "draft_tensor_parallel_size": 4,
    "disable_by_batch_size": args.most})
"""
VALUES = {"DRAFT": "org/draft", "K": "4", "MOST": "16", "TP": "2", "MODEL": "m"}
TODAY = {
    "model": "org/draft",
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 16, 4], [17, 4096, 0]],
}


def told(command: str) -> dict[str, object]:
    """The speculative config that a shell gives to the server."""
    shown = subprocess.run(
        ["bash", "-c", command.replace("vllm serve", "printf '%s\\n'")],
        env={**os.environ, **VALUES},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    config: dict[str, object] = json.loads(shown[shown.index("--speculative-config") + 1])
    return config


@pytest.mark.parametrize(
    "command",
    [
        'vllm serve m --speculative-model "$DRAFT" --num-speculative-tokens $K '
        "--speculative-disable-by-batch-size ${MOST}",
        'vllm serve m --speculative-config "{\\"model\\": \\"$DRAFT\\", '
        '\\"num_speculative_tokens\\": $K, \\"disable_by_batch_size\\": $MOST}"',
        'vllm serve m --speculative-config \'{"model": "\'"$DRAFT"\'", '
        "\"num_speculative_tokens\": '$K', \"disable_by_batch_size\": '$MOST'}'",
    ],
)
def test_variables_are_filled_in_where_they_were(command: str) -> None:
    found = judged(command)
    assert not found.remaining, found.remaining
    assert told(found.corrected) == TODAY


def test_expressions_of_a_script_are_kept() -> None:
    found = judged(SCRIPT)
    assert {finding.check for finding in found.findings} == {"removed_key", "batch_schedule",
                                                            "monitoring"}  # fmt: skip
    assert not found.remaining
    assert "[[1, args.most, args.k], [args.most + 1, 4096, 0]]" in found.corrected
    assert '"draft_tensor_parallel_size": 4' in found.corrected, "the target's may be 4"


@pytest.mark.parametrize(
    "command",
    [
        'vllm serve "$MODEL" -tp $TP --per-request-spec-decode-metrics detailed '
        '--speculative-config "{\\"method\\": \\"draft_model\\", \\"model\\": \\"$DRAFT\\", '
        '\\"num_speculative_tokens\\": $K, \\"draft_tensor_parallel_size\\": 4}"',
        "vllm serve m --per-request-spec-decode-metrics detailed --speculative-config "
        '"{\\"method\\": \\"$METHOD\\", \\"num_speculative_tokens\\": 3}"',
    ],
)
def test_what_may_be_right_is_not_called_wrong(command: str) -> None:
    found = judged(command)
    assert not found.findings and not found.corrected, found


def test_a_config_that_stands_elsewhere_is_said_to() -> None:
    for text in (
        'vllm serve m --speculative-config "$SPEC" --use-v2-block-manager',
        'from vllm import LLM\nLLM("m", speculative_config=make(), use_v2_block_manager=True)',
    ):
        found = judged(text)
        [note] = [one for one in found.findings if one.check == "unread_config"]
        assert note.level == "note" and ("$SPEC" in note.message or "make()" in note.message)
        assert not {"broken_config", "speculation"} & {one.check for one in found.findings}
        assert "block" not in found.corrected and not found.remaining
        assert '"$SPEC"' in found.corrected or "make()" in found.corrected


def test_a_shell_fills_in_nothing_in_single_quotes() -> None:
    command = "vllm serve m --speculative-config '{\"num_speculative_tokens\": $K}'"
    assert shlex.split(command)[-1] == '{"num_speculative_tokens": $K}'
    assert [one.check for one in judged(command).findings if one.level == "error"] == [
        "broken_config"
    ]


def test_one_rank_is_the_only_one() -> None:
    [finding] = [
        one
        for one in judged(
            "vllm serve m --speculative-config "
            '\'{"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}\''
        ).findings
        if one.check == "draft_ranks"
    ]
    assert finding.message == "it must be the target's 1"
