"""Petatron's models inside transformers: `import petatron.hf` registers them with its Auto classes.

import petatron.hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("folder of a model")     # `model_type: petatron`
model = petatron.hf.from_checkpoint("runs/mine")                      # any model that Petatron saved, or converts

Nothing of Petatron imports this package, and it alone imports transformers when it is imported.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("petatron.hf needs transformers: pip install 'petatron[hf]'", name=error.name) from error

from petatron.hf.configuration import PetatronConfig
from petatron.hf.generation_cache import PetatronCache
from petatron.hf.modeling import PetatronForCausalLM, from_checkpoint

AutoConfig.register(PetatronConfig.model_type, PetatronConfig, exist_ok=True)
AutoModelForCausalLM.register(PetatronConfig, PetatronForCausalLM, exist_ok=True)

__all__ = ["PetatronCache", "PetatronConfig", "PetatronForCausalLM", "from_checkpoint"]
