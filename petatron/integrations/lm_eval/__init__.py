"""Petatron's model inside lm-evaluation-harness: `import petatron.integrations.lm_eval` registers it (extra `lm-eval`)."""

from petatron.integrations.lm_eval.lm_eval_model import PetatronLM

__all__ = ["PetatronLM"]
