"""llama.cpp's server as a worker of `peers.py`, asked over loopback; LLAMA_SERVER is its program.

Models are GGUF files that `peers.py` has converted. Prompts go in as ids and nothing is cached. A
build keeps back the end of a stream whose bytes are no text, so fewer ids may come than were made.
"""

import atexit
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request

from protocol import Job, Loaded, end_with_parent, one_by_one, serve

SERVER = os.environ["LLAMA_SERVER"]
START_S = 120.0


def command(job: Job, port: int) -> list[str]:
    """Of a server with one slot."""
    words = [SERVER, "-m", job.target, "--port", str(port), "-t", str(job.threads)]
    words += ["-c", str(job.max_model_len), "-np", "1", "--device", "none", "--no-webui"]
    words += ["--poll", str(job.setting["poll"])]
    if job.draft:
        words += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(job.k)]
        if job.setting["draft_poll"] != "as poll":
            words += ["--spec-draft-poll", str(job.setting["draft_poll"])]
        words += ["--spec-draft-device", "none", "--spec-draft-model", job.draft]
    return words


def load(job: Job) -> Loaded:
    """Start the server and wait until it is ready; it ends with this process."""
    assert job.method in (None, "draft_model"), job.method
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(command(job, port), preexec_fn=end_with_parent)
    atexit.register(process.kill)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while not _ready(url):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit("llama.cpp's server did not start")
        time.sleep(0.02)

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        assert k == job.k, (k, job.k)
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True,
                "cache_prompt": False, "stream": True, "return_tokens": True}  # fmt: skip
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
        found: list[int] = []
        first_s = 0.0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    found += event.get("tokens") or []
                    # Its own clock: a first token that is half a character is not streamed.
                    first_s = event.get("timings", {}).get("prompt_ms", 0.0) / 1e3 or first_s
        return found, first_s

    version = subprocess.run([SERVER, "--version"], capture_output=True, text=True).stderr
    versions = {"llama.cpp": " ".join(version.split("\n")[0].split())}
    return Loaded(versions, one_by_one(generate))


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    serve(load)
