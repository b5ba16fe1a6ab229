"""Decoding by the transformers engine's cohorts on a GPU: CUDA graphs against step by step, in the same session.

`python -m benchmarks.decoding [--rows 64] [--tokens 128] [--hidden 384] [--layers 6]`: about 20 seconds. Prints, as its
last line, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kbrl_async.sampling.transformers.running_batch import CohortStats, RunningBatch, RunningSequence
from protocols.records import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    heads = options.hidden // 64
    config = Qwen2Config(
        vocab_size=4096, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).cuda().eval()
    rates: dict[bool, list[float]] = {True: [], False: []}
    captured, failure = 0, ""
    for repeat in range(options.repeats + 1):
        for graphs in (True, False):
            rate, cohort = decode(model, options, graphs)
            if repeat:  # the first one warms up
                rates[graphs].append(rate)
            if cohort._graphs is not None:
                captured, failure = cohort._graphs.captured, cohort._graphs.failure
            print(f"graphs={graphs}: {rate:.0f} tokens/s", flush=True)
    with_graphs, without = (statistics.median(rates[graphs]) for graphs in (True, False))
    print(
        json.dumps(
            {
                "benchmark": "decoding",
                "machine": torch.cuda.get_device_name(),
                "rows": options.rows,
                "tokens": options.tokens,
                "parameters": sum(p.numel() for p in model.parameters()),
                "graphs_tokens_per_s": round(with_graphs),
                "plain_tokens_per_s": round(without),
                "ratio": round(with_graphs / without, 2),
                "captured": captured,
                "failure": failure,
            }
        )
    )


def decode(model: torch.nn.Module, options: argparse.Namespace, graphs: bool) -> tuple[float, RunningBatch]:
    """Tokens a second of one batch whose rows end at different times, capturing included."""
    cohort, rng = RunningBatch(0, model, frozenset(), CohortStats(), graphs=graphs), random.Random(0)
    for i in range(options.rows):
        params = SamplingParams(rng.randint(options.tokens // 2, options.tokens))
        cohort.join([RunningSequence(f"r{i}", [rng.randrange(4096) for _ in range(20)], params, random.Random(i))])
    torch.cuda.synchronize()
    started, before = time.perf_counter(), cohort._stats.generated_tokens
    while cohort.rows:
        cohort.step()
    torch.cuda.synchronize()
    return (cohort._stats.generated_tokens - before) / (time.perf_counter() - started), cohort


if __name__ == "__main__":
    main()
