"""One rank of `petatron verify --rollouts`: builds the model, measures every case, and what the same costs without `--exact-rollouts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from petatron.base.errors import Problem, raise_problems
from petatron.config import RunConfig
from petatron.config.required_settings import known_vocab_size
from petatron.kernels.batch_invariant.attention import KEY_TILE
from petatron.mesh.mesh import ParallelMesh
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from petatron.train.build_run import build_model, launch
from petatron.validate import load_config
from petatron.verify.measure_rollouts import RolloutCase, RolloutResult, measure_rollouts, random_prompts

_WARM_UP_PROMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What is drawn: so many prompts of 1 to `longest` tokens, in all batches, whole and in chunks.

    inject: attention in the engine merges tiles of another size than that of training.
    """

    prompts: int
    longest: int
    new_tokens: int
    batches: tuple[int, ...]
    chunk: int
    seed: int
    inject: bool = False
    measures_cost: bool = True

    @property
    def cases(self) -> list[RolloutCase]:
        return [RolloutCase(batch, chunk) for batch in self.batches for chunk in (None, self.chunk)]


def load_rollouts(argv: Sequence[str], plan: RolloutPlan, *, world_size: int | None = None) -> RunConfig:
    """Returns the config of a model and a layout; nothing is trained, so data and rate may be missing."""
    fixed = ["--train-iters=1", *(["--mock-data"] if "--mock-data" not in argv else [])]
    fixed += [] if "--lr" in argv else ["--lr", "1e-3"]
    loaded = load_config([*argv, *fixed], world_size=world_size, read_checkpoint=read_checkpoint_args)
    config = open_tokenizer(loaded)[0].config
    room = config.model.max_position_embeddings - plan.new_tokens
    if plan.longest > room:
        rule = f"and {plan.new_tokens} new tokens are more than the {config.model.max_position_embeddings} positions"
        raise_problems([Problem("--longest-prompt", str(plan.longest), rule, f"Use {max(room, 1)} or less.")])
    return config


def measure_run(config: RunConfig, plan: RolloutPlan) -> dict[str, Any]:
    """Returns the results of all cases by their mode, on every rank."""
    mesh = launch(config)
    exact = config.train.exact_rollouts
    results = {"exact": exact, "cases": [asdict(result) for result in _measure(config, mesh, plan)]}
    if exact and plan.measures_cost:
        other = replace(config, train=replace(config.train, exact_rollouts=False))
        results["other_mode"] = [asdict(result) for result in _measure(other, mesh, replace(plan, inject=False))]
    return results


def _measure(config: RunConfig, mesh: ParallelMesh, plan: RolloutPlan) -> Iterator[RolloutResult]:
    model: ParallelModel = build_model(config, mesh)
    vocab_size = known_vocab_size(model.spec.config)
    prompts = random_prompts(plan.prompts, longest=plan.longest, vocab_size=vocab_size, seed=plan.seed)
    sizes = {"new_tokens": plan.new_tokens, "row_tokens": max(config.model.seq_length, plan.longest + plan.new_tokens)}
    tile = {"key_tile": KEY_TILE // 2} if plan.inject else {}
    for _ in measure_rollouts(model, prompts[:_WARM_UP_PROMPTS], plan.cases[-2:], **sizes):
        pass
    yield from measure_rollouts(model, prompts, plan.cases, **sizes, **tile)
