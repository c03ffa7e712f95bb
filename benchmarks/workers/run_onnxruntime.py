"""ONNX Runtime GenAI as a worker of `peers.py`; models are folders that its builder has made."""

import json
import time

import onnxruntime_genai as genai
from protocol import Job, Loaded, one_by_one, serve


def load(job: Job) -> Loaded:
    """A model on the CPU, no drafts."""
    assert job.method is None, job.method
    config = genai.Config(job.target)
    options = {"session_options": {"intra_op_num_threads": job.threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = genai.Model(config)

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        params = genai.GeneratorParams(model)
        length = len(prompt) + tokens
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        began = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt)
        generator.generate_next_token()
        first_s = time.perf_counter() - began
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return [int(i) for i in generator.get_sequence(0)[len(prompt) :]], first_s

    return Loaded({"onnxruntime_genai": genai.__version__}, one_by_one(generate))


if __name__ == "__main__":
    serve(load)
