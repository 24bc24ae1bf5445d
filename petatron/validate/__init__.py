"""Rules that need to know what kernels, layer kinds, optimizers, schedules and layouts support; `load_config` applies all rules.

A rule asks the code that it is about: declarations without torch (`kernels/size_limits.py`, `config/schema/`) that kernels, schedules
and layers use too, or the spec of a model (`layer_capabilities.py`). `config/` has the schema, its bounds and derived values.
"""

from petatron.validate.load_checked_config import check_config, load_config, resolve_config, without_problems

__all__ = ["check_config", "load_config", "resolve_config", "without_problems"]
