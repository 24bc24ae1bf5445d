"""What an engine does differently where log-probabilities are to be those of training, bit for bit."""

from __future__ import annotations

from dataclasses import replace

from petatron.base.errors import Problem, raise_problems
from petatron.infer.engine_options import EngineOptions
from petatron.parallel.parallel_model import ParallelModel


def exact_options(options: EngineOptions, model: ParallelModel) -> EngineOptions:
    """Returns the options without what computes other bits; `ConfigError` where they need that.

    An engine of a model with `--exact-rollouts` is exact also if that is not asked for: it calls the model's functions.
    """
    problems: list[Problem] = []
    if options.exact and not model.batch_invariant:
        rule = "needs a model whose functions are those of training whatever the batch"
        problems.append(Problem("exact", "True", rule, "Build the model with --exact-rollouts."))
    if not options.exact and not model.batch_invariant:
        return options
    if options.fp8_weights:
        rule = "quantizes weights that training does not"
        problems.append(Problem("--fp8-weights", "", rule, "Leave it out, or leave --exact-rollouts out."))
    if options.speculative_tokens:
        rule = "verifies several tokens at once, which --exact-rollouts has no proof for"
        problems.append(
            Problem("--speculative-tokens", str(options.speculative_tokens), rule, "Leave one of them out.")
        )
    raise_problems(problems)
    return replace(options, exact=True, copied_weights=False, recorded_steps=False)
