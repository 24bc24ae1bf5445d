"""`petatron data merge` under the name and with the flags that Megatron users' scripts call; runs from a clone.

Megatron's `--input` is a folder, of which it joins all datasets in the order of their names.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from petatron.cli.main import main


def _prefixes(word: str) -> list[str]:
    """Returns the datasets of a folder; anything else is a dataset's prefix itself."""
    folder = Path(word)
    datasets = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx")) if folder.is_dir() else []
    return datasets or [word]


if __name__ == "__main__":
    words = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word.startswith("--input=") else [word])]
    at = words.index("--input") + 1 if "--input" in words else len(words)
    words[at : at + 1] = [prefix for word in words[at : at + 1] for prefix in _prefixes(word)]
    sys.exit(main(["data", "merge", *words]))
