"""`--rerun-mode`: results of a step that look wrong are computed again, to tell transient errors of the hardware.

The forward and backward passes of an iteration depend on the weights, the batch, the random states and the FP8 histories. With all of
these as they were, a second run gives the same bits, unless the hardware failed in one of the two. `validate_results` runs an iteration
again whose loss is not finite, or is suspicious by a check that was asked for; if the second result is another one, the error was
transient, and the update uses the second. `report_stats` runs every iteration twice and counts those that differ.

All ranks run again together, since they communicate. Injected errors change what is compared, never what is trained with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from petatron.base.errors import TrainError
from petatron.config.schema.training import TrainConfig
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.rng import stable_seed
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.hooks.step_hook import StepHook
from petatron.train.report.log_records import MetricRecord, event_record

UNEXPECTED_FACTOR, MEMORY_STEPS = 10.0, 100
"""A loss or gradient is suspicious if it is this many times the largest of this many steps before."""
_Result = tuple[float, float]


class ResultValidation(StepHook):
    """Runs the passes of an iteration, and again where they are to be validated."""

    def __init__(self, config: TrainConfig, model: ParallelModel) -> None:
        self._config, self._model = config, model
        self._losses, self._norms = deque[float](maxlen=MEMORY_STEPS), deque[float](maxlen=MEMORY_STEPS)
        self._events: list[str] = []
        self._compared = self._differing = 0

    @property
    def is_on(self) -> bool:
        return self._config.rerun_mode != "disabled"

    def run(self, iteration: int, passes: Callable[[], Tensor]) -> Tensor:
        """Returns the loss of the passes, whose gradients are those of the last run."""
        if not self.is_on:
            return passes()
        streams, fp8 = self._model.rng_streams, self._model.fp8_gemms
        random_states = {name: state.clone() for name, state in streams.state().items()}
        histories = {name: state.clone() for name, state in fp8.state().items()}
        loss = passes()
        first = self._injected(self._result(loss), iteration, again=False)
        suspicions = all_gather_json(self._suspicion(first, iteration), self._model.mesh.control)
        if not any(suspicions) and self._config.rerun_mode != "report_stats":
            self._remember(self._result(loss))
            return loss
        streams.restore(random_states)
        if histories:
            fp8.load_state(histories, self._model.mesh.device)
        loss = passes()
        second = self._injected(self._result(loss), iteration, again=True)
        self._compare(iteration, suspicions, first, second)
        self._remember(self._result(loss))
        return loss

    def records(self, iteration: int) -> Iterator[MetricRecord]:
        events, self._events = self._events, []
        for message in events:
            yield event_record(message, iteration=iteration)
        if self._config.rerun_mode == "report_stats" and self._compared:
            message = f"{self._differing} of {self._compared} iterations gave another result when they ran again"
            yield event_record(message, iteration=iteration, reran=self._compared, differing=self._differing)
            self._compared = self._differing = 0

    def _result(self, loss: Tensor) -> _Result:
        """Returns the loss, and the norm of this rank's gradients."""
        squares = [float(grad.float().square().sum()) for group in self._model.param_groups for grad in group.grads()]
        return float(loss), math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else math.nan

    def _suspicion(self, result: _Result, iteration: int) -> str:
        """Returns why a result must be validated; empty if it need not."""
        loss, norm = result
        if self._is_injected(iteration) and self._model.mesh.rank == 0:
            return f"an injected {self._config.error_injection_type}"
        if self._config.check_for_nan_in_loss_and_grad and not (math.isfinite(loss) and math.isfinite(norm)):
            return "a loss or gradient that is not finite"
        if self._config.check_for_spiky_loss and self._losses and loss > UNEXPECTED_FACTOR * max(self._losses):
            return f"a loss of {loss:.6E}"
        if self._config.check_for_large_grads and self._norms and norm > UNEXPECTED_FACTOR * max(self._norms):
            return f"gradients with a norm of {norm:.3f}"
        return ""

    def _compare(self, iteration: int, suspicions: Sequence[str], first: _Result, second: _Result) -> None:
        same = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(first, second, strict=True))
        answers = all_gather_json([same, self._suspicion(second, -1)], self._model.mesh.control)
        differing = [rank for rank, (is_same, _) in enumerate(answers) if not is_same]
        self._compared += 1
        self._differing += bool(differing)
        if self._config.rerun_mode == "report_stats":
            return
        what = ", ".join(dict.fromkeys(f"{text} on rank {rank}" for rank, text in enumerate(suspicions) if text))
        if not differing:
            self._events.append(
                f"iteration {iteration} had {what}, and the same when it ran again: the data and the learning rate, or a fault that "
                "persists. Resuming on other hardware tells which"
            )
            return
        ranks = ", ".join(map(str, differing))
        if any(text for _, text in answers):
            raise TrainError(
                f"Iteration {iteration} had {what}. It ran again with another result on rank {ranks}, which is wrong too. Look at the "
                "hardware; resume from the last checkpoint."
            )
        self._events.append(
            f"WARNING: iteration {iteration} had {what}, and another result on rank {ranks} when it ran again: a transient error. "
            "The second result is used. Look at the hardware of this rank"
        )

    def _remember(self, result: _Result) -> None:
        self._losses.append(result[0])
        self._norms.append(result[1])

    def _is_injected(self, iteration: int) -> bool:
        rate = self._config.error_injection_rate
        return rate > 0 and iteration > 0 and stable_seed(self._config.seed, "injected error", iteration) % rate == 0

    def _injected(self, result: _Result, iteration: int, *, again: bool) -> _Result:
        kind = self._config.error_injection_type
        wrong = kind == "persistent_error" or (kind == "transient_error" and not again)
        if not wrong or not self._is_injected(iteration) or self._model.mesh.rank != 0:
            return result
        return 2 * result[0] + 1, result[1]
