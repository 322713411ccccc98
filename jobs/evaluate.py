"""Evaluate a trained model on held-out text: loss a token, perplexity a token, a word and a byte, bits a byte.

    mesh-mpi launch -n 4 -- evaluate runs/quickstart                             its latest checkpoint on its data.valid
    mesh-mpi evaluate runs/quickstart --data news.h5 --logit-scale 0.9           another token file, logits times 0.9
    mesh-mpi evaluate runs/quickstart/checkpoints/step_00000100 mesh_shape=data:1;model:1 sequences_per_batch=4

The configuration is the checkpoint's; mesh_shape, layout, storage, float_type, the batch and data may be set anew, and change figures by rounding only.
Without a launcher the ranks of the mesh are simulated in this process. A document's end counts as a token and not as a byte; words
stand between white space. Prints one line for people and one line of JSON.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi evaluate``."""
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run's folder (its latest checkpoint), or a checkpoint's")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration, dotted: mesh_shape=model:2")
    parser.add_argument("--data", metavar="FILE", help="a token file, or bundled:sotu (default: the run's data.valid)")
    parser.add_argument("--logit-scale", type=float, default=1.0, metavar="X", help="multiply the logits by X (default 1)")
    parser.add_argument("--batches", type=int, default=0, metavar="N", help="only the first N batches (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the figures on the speaking rank."""
    import json

    from mesh_mpi.log import is_speaker
    from mesh_mpi.training.evaluation import evaluate_checkpoint

    found = evaluate_checkpoint(arguments.source, arguments.overrides, arguments.data, arguments.logit_scale, arguments.batches)
    if is_speaker():
        print(f"evaluate {arguments.source}: {describe(found.figures())}")
        print(json.dumps({key: value if value < float("inf") else None for key, value in found.figures().items()}), flush=True)
    return 0


def describe(figures: dict) -> str:
    """Return the figures as one line for people."""
    return (f"loss {figures['loss']:.4f} nats a token; perplexity {figures['perplexity_token']:.5g} a token, {figures['perplexity_word']:.5g} a word, "
            f"{figures['perplexity_byte']:.5g} a byte; {figures['bits_per_byte']:.4f} bits a byte "
            f"({figures['tokens']:,} tokens, {figures['words']:,} words, {figures['bytes']:,} bytes in {figures['rows']:,} rows)")
