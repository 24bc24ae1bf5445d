"""Real Megatron-Core on CPU, both ways: its checkpoints give Petatron the logits of its own model, and it loads what Petatron writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

from petatron.base.errors import ConfigError
from petatron.pretrained.convert_model import ConversionOptions, MegatronLayout, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.megatron_core.compare import logit_difference
from tests.megatron_core.models import BERTS
from tests.megatron_core.run_core import WHEEL, run_core

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEEL.is_dir(), reason=f"{WHEEL} has no megatron-core: make megatron-core fetches it"),
]
FORMATS: tuple[Literal["legacy", "torch_dist"], ...] = ("legacy", "torch_dist")
SAVED: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"newer": True},
    "moe": {},
    "mla": {"format": "legacy"},
    "qk-norm": {"format": "legacy", "newer": True},
    "yarn": {},
    "dsa": {},
}
ENCODERS: dict[str, dict[str, Any]] = {"bert": {}, "bert alone": {"format": "legacy"}}
LAYOUTS = {"one rank": (1, 1, tuple(SAVED)), "tp 2 pp 2": (2, 2, ("gpt", "llama", "moe", "mla", "dsa"))}


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """Checkpoints of several kinds, as versions 0.16 and 0.20 (`newer`) store them."""
    tp, pp, kinds = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("saved")
    run_core(
        *({"task": "save", "kind": kind, "out": kind, "tp": tp, "pp": pp, **SAVED[kind]} for kind in kinds),
        folder=folder,
    )
    return folder, tp, pp


def test_logits_are_those_of_megatron_core(saved: tuple[Path, int, int], tmp_path: Path):
    for folder in sorted(saved[0].iterdir()):
        difference = logit_difference(folder, tmp_path / folder.name)
        assert difference < 2e-6, folder.name


def test_megatron_core_loads_what_is_written(saved: tuple[Path, int, int], tmp_path: Path):
    """At its default strictness, with weights that give the very same logits."""
    folder, tp, pp = saved
    jobs: list[dict[str, Any]] = []
    for source in sorted(folder.iterdir()):
        for form in FORMATS:
            kind, target = source.name, tmp_path / f"{source.name} {form}"
            layout = MegatronLayout(format=form, tp=tp, pp=pp, layer_spec="local")
            convert(open_model_reader(source), target, ConversionOptions(target_format="megatron", megatron=layout))
            shutil.copy(source / "reference.safetensors", target)
            jobs.append({"task": "load", "kind": kind, "out": target.name, "format": form, "tp": tp, "pp": pp})
    results = run_core(*jobs, folder=tmp_path)
    assert [result["difference"] for result in results] == [0.0] * len(jobs)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_encoders_have_the_logits_of_megatron_core(tmp_path: Path, tp: int, pp: int):
    """Megatron's BERT in both formats; it is read, and not written."""
    jobs = [{"task": "save", "kind": kind, "out": kind, "tp": tp, "pp": pp, **more} for kind, more in ENCODERS.items()]
    run_core(*jobs, folder=tmp_path)
    for kind, has_order in BERTS.items():
        assert logit_difference(tmp_path / kind, tmp_path / f"ours {kind}") < 2e-6, kind
        model = open_model_reader(tmp_path / kind).spec.config
        assert (model.model_type, model.bert_binary_head, model.num_token_types) == ("bert", has_order, 2 * has_order)
        layout = ConversionOptions(target_format="megatron", megatron=MegatronLayout(format="torch_dist"))
        with pytest.raises(ConfigError, match=r"--model-type bert is read from Megatron's files"):
            convert(open_model_reader(tmp_path / kind), tmp_path / "written", layout)
