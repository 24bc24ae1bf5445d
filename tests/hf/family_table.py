"""The table of families in `docs/huggingface.md`, which a test compares with the one generated here.

All families load, save and train, and all but encoders generate; the layouts are those in which `tests/hf` compares logits, loss,
gradients and greedy tokens with transformers.
"""

from __future__ import annotations

from petatron.models.hf.families import FAMILIES
from petatron.models.hf.shared_tensor_names import EXPERTS

DENSE_LAYOUTS = ("tp1", "tp2", "tp2-sp", "pp2", "tp2-pp2")
ENCODER_LAYOUTS = ("tp1", "tp2-sp", "pp2", "cp2")
EXPERT_LAYOUTS = ("tp1", "tp2", "ep2", "tp2-etp1-ep2", "pp2", "tp2-pp2")
_HEAD = ("`model_type`", "models", "what tells it apart", "loads", "saves", "trains", "generates", "layouts proven")


def family_table() -> str:
    """Returns the table in Markdown."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for family in FAMILIES:
        has_experts = any(name.startswith(EXPERTS) for row in family.mappings for name in row.logical_modules)
        is_decoder = family.model_type == "decoder"
        layouts = ENCODER_LAYOUTS if not is_decoder else EXPERT_LAYOUTS if has_experts else DENSE_LAYOUTS
        uses = ("yes", "yes", "yes", "no" if family.model_type == "bert" else "yes")
        rows.append((f"`{family.name}`", family.models, family.what_differs, *uses, ", ".join(layouts)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
