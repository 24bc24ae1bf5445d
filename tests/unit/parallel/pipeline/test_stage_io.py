"""What a stage does not keep of what the model declares is said, before another rank waits for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from petatron.base.errors import DataError, TrainError
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import BoundaryTensor, LossSpec, ModelIO, StageOutput
from petatron.parallel.parallel_model import ParallelModel
from petatron.schedule.pipeline_plan import PipelinePlan
from petatron.train.build_run import build_model
from tests.parity.communication.two_streams import gradients, on_mesh
from tests.parity.harness import tiny_run

Function = Callable[[Tensor, dict[str, Tensor]], StageOutput]
BATCH = Batch(torch.arange(12).view(2, 6), loss_mask=torch.ones(2, 6, dtype=torch.float64))


class Stage(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))

    def forward(self, batch: Batch, inputs: dict[str, Tensor], **_: object) -> StageOutput:
        return self.function(self.weight * batch.tokens.t().unsqueeze(-1), inputs)


def model_of(*functions: Function, takes: tuple[BoundaryTensor, ...] = (BoundaryTensor("x", 1),)) -> ParallelModel:
    """So many stages on one rank."""
    count = len(functions)
    io = ModelIO(boundaries=((), *(takes,) * (count - 1)), losses=(LossSpec("loss"),))
    modules = {index: Stage(function) for index, function in enumerate(functions)}
    return on_mesh(modules, io, PipelinePlan("interleaved", 1, count), ParallelMesh.single())


def loss_of(x: Tensor) -> StageOutput:
    return StageOutput({}, {"loss": x.squeeze(-1)}, {})


def test_a_name_that_nobody_gives():
    model = model_of(lambda x, _: StageOutput({"y": x}, {}, {}), lambda x, inputs: loss_of(x))
    with pytest.raises(
        TrainError,
        match=r"Stage 1 takes 'x', and stage 0 neither returns nor takes it\. It returns: y; it takes: nothing",
    ):
        model.train_step([BATCH])


def test_a_loss_that_is_not_declared():
    model = model_of(lambda x, _: StageOutput({}, {"other": x.squeeze(-1)}, {}))
    with pytest.raises(TrainError, match="Stage 0 returns the loss 'other', and the model declares: loss"):
        model.train_step([BATCH])


@pytest.mark.parametrize(
    ("wrong", "said"), [(lambda x: x[:3], r"\[3, 2, 1\] torch.float64"), (Tensor.float, r"\[6, 2, 1\] torch.float32")]
)
def test_another_shape_or_dtype_than_declared(wrong: Callable[[Tensor], Tensor], said: str):
    model = model_of(lambda x, _: StageOutput({"x": wrong(x)}, {}, {}), lambda x, inputs: loss_of(x))
    with pytest.raises(TrainError, match=rf"Stage 0 gives 'x' as {said}, and stage 1 takes \[6, 2, 1\] torch.float64"):
        model.train_step([BATCH])


def test_an_output_that_the_model_does_not_have():
    model = build_model(tiny_run(), ParallelMesh.single())
    with pytest.raises(TrainError, match=r"no output 'logit'\. It has: logits, hidden_states"):
        model.forward([BATCH], collect=["logit"])


def test_a_mask_that_the_batch_does_not_have():
    model = model_of(lambda x, _: loss_of(x))
    with pytest.raises(DataError, match=r"The batch has no array 'loss_mask'\. Its arrays: tokens"):
        model.train_step([Batch(BATCH.tokens)])


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda x, loss: ModelIO(boundaries=((x,),), losses=(loss,)), "nothing comes before the first stage"),
        (lambda x, loss: ModelIO(boundaries=((), (x, x)), losses=(loss,)), "x declared twice"),
        (lambda x, loss: ModelIO(boundaries=((),), losses=(loss, loss)), "loss declared twice"),
    ],
)
def test_declarations_that_contradict_themselves(declare: Callable[..., ModelIO], said: str):
    with pytest.raises(AssertionError, match=said):
        declare(BoundaryTensor("x", 1), LossSpec("loss"))


def test_a_stage_may_return_what_it_took():
    """Explicitly, which is the same as forwarding; and the gradients of two uses are summed either way."""
    losses = []
    for explicit in (True, False):
        model = model_of(
            lambda x, _: StageOutput({"x": x}, {}, {}),
            lambda x, inputs, explicit=explicit: StageOutput(
                {"x": inputs["x"]} if explicit else {}, {"loss": inputs["x"].square().squeeze(-1)}, {}
            ),
            lambda x, inputs: loss_of(inputs["x"]),
        )
        loss = model.train_step([BATCH])
        losses.append((float(loss), float(gradients({0: model.stages[0]})["weight"])))
    tokens = BATCH.tokens.double()
    wanted = ((4 * tokens.square() + 2 * tokens).mean(), (4 * tokens.square() + tokens).mean())
    assert losses[0] == losses[1] == pytest.approx([float(x) for x in wanted], rel=1e-14)


@pytest.mark.parametrize("declared", [True, False])
def test_what_needs_no_gradient_gets_none(declared: bool):
    """Neither a tensor that was declared so, nor one that no weight leads to."""
    model = model_of(
        lambda x, _: StageOutput({"x": x if not declared else x.detach()}, {}, {}),
        lambda x, inputs: loss_of(x * inputs["x"]),
        takes=(BoundaryTensor("x", 1, requires_grad=declared),),
    )
    model.train_step([BATCH])
    assert model.stages[0].weight.grad is None
    wanted = float((2 * BATCH.tokens.double().square()).mean())
    assert float(gradients({1: model.stages[1]})["weight"]) == pytest.approx(wanted, rel=1e-14)


def test_a_stage_whose_input_nobody_uses_sends_zeros():
    model = model_of(lambda x, _: StageOutput({"x": x}, {}, {}), lambda x, inputs: loss_of(x))
    model.train_step([BATCH])
    assert torch.equal(gradients({0: model.stages[0]})["weight"], torch.zeros(1, dtype=torch.float64))
