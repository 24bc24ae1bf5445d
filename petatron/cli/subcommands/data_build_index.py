"""`petatron data build-index`: builds the sample indices of a run before it starts, on a machine without devices."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from petatron.base.errors import DataError
from petatron.cli.subcommands.open_run_data import add_run_arguments, open_run_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, accepted="what `petatron train` gets: a preset, a YAML file or a run folder")


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    config, tokenizer, checkpoints = open_run_data(args.run, flags, world_size=args.world_size)
    if config.data.mock_data:
        raise DataError("--mock-data has no files, and no indices. Give --data-path.")

    from petatron.data.index_cache import IndexLog
    from petatron.mesh.mesh import ParallelMesh
    from petatron.train.build_run import RunLength, build_loaders
    from petatron.train.samples_of_iteration import recorded_positions

    positions = [] if checkpoints is None else recorded_positions(checkpoints)
    length = RunLength.from_config(config)
    if positions:
        last = positions[-1]
        length = RunLength.from_config(config, iteration=last.iteration, consumed_samples=last.consumed_samples)
    log, start_s = IndexLog(records_all=True), time.monotonic()
    loaders = build_loaders(config, ParallelMesh.single(), tokenizer, train_samples=length.samples, index_log=log)
    order = loaders.train.fingerprint
    for loader in (loaders.train, *loaders.valid.values(), loaders.test):
        if loader is not None:
            loader.close()
    print(f"sample indices: {log or 'none are kept in files'}; {time.monotonic() - start_s:.1f} s")
    print(f"{length.samples:,} training samples of {length.iterations:,} iterations, order {order}")
    return 0
