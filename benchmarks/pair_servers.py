"""Servers of `real_pair.py`: Foretoken's and llama.cpp's, with one setting each, and their memory.

Knows nothing of prompts. A server runs as long as its block; its start is timed up to its first
answer, since a port that listens says nothing of weights.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engines import library_path, llama_server
from served import started

from foretoken.hardware import anonymous_memory

CONTEXT = 4096
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of drafts that are tried; for llama.cpp and for us the same."""
OURS, PEER = "foretoken", "llama.cpp"
POLL_S = 0.5
"""Between two looks whether a server answers yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an engine is started and asked."""

    engine: str
    name: str
    command: tuple[str, ...]
    """{port} stands for the port."""
    env: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)
    """Added to every request."""
    drafts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A target, a draft model, and where llama.cpp was compiled."""

    model: Path
    draft: Path | None
    environment: Path
    """The virtual environment whose tools compiled it."""
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers."""

    url: str
    setting: Setting
    process: int


def our_settings(files: Files, slots: int = 1) -> list[Setting]:
    """Plain, every length of the draft model, look-ups alone, and control over all of them."""
    common = ["serve", str(files.model), "--port", "{port}", "--max-model-len", str(CONTEXT)]
    common += ["--no-enable-prefix-caching", "--max-num-seqs", str(slots)]
    detailed = ["--per-request-spec-decode-metrics", "detailed"]
    env = {"FORETOKEN_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": str(files.threads)}

    def setting(name: str, config: str, *more: str, **body: object) -> Setting:
        words = [sys.executable, "-m", "foretoken", *common, *detailed]
        words += ["--speculative-config", config, *more]
        drafts = config != "none"
        return Setting(engine=OURS, name=name, command=tuple(words), env=env, drafts=drafts,
                       body=body)  # fmt: skip

    # The peer has 8-bit activations whatever it is told; ours are a choice.
    eight = ("--activations", "int8")
    found = [
        setting("plain", "none"),
        setting("plain, int8 activations", "none", *eight),
        setting("look-ups, control", '{"method": "auto"}'),
    ]
    if files.draft is not None:
        path = files.draft.as_posix()
        draft = f'{{"method": "draft_model", "model": "{path}"}}'
        found.append(setting("draft, control", draft))
        both = f'{{"method": "ngram"}}, {{"method": "suffix"}}, {draft}'
        together = f'{{"method": "auto", "drafters": [{both}]}}'
        found.append(setting("draft and look-ups, control", together))
        found.append(setting("draft and look-ups, control, int8 activations", together, *eight))
        longest = draft.replace("}", f', "num_speculative_tokens": {max(LENGTHS)}}}')
        for note, more in (("", ()), (", int8 activations", eight)):
            found += [
                setting(f"draft, k={k}{note}", longest, "--no-adaptive-speculation", *more,
                        speculation={"num_speculative_tokens": k})
                for k in LENGTHS
            ]  # fmt: skip
    return found


def peer_settings(files: Files, slots: int = 1) -> list[Setting]:
    """Threads' pool, polling, attention and cache for plain decoding; then every length of the
    draft model and every look-up, in the first of them."""
    pairs = (
        ("plain", "own", ()),
        ("plain, OpenMP", "openmp", ()),
        ("plain, no polling", "own", ("--poll", "0")),
        ("plain, all polling", "own", ("--poll", "100")),
        ("plain, flash attention on", "own", ("-fa", "on")),
        ("plain, flash attention off", "own", ("-fa", "off")),
        ("plain, q8_0 cache", "own", ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
        ("plain, one thread", "own", ("-t", "1")),
    )
    found = [peer_setting(files, slots, name, pool, *more) for name, pool, more in pairs]
    kinds = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
    found += [peer_setting(files, slots, kind, "own", "--spec-type", kind) for kind in kinds]
    if files.draft is not None:
        draft = ("--spec-type", "draft-simple", "-md", str(files.draft))
        draft = (*draft, "-td", str(files.threads))
        for k in LENGTHS:
            words = (*draft, "--spec-draft-n-max", str(k))
            found.append(peer_setting(files, slots, f"draft, k={k}", "own", *words))
        sure = (*draft, "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.75")
        found.append(peer_setting(files, slots, "draft, k=8 where sure", "own", *sure))
    return found


def peer_setting(files: Files, slots: int, name: str, pool: str, *more: str) -> Setting:
    """llama.cpp's server with more words; later ones win."""
    words = [str(llama_server(files.environment)), "-m", str(files.model), "--port", "{port}"]
    words += ["-t", str(files.threads), "-c", str(CONTEXT * slots), "-np", str(slots)]
    words += ["--device", "none", "--no-webui", *more]
    env = {"LD_LIBRARY_PATH": library_path(files.environment, pool)}
    return Setting(engine=PEER, name=name, command=tuple(words), env=env,
                   body={"cache_prompt": False}, drafts="plain" not in name)  # fmt: skip


@contextmanager
def running(setting: Setting, logs: Path) -> Iterator[Running]:
    """The server as long as the block.

    Raises:
        EndpointError: it does not start.
    """
    log = logs / f"{setting.engine}.log"
    with started(setting.command, setting.env, log, poll_s=POLL_S) as server:
        yield Running(url=server.url, setting=setting, process=server.process.pid)


def memory_of(process: int) -> tuple[float, float]:
    """Resident and anonymous memory of a server and of what it started, GB."""
    resident, anonymous = 0, 0
    for one in _family(process):
        pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
        resident += pages * os.sysconf("SC_PAGE_SIZE")
        anonymous += anonymous_memory(one) or 0
    return resident / 1e9, anonymous / 1e9


def _family(process: int) -> Sequence[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(one for child in children for one in _family(int(child)))]


def imports_s() -> float:
    """Seconds of an interpreter that imports what a server imports, and ends."""
    began = time.perf_counter()
    code = "import foretoken.server.run, foretoken.llm, foretoken.engine.thread"
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began
