"""Continue a text with a trained model.

    mesh-mpi generate runs/quickstart --prompt "The state of " --temperature 0
    mesh-mpi launch -n 4 -- generate runs/quickstart --prompt "We have " --tokens 60 --temperature 0.8 --top-k 40 --samples 3

Greedy at temperature 0. Draws depend on seed, sample and position: the same under every mesh and layout (in float32, two symbols whose
logits agree to rounding may change places; float_type=float64 excludes that). A text ends with the document's end, after --tokens, or where
prompt and text fill the model's length. Prints prompt and text; what was done stands on stderr.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi generate``."""
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run's folder (its latest checkpoint), or a checkpoint's")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration, dotted: mesh_shape=model:2")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the beginning (default: none, the beginning of a document)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="at most so many (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: the likeliest symbol (default 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only among the K likeliest (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default 0)")
    parser.add_argument("--samples", type=int, default=1, metavar="M", help="so many continuations (default 1)")


def run(arguments: argparse.Namespace) -> int:
    """Generate and print on the speaking rank."""
    import os
    import time

    from mesh_mpi.log import is_speaker, say
    from mesh_mpi.training.generation import Choice, generate

    start, a = time.perf_counter(), arguments
    prompt = os.fsencode(a.prompt)
    samples = generate(a.source, prompt, a.overrides, a.tokens, Choice(a.temperature, a.top_k, a.seed), a.samples)
    for number, sample in enumerate(samples, 1):
        say(f"sample {number} of {len(samples)}: {sample.n_tokens} tokens, stopped at {sample.stopped}")
        if is_speaker():
            print((prompt + sample.text).decode("utf-8", "replace"), flush=True)
    say(f"generate: {sum(s.n_tokens for s in samples)} tokens in {time.perf_counter() - start:.1f} s, the loading of the model included")
    return 0
