"""Activation offload changes no bit, frees what it sends, brings it back one layer ahead, and reuses its buffers."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.offload_plan import plan_offload
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.registry import model_spec
from petatron.parallel import activation_offload
from petatron.parallel.activation_offload import HostBufferPool, HostLink, apply_activation_offload
from petatron.parallel.offload_regions import OffloadRegions
from tests.longform import diagonal
from tests.run_stage import run_stage
from tests.unit.models.kept import alive_bytes, kept_bytes
from tests.unit.models.test_activations import BASE, LLAMA, RECOMPUTE, batch_of, build, recompute, run_of

MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-layer-freq 2 --hidden-dropout 0.3"
MODELS = {
    "gpt": f"{BASE} --attention-dropout 0.2 --hidden-dropout 0.3",
    "llama": f"{LLAMA} --num-query-groups 2 --qk-layernorm",
    "moe": f"{LLAMA} {MIXTURE}",
}
Bits = dict[str, Tensor]


def offloading(
    run: RunConfig, number: int, memory: MemoryConfig | None = None, *, smallest: int = 1, **options: Any
) -> tuple[Decoder, HostLink]:
    model, streams = build(run, **options)
    memory = replace(memory or MemoryConfig(), cpu_offloading_num_layers=number)
    link = HostLink(torch.device("cpu"))
    plan = recompute(run, model, memory, streams, in_flight=2)
    layers = model_spec(run).stage_layers(model.stage)
    offload = plan_offload(memory, ActivationShape.from_config(run, device="cpu"), layers, plan)
    line = apply_activation_offload(model, offload, link, min_bytes=smallest)
    assert (line is None) == (number == 0)
    return model, link


def train(model: Decoder, run: RunConfig) -> Bits:
    """Everything that three micro-batches leave behind, two of them in flight at a time as in a pipeline."""
    torch.manual_seed(1)
    batch = batch_of(run)
    waiting, bits = [], {}
    for at in range(3):
        shifted = Batch(batch.tokens.roll(at, 1), batch.labels.roll(at, 1), batch.loss_mask)
        waiting.append(run_stage(model, shifted, aux_loss_scale=torch.tensor(0.25)))
        bits[f"losses {at}"] = waiting[-1].detach()
        if len(waiting) == 2:
            waiting.pop(0).sum().backward()
    waiting.pop().sum().backward()
    bits["random"] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        bits[name] = parameter.grad
        parameter.grad = None
    return bits


def differing(found: Bits, wanted: Bits) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@cache
def _without_offload(model: str) -> Bits:
    run = run_of(MODELS[model])
    return train(offloading(run, 0)[0], run)


@diagonal(4)
@pytest.mark.parametrize("recompute", ["nothing", "layernorm", "three", "all", "uniform-1", "uniform-2", "block-2"])
@pytest.mark.parametrize("model", MODELS)
def test_no_bit_changes(model: str, recompute: str):
    run, wanted = run_of(MODELS[model]), _without_offload(model)
    for number in (1, 3):
        offloaded, link = offloading(run, number, RECOMPUTE[recompute])
        assert differing(train(offloaded, run), wanted) == []
        assert link.offloaded_bytes > 0


def test_the_test_sees_a_tensor_that_comes_back_wrong(monkeypatch: pytest.MonkeyPatch):
    run = run_of(MODELS["llama"])
    wanted = train(offloading(run, 0)[0], run)
    broken, link = offloading(run, 1)
    monkeypatch.setattr(link.to_device, "copy", lambda target, source: target.zero_())
    assert differing(train(broken, run), wanted) != []


@diagonal(3)
@pytest.mark.parametrize("recompute", ["nothing", "layernorm", "uniform-1"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_was_sent_is_free_on_the_device(number: int, recompute: str):
    """Host buffers are not counted; everything else that lives on is less by what was sent."""
    run = run_of(LLAMA)
    batch = batch_of(run)
    kept: list[int] = []
    for count in (0, number):
        model, link = offloading(run, count, RECOMPUTE[recompute])
        train(model, run)  # afterwards there are buffers for all
        link.offloaded_bytes = 0
        known = [*model.parameters(), batch.tokens, batch.labels, batch.loss_mask, *link.buffers.slabs]
        kept.append(kept_bytes(lambda model=model: run_stage(model, batch), without=known)[0])
        sent = link.offloaded_bytes
    assert sent > 0
    assert kept[0] - kept[1] == sent


def test_nothing_is_left_after_the_backward_pass():
    run = run_of(MODELS["moe"])
    model, link = offloading(run, 2)
    batch = batch_of(run)
    train(model, run)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    known = [*model.parameters(), *grads, batch.tokens, batch.labels, batch.loss_mask, *link.buffers.slabs]
    assert alive_bytes(lambda: run_stage(model, batch).sum().backward(), without=known) == 0


def test_buffers_are_used_again():
    run = run_of(MODELS["llama"])
    model, link = offloading(run, 2)
    train(model, run)
    made = sum(slab.numel() for slab in link.buffers.slabs)
    for _ in range(3):
        train(model, run)
    assert sum(slab.numel() for slab in link.buffers.slabs) == made


def test_a_graph_that_is_dropped_gives_its_buffers_back():
    run = run_of(MODELS["llama"])
    model, link = offloading(run, 2)
    run_stage(model, batch_of(run))
    gc.collect()
    made = len(link.buffers.slabs)
    run_stage(model, batch_of(run))
    assert len(link.buffers.slabs) == made > 0


def test_layers_come_back_one_ahead(monkeypatch: pytest.MonkeyPatch):
    """Told by the order in which layers run backward and groups are fetched: the first group is asked for, all others wait."""
    run = run_of(f"{LLAMA} --num-layers 8")
    order: list[str] = []
    numbers: dict[int, int] = {}
    init, fetch = activation_offload._OffloadGroup.__init__, activation_offload._OffloadGroup.start_reload

    def numbered(self: Any, *args: Any) -> None:
        init(self, *args)
        numbers[id(self)] = len(numbers)

    def noted(self: Any) -> None:
        if not self._reload_started:
            order.append(f"fetch {numbers[id(self)]}")
        fetch(self)

    monkeypatch.setattr(activation_offload._OffloadGroup, "__init__", numbered)
    monkeypatch.setattr(activation_offload._OffloadGroup, "start_reload", noted)
    model, _ = offloading(run, 4)
    for at, layer in enumerate(model.layers.values()):
        layer.register_full_backward_hook(lambda *_, at=at: order.append(f"layer {at}"))
    run_stage(model, batch_of(run)).sum().backward()
    assert order == [
        *("layer 7", "fetch 3", "fetch 2", "layer 6"),
        *("layer 5", "fetch 1", "layer 4"),
        *("layer 3", "fetch 0", "layer 2"),
        *("layer 1", "layer 0"),
    ]


def test_at_most_two_layers_are_on_their_way(monkeypatch: pytest.MonkeyPatch):
    run = run_of(f"{LLAMA} --num-layers 6")
    events: list[int] = []
    send, let_go = activation_offload._OffloadGroup.offload, activation_offload._OffloadGroup.free_device_memory
    groups: list[Any] = []

    def sending(self: Any, memory: Any) -> Any:
        if self not in groups:
            groups.append(self)
            events.append(len(groups))
        return send(self, memory)

    def leaving(self: Any) -> None:
        let_go(self)
        assert self._offloading == {}
        groups.remove(self)

    monkeypatch.setattr(activation_offload._OffloadGroup, "offload", sending)
    monkeypatch.setattr(activation_offload._OffloadGroup, "free_device_memory", leaving)
    model, _ = offloading(run, 6)
    run_stage(model, batch_of(run)).sum().backward()
    assert events == [1, 2, 2, 2, 2, 2]
    assert groups == []


def test_small_tensors_weights_and_what_others_hold_stay():
    run = run_of(LLAMA)
    model, link = offloading(run, 3, smallest=1 << 20)
    train(model, run)
    assert link.offloaded_bytes == 0
    model, link = offloading(run, 3, stage=PipelineStage((0, 1, 2), has_embedding=False, has_loss=False))
    sent: list[int] = []
    send = link.to_host.copy
    link.to_host.copy = lambda target, source: sent.append(source.untyped_storage()._cdata) or send(target, source)
    x = torch.randn(16, 2, 32, requires_grad=True)
    batch = batch_of(run)
    y = run_stage(model, batch, x)
    stay = {tensor.untyped_storage()._cdata for tensor in (x, *model.parameters())}
    assert sent and not stay & set(sent)
    y.sum().backward()
    assert x.grad is not None


def _whole_forward(link: HostLink) -> activation_offload._OffloadForward:
    return activation_offload._OffloadForward(link, activation_offload._OffloadCriteria(1, 0, 2, OffloadRegions()), [])


def test_a_weight_is_recognized_by_its_memory_and_by_its_name():
    """Flat buffers hold many weights in one memory; a gathered weight has a memory that nobody knew when the layer began."""
    weights = torch.zeros(64)
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(weights[:16].view(4, 4))
    forward = _whole_forward(HostLink(torch.device("cpu")))
    forward.enter_layer(module, (FULL,))
    other, gathered = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
    for stays in (weights[32:], module.weight, module.weight.t(), gathered, gathered.t()):
        assert isinstance(forward.pack(stays), Tensor)
    stored = forward.pack(other.t())
    assert not isinstance(stored, Tensor)
    forward.finish()
    back = forward.unpack(stored)
    assert torch.equal(back, other.t()) and back.stride() == other.t().stride() and back.data_ptr() != other.data_ptr()


def test_views_of_one_memory_are_sent_once_and_keep_their_strides():
    link = HostLink(torch.device("cpu"))
    forward = _whole_forward(link)
    forward.enter_layer(nn.Identity(), (FULL,))
    whole = torch.randn(6, 10)
    views = [whole, whole[:, 2:5], whole.t()[3:], whole.view(-1)[7:9], whole.view(torch.int32)[1]]
    stored = [forward.pack(view) for view in views]
    assert link.offloaded_bytes == whole.nbytes
    forward.finish()
    back = [forward.unpack(each) for each in stored]
    for view, found in zip(views, back, strict=True):
        assert torch.equal(found, view) and found.stride() == view.stride() and found.dtype == view.dtype
    assert len({found.untyped_storage().data_ptr() for found in back}) == 1


def test_without_gradients_nothing_moves():
    run = run_of(LLAMA)
    model, link = offloading(run, 3)
    plain, _ = offloading(run, 0)
    with torch.no_grad():
        assert torch.equal(run_stage(model.eval(), batch_of(run)), run_stage(plain.eval(), batch_of(run)))
    assert link.offloaded_bytes == 0


def test_a_graph_may_be_used_twice():
    run = run_of(MODELS["llama"])
    found: list[list[Tensor]] = []
    for number in (0, 2):
        model, _ = offloading(run, number, stage=PipelineStage((0, 1, 2), has_embedding=True, has_loss=False))
        loss = run_stage(model, batch_of(run)).square().sum()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        found.append([*first, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_failing_layer_leaves_nothing_open():
    run = run_of(LLAMA)
    model, _ = offloading(run, 3)
    last = list(model.layers.values())[-1]
    handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_stage(model, batch_of(run))
    handle.remove()
    plain, _ = offloading(run, 0)
    assert differing(train(model, run), train(plain, run)) == []


@pytest.mark.parametrize("size", [1, 512, 513, 4096, 100_000, 1_048_577])
def test_buffers_are_little_larger_than_asked(size: int):
    memory = HostBufferPool(pinned=False)
    buffer = memory.allocate(size)
    assert size <= buffer.numel() <= max(512, size * 9 // 8 + 512)
    again = memory.allocate(size)
    assert again.data_ptr() != buffer.data_ptr()
    memory.release(buffer)
    assert memory.allocate(size).data_ptr() == buffer.data_ptr()


def test_slabs_hold_many_buffers(monkeypatch: pytest.MonkeyPatch):
    """As with page-locked memory, which this machine may not have."""
    monkeypatch.setattr(activation_offload, "_SLAB_BYTES", 1 << 14)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: empty(*args, **options))
    memory = HostBufferPool(pinned=True)
    buffers = [memory.allocate(size) for size in (5000, 5000, 5000, 60_000, 512)]
    assert [slab.numel() for slab in memory.slabs] == [1 << 14, 1 << 16]
    spans = sorted((buffer.data_ptr(), buffer.data_ptr() + buffer.numel()) for buffer in buffers)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cpu-offloading-num-layers -1", "--cpu-offloading-num-layers -1 is below 0"),
        (
            "--cpu-offloading-num-layers 4",
            "--cpu-offloading-num-layers 4 is more than the 3 layers of a pipeline stage. Use 3 or less; a quarter of them",
        ),
        (
            "--cpu-offloading-num-layers 2 --recompute-memory-budget-gb 1",
            "--cpu-offloading-num-layers 2 cannot be combined with --recompute-memory-budget-gb, which counts on nothing",
        ),
    ],
)
def test_what_is_refused(flags: str, message: str):
    with pytest.raises(ConfigError) as caught:
        run_of(f"{LLAMA} {flags}")
    assert message in str(caught.value) and len(caught.value.problems) == 1
