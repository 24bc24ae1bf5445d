"""Types of settings whose values are treated specially: paths, private keys, modules, and flags that a saved config does not repeat."""

from __future__ import annotations

from typing import Annotated

# What `fields.py` reads off an annotation beside its type.
FilePath = Annotated[str, "path"]
"""A file, a folder or the prefix of files. A saved config holds it absolute, so that it can be started from any folder."""
PrivateKeyPath = Annotated[str, "path", "private"]
"""The file of a private key. Neither checkpoints nor saved configs say where it is."""
ModuleName = Annotated[str, "repeatable"]
"""A module to import; the flag may be given several times, and all of them count."""
NotSavedFlag = Annotated[bool, "one start"]
"""An answer to a question of one start. A saved config does not repeat it, so that the next start asks again."""
WeightsCopy = "copy of the owned weights"
"""The mark of a setting that makes each rank keep a copy of the weights that it updates, in the precision of its master weights."""
NotSavedOnResumeFlag = Annotated[bool, "one load"]
"""How this start loads. In a run that continues in its own folder, a saved config does not repeat it."""
