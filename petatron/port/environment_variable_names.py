"""Names of environment variables that every shell or scheduler sets, which a ported command leaves to the shell that starts it.

They keep their names in what a script becomes, and the shell that starts the run fills them in.
"""

from __future__ import annotations

import re
import shlex

_NAMES = frozenset(
    (
        *("HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "UID", "HOSTNAME", "HOST", "TMPDIR", "SHELL", "PATH"),
        *("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CONDA_PREFIX", "VIRTUAL_ENV"),
        *("XDG_CACHE_HOME", "SCRATCH", "HF_HOME"),
    )
)
_SCHEDULERS = ("SLURM_", "SLURMD_", "PBS_", "LSB_")
COMMANDS = {"pwd": "PWD", "whoami": "USER", "id -un": "USER", "hostname": "HOSTNAME"}
"""Commands whose output is the value of a variable."""
_REFERENCE = re.compile(r"\\\$\{(\w+)\}")


def is_of_environment(name: str) -> bool:
    """Whether every shell has a variable, or every job of a scheduler.

    >>> is_of_environment("PWD"), is_of_environment("SLURM_JOB_ID"), is_of_environment("DATA_PATH")
    (True, True, False)
    """
    return name in _NAMES or name.startswith(_SCHEDULERS)


def shell_quoted(text: str) -> str:
    """Returns a word for a shell, which replaces such names in it and nothing else.

    >>> print(shell_quoted("a b"), shell_quoted("${HOME}/a $b"), shell_quoted("${DATA}"))
    'a b' "${HOME}/a \\$b" '${DATA}'
    """
    escaped = re.sub(r'([\\"`$])', r"\\\1", text)
    names = [match[1] for match in _REFERENCE.finditer(escaped) if is_of_environment(match[1])]
    if not names:
        return shlex.quote(text)
    return f'"{_REFERENCE.sub(lambda match: match[0][is_of_environment(match[1]) :], escaped)}"'
