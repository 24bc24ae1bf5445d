"""TRL's trainers on the work of `petatron bench posttrain`: SFT, LoRA and GRPO with transformers and PEFT, as their users run them.

`python -m petatron.bench.peers.trl_trainers WORK.json MEASURED.json` runs one of them in a process of its own, and writes what it measured.
Weights are random; they are fp32 under bf16 autocast, as TRL trains, or bf16 where they are frozen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

TRL = "trl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlWork:
    """What a trainer does.

    kind: sft, lora or grpo. folder: has config.json, a tokenizer, and data.jsonl. rows: of `seq_length`, or answers, for each forward pass.
    micro_batches: of them in a step. recompute: TRL's gradient checkpointing, on by its default.
    """

    kind: str
    folder: str
    steps: int
    rows: int
    micro_batches: int
    seq_length: int
    recompute: bool
    learning_rate: float = 1e-5
    packing_strategy: str = "bfd"
    lora_rank: int = 16
    answers_per_prompt: int = 8
    answer_tokens: int = 512
    continuous_batching: bool = False
    device: str = "cuda"


@dataclass(slots=True)
class TrlMeasured:
    """step_s: of each step. answer_tokens: the mean length of GRPO's answers."""

    step_s: list[float]
    peak_bytes: int
    answer_tokens: float
    versions: Mapping[str, str]


def run(work: TrlWork) -> TrlMeasured:
    import transformers

    folder = Path(work.folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if work.kind == "lora" else torch.float32
    with torch.device(work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    build = _grpo if work.kind == "grpo" else _sft
    clock = _StepClock()
    trainer = build(work, model, tokenizer, records, clock)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return TrlMeasured(
        step_s=clock.step_s,
        peak_bytes=torch.cuda.max_memory_allocated() if work.device == "cuda" else 0,
        answer_tokens=history[-1].get("completions/mean_length", 0.0),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("trl", "transformers", "peft", "torch", "accelerate")}


class _StepClock:
    """Times steps; a callback of the trainer."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._began = 0.0

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.begin()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.end()

        return Callback()

    def begin(self) -> None:
        _wait()
        if not self._began:
            self._began = time.perf_counter()

    def end(self) -> None:
        """A step begins where the one before ended: batches are made in between."""
        _wait()
        now = time.perf_counter()
        self.step_s.append(now - self._began)
        self._began = now


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _arguments(work: TrlWork) -> dict[str, Any]:
    return {
        "output_dir": f"{work.folder}/trl",
        "max_steps": work.steps,
        "per_device_train_batch_size": work.rows,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_checkpointing": work.recompute,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "bf16": work.device == "cuda",
        "use_cpu": work.device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }


def _sft(work: TrlWork, model: Any, tokenizer: Any, records: list[dict[str, Any]], clock: _StepClock) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    peft_config = None
    if work.kind == "lora":
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=work.lora_rank, lora_alpha=2 * work.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    return SFTTrainer(
        model,
        args=SFTConfig(
            **_arguments(work), max_length=work.seq_length, packing=True, packing_strategy=work.packing_strategy
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[clock.callback()],
    )


def _grpo(work: TrlWork, model: Any, tokenizer: Any, records: list[dict[str, Any]], clock: _StepClock) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model,
        reward_funcs=count_vowels,
        args=GRPOConfig(
            **_arguments(work),
            num_generations=work.answers_per_prompt,
            max_completion_length=work.answer_tokens,
            use_transformers_continuous_batching=work.continuous_batching,
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        callbacks=[clock.callback()],
    )


def count_vowels(completions: list[str], **record: Any) -> list[float]:
    """Returns a reward for each answer that costs nothing to compute, and that answers differ in."""
    return [sum(map(text.count, "aeiou")) / max(1, len(text)) for text in completions]


if __name__ == "__main__":
    measured = run(TrlWork(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    Path(sys.argv[2]).write_text(json.dumps(asdict(measured)), encoding="utf-8")
