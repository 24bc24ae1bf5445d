"""`petatron generate` under the name and with the flags of Megatron's script; runs from a clone.

    torchrun --nproc_per_node=2 examples/inference/gpt/gpt_static_inference.py --load RUN --tensor-model-parallel-size 2 \\
        --prompts "Once upon a time" "The capital of France is" --num-tokens-to-generate 32 --output-path answers.json

petatron/port/inference_flags.py has the table of flags. There is one engine:
gpt_static_inference.py and gpt_dynamic_inference.py do the same.
"""

from __future__ import annotations

import sys

from answer_prompts import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
