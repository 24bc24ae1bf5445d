"""Settings of NCCL communicators: Megatron's YAML form and high-priority groups, and every mistake in them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.config import ParallelConfig
from petatron.config.nccl_communicators import CommunicatorSettings, communicator_options, communicator_problems


def options(tmp_path: Path, text: str, *groups: str) -> ParallelConfig:
    (tmp_path / "nccl.yaml").write_text(text)
    return ParallelConfig(
        nccl_communicator_config_path=str(tmp_path / "nccl.yaml"), high_priority_stream_groups=tuple(groups)
    )


def test_a_group_of_megatron_is_the_axes_that_do_its_work(tmp_path: Path):
    found = communicator_options(options(tmp_path, "dp: {cga_cluster_size: 2, max_ctas: 16, net_name: IB}", "ep", "dp"))
    wanted = CommunicatorSettings(is_high_priority_stream=True, cga_cluster_size=2, max_ctas=16, net_name="IB")
    assert found.for_axis("dp_cp") == found.for_axis("shard") == wanted
    assert found.for_axis("ep_etp") == CommunicatorSettings(is_high_priority_stream=True)
    assert found.for_axis("tp") == CommunicatorSettings()


def test_blocks_of_an_axis_have_its_settings():
    found = communicator_options(ParallelConfig(high_priority_stream_groups=("cp",)))
    assert found.for_axis("cp/2") == found.for_axis("cp%2") == CommunicatorSettings(is_high_priority_stream=True)


def test_every_mistake_is_reported_at_once(tmp_path: Path):
    text = "mp: {max_ctas: 4}\ntp: {max_ctas: 400, speed: 3, is_high_priority_stream: 1, net_name: 7}"
    config = options(tmp_path, text, "xp")
    said = "\n".join(str(problem) for problem in communicator_problems(config))
    for part in ("xp names no group", "'mp'", "tp.max_ctas: 400", "tp.speed", "Write true or false", "tp.net_name: 7"):
        assert part in said
    with pytest.raises(ConfigError, match="6 problems"):
        communicator_options(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp: [", "is no YAML"),
        ("- tp", "is not a table"),
        ("tp: 3", "is not a table"),
        ("tp: {max_ctas: !!timestamp 3}", "not what its tag says"),
    ],
)
def test_a_file_of_another_form(tmp_path: Path, text: str, said: str):
    (problem,) = communicator_problems(options(tmp_path, text))
    assert said in str(problem)


def test_a_file_that_is_not_there():
    (problem,) = communicator_problems(ParallelConfig(nccl_communicator_config_path="/nowhere/nccl.yaml"))
    assert "cannot be read" in str(problem)
