"""`petatron plan cache`: the bytes that a model keeps of a sequence while it generates."""

from __future__ import annotations

from collections.abc import Sequence

from petatron.cli.train import load_planned

USAGE = """usage: petatron plan cache [PRESET] [--config FILE] [flags of petatron train]

Says what one rank keeps of a sequence while it generates, in all layers together: of each token, where layers attend, and of the
sequence, however long it is, where they are recurrent. --tp shares heads out; --bf16 halves what is not in float32 anyway.

For example: petatron plan cache nemotron-h-8b --bf16
"""
_LENGTHS = (1_024, 8_192, 65_536, 1_048_576)


def main(argv: Sequence[str]) -> int:
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    run = load_planned(argv).config
    from petatron.estimate.generation_bytes import GenerationBytes
    from petatron.models.registry import model_spec
    from petatron.optim.loss_scaler import compute_dtype

    dtype, tp = compute_dtype(run.precision), run.parallel.tensor_model_parallel_size
    kept = GenerationBytes.of(model_spec(run), dtype, tp=tp)
    print(f"bytes on one of {tp} tensor-parallel ranks, {str(dtype).removeprefix('torch.')}")
    print(f"{'of each token':<32}{kept.per_token:>16,}   in {kept.paged_layers} layers")
    print(f"{'of each sequence':<32}{kept.per_sequence:>16,}   in {kept.recurrent_layers} layers")
    for tokens in _LENGTHS:
        print(f"{f'a sequence of {tokens:,} tokens':<32}{kept.per_sequence + tokens * kept.per_token:>16,}")
    return 0
