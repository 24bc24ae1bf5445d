"""Options of NCCL communicators, and the environment variables of NCCL and torch.

`env_variables` lists every variable this package relies on, with the reason; `environment.py` sets them before the first group exists,
unless the user has, and `petatron doctor` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from petatron.config.nccl_communicators import CommunicatorSettings

_CONFIG_FIELDS = ("cga_cluster_size", "min_ctas", "max_ctas", "net_name")


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """An environment variable, its value, and the reason."""

    name: str
    value: str
    reason: str


_ALWAYS_VARIABLES = (
    EnvVariable(
        "TORCH_GLOO_LAZY_INIT", "1", "gloo connects two ranks when they first communicate, not all with all at start"
    ),
)
_NCCL_VARIABLES = (
    EnvVariable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a failed or late collective ends the process instead of hanging it"
    ),
    EnvVariable("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", "our own report of the last operations takes the place of a dump"),
    EnvVariable(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "120", "a rank stuck inside NCCL itself is ended after two minutes"
    ),
)
_SHARED_DEVICE_VARIABLES = (
    EnvVariable("NCCL_SOCKET_IFNAME", "lo", "ranks that share a device talk through the loopback interface"),
    EnvVariable("NCCL_IB_DISABLE", "1", "no InfiniBand between ranks of one machine that pass for several"),
    EnvVariable("NCCL_NVLS_ENABLE", "0", "no switch multicast within one device"),
)


def env_variables(*, nccl: bool, ranks_per_device: int = 1, rank: int = 0) -> tuple[EnvVariable, ...]:
    """Returns the variables of a rank; `ranks_per_device` is how many ranks share its device on purpose.

    NCCL refuses two ranks on one device of one host, so ranks that share one appear as separate hosts.

    >>> [variable.name for variable in env_variables(nccl=False)]
    ['TORCH_GLOO_LAZY_INIT']
    """
    variables = (*_ALWAYS_VARIABLES, *(_NCCL_VARIABLES if nccl else ()))
    if nccl and ranks_per_device > 1:
        host = EnvVariable(
            "NCCL_HOSTID", f"rank{rank}", "NCCL takes the ranks of one device for those of several hosts"
        )
        variables += (host, *_SHARED_DEVICE_VARIABLES)
    return variables


def nccl_timeout(timeout: timedelta) -> timedelta:
    """Returns NCCL's own time limit: longer than ours, at which our watchdog ends the process with a report."""
    return timeout + min(timeout, timedelta(minutes=1))


def nccl_options(settings: CommunicatorSettings, timeout: timedelta) -> Any:
    """Returns torch's options of an NCCL process group; the time limit is the group's, which torch reads here too."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = settings.is_high_priority_stream
    for name in _CONFIG_FIELDS:
        value = getattr(settings, name)
        if value is not None:
            setattr(options.config, name, value)
    return options
