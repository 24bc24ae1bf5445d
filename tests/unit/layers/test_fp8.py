"""Products of a layer in eight bits: close to the exact ones, cast as rarely as promised, never without an answer."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import petatron
from petatron.config.schema.precision import PrecisionConfig
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, REFERENCE, Fp8Kernels
from petatron.kernels.linear_gemms import PLAIN_GEMM
from petatron.kernels.moe.grouped_gemm import ExpertCounts, looped_linear
from petatron.layers.ops import fp8_weight
from petatron.layers.ops.fp8_gemm import Fp8ExpertGemms, fp8_gemm_factory, is_fp8_layer
from petatron.layers.ops.fp8_scaling import CurrentTensorwiseScaling, DelayedScaling
from petatron.layers.ops.linear_op import GemmOp
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable
from tests.longform import diagonal

RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]


def precision(recipe: str = "tensorwise", **others: Any) -> PrecisionConfig:
    return PrecisionConfig(**{"bf16": True, "fp8_format": "hybrid", "fp8_recipe": recipe, **others})


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(ours: Tensor, true: Tensor) -> float:
    return float((ours.double() - true.double()).norm() / true.double().norm())


def counted() -> tuple[Fp8Kernels, Counter[str]]:
    """The reference, and how often each of its functions was called."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(REFERENCE, name)(*args, **kwargs)

        return call

    return Fp8Kernels(**{field.name: counting(field.name) for field in dataclasses.fields(Fp8Kernels)}), calls


@diagonal(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_products(recipe: str, fp8_format: str, dtype: torch.dtype):
    multiplication = fp8_gemm_factory(precision(recipe, fp8_format=fp8_format), kernels=REFERENCE)()
    x, w, g = (draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(256, 128), (384, 128), (256, 384)]))
    for _ in range(3):
        y, kept = multiplication.forward(x, w)
        x_grad, job = multiplication.backward(g, w, kept)
        w_grad = torch.full(w.shape, float("nan"))
        assert not job.needs_input
        job.write(None, w_grad, accumulate=False)
        job.write(None, w_grad, accumulate=True)
        multiplication.new_step(2)
    rough = 0.08 if fp8_format == "hybrid" and recipe != "blockwise" else 0.045
    assert y.dtype == x_grad.dtype == dtype
    assert 0.01 < distance(y, x.double() @ w.double().t()) < 0.045
    assert 0.01 < distance(x_grad, g.double() @ w.double()) < rough
    assert 0.01 < distance(w_grad, 2 * g.double().t() @ x.double()) < rough


@pytest.mark.parametrize(("recipe", "gradient"), [("tensorwise", E5M2), ("rowwise", E5M2), ("blockwise", E4M3)])
def test_hybrid_has_gradients_of_more_range(recipe: str, gradient: torch.dtype):
    """But for blocks, which the hardware multiplies in e4m3 alone."""
    seen: list[torch.dtype] = []

    def gemm(a: Any, b: Any, **options: Any) -> Tensor:
        seen.extend((a.values.dtype, b.values.dtype))
        return REFERENCE.gemm(a, b, **options)

    kernels = dataclasses.replace(REFERENCE, gemm=gemm)
    multiplication = fp8_gemm_factory(precision(recipe), kernels=kernels)()
    _, kept = multiplication.forward(draw(128, 128, seed=0), w := draw(128, 128, seed=1))
    _, job = multiplication.backward(draw(128, 128, seed=2), w, kept)
    job.write(None, torch.empty(128, 128), accumulate=False)
    assert seen == [E4M3, E4M3, gradient, E4M3, gradient, E4M3]


def test_the_fast_way_of_summing_is_for_the_forward_pass():
    fast: list[bool] = []

    def gemm(a: Any, b: Any, **options: Any) -> Tensor:
        fast.append(options["fast"])
        return REFERENCE.gemm(a, b, **options)

    multiplication = fp8_gemm_factory(precision(), kernels=dataclasses.replace(REFERENCE, gemm=gemm))()
    _, kept = multiplication.forward(draw(32, 16, seed=0), w := draw(16, 16, seed=1))
    multiplication.backward(draw(32, 16, seed=2), w, kept)[1].write(None, torch.empty(16, 16), accumulate=True)
    assert fast == [True, False, False]


@pytest.mark.parametrize("cache_weights", [True, False])
def test_a_weight_is_cast_once_per_step(cache_weights: bool):
    kernels, calls = counted()
    multiplication = fp8_gemm_factory(precision("blockwise"), kernels=kernels, cache_weights=cache_weights)()
    x, w, g = draw(128, 128, seed=0), draw(128, 128, seed=1), draw(128, 128, seed=2)
    for _ in range(2):
        for _ in range(3):
            _, kept = multiplication.forward(x, w)
            multiplication.backward(g, w, kept)
        multiplication.new_step(2)
    assert calls["cast_block_128x128"] == (2 if cache_weights else 12)
    assert calls["cast_block_1x128"] == 12


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_large_micro_batch_casts_a_weight_for_each_use(recipe: str, monkeypatch: pytest.MonkeyPatch):
    """In the orientation that is read, and to the same bits as a weight that is cached."""
    monkeypatch.setattr(fp8_weight, "MIN_ROWS_TO_REQUANTIZE", 128)
    x, w, g = draw(128, 128, seed=0), draw(256, 128, seed=1), draw(128, 256, seed=2)
    wanted: list[str] = []
    names = {"rowwise": ["cast_rowwise"], "blockwise": ["cast_block_128x128"]}.get(
        recipe, ["cast_speculative", "cast_with_scale"]
    )

    def noting(name: str) -> Any:
        def cast(matrix: Tensor, *args: Any, **options: Any) -> Any:
            if matrix.shape == w.shape:
                wanted.append(options["orientation"])
            return getattr(REFERENCE, name)(matrix, *args, **options)

        return cast

    found: list[tuple[Tensor, Tensor]] = []
    for micro_batches in (2, 1):
        kernels = dataclasses.replace(REFERENCE, **{name: noting(name) for name in names})
        multiplication = fp8_gemm_factory(precision(recipe), kernels=kernels)()
        multiplication.new_step(micro_batches)
        y, kept = multiplication.forward(x, w)
        found.append((y, multiplication.backward(g, w, kept)[0]))
    assert wanted == ["both", "rows", "columns"]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    multiplication.forward(x[:64], w)  # few rows
    assert wanted[-1] == ("columns" if recipe == "blockwise" else "both")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("step", [0, 1])
def test_an_input_that_is_cast_again_gives_the_same_bits(recipe: str, step: int):
    """Of all three GEMMs, with nothing of the input's size saved; `step` 1: a delayed scale is in use."""
    make = fp8_gemm_factory(precision(recipe), kernels=REFERENCE)
    x, w, g = (draw(*shape, seed=seed) for seed, shape in enumerate([(256, 128), (384, 128), (256, 384)]))
    found: list[tuple[Tensor, ...]] = []
    for recasting in (False, True):
        gemm = make()
        for scale in (1.0, 3.0)[: step + 1]:
            gemm.new_step(1)
            way = gemm.requantizing() if recasting else gemm
            y, kept = way.forward(scale * x, w)
            x_grad, job = way.backward(g, w, kept)
            w_grad = torch.full(w.shape, float("nan"))
            assert job.needs_input is recasting
            job.write(scale * x if recasting else None, w_grad, accumulate=False)
        if recasting:
            assert [tensor.numel() for tensor in kept] == ([1] if recipe in ("tensorwise", "delayed") else [])
        found.append((y, x_grad, w_grad, *(history.state() for history in gemm.amax_histories().values())))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_sizes_that_do_not_fit_are_not_cast_again_either():
    gemm = fp8_gemm_factory(precision("blockwise"), kernels=REFERENCE)()
    x, w, g = draw(24, 16, seed=0), draw(16, 16, seed=1), draw(24, 16, seed=2)
    y, kept = gemm.requantizing().forward(x, w)
    x_grad, job = gemm.requantizing().backward(g, w, kept)
    assert not kept and job.needs_input and torch.equal(y, x @ w.t()) and torch.equal(x_grad, g @ w)


@pytest.mark.parametrize("available", [True, False])
def test_only_an_input_that_is_available_is_cast_again(available: bool):
    gemm = fp8_gemm_factory(precision("tensorwise"), kernels=REFERENCE)()
    op = GemmOp(gemm, requantizing_gemm=gemm.requantizing())
    x, w = draw(32, 16, seed=0).requires_grad_(), draw(16, 16, seed=1).requires_grad_()
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x):
        y = op(as_recomputable(x) if available else RecomputableOutput(x * 1.0, None), w)
    assert (torch.Size([16, 32]) in saved) is not available
    y.sum().backward()
    assert x.grad is not None and w.grad is not None
    exact = torch.autograd.grad((x @ w.t()).sum(), (x, w))
    assert distance(x.grad, exact[0]) < 0.05 and distance(w.grad, exact[1]) < 0.05


def test_the_scale_of_a_weight_is_found_once_per_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8_weight, "MIN_ROWS_TO_REQUANTIZE", 16)
    kernels, calls = counted()
    multiplication = fp8_gemm_factory(precision("tensorwise"), kernels=kernels)()
    x, w, g = draw(16, 16, seed=0), draw(16, 16, seed=1), draw(16, 16, seed=2)
    for _ in range(2):
        multiplication.new_step(1)
        _, kept = multiplication.forward(x, w)
        multiplication.backward(g, w, kept)
    assert calls == {"cast_speculative": 2 * 3, "cast_with_scale": 2, "gemm": 4}  # of x, w and g; then the columns of w
    w.mul_(-4.0)
    multiplication.end_step()
    before = multiplication.forward(x, w / -4.0)[0]
    multiplication.end_step()
    assert torch.equal(multiplication.forward(x, w)[0], -4.0 * before), "a scale of the old weight would saturate"


def test_a_changed_weight_counts_from_the_new_step_on():
    multiplication = fp8_gemm_factory(precision(), kernels=REFERENCE)()
    x, w = draw(16, 16, seed=0), draw(16, 16, seed=1)
    before = multiplication.forward(x, w)[0]
    w.mul_(-1)
    assert torch.equal(multiplication.forward(x, w)[0], before)
    multiplication.new_step(2)
    assert torch.equal(multiplication.forward(x, w)[0], -before)


@pytest.mark.parametrize(("recipe", "rows", "shape"), [("rowwise", 24, (16, 32)), ("blockwise", 128, (144, 128))])
def test_sizes_the_hardware_does_not_take_stay_as_they_are(
    recipe: str, rows: int, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
):
    make = fp8_gemm_factory(precision(recipe), kernels=REFERENCE)
    x, w, g = draw(rows, shape[1], seed=0), draw(*shape, seed=1), draw(rows, shape[0], seed=2)
    with caplog.at_level(logging.INFO, logger="petatron"):
        for multiplication in (make(), make()):
            y, kept = multiplication.forward(x, w)
            x_grad, job = multiplication.backward(g, w, kept)
    assert kept == () and job.needs_input
    w_grad = torch.zeros(shape)
    job.write(x, w_grad, accumulate=False)
    assert torch.equal(y, x @ w.t()) and torch.equal(x_grad, g @ w)
    assert torch.allclose(w_grad, g.t() @ x, atol=1e-4)
    assert len(caplog.records) == 1
    assert f"a GEMM of {rows} rows times a weight of {shape[0]} x {shape[1]} does not run in FP8" in caplog.text


def test_through_autograd():
    multiply = GemmOp(fp8_gemm_factory(precision("rowwise"), kernels=REFERENCE)())
    x, w = draw(8, 4, 64, seed=0).requires_grad_(), draw(32, 64, seed=1).requires_grad_()
    y = multiply(RecomputableOutput(x, None), w)
    g = draw(8, 4, 32, seed=2)
    x_grad, w_grad = torch.autograd.grad(y, (x, w), g)
    true = torch.autograd.grad(x @ w.t(), (x, w), g)
    assert distance(x_grad, true[0]) < 0.08 and distance(w_grad, true[1]) < 0.08


class TestDelayed:
    def scaling(self, *, length: int = 1, most_recent: bool = True) -> DelayedScaling:
        return DelayedScaling(REFERENCE, E4M3, length=length, most_recent=most_recent)

    def test_the_first_step_looks_at_the_tensor_and_later_ones_back(self):
        scaling = self.scaling()
        x = torch.full((16, 16), 448.0)
        assert scaling(x).rows.scale == 1
        assert scaling(x * 4).rows.scale == 4
        scaling.new_step()
        assert scaling(x / 64).rows.scale == 4
        scaling.new_step()
        assert scaling(x).rows.scale == 1 / 64

    def test_in_the_first_step_a_tensor_is_cast_as_before_after_larger_ones(self):
        """As recompute does in a pipeline, where other micro-batches came in between."""
        scaling = self.scaling()
        x = torch.logspace(-14, 0, 256, base=2.0).view(16, 16)
        first, larger, again = (scaling(each).rows for each in (x, 1024 * x, x))
        assert torch.equal(first.scale, again.scale) and torch.equal(first.values.float(), again.values.float())
        assert larger.scale == 1024 * first.scale
        scaling.new_step()
        assert scaling(x).rows.scale == larger.scale, "the step's amax is that of all"

    @pytest.mark.parametrize(("most_recent", "wanted"), [(True, [1, 8, 2, 1, 1]), (False, [1, 8, 8, 8, 2])])
    def test_history(self, most_recent: bool, wanted: list[float]):
        scaling, scales = self.scaling(length=3, most_recent=most_recent), []
        for factor in (1, 8, 2, 1, 1):
            scaling(torch.full((16, 16), 448.0 * factor))
            scaling.new_step()
            scales.append(float(scaling(torch.zeros(16, 16)).rows.scale))
        assert scales == wanted

    def test_a_step_without_use_changes_nothing(self):
        scaling = self.scaling()
        scaling.new_step()
        assert not scaling.state().any()
        scaling(torch.full((16, 16), 448.0))
        scaling.new_step()
        scaling.new_step()
        assert scaling(torch.zeros(16, 16)).rows.scale == 1

    def test_infinity_does_not_spoil_the_steps_after(self):
        scaling = self.scaling(length=4, most_recent=False)
        scaling(torch.full((16, 16), 896.0))
        scaling.new_step()
        assert scaling(torch.full((16, 16), float("inf"))).rows.values.float().isnan().all()
        scaling.new_step()
        assert scaling(torch.ones(16, 16)).rows.scale == 2

    def test_history_and_scale_stay_where_they_are(self):
        """A CUDA graph knows their addresses; also after a checkpoint was loaded."""
        scaling, places = self.scaling(length=3), set()
        for step in range(5):
            scaling(torch.full((16, 16), 448.0))
            scaling.new_step()
            if step == 3:
                scaling.load_state(scaling.state(), torch.device("cpu"))
            assert scaling._history is not None and scaling._scale is not None
            places.add((scaling._history.data_ptr(), scaling._scale.data_ptr()))
        assert len(places) == 1

    def test_what_the_device_did_not_run_is_undone(self):
        scaling = self.scaling()
        scaling(torch.full((16, 16), 448.0))
        undo, state = scaling.undo_point(), scaling.state()
        scaling._used = False  # as `new_step` notes, whose kernel a failed capture drops
        scaling.pause()
        undo()
        assert torch.equal(scaling.state(), state) and not scaling._paused

    def test_what_is_cast_in_a_pause_is_forgotten(self):
        scaling, other = self.scaling(), self.scaling()
        for step, largest in enumerate((1, 32, 2)):
            for each in (scaling, other):
                each.new_step()
                each(torch.full((16, 16), 448.0 * largest))
            scaling.pause()
            # As in training, the first step looks at the tensor and later ones back.
            assert scaling(torch.full((16, 16), 448.0 * 1024)).rows.scale == [1024, 1, 32][step]
            assert torch.equal(scaling.state(), other.state())
        fresh = self.scaling()
        fresh.pause()
        assert fresh(torch.full((16, 16), 896.0)).rows.scale == 2 and not fresh.state().any()

    @pytest.mark.parametrize("steps", range(5))
    @pytest.mark.parametrize("in_between", [False, True])
    def test_resuming_goes_on_bit_for_bit(self, steps: int, in_between: bool):
        """Whether a step ends with the call or begins with it, and from a state on the host."""
        config = precision("delayed", fp8_amax_history_len=3, fp8_amax_compute_algo="max")
        ours, resumed = (fp8_gemm_factory(config, kernels=REFERENCE)() for _ in range(2))
        w = draw(32, 16, seed=0)

        def step(multiplication: Any, seed: int) -> list[Tensor]:
            if in_between:
                multiplication.new_step(2)
            scale = 4.0 ** (seed % 3)
            y, kept = multiplication.forward(draw(48, 16, seed=seed) * scale, w)
            x_grad, _ = multiplication.backward(draw(48, 32, seed=seed + 50) * scale, w, kept)
            if not in_between:
                multiplication.new_step(2)
            return [y, x_grad, *kept]

        for seed in range(steps):
            step(ours, seed)
        for name, history in resumed.amax_histories().items():
            history.load_state(ours.amax_histories()[name].state(), torch.device("cpu"))
        for seed in range(steps, steps + 5):
            for mine, again in zip(step(ours, seed), step(resumed, seed), strict=True):
                assert torch.equal(mine.float(), again.float())

    def test_other_recipes_have_no_histories(self):
        assert fp8_gemm_factory(precision("rowwise"), kernels=REFERENCE)().amax_histories() == {}


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ({"fp8_format": None}, []),
        ({}, [0, 1, 2, 3]),
        ({"first_last_layers_bf16": True}, [1, 2]),
        ({"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3}, [0]),
        ({"num_layers_at_start_in_bf16": 2}, [0, 1, 2, 3]),
    ],
)
def test_layers_in_eight_bits(others: dict[str, Any], wanted: list[int]):
    config = precision(**others)
    assert [layer for layer in range(4) if is_fp8_layer(config, layer, num_layers=4)] == wanted


@pytest.mark.parametrize("counts", [torch.tensor([5, 0, 27]), torch.tensor([5, 0, 20]), 16])
def test_experts(counts: ExpertCounts):
    experts = 3 if isinstance(counts, Tensor) else 2
    kernels, calls = counted()
    layer = Fp8ExpertGemms(kernels)
    x, w, g = draw(32, 64, seed=0), draw(experts, 48, 64, seed=1), draw(32, 48, seed=2)
    for _ in range(2):
        multiplication = layer(counts)
        y, kept = multiplication.forward(x, w)
        x_grad, job = multiplication.backward(g, w, kept)
    assert calls["cast_rowwise_operand"] == 4 and calls["cast_matrices"] == 1
    assert distance(y, looped_linear(x, w, counts)) < 0.05
    assert distance(x_grad, looped_linear(g, w.transpose(1, 2), counts)) < 0.05
    exact = torch.autograd.functional.vjp(lambda weight: looped_linear(x, weight, counts), w, g)[1]
    w_grad = torch.ones(w.shape)
    job.write(x, w_grad, accumulate=True)
    assert job.needs_input and torch.allclose(w_grad, 1 + exact, atol=1e-4)
    layer.new_step(2)
    layer(counts).forward(x, w)
    assert calls["cast_rowwise_operand"] == 5 and calls["cast_matrices"] == 2


@pytest.mark.parametrize("rows", [0, 8])
def test_experts_of_sizes_the_hardware_does_not_take(rows: int):
    width = 64 if rows == 0 else 20
    layer = Fp8ExpertGemms(REFERENCE)
    x, w, counts = draw(rows, width, seed=0), draw(2, 48, width, seed=1), torch.tensor([rows, 0])
    multiplication = layer(counts)
    y, kept = multiplication.forward(x, w)
    assert torch.equal(y, looped_linear(x, w, counts))
    x_grad, _ = multiplication.backward(torch.ones_like(y), w, kept)
    assert x_grad.shape == x.shape


@diagonal(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_network_learns_as_well_as_in_full_precision(recipe: str):
    """Two layers that imitate two others, 120 steps."""

    def losses(make: Any) -> list[float]:
        torch.manual_seed(1)
        multiplications = [make(), make()]
        weights = [(torch.randn(128, 128) / 128**0.5).requires_grad_() for _ in range(2)]
        goals = [torch.randn(128, 128) / 128**0.5 for _ in range(2)]
        optimizer = torch.optim.Adam(weights, lr=1e-3)
        found = []
        for _ in range(120):
            x = torch.randn(128, 128)
            y, goal = x, x
            for way, weight, wanted in zip(multiplications, weights, goals, strict=True):
                y = GemmOp(way)(RecomputableOutput(torch.tanh(y), None), weight)
                goal = torch.tanh(goal) @ wanted.t()
            loss = (y - goal).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for way in multiplications:
                if way is not PLAIN_GEMM:
                    way.new_step(2)
            found.append(loss.item())
        return found

    plain, ours = losses(lambda: PLAIN_GEMM), losses(fp8_gemm_factory(precision(recipe), kernels=REFERENCE))
    assert plain[-1] < 0.5 * plain[0]
    assert ours != plain
    assert sum(ours[-20:]) == pytest.approx(sum(plain[-20:]), rel=0.03)


def test_weights_that_change_between_two_uses_are_cast_again():
    """Training, then generating, then training: no product is done with what a weight was."""
    flags = "--mock-data --lr 1e-2 --train-iters 3 --bf16 --fp8-format hybrid --seq-length 32 --eval-iters 0".split()
    run = petatron.load("tiny-llama", flags).config
    model = petatron.build_model(run, petatron.launch(run))
    optimizer = petatron.build_optimizer(run, model)
    tokens = torch.arange(32).view(1, 32)
    for batches in petatron.build_loader(run, model.mesh):
        model.train_step(batches)
        optimizer.step()
        with torch.no_grad():
            now = model.module.logits(tokens)
            model.fp8_gemms.end_step()
            assert torch.equal(now, model.module.logits(tokens))


def test_a_scale_is_guessed_to_be_the_last_one():
    guesses: list[float] = []

    def cast(x: Tensor, *args: Any, previous_scale: Tensor, **options: Any) -> Any:
        guesses.append(float(previous_scale))
        return REFERENCE.cast_speculative(x, *args, previous_scale=previous_scale, **options)

    quantizer = CurrentTensorwiseScaling(dataclasses.replace(REFERENCE, cast_speculative=cast), E4M3)
    x = draw(32, 32, seed=0)
    scales = [float(quantizer(factor * x).rows.scale) for factor in (1.0, 1.0, 16.0, 2.0)]
    assert guesses == [1.0, *scales[:-1]]
    assert scales == [float(REFERENCE.cast_tensor(factor * x, E4M3).rows.scale) for factor in (1.0, 1.0, 16.0, 2.0)]
    assert len(set(scales)) == 3


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_inference_mode_leaves_nothing_that_training_cannot_change(recipe: str):
    """An evaluation may come first."""
    ours, other = (fp8_gemm_factory(precision(recipe), kernels=REFERENCE)() for _ in range(2))
    x, w = draw(128, 128, seed=0), draw(128, 128, seed=1)
    with torch.inference_mode():
        ours.forward(x, w)
    for gemm in (ours, other):
        gemm.new_step(1)
    assert torch.equal(ours.forward(x, w)[0], other.forward(x, w)[0])
