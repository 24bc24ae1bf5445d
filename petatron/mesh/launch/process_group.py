"""Joins the process group and leaves it: device, variables, store, default process group.

The order matters. The device is bound before anything touches CUDA, variables are set before the library that reads them starts,
and the default group is gloo's with either backend: it connects nothing until two ranks communicate, so a world of any size starts at
once. `ParallelMesh` creates the groups that move device memory.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import resource
import sys
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the fake backend; nothing public does

from petatron.base.errors import LaunchError
from petatron.mesh.launch.environment import Backend, RankEnvironment, interface_variables, set_default_variables
from petatron.mesh.launch.nccl_options import env_variables
from petatron.mesh.launch.rendezvous import Rendezvous

_MAX_OPEN_FILES = 65_536
"""The limit of open files a rank requests; sockets count."""


def start_process_group(
    environment: RankEnvironment,
    *,
    backend: Backend | None = None,
    timeout_minutes: float = 10.0,
    device_type: Literal["cpu", "cuda"] = "cpu",
    deterministic: bool = False,
    ranks_per_device: int = 1,
) -> Backend:
    """Joins all ranks and returns the backend of the device's memory; a world of one joins nothing.

    `fake` simulates joining (for planning). `deterministic` restricts torch to deterministic kernels; cuBLAS needs its variable
    before CUDA starts.
    """
    backend = backend or ("nccl" if device_type == "cuda" else "gloo")
    if deterministic:
        set_default_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        torch.use_deterministic_algorithms(True)
    if backend == "nccl" and (device_type != "cuda" or not dist.is_nccl_available()):
        raise LaunchError(
            f"--distributed-backend nccl needs CUDA devices and a torch built with NCCL; here the device is "
            f"{device_type} and NCCL is {'' if dist.is_nccl_available() else 'not '}available. Use gloo."
        )
    wanted = env_variables(nccl=backend == "nccl", ranks_per_device=ranks_per_device, rank=environment.rank)
    defaults = {variable.name: variable.value for variable in wanted}
    set_default_variables({**defaults, **interface_variables(environment)})
    if device_type == "cuda":
        _bind_device(local_device_index(environment.local_rank, torch.cuda.device_count(), ranks_per_device))
    if environment.world_size == 1:
        return backend
    if backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=environment.rank, world_size=environment.world_size)
        return backend
    _raise_descriptor_limit(environment)
    store = _join_ranks(environment, timedelta(minutes=timeout_minutes))
    if backend == "nccl":
        _claim_device(store, environment, ranks_per_device)
    else:
        atexit.register(_stop_after_success)
    return backend


def _join_ranks(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    rendezvous = Rendezvous(environment, timeout=timeout)
    rendezvous.wait_for_all_ranks(timeout)
    # Newer versions of NCCL ask for it on connections that move data, in place of a number that everybody knows.
    set_default_variables({"NCCL_SOCKET_MAGIC": f"{rendezvous.random_number():#018x}"})
    # gloo also under NCCL. And no device: one bound to this group would make NCCL split every later group from the world,
    # which all ranks would have to join, while ours are created by their members alone.
    dist.init_process_group(
        "gloo",
        store=rendezvous.process_group_store(),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )
    return rendezvous.store


def _stop_after_success() -> None:
    """Leaves gloo's groups at the end of a program that has not: the interpreter may abort over their threads.

    After an exception they are left as they are: destroying them could wait for ranks that are gone. So are NCCL's, always: they would
    wait for CUDA graphs, which the program still holds.
    """
    if not hasattr(sys, "last_value"):
        stop_process_group()


def new_group(
    name: str,
    ranks: tuple[int, ...],
    *,
    backend: str,
    timeout: timedelta,
    device: torch.device | None = None,
    options: object = None,
) -> dist.ProcessGroup:
    """Creates a process group by its members alone; they find each other by name and ranks.

    `dist.new_group` would put the number of this process's groups into the name, so that ranks with different numbers of groups
    (the ends of a pipeline have more) never match. With a device the communicator is connected here, not by the first collective.
    """
    taken = set(c10d._world.pg_names.values())
    label = f"{name}:{','.join(map(str, ranks))}"
    unique_name = next(text for attempt in itertools.count() if (text := f"{label}#{attempt}") not in taken)
    place = len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend(backend), c10d._get_default_store()
    group, _ = c10d._new_process_group_helper(
        *place, c10d.GroupName(unique_name), options, timeout=timeout, device_id=device, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _bind_device(index: int) -> None:
    """Binds a device to this process, also for autograd's thread: its first call may be cuBLAS's."""
    torch.cuda.set_device(index)
    x = torch.zeros(1, device=torch.device("cuda", index), requires_grad=True)
    (x + x).sum().backward()


def local_device_index(local_rank: int, num_visible: int, ranks_per_device: int = 1) -> int:
    """Returns the CUDA device of a local rank. With one visible device the launcher has bound each rank to its own, or they share it."""
    if num_visible == 1:
        return 0
    index = local_rank // ranks_per_device
    if index >= num_visible:
        most = num_visible * ranks_per_device
        raise LaunchError(
            f"Local rank {local_rank} has no CUDA device: {num_visible} are visible. Start at most {most} ranks per machine "
            "(--nproc-per-node), let several share one with --ranks-per-device, or use --device cpu."
        )
    return index


def _claim_device(store: dist.Store, environment: RankEnvironment, ranks_per_device: int) -> None:
    """Refuses a device that more ranks use than intended; NCCL would refuse it with less of a reason, or hang."""
    index = torch.cuda.current_device()
    unique = str(torch.cuda.get_device_properties(index).uuid)
    if (count := store.add(f"device/{unique}", 1)) > ranks_per_device:
        raise LaunchError(
            f"Rank {environment.rank} is number {count} on CUDA device {index} ({unique}), which "
            f"{ranks_per_device} may use. Start one rank per GPU; to try a layout on fewer GPUs, say --ranks-per-device N, where "
            "speed means nothing."
        )


def _raise_descriptor_limit(environment: RankEnvironment) -> None:
    """Raises the limit of open files: every connection is one, and the usual soft limit of 1,024 is soon reached; needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # The store of rank 0 has a connection to every rank and to its watchdog, in addition to groups and files.
    needed = 3 * environment.world_size + 256 if environment.rank == 0 else 256
    if max(soft, most) < needed:
        raise LaunchError(
            f"Rank {environment.rank} may open {max(soft, most):,} files and needs about {needed:,} for the connections of "
            f"{environment.world_size:,} ranks. Raise the hard limit (ulimit -Hn, or LimitNOFILE of the job's service)."
        )


def stop_process_group() -> None:
    """Destroys all process groups, if there are any."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # NCCL waits for CUDA graphs that hold its collectives, and models are full of cycles
        dist.destroy_process_group()
