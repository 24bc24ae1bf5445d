"""Trains with real Megatron-Core on CPU: its optimizers, its schedule, its pipeline; saves and resumes as Megatron's trainer does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file
from torch import Tensor

from tests.megatron_core.core_on_cpu import Job, build, rank_folder, stored_arguments
from tests.megatron_core.models import PADDED, POSITIONS, TRAINING


def _set_state(self: DistributedOptimizer, param: Tensor, tensors: dict[str, Tensor]) -> None:
    """As Megatron's own, which does not expect the step beside the moments: there torch has it, and its usual kernels do not."""
    group, place = self.model_param_group_index_map[param]
    main = self.optimizer.param_groups[group]["params"][place]
    for name, state in {"param": main, **self.optimizer.state[main]}.items():
        if name != "step":
            state.data.copy_(tensors[name])


DistributedOptimizer._set_main_param_and_optimizer_states = _set_state
DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(TRAINING["micro_batch_size"] / TRAINING["global_batch_size"]))
"""By the number of micro-batches, which this version's schedule does for losses of experts, and later ones for this one too."""
_GLOBAL_BATCH, _MICRO_BATCH = TRAINING["global_batch_size"], TRAINING["micro_batch_size"]


class Trainer:
    """A model with Megatron's optimizer and schedule."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        model = build(job, seed)
        config = model.config
        distributed = job.optimizer == "distributed"
        wrapped = Float16Module(config, model) if job.bf16 else model
        data_parallel = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, data_parallel, wrapped)
        self.inner = model
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=TRAINING["lr"],
                min_lr=TRAINING["min_lr"],
                weight_decay=TRAINING["weight_decay"],
                adam_beta1=TRAINING["adam_beta1"],
                adam_beta2=TRAINING["adam_beta2"],
                adam_eps=TRAINING["adam_eps"],
                clip_grad=TRAINING["clip_grad"],
                bf16=job.bf16,
                params_dtype=torch.bfloat16 if job.bf16 else torch.float32,
                use_distributed_optimizer=distributed,
            ),
            [self.model],
        )
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss
        iterations = TRAINING["train_iters"] * _GLOBAL_BATCH
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=TRAINING["lr"],
            min_lr=TRAINING["min_lr"],
            lr_warmup_steps=TRAINING["lr_warmup_iters"] * _GLOBAL_BATCH,
            lr_decay_steps=iterations,
            lr_decay_style=TRAINING["lr_decay_style"],
            start_wd=TRAINING["weight_decay"],
            end_wd=TRAINING["weight_decay"],
            wd_incr_steps=iterations,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        self.tokens = load_file(job.tokens)["tokens"]
        self.iteration = 0

    def run(self, steps: int) -> list[float]:
        """Trains, and returns the losses on the last stage."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        samples = self.tokens[self.iteration]
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(samples.split(_MICRO_BATCH)),
            model=[self.model],
            num_microbatches=_GLOBAL_BATCH // _MICRO_BATCH,
            seq_length=POSITIONS,
            micro_batch_size=_MICRO_BATCH,
        )
        updated, _, _ = self.optimizer.step()
        assert updated
        self.scheduler.step(_GLOBAL_BATCH)
        self.iteration += 1
        return sum(parts) / len(parts) if parts else 0.0

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of this iteration."""
        step, job = folder / f"iter_{self.iteration:07d}", self.job
        step.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        arguments = argparse.Namespace(**vars(stored_arguments(job)) | TRAINING | {"bf16": job.bf16})
        arguments.vocab_size = PADDED  # its loss is over the padding too
        arguments.consumed_train_samples = self.iteration * _GLOBAL_BATCH
        arguments.use_distributed_optimizer = job.optimizer == "distributed"
        common: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": self.iteration}
        common |= {"opt_param_scheduler": self.scheduler.state_dict(), "num_floating_point_operations_so_far": 1.0}
        if job.format == "legacy":
            target = rank_folder(job, step)
            target.mkdir(exist_ok=True)
            if job.optimizer == "distributed":
                self.optimizer.save_parameter_state(str(target / "distrib_optim.pt"))
            state = {"model": self.inner.state_dict_for_save_checkpoint(), "optimizer": self.optimizer.state_dict()}
            torch.save({**common, **state}, target / "model_optim_rng.pt")
        else:
            dist_checkpointing.save({**common, **self._sharded_state(False)}, str(step))
        (folder / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))

    def load(self, folder: Path) -> None:
        """Resumes from a checkpoint, at the default strictness."""
        (step,), job = folder.glob("iter_*"), self.job
        if (
            job.optimizer == "distributed"
        ):  # without state it has no step to say, unless its kernels are Transformer Engine's
            for optimizer in self.optimizer.chained_optimizers:
                optimizer._init_optimizer_states_with_dummy_values()
        if job.format == "legacy":
            source = rank_folder(job, step)
            content = torch.load(source / "model_optim_rng.pt", weights_only=False)
            self.inner.load_state_dict(content["model"], strict=True)
            self.optimizer.load_state_dict(content["optimizer"])
            if job.optimizer == "distributed":
                self.optimizer.load_parameter_state(str(source / "distrib_optim.pt"))
        else:
            sharded = self._sharded_state(True)
            content = dist_checkpointing.load(sharded, str(step), strict=job.strict)
            self.inner.load_state_dict(content["model"], strict=True)
            self.optimizer.load_state_dict(content["optimizer"])
        if job.optimizer == "distributed":  # it gives all weights the same step, which torch counts in place
            for optimizer in self.optimizer.chained_optimizers:
                for state in optimizer.optimizer.state.values():
                    state["step"] = state["step"].clone()
        self.scheduler.load_state_dict(content["opt_param_scheduler"])
        self.iteration = content["iteration"]
        assert content["args"].consumed_train_samples == self.iteration * _GLOBAL_BATCH

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        model = self.inner.sharded_state_dict()
        metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
        if self.job.optimizer == "distributed":
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        state = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": state}


def _forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    ids = next(batches)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(POSITIONS).unsqueeze(0).expand(len(tokens), POSITIONS)
    mask = torch.triu(torch.ones(1, 1, POSITIONS, POSITIONS, dtype=torch.bool), 1)

    def loss(losses: Tensor) -> tuple[Tensor, float]:
        mean = losses.float().mean()
        return mean, mean.item()

    return model(tokens, positions, mask, labels=labels), loss


def train(job: Job) -> dict[str, Any]:
    """Trains, saves, and trains on; returns the losses after the checkpoint."""
    trainer = Trainer(job, seed=1)
    before = trainer.run(job.steps)
    trainer.save(Path(job.out))
    return {"before": before, "losses": trainer.run(job.more_steps), "last": parallel_state.is_pipeline_last_stage()}


def resume(job: Job) -> dict[str, Any]:
    """Continues a checkpoint; returns its losses."""
    trainer = Trainer(job, seed=99)
    trainer.load(Path(job.out))
    return {"losses": trainer.run(job.more_steps)}
