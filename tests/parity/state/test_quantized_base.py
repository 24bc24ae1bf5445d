"""Adapters beside weights in NF4 or FP8 train as beside the weights that those stand for, in every layout, and resume bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import petatron
from petatron.base.errors import ConfigError
from petatron.estimate.state_bytes import state_bytes
from petatron.kernels.block_quantization import DequantizingGemm, quantize
from petatron.mesh.mesh import ParallelMesh
from petatron.parallel.install_fp8_gemms import fp8_linears
from petatron.parallel.tensor_parallel import gemm_of
from petatron.sharding.flat_shard import group_tensor_shards
from tests.dist import RankPool
from tests.parity.harness import BOUNDS, check_traces, tiny_run, train
from tests.parity.state.test_resume import STOP, trained

WIDE = "--hidden-size 128 --ffn-hidden-size 128 --init-method-std 0.05"
LORA = f"{WIDE} --adapter lora --adapter-rank 2 --lr 0.05"


def save_bases(folder: Path, form: str) -> tuple[Path, Path]:
    """Saves a model, and what its quantized weights stand for."""
    model = petatron.build_model(tiny_run(f"{WIDE} --seed 7", dtype="float64"), ParallelMesh.single())
    petatron.save_checkpoint(folder / "base", step=1, model=model)
    with torch.no_grad():
        for layer in model.module.layers.values():
            for _, linear in fp8_linears(layer):
                linear.weight.copy_(quantize(linear.weight, form).dequantize())
    petatron.save_checkpoint(folder / "coarse", step=1, model=model)
    return folder / "base", folder / "coarse"


@pytest.mark.parametrize(
    ("form", "kind", "layout", "world_size"),
    [
        ("nf4", "lora", "", 1),
        ("fp8", "dora", "", 1),
        ("nf4", "lora", "--tp 2 --sequence-parallel", 2),
        ("nf4", "dora", "--pp 2 --dp 2 --use-distributed-optimizer", 4),
    ],
)
def test_it_trains_as_beside_dequantized_weights(
    ranks: RankPool, tmp_path: Path, form: str, kind: str, layout: str, world_size: int
):
    base, coarse = save_bases(tmp_path, form)
    lora = LORA.replace("--adapter lora", f"--adapter {kind}")
    if kind == "dora":  # magnitudes begin with the norms of the weights, which are those of the base where that is read
        base = coarse
    alone = train(tiny_run(f"{lora} --pretrained-checkpoint {coarse}", dtype="float64"))
    flags = f"{lora} --pretrained-checkpoint {base} --adapter-base-format {form} {layout}"
    check_traces(ranks, tiny_run(flags, world_size=world_size, dtype="float64"), alone, BOUNDS["float64"])


@pytest.mark.parametrize("flags", ["--bf16", "--num-experts 4 --dp 2 --ep 2 --use-distributed-optimizer"])
def test_it_resumes_bitwise(ranks: RankPool, tmp_path: Path, flags: str):
    world_size = 2 if "--dp 2" in flags else 1
    run = f"{LORA} --adapter-base-format nf4 {flags}"
    whole = trained(ranks, run, world_size)
    trained(ranks, f"{run} --save {tmp_path} --exit-interval {STOP}", world_size)
    after = trained(ranks, f"{run} --save {tmp_path} --load {tmp_path}", world_size)
    for rank in range(world_size):
        for key, tensor in whole[rank][1].items():
            assert torch.equal(after[rank][1][key], tensor), key


def test_weights_take_the_bytes_of_their_codes():
    model = petatron.build_model(tiny_run(f"{LORA} --bf16 --adapter-base-format nf4"), ParallelMesh.single())
    linears = [linear for layer in model.module.layers.values() for _, linear in fp8_linears(layer)]
    gemms = [gemm_of(linear) for linear in linears]
    assert all(isinstance(gemm, DequantizingGemm) for gemm in gemms)
    stored = sum(gemm.weight.num_bytes for gemm in gemms if isinstance(gemm, DequantizingGemm))
    elements = sum(linear.weight.numel() for linear in linears)
    assert stored == elements * 4.25 / 8 and all(linear.weight.untyped_storage().nbytes() <= 2 for linear in linears)
    plain, nf4 = (
        state_bytes(tiny_run(f"{LORA} --bf16 {flags}")).weights for flags in ("", "--adapter-base-format nf4")
    )
    assert plain - nf4 == pytest.approx(elements * 2 - stored, rel=0.02)
    frozen = [group for group in model.param_groups if not group.spec.trainable]
    assert all(group.flat_weights.numel() == 0 for group in frozen)
    read = {shard.name: view for group in frozen for shard, view in group_tensor_shards(group, group.weights())}
    assert torch.equal(
        read["layers.0.mlp.down.weight"], model.module.layers["0"].mlp.down.linear_op.gemm_op.gemm.weight.dequantize()
    )


def test_what_it_is_not_combined_with():
    for flags, told in (
        ("--data-parallel-sharding-strategy optim_grads_params --dp 2", "ranks would gather quantized weights"),
        ("--bf16 --fp8-format hybrid", "FP8 GEMMs cast weights themselves"),
    ):
        with pytest.raises(ConfigError, match=told):
            tiny_run(f"{LORA} --adapter-base-format nf4 {flags}", world_size=2 if "--dp" in flags else 1)
