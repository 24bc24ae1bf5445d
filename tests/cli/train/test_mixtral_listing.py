"""The listing people copy for Mixtral 8x7B: its exact flags, sizes scaled down, on eight CPU ranks under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[3]

LISTING = """
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 1
  --expert-model-parallel-size 4
  --num-experts 8
  --moe-router-topk 2
  --moe-router-load-balancing-type aux_loss
  --moe-aux-loss-coeff 0.01
  --hidden-size 64
  --num-layers 2
  --num-attention-heads 8
  --seq-length 32
  --max-position-embeddings 32
  --bf16
  --use-mcore-models
  --transformer-impl transformer_engine
  --mock-data
"""
# The listing leaves these to the script around it.
REST = "--train-iters 6 --lr 1e-2 --log-interval 1 --eval-iters 0 --save out --live off"


def test_the_listing_trains(tmp_path: Path):
    script = ROOT / "pretrain_gpt.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*torchrun, *LISTING.split(), *REST.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["iteration"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.1
    for record in steps:
        assert set(record["router_health"]) == {"0", "1"}
        for layer in record["router_health"].values():
            assert 1.0 <= layer["load_max_over_mean"] <= 8.0 and layer["dropped"] == 0.0
            assert 0.0 < layer["entropy"] < 2.08 and layer["extra_loss"] >= 0.0099
    assert "load balancing loss" in done.stdout and "expert load max/mean" in done.stdout
