"""An installation without extras: what works, and that the rest says what to install."""

import shlex

import pytest

from tests.guards.test_public_face import without_extras

OFFLINE = """
from foretoken import LLM, SamplingParams
from foretoken.errors import MissingPackageError

params = SamplingParams(temperature=0.0, max_tokens=8)
with LLM("demo", speculative_config={"method": "eagle3", "model": "demo-eagle3"}) as llm:
    for output in llm.generate(["def f("], params):
        print(len(output.outputs[0].token_ids))
    try:
        llm.generate(["x"], SamplingParams(structured_outputs={"regex": "[ab]+"}))
    except MissingPackageError as error:
        print(error)
    print(len(llm.generate(["def f("], params)))
"""
COMMAND = "sys.argv = ['foretoken', *{words!r}]\nfrom foretoken.cli import main\nmain()"


def without_extras_run(*words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command line where no extra is installed."""
    done = without_extras(COMMAND.format(words=list(words)), timeout_s=280)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate 'def f(' --max-tokens 4", "lab plan demo"])
def test_commands_that_need_no_extra(command: str) -> None:
    status, output, errors = without_extras_run(*shlex.split(command))
    assert status == 0, errors
    assert output.strip()


@pytest.mark.slow
def test_offline_use_needs_no_extra_and_grammars_name_theirs() -> None:
    done = without_extras(OFFLINE, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "8",
        "structured_outputs needs llguidance, which is not installed: "
        'pip install "foretoken[serve]"',
        "1",
    ]


URL = "http://127.0.0.1:9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["serve", "demo"], "starlette", "serve"),
        (["lab", "record", URL], "uvicorn", "serve"),
        (["lab", "bench", "--server", URL], "httptools", "serve"),
        (["lab", "report", "."], "matplotlib", "report"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given[:2]),
)
def test_other_commands_say_what_to_install(words: list[str], package: str, extra: str) -> None:
    status, _, errors = without_extras_run(*words)
    assert status == 2, errors
    [line] = errors.strip().splitlines()
    assert line.startswith("foretoken: ")
    assert line.endswith(
        f'needs {package}, which is not installed: pip install "foretoken[{extra}]"'
    )
