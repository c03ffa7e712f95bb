"""Other people's load generators against `foretoken serve demo`, unmodified.

    python benchmarks/clients.py --vllm-python VENV/bin/python --guidellm VENV/bin/guidellm

Runs `vllm bench serve` (its own entry function, in an environment of its own) and `guidellm run`
against one server and prints what they report. Both count tokens with the packaged tokenizer. The
last line is JSON; exit code 1 if one of them failed a request or could not run.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

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
    metrics = found["metrics"]
    totals = metrics["request_totals"]

    def median(name: str) -> float:
        value: float = metrics[name]["successful"]["percentiles"]["p50"]
        return value

    return {
        "completed": totals["successful"],
        "failed": totals["errored"],
        "tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms_p50": median("time_to_first_token_ms"),
        "tpot_ms_p50": median("time_per_output_token_ms"),
        "itl_ms_p50": median("inter_token_latency_ms"),
    }


def tokenizer() -> Path:
    """The folder of the packaged model, whose tokenizer both clients load."""
    return Path(str(resources.files("foretoken"))) / "packaged" / "demo"


def run(command: list[str], timeout_s: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vllm")
    parser.add_argument("--guidellm", type=Path, help="the program of that name")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--timeout-s", type=float, default=500)
    given = parser.parse_args()
    tools = {"vllm": (given.vllm_python, vllm), "guidellm": (given.guidellm, guidellm)}
    command = [sys.executable, "-m", "foretoken", "serve", "demo", "--port", "0"]
    command += ["--kv-cache-memory-bytes", "200000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    results: dict[str, Any] = {}
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server did not start"
        for name, (program, measure) in tools.items():
            if program is None:
                continue
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measure(program, found[0], Path(folder), given)
            print(name, json.dumps(results[name]), flush=True)
    finally:
        process.terminate()
        process.wait(60)
    print(json.dumps(results))
    whole = all(r["failed"] == 0 and r["completed"] == given.requests for r in results.values())
    return 0 if results and whole else 1


if __name__ == "__main__":
    sys.exit(main())
