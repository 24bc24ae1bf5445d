"""Makes the masked samples that real megatron-core wrote: `make megatron-core`, then `python -m tests.golden.make_masked`.

`masked/samples.npz` has the arrays of each case of `GOLDEN`, named CASE/ARRAY, for the corpus of
`tests/unit/data/masked/sentence_corpus.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.megatron_core.run_masked_samples import real_samples
from tests.unit.data.masked.sentence_corpus import GOLDEN

FILE = Path(__file__).parent / "masked" / "samples.npz"


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        cases = real_samples(Path(folder), GOLDEN)
    arrays = {
        f"{case}/{name}": array.astype(np.int16) for case, named in cases.items() for name, array in named.items()
    }
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
