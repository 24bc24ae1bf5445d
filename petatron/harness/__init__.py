"""Models of Petatron in other programs' evaluations: lm-evaluation-harness (`lm_eval`)."""
