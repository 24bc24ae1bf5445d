"""Settings of each NCCL communicator: `--nccl-communicator-config-path` (Megatron's YAML form) and `--high-priority-stream-groups`.

tp: {is_high_priority_stream: true, max_ctas: 8}
dp: {cga_cluster_size: 2, min_ctas: 4, max_ctas: 16, net_name: IB}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from petatron.base.errors import Problem, raise_problems
from petatron.base.untrusted_files import read_limited_bytes
from petatron.config.schema.parallel import ParallelConfig, RawParallelConfig
from petatron.config.yaml_file import MAX_YAML_BYTES
from petatron.config.yaml_limits import limited_loader

# A group as Megatron names it -> the axes here whose communicators do that work.
AXES_BY_GROUP: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "hcp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp_cp", "shard", "dp_outer"),
    "dp_cp": ("dp_cp", "shard", "dp_outer"),
    "intra_dp_cp": ("shard",),
    "inter_dp_cp": ("dp_outer",),
    "embd": ("ends",),
    "ep": ("ep_etp",),
    "ep_dp": ("edp", "edp_shard"),
}
_PATH = "--nccl-communicator-config-path"
_COUNTS = ("cga_cluster_size", "min_ctas", "max_ctas")
_KEYS = ("is_high_priority_stream", *_COUNTS, "net_name")
_MAX_COUNTS = {"cga_cluster_size": 8, "min_ctas": 64, "max_ctas": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorSettings:
    """Settings of one communicator; None leaves a choice to NCCL."""

    is_high_priority_stream: bool = False
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None


@dataclass(frozen=True, slots=True)
class CommunicatorOptions:
    """Settings by axis."""

    by_axis: Mapping[str, CommunicatorSettings] = field(default_factory=dict)

    def for_axis(self, axis: str) -> CommunicatorSettings:
        """Returns the settings of an axis; a sub-axis (`cp/2`, `cp%2`) has its settings."""
        main_axis = axis.partition("/")[0].partition("%")[0]
        return self.by_axis.get(main_axis, CommunicatorSettings())


def communicator_options(config: ParallelConfig) -> CommunicatorOptions:
    """Returns the settings of a run; ConfigError with all their problems.

    >>> communicator_options(ParallelConfig(high_priority_stream_groups=("tp",))).for_axis("tp").is_high_priority_stream
    True
    """
    raise_problems(communicator_problems(config))
    by_axis: dict[str, CommunicatorSettings] = {}
    for group, values in _read_file(config.nccl_communicator_config_path).items():
        by_axis |= {axis: CommunicatorSettings(**values) for axis in AXES_BY_GROUP[group]}
    for group in config.high_priority_stream_groups:
        for axis in AXES_BY_GROUP[group]:
            by_axis[axis] = replace(by_axis.get(axis, CommunicatorSettings()), is_high_priority_stream=True)
    return CommunicatorOptions(by_axis)


def communicator_problems(config: RawParallelConfig) -> Iterator[Problem]:
    """Yields every problem of both settings."""
    import yaml

    known = f"The groups are {', '.join(AXES_BY_GROUP)}."
    for group in config.high_priority_stream_groups:
        if group not in AXES_BY_GROUP:
            yield Problem("--high-priority-stream-groups", group, "names no group of communicators", known)
    path = config.nccl_communicator_config_path
    if path is None:
        return
    try:
        groups = _read_file(path)
    except OSError as error:
        yield Problem(_PATH, path, f"cannot be read: {error.strerror or error}", "Give the path of a YAML file.")
        return
    except yaml.YAMLError as error:
        yield Problem(_PATH, path, f"is no YAML: {str(error).splitlines()[0]}", "Mend it.")
        return
    except RecursionError:
        yield Problem(_PATH, path, "is nested too deeply", "Write for example `dp: {max_ctas: 16}`.")
        return
    except (ValueError, OverflowError) as error:
        yield Problem(_PATH, path, str(error), "Write for example `dp: {max_ctas: 16}`.")
        return
    except (AttributeError, LookupError, TypeError):  # PyYAML's of a value with a wrong tag
        rule = "has a value that is not what its tag says"
        yield Problem(_PATH, path, rule, "Write for example `dp: {max_ctas: 16}`.")
        return
    for group, values in groups.items():
        if group not in AXES_BY_GROUP:
            yield Problem(_PATH, path, f"has settings of {group!r}, which is no group of communicators", known)
        for key, value in values.items():
            yield from _value_problems(path, f"{group}.{key}", key, value)


def _value_problems(path: str, where: str, key: str, value: Any) -> Iterator[Problem]:
    if key not in _KEYS:
        yield Problem(_PATH, path, f"has a setting {where}", f"The settings are {', '.join(_KEYS)}.")
    elif key == "is_high_priority_stream" and not isinstance(value, bool):
        yield Problem(_PATH, path, f"says {where}: {value}", "Write true or false.")
    elif key in _COUNTS and (
        isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_COUNTS[key]
    ):
        yield Problem(_PATH, path, f"says {where}: {value}", f"Write a number from 1 to {_MAX_COUNTS[key]}.")
    elif key == "net_name" and not isinstance(value, str):
        yield Problem(_PATH, path, f"says {where}: {value}", "Write the name of a network, such as IB or Socket.")


def _read_file(path: str | None) -> Mapping[str, Mapping[str, Any]]:
    if path is None:
        return {}
    import yaml

    class NoAliasLoader(limited_loader()):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("uses an alias (*name), by which a few lines can stand for gigabytes")
            return super().compose_node(parent, index)

    content = NoAliasLoader(read_limited_bytes(Path(path), MAX_YAML_BYTES).decode()).get_single_data() or {}
    if not isinstance(content, dict) or not all(isinstance(values, dict) for values in content.values()):
        raise ValueError("is not a table of groups, each with a table of settings")
    return content
