"""`UpdateRuleSpec`: an optimizer's properties besides the update itself: its state tensors, unit, cost, and limits.

The step of a rule is a class in `optim/`. All other code asks the declaration here and names no optimizer: which parameters a rule takes
and who takes the others, which state it has for a parameter (memory estimates, checkpoints, buffers), what it must see at a time
(its unit, from which follow communication and offload), and which settings it reads.

    unit      a step needs                               communication
    element   one element                                none
    tensor    sums over a logical tensor's elements      all-reduces of rows, columns and scalars (`optim/update_by_tensor_sums.py`)
    matrix    a logical matrix, whole                    its elements meet on one rank (`optim/matrix_update.py`)

Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from petatron.base.errors import Problem
from petatron.config.parse_name_value import parse_named_settings

SettingsT = TypeVar("SettingsT")
RuleUnit = Literal["element", "tensor", "matrix"]
StateShape = Literal["element", "row", "column", "row_pair", "column_pair", "matrix"]
OPTIMIZER_FLAG, OPTIMIZER_SETTINGS_FLAG = "--optimizer", "--optimizer-settings"
OPTIMIZER_NAME = "optimizer"
"""The mark of a field that names an optimizer."""
OptimizerName = Annotated[str, OPTIMIZER_NAME]
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class RuleStateTensor:
    """A kind of state. `element`: a value for each element, sharded as the parameter. All other shapes belong to a matrix as a whole.

    A `row` has a value for each row, a `row_pair` for each pair of rows (a square matrix, such as a covariance), a `matrix` for each
    element, but is not sharded like the parameter.
    Each matrix of a stack has its own state. dtype: `main` is that of the master weights. initial: its values before the first step; only a
    square can be the identity.

    >>> RuleStateTensor("left", "row_pair").dims(4, 6), RuleStateTensor("exp_avg", dtype="bf16").element_bytes(4)
    ((4, 4), 2)
    """

    kind: str
    shape: StateShape = "element"
    dtype: Literal["main", "bf16"] = "main"
    initial: Literal["zeros", "identity"] = "zeros"

    def dims(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns its shape for a matrix."""
        shapes = {
            "row": (rows,),
            "column": (columns,),
            "row_pair": (rows, rows),
            "column_pair": (columns, columns),
        }
        return shapes.get(self.shape, (rows, columns))

    def element_bytes(self, main_bytes: int) -> int:
        """Returns the bytes of a value, given those of a master weight."""
        return main_bytes if self.dtype == "main" else _BF16_BYTES


@dataclass(frozen=True, slots=True)
class WidthScaling:
    """How muP changes a rule's learning rate and epsilon: the exponents of the ratios of fan-in and fan-out to those of the base model.

    >>> sgd, adam = WidthScaling(lr_fan_in=-1, lr_fan_out=1), WidthScaling(lr_fan_in=-1)
    >>> sgd.lr(fan_in=1.0, fan_out=4.0), sgd.lr(fan_in=4.0, fan_out=4.0), adam.lr(fan_in=4.0, fan_out=4.0)
    (4.0, 1.0, 0.25)
    """

    lr_fan_in: int = 0
    lr_fan_out: int = 0
    eps_fan_in: int = 0

    def lr(self, *, fan_in: float, fan_out: float) -> float:
        """Returns the multiplier of a parameter's learning rate."""
        return fan_in**self.lr_fan_in * fan_out**self.lr_fan_out

    def eps(self, *, fan_in: float) -> float:
        """Returns the multiplier of what is added to the root of the second moment."""
        return fan_in**self.eps_fan_in


class UpdateRuleSpec(ABC):
    """An optimizer's declaration. Subclasses are frozen dataclasses whose fields are its settings (`--optimizer-settings NAME=VALUE`).

    name: the value of `--optimizer`. title: its name in reports. hidden_matrices_only: it updates the weight matrices of layers, and
    `scalar_optimizer` all other parameters. width_scaling: how muP changes its learning rate; None: nobody has said, and muP is refused.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[RuleUnit] = "element"
    hidden_matrices_only: ClassVar[bool] = False
    width_scaling: ClassVar[WidthScaling | None] = None

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Returns the rule with the settings of an `OptimizerConfig`; raises `ConfigError` with every problem."""
        chosen_by = f"{OPTIMIZER_FLAG} {cls.name}"
        return cls(**parse_named_settings(cls, config.optimizer_settings, OPTIMIZER_SETTINGS_FLAG, chosen_by))

    @abstractmethod
    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        """Returns the state of a parameter of this logical shape."""

    def element_state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        """Returns the state with a value for each element."""
        return tuple(state for state in self.state(shape) if state.shape == "element")

    def matrix_flops(self, rows: int, columns: int) -> int:
        """Returns the operations of updating a matrix, by which ranks divide the matrices among them."""
        return rows * columns

    @property
    def scalar_optimizer(self) -> str | None:
        """The name of the optimizer of the parameters that this one does not update (embeddings, norms, biases)."""
        return None

    @property
    def fuses_qkv(self) -> bool:
        """Whether queries, keys and values of a fused weight are one matrix to a rule with the unit `matrix`."""
        return False

    @property
    def bf16_state_settings(self) -> Mapping[str, str]:
        """The settings that store all of its state in bf16, by name; empty if it cannot."""
        return {}

    @property
    def offload_problem(self) -> str | None:
        """Returns why its state cannot be swapped between the device and the host or a disk; None if it can."""
        reasons = {
            "matrix": "whose state is needed twice in a step: before and after matrices are gathered",
            "tensor": "whose state is needed twice in a step: before and after sums over whole tensors",
        }
        return reasons.get(self.unit)

    def mup_problems(self) -> Iterator[Problem]:
        """Yields settings with which the declared scaling is not that of muP."""
        return iter(())

    def mup_notices(self) -> Iterator[str]:
        """Yields what is valid with muP and keeps the best learning rate from being that of the base model."""
        return iter(())

    def problems(self) -> Iterator[Problem]:
        """Yields settings that cannot be combined; bounds of numbers are those of their fields."""
        return iter(())


@dataclass(frozen=True)
class SectionRuleSpec(UpdateRuleSpec, Generic[SettingsT]):
    """A rule of this package: its settings are fields of `OptimizerConfig`, so that each has a flag."""

    settings: SettingsT

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(config)
