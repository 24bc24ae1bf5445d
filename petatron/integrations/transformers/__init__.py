"""Petatron's models inside transformers: `import petatron.integrations.transformers` registers them with its Auto classes.

from petatron.integrations.transformers import from_checkpoint
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("folder of a model")     # `model_type: petatron`
model = from_checkpoint("runs/mine")                                  # any model that Petatron saved, or converts
Nothing of Petatron imports this package.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ModuleNotFoundError as error:
    needs = "petatron.integrations.transformers needs transformers: pip install 'petatron[hf]'"
    raise ModuleNotFoundError(needs, name=error.name) from error

from petatron.integrations.transformers.configuration import PetatronConfig
from petatron.integrations.transformers.generation_cache import PetatronCache
from petatron.integrations.transformers.modeling import PetatronForCausalLM, from_checkpoint

AutoConfig.register(PetatronConfig.model_type, PetatronConfig, exist_ok=True)
AutoModelForCausalLM.register(PetatronConfig, PetatronForCausalLM, exist_ok=True)

__all__ = ["PetatronCache", "PetatronConfig", "PetatronForCausalLM", "from_checkpoint"]
