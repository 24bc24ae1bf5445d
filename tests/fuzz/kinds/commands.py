"""Commands as a user types them, run in this process."""

from __future__ import annotations

import contextlib
import io

from petatron.cli.main import main
from tests.fuzz.kind import Refused


def petatron_says(*words: str) -> str:
    """What `petatron WORDS` prints; a command that fails has refused. All of it is printed again, for the harness to see."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    print(out.getvalue(), err.getvalue())
    if code:
        raise Refused(err.getvalue())
    return out.getvalue()
