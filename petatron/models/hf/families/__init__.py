"""All families, in the order in which one is chosen for a model that several can express.

A family is a file of this folder, or a part of one, and a line of this list; nothing else knows it by name.
"""

from petatron.models.hf.families.bert import BERT, MEGATRON_BERT, MODERNBERT, ROBERTA
from petatron.models.hf.families.bloom_and_mpt import BLOOM, MPT
from petatron.models.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from petatron.models.hf.families.deepseek_v32_and_glm5 import DEEPSEEK_V32, GLM_MOE_DSA
from petatron.models.hf.families.experts.gpt_oss import GPT_OSS
from petatron.models.hf.families.experts.llama4 import LLAMA4
from petatron.models.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from petatron.models.hf.families.glm import GLM, GLM4, GLM4_MOE
from petatron.models.hf.families.gpt2_and_neox import GPT2, GPT_NEOX
from petatron.models.hf.families.granite import GRANITE, GRANITE_MOE
from petatron.models.hf.families.hybrid.bamba import BAMBA, FALCON_H1
from petatron.models.hf.families.hybrid.granite_hybrid import GRANITE_HYBRID
from petatron.models.hf.families.hybrid.kimi_linear import KIMI_LINEAR
from petatron.models.hf.families.hybrid.mamba2 import MAMBA2
from petatron.models.hf.families.hybrid.minimax import MINIMAX
from petatron.models.hf.families.hybrid.nemotron_h import NEMOTRON_H
from petatron.models.hf.families.hybrid.qwen3_next import QWEN3_NEXT
from petatron.models.hf.families.images.llava import LLAVA
from petatron.models.hf.families.images.qwen_vl import QWEN2_5_VL
from petatron.models.hf.families.images.smolvlm import SMOLVLM
from petatron.models.hf.families.llama import LLAMA
from petatron.models.hf.families.mistral import MINISTRAL, MISTRAL, MIXTRAL
from petatron.models.hf.families.nemotron import NEMOTRON
from petatron.models.hf.families.olmo import OLMO2, OLMO3, OLMOE
from petatron.models.hf.families.phi import PHI3
from petatron.models.hf.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from petatron.models.hf.families.smollm3 import SMOLLM3
from petatron.models.hf.families.starcoder2 import STARCODER2
from petatron.models.hf.families.t5 import MT5, T5

FAMILIES = (
    GPT2,
    LLAMA,
    MISTRAL,
    MINISTRAL,
    SMOLLM3,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    OLMO3,
    GRANITE,
    PHI3,
    GLM,
    GLM4,
    STARCODER2,
    NEMOTRON,
    GPT_NEOX,
    BLOOM,
    MPT,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    KIMI_LINEAR,
    MINIMAX,
    OLMOE,
    GRANITE_MOE,
    GPT_OSS,
    LLAMA4,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE,
    GLM_MOE_DSA,
    MAMBA2,
    BAMBA,
    NEMOTRON_H,
    FALCON_H1,
    GRANITE_HYBRID,
    BERT,
    MEGATRON_BERT,
    ROBERTA,
    MODERNBERT,
    T5,
    MT5,
    LLAVA,
    SMOLVLM,
    QWEN2_5_VL,
)
