"""All families, in the order in which one is chosen for a model that several can express.

A family is a file of this folder, or a part of one, and a line of this list; nothing else knows it by name.
"""

from petatron.models.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from petatron.models.hf.families.gemma import GEMMA
from petatron.models.hf.families.gpt2 import GPT2
from petatron.models.hf.families.llama import LLAMA
from petatron.models.hf.families.mistral import MISTRAL, MIXTRAL
from petatron.models.hf.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

FAMILIES = (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)
