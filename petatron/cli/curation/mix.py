"""`petatron data mix`: the weights of a blend from the sizes of its datasets."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import align_columns
from petatron.base.safe_files import write_atomic
from petatron.cli.curation.step_arguments import output_file_problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = (
        "Print --data-path with weights from token counts, and the epochs that a run reads of each dataset."
    )
    add("prefixes", nargs="+", metavar="PREFIX", help="dataset prefixes, or their .bin or .idx")
    add("--temperature", type=float, metavar="T", help="shares in proportion to tokens^(1/T) (1: to size)")
    add("--weights", nargs="+", type=float, metavar="W", help="shares of your own, one for each dataset")
    add("--target-tokens", type=_token_count, metavar="N", help="tokens of the run, 300B for example (all there are)")
    add("--max-epochs", type=float, metavar="E", help="give what is beyond E epochs of a dataset to the others")
    add("--yaml", metavar="FILE", help="write the blend as a file for --config")


def run(args: argparse.Namespace) -> int:
    problems = output_file_problems("--yaml", args.yaml)
    if args.weights is not None and args.temperature is not None:
        problems.append(Problem("--temperature", "", "is of no use beside --weights", "Give one of them."))
    raise_problems(problems)

    import yaml

    from petatron.config.schema.data_blend import dataset_prefix
    from petatron.data.curate.mix_sources import MANY_EPOCHS, Source, mix_sources
    from petatron.data.indexed_dataset import IndexedDataset

    datasets = [IndexedDataset(dataset_prefix(prefix)) for prefix in args.prefixes]
    mix = mix_sources(
        [Source(dataset.prefix, dataset.num_tokens) for dataset in datasets],
        weights=args.weights,
        temperature=1.0 if args.temperature is None else args.temperature,
        target_tokens=args.target_tokens,
        max_epochs=args.max_epochs,
    )
    rows = [("weight", "tokens there", "tokens read", "epochs", "dataset")]
    rows += [
        (f"{part.weight:.4f}", f"{part.source.tokens:,}", f"{part.tokens:,}", f"{part.epochs:.2f}", part.source.prefix)
        for part in mix.sources
    ]
    print(align_columns(rows))
    print(f"{mix.target_tokens:,} tokens in all")
    for part in mix.repeated:
        print(
            f"warning: {part.source.prefix} is read {part.epochs:.1f} times; more than {MANY_EPOCHS:g} epochs add little. "
            "Lower its weight, or set --max-epochs."
        )
    content = yaml.safe_dump(mix.config(), sort_keys=False)
    print(f"\n--data-path {shlex.join(mix.data_path)}\n\n{content}", end="")
    if args.yaml is not None:
        write_atomic(Path(args.yaml), content)
        print(f"\nwrote {args.yaml}, for --config {args.yaml}")
    return 0


def _token_count(text: str) -> int:
    """
    >>> _token_count("300B"), _token_count("2.5M"), _token_count("1_000")
    (300000000000, 2500000, 1000)
    """
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    unit = units.get(text[-1:].upper())
    return round(float(text[:-1]) * unit) if unit else int(text)
