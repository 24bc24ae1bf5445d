"""The rank's environment: its place among the ranks, and how ranks find each other. The one place that reads environment variables.

Three launchers start the same program. `petatron train --nproc-per-node` and torchrun describe a rank with torchrun's
six variables; `srun` describes it with SLURM's. Without either, the process is alone and needs no process group.

SLURM needs care. A batch script, an `salloc` shell and an interactive step all carry SLURM variables although only one
process runs there: believing SLURM_NTASKS=8 in such a shell would wait for seven ranks nobody starts. So SLURM counts
only inside a step that `srun` made, which is a step id below the reserved ones (interactive, batch, extern ...).
Inside a step the step's own variables win over the job's, because a step may use a part of the job.

torch is imported inside the functions that need it: the launcher shares this module and has to start ranks at once.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from petatron.base.errors import LaunchError
from petatron.mesh.launch.nat_and_trusted_networks import NETWORKS_VARIABLE, Network, parse_networks
from petatron.mesh.launch.shared_secret import SECRET_VARIABLE as SECRET
from petatron.mesh.launch.shared_secret import check_secret

Launcher = Literal["petatron", "torchrun", "slurm", "single"]
Backend = Literal["gloo", "nccl", "fake"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
STORE_FILE, SECRET_NAME = "PETATRON_STORE_FILE", "PETATRON_SECRET_NAME"
STARTED_BY = "PETATRON_STARTED_BY"
"""Tells ranks of our own launcher from torchrun's, whose variables both have."""
API_KEY_VARIABLE = "PETATRON_API_KEY"
IMPORT_VARIABLE = "PETATRON_IMPORT"
JOINED_STORE = "PETATRON_JOINED_STORE"
"""In a rank that has joined a run: which process, at which address, and the name of the store's server there."""
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Step ids from here up are not made by srun: 0xfffffffa is an interactive step, then come batch, extern and pending.
FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """This process's place among all ranks, and where rank 0 can be reached."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: Launcher
    store_file: str | None = None
    """The store file of ranks that our launcher started on one machine, in place of an address."""
    secret: str | None = field(default=None, repr=False)
    """The secret by which ranks of several machines prove that they belong together (`shared_secret.py`)."""
    secret_name: str | None = None
    """Where the secret was not passed on: the name under which rank 0 writes it for the others."""
    restart_count: int | None = None
    """Where torchrun's agent hosts a store: how often it has restarted the ranks."""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether no rank is on another machine."""
        return self.local_world_size == self.world_size


SINGLE_PROCESS = RankEnvironment(
    rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="127.0.0.1", master_port=0, launcher="single"
)


def read_environment(env: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Reads torchrun's variables, else SLURM's; neither means a single process."""
    if "RANK" in env or "LOCAL_RANK" in env:
        environment = _from_torchrun(env)
    elif _inside_slurm_step(env):
        environment = _from_slurm(env)
    elif env.get("WORLD_SIZE", "1") != "1":
        environment = _from_torchrun(env)
    else:
        return SINGLE_PROCESS
    _check_consistent(environment)
    return environment


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    _require(env, TORCHRUN_VARIABLES, who="torchrun's variables")
    restart_count = None
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        restart_count = _integer(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0
    is_on_one_machine = env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]
    # Ranks of one machine share a home folder for sure; others would wait for a secret that never comes.
    agent_secret = (
        f"torchrun-{env['MASTER_PORT']}-{restart_count}" if restart_count is not None and is_on_one_machine else None
    )
    return RankEnvironment(
        **{name.lower(): _integer(env, name) for name in TORCHRUN_VARIABLES if name != "MASTER_ADDR"},
        master_addr=env["MASTER_ADDR"],
        launcher="petatron" if env.get(STARTED_BY) == "petatron" else "torchrun",
        store_file=env.get(STORE_FILE),
        secret=secret_from_env(env),
        secret_name=env.get(SECRET_NAME, agent_secret),
        restart_count=restart_count,
    )


def secret_from_env(env: Mapping[str, str] = os.environ) -> str | None:
    """Returns the secret of the run, if it was passed on."""
    return check_secret(env[SECRET]) if SECRET in env else None


def trusted_networks_from_env(env: Mapping[str, str] = os.environ) -> tuple[Network, ...]:
    """Returns the networks from which connections to gloo are taken for ranks'."""
    return parse_networks(env.get(NETWORKS_VARIABLE, ""))


def record_joined_store(environment: RankEnvironment, identity: bytes) -> None:
    """Records the run that this process has joined, for those who open the store again to report a failure."""
    os.environ[JOINED_STORE] = f"{_joined_place(environment)}/{identity.hex()}"


def joined_store_from_env(environment: RankEnvironment, env: Mapping[str, str] = os.environ) -> bytes | None:
    """Returns the name of the store that this process has joined, if it has; what a parent left in the environment does not count."""
    place, _, identity = env.get(JOINED_STORE, "").rpartition("/")
    return bytes.fromhex(identity) if place == _joined_place(environment) else None


def _joined_place(environment: RankEnvironment) -> str:
    place = environment.rank, environment.restart_count, environment.master_addr, environment.master_port
    return " ".join(map(str, (os.getpid(), *place)))


def api_key_from_env(env: Mapping[str, str] = os.environ) -> str | None:
    """Returns the key that clients of a server must send, if it is set. It is never a command argument, which every user can list."""
    return env.get(API_KEY_VARIABLE) or None


def imports_from_env(env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the modules that every command imports first, as `--import` does; they are separated as the folders of PATH are."""
    return [name for name in env.get(IMPORT_VARIABLE, "").split(os.pathsep) if name]


def _inside_slurm_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < FIRST_RESERVED_SLURM_STEP


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    tasks = _first_present(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = _first_present(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    _require(env, ("SLURM_PROCID", "SLURM_LOCALID", tasks, nodes, "SLURM_JOB_ID"), who="SLURM's variables")
    hosts = expand_hosts(env[nodes])
    world_size = _integer(env, tasks)
    port = 10_000 + (_integer(env, "SLURM_JOB_ID") + _integer(env, "SLURM_STEP_ID")) % 20_000
    return RankEnvironment(
        rank=_integer(env, "SLURM_PROCID"),
        local_rank=_integer(env, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_slurm_local_world_size(env, num_nodes=len(hosts), world_size=world_size),
        master_addr=env.get("MASTER_ADDR", hosts[0]),
        master_port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else port,
        launcher="slurm",
        secret=secret_from_env(env),
        secret_name=f"slurm-{env['SLURM_JOB_ID']}-{env['SLURM_STEP_ID']}",
    )


def _slurm_local_world_size(env: Mapping[str, str], *, num_nodes: int, world_size: int) -> int:
    """Returns the tasks on this node: SLURM writes `4(x2),3` for nodes with 4, 4 and 3 tasks."""
    name = _first_present(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name not in env:
        if world_size % num_nodes:
            raise LaunchError(
                f"SLURM runs {world_size} tasks on {num_nodes} nodes, and SLURM_TASKS_PER_NODE, which would say how "
                "many are here, is not set. Start the ranks with srun --ntasks-per-node=N."
            )
        return world_size // num_nodes
    counts: list[int] = []
    for part in env[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"{name}={env[name]} is not a list of task counts such as 4(x2),3. Start with srun.")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node} is outside {name}={env[name]} ({len(counts)} nodes). Start with srun.")
    return counts[node]


def expand_hosts(nodelist: str) -> list[str]:
    """Returns all names in a SLURM host list, in its order: `gpu[003-004,12],login` is gpu003, gpu004, gpu12, login."""
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodelist):
        pieces = [_expand_piece(piece, nodelist) for piece in re.split(r"(\[[^\]]*\])", item.strip()) if piece]
        hosts += ["".join(parts) for parts in itertools.product(*pieces)] if pieces else []
    if not hosts:
        raise LaunchError(f"SLURM's node list {nodelist!r} names no host. Start the ranks with srun inside a job.")
    return hosts


def _expand_piece(piece: str, nodelist: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    names: list[str] = []
    for span in piece[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span.strip())
        if match is None:
            raise LaunchError(
                f"Cannot read {span!r} in SLURM's node list {nodelist!r}: expected a number or a range such as "
                "003-010. Set MASTER_ADDR to the first host to go on without it."
            )
        first, last = match[1], match[2] or match[1]
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def _first_present(env: Mapping[str, str], preferred: str, fallback: str) -> str:
    return preferred if preferred in env else fallback


def _require(env: Mapping[str, str], names: tuple[str, ...], *, who: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        present = [name for name in names if env.get(name)]
        raise LaunchError(
            f"{who} are incomplete: {', '.join(present)} set, {', '.join(missing)} not. Start the ranks with "
            "`petatron train --nproc-per-node N`, torchrun or srun, or unset these variables to run one process."
        )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} is not a whole number. Whatever launched this rank set it.") from None


def _check_consistent(environment: RankEnvironment) -> None:
    rank, size = environment.rank, environment.world_size
    local_rank, local_size = environment.local_rank, environment.local_world_size
    rules = {
        f"rank {rank} is not below the world size {size}": 0 <= rank < size,
        f"local rank {local_rank} is not below the local world size {local_size}": 0 <= local_rank < local_size,
        f"the local world size {local_size} exceeds the world size {size}": local_size <= size,
        f"port {environment.master_port} is not between 1 and 65535": 0 < environment.master_port < 65_536,
    }
    if wrong := [text for text, holds in rules.items() if not holds]:
        who, names = (
            ("slurm", "SLURM_PROCID, SLURM_NTASKS, ...")
            if environment.launcher == "slurm"
            else ("torchrun", ", ".join(TORCHRUN_VARIABLES))
        )
        raise LaunchError(
            f"The {who} variables ({names}) contradict each other: {'; '.join(wrong)}. Left-over exports in "
            "the shell are the usual cause; unset them."
        )


def usable_cores() -> int:
    """Returns the cores this process may use: its affinity mask, limited by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2 here, or the quota is the word "max"
        return cores


def rank_variables(
    environment: RankEnvironment, *, error_file: str | None = None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns all variables of a rank that we start ourselves; the user's settings for threads and interfaces are kept."""
    env = {**base, **{name: str(getattr(environment, name.lower())) for name in TORCHRUN_VARIABLES}}
    # A launcher started under torchrun must not make its ranks wait for that torchrun's store.
    for name in ("TORCHELASTIC_USE_AGENT_STORE", ERROR_FILE, STORE_FILE, SECRET, SECRET_NAME, STARTED_BY):
        env.pop(name, None)
    variables = {ERROR_FILE: error_file, STORE_FILE: environment.store_file}
    variables |= {STARTED_BY: "petatron" if environment.launcher == "petatron" else None}
    variables |= {SECRET: environment.secret, SECRET_NAME: environment.secret_name}
    env.update({name: value for name, value in variables.items() if value is not None})
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // environment.local_world_size)))
    return {**interface_variables(environment), **env}


def interface_variables(environment: RankEnvironment) -> dict[str, str]:
    """Returns the variables that keep gloo and NCCL on the loopback interface where all ranks are on one machine.

    No connection from outside is needed; and gloo would resolve the host name, which is slow where DNS is broken.
    """
    is_local = environment.is_on_one_machine and sys.platform == "linux"
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if is_local else {}


def set_default_variables(wanted: Mapping[str, str]) -> None:
    """Sets variables of libraries that read them later; those the user has set are kept."""
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def error_file(env: Mapping[str, str] = os.environ) -> str | None:
    """Returns the file in which this rank reports a failure, if its launcher reads one."""
    return env.get(ERROR_FILE)


def has_peers(env: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return env.get("WORLD_SIZE", "1") != "1" or _inside_slurm_step(env)


def process_variables() -> Mapping[str, str]:
    """Returns the variables of this process."""
    return os.environ
