"""Copies of weights on a CPU: the same tokens as without them, nothing stale, and nothing for others than the engine's steps."""

from __future__ import annotations

import pytest
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step.generation_weights import (
    HostGemm,
    HostGemms,
    pack_weight,
    packed_gemm,
    packing_unsupported_reason,
)
from petatron.layers.linear import Linear
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.tensor_parallel import gemm_of
from tests.unit.infer.test_sample import model_in

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=1)
needs_packing = pytest.mark.skipif(
    packing_unsupported_reason(torch.float32) is not None, reason=str(packing_unsupported_reason(torch.float32))
)


@pytest.fixture
def no_half_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petatron.kernels.cpu_matmul.cpu_instructions", frozenset[str])


def answers(engine: Engine) -> list[Completion]:
    return [row[0] for row in engine.complete(PROMPTS, GREEDY)]


def host_gemms(model: ParallelModel) -> list[HostGemm]:
    found = [gemm_of(module) for module in model.module.modules() if isinstance(module, Linear)]
    return [gemm for gemm in found if isinstance(gemm, HostGemm)]


@needs_packing
@pytest.mark.parametrize(("shape", "opaque"), [((48, 16), False), ((1000, 512), True)])
@pytest.mark.parametrize("rows", [2, 8, 65])
def test_a_packed_weight_multiplies_alike(shape: tuple[int, int], opaque: bool, rows: int):
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    packed = pack_weight(weight)
    assert (packed.layout is not torch.strided) == opaque
    expected = x.double() @ weight.double().t()
    assert torch.allclose(packed_gemm(x, packed).double(), expected, atol=1e-4)


def test_only_float32_is_packed_and_never_beside_mkl(monkeypatch: pytest.MonkeyPatch):
    assert packing_unsupported_reason(torch.float64) == "weights in float64 are not packed"
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    assert "MKL" in str(packing_unsupported_reason(torch.float32))
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert packing_unsupported_reason(torch.float32) == "this PyTorch has no oneDNN"


@needs_packing
@pytest.mark.parametrize("recorded", [True, False])
def test_packed_weights_change_no_token(monkeypatch: pytest.MonkeyPatch, recorded: bool):
    """Also with oneDNN's opaque tensors, which a recording has to repeat."""
    monkeypatch.setattr("petatron.infer.step.generation_weights._MIN_ONEDNN_ELEMENTS", 1)
    monkeypatch.setattr("petatron.infer.step.generation_weights._MIN_ONEDNN_WIDTH", 1)
    model = model_in("--num-layers 2")
    plain = answers(Engine(model, options=EngineOptions(copied_weights=False)))
    engine = Engine(model, options=EngineOptions(recorded_steps=recorded))
    for _ in range(2):
        for one, other in zip(answers(engine), plain, strict=True):
            assert one.ids == other.ids
            assert [each.logprob for each in one.logprobs] == pytest.approx(
                [e.logprob for e in other.logprobs], abs=1e-4
            )
    packed = [gemm._packed for gemm in host_gemms(model)]
    assert packed and all(each is not None and each.layout is not torch.strided for each in packed)


def test_weights_of_another_precision_are_converted_once(no_half_instructions: None):
    model = model_in("--bf16")
    plain = answers(Engine(model, options=EngineOptions(copied_weights=False)))
    engine = Engine(model)
    found = answers(engine)
    widened = [gemm._widened for gemm in host_gemms(model)]
    assert widened and all(each is not None and each.dtype == torch.float32 for each in widened)
    assert [each.ids for each in found] == [each.ids for each in plain]
    answers(engine)
    assert all(gemm._widened is before for gemm, before in zip(host_gemms(model), widened, strict=True))


def test_one_sequence_packs_nothing():
    model = model_in()
    Engine(model).complete([PROMPTS[0]], GREEDY)
    assert all(gemm._packed is None for gemm in host_gemms(model))


def test_copies_of_changed_weights_are_made_anew(no_half_instructions: None):
    model = model_in("--bf16")
    engine = Engine(model)
    before = answers(engine)
    with torch.no_grad():
        for param in model.module.parameters():
            param.mul_(-1.5)
    engine.forget_prefixes()
    after = [each.ids for each in answers(engine)]
    fresh = answers(Engine(model, options=EngineOptions(copied_weights=False)))
    assert after == [each.ids for each in fresh] != [each.ids for each in before]


def test_outside_steps_the_weight_itself_is_read():
    """An evaluation or a training step beside an engine that nobody released."""
    owner = HostGemms()
    gemm, x, weight = owner.new(), torch.randn(2, 4), torch.randn(3, 4)
    with owner.step():
        for _ in range(4):
            gemm.forward(x, weight)
    changed = torch.randn(3, 4)
    assert torch.equal(gemm.forward(x, changed)[0], x @ changed.t())
    grad = torch.randn(2, 3)
    assert torch.equal(gemm.backward(grad, changed, ())[0], grad @ changed)
    out = torch.empty(1, 2, 3)
    gemm.forward_into(x[None], changed, out)
    assert torch.equal(out[0], x @ changed.t())


def test_a_released_model_has_its_gemms_back():
    model = model_in()
    engine = Engine(model)
    assert host_gemms(model)
    engine.release()
    assert not host_gemms(model)


def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petatron.infer.step.generation_weights.host_memory_bytes", lambda: 1000)
    model = model_in()
    Engine(model)
    assert not host_gemms(model)
