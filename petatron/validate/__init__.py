"""Rules that need to know what kernels, layer kinds, optimizers, schedules and layouts can do, and the door to a checked config.

`config/` has the schema, its bounds and what follows from them. A rule stands here, and asks for what it is about where that is
implemented: in modules without torch beside a kernel (`kernels/limits.py`), a schedule or a layer kind, which these use themselves.
"""

from petatron.validate.check_all import check_config
from petatron.validate.load import load_config, resolve_config, without_problems

__all__ = ["check_config", "load_config", "resolve_config", "without_problems"]
