"""The part of the schema that says what a run does: its optimizer, how long, on which data, what it keeps, what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.base.remote_address import is_remote
from petatron.config.schema.evaluation import EvaluationSettings
from petatron.config.schema.monitoring import StepCheckSettings, StepLogSettings
from petatron.config.schema.numeric_bounds import (
    BatchSize,
    ByteCount,
    DecayRate,
    Factor,
    Fraction,
    IterationCount,
    LearningRate,
    PortNumber,
    RankCount,
    RunMinutes,
    SampleCount,
    Seconds,
    Seed,
    SmallCount,
)
from petatron.config.schema.objective_and_dataset_names import BEST_FIT_DATASET, MASKED_DATASETS
from petatron.config.schema.optimizers.adafactor import AdafactorSettings
from petatron.config.schema.optimizers.adam import AdamSettings
from petatron.config.schema.optimizers.lion import LionSettings
from petatron.config.schema.optimizers.muon import MuonSettings
from petatron.config.schema.optimizers.sgd import SgdSettings
from petatron.config.schema.optimizers.soap import SoapSettings
from petatron.config.schema.optimizers.update_rule_spec import OptimizerName
from petatron.config.schema.sections.fill_in_middle import FillInMiddleSettings
from petatron.config.schema.sections.hybrid import MAMBA, all_symbols, branch_symbols
from petatron.config.schema.sections.linear_attention import has_linear_attention
from petatron.config.schema.sections.masked_text import MaskedTextSettings
from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.config.schema.sections.tokenizer_options import TokenizerOptions, TokenizerType
from petatron.config.schema.setting_metadata import Feature, NotWith, RunSettings, UsedWhen, used_with

# What `fields.py` reads off an annotation beside its type.
FilePath = Annotated[str, "path"]
"""A file, a folder or the prefix of files. A saved config holds it absolute, so that it can be started from any folder."""
PrivateKeyPath = Annotated[str, "path", "private"]
"""The file of a private key. Neither checkpoints nor saved configs say where it is."""
ModuleName = Annotated[str, "repeatable"]
"""A module to import; the flag may be given several times, and all of them count."""
NotSavedFlag = Annotated[bool, "one start"]
"""An answer to a question of one start. A saved config does not repeat it, so that the next start asks again."""
WeightsCopy = "copy of the owned weights"
"""The mark of a setting that makes each rank keep a copy of the weights that it updates, in the precision of its master weights."""
NotSavedOnResumeFlag = Annotated[bool, "one load"]
"""How this start loads. In a run that continues in its own folder, a saved config does not repeat it."""
_DECOUPLED = used_with("optim.decoupled_lr", reason="there is no --decoupled-lr")
_LOADS = used_with("checkpoint.load", reason="there is no --load")
_SAVES = used_with("checkpoint.save", reason="there is no --save")
_PRETRAINED = "checkpoint.pretrained_checkpoint"
_BLENDS = UsedWhen(
    lambda run: bool(run.data.data_path or run.data.data_args_path or run.data.train_data_path),
    "there are no datasets to blend",
)
_READS_DATASETS = UsedWhen(
    lambda run: run.data.dataloader_type != "external", "--dataloader-type external brings batches of its own"
)
_HAS_TOKENIZED = used_with(
    *("checkpoint.load", _PRETRAINED, "data.data_path", "data.data_args_path", "data.train_data_path"),
    reason="there is neither a model to start from nor data that was tokenized",
)
_FROM = used_with("checkpoint.use_checkpoint_args", _PRETRAINED, reason="it is for --use-checkpoint-args and --from")
_NO_OVERRIDE = NotWith(
    "override_opt_param_scheduler",
    rule="takes the checkpoint's schedule, and --override-opt-param-scheduler this run's",
)
_SAMPLES, _PROFILES = used_with("log.sample_prompts"), used_with("log.profile")
_WANDB = used_with("log.wandb_project")
_AVERAGES = used_with("train.ema_decay")
_ON_DEVICE = UsedWhen(lambda run: run.train.device != "cpu", "the CPU computes")
_REMOTE_DATA = UsedWhen(
    lambda run: (
        run.data.data_args_path is not None
        or any(
            map(
                is_remote,
                (
                    *run.data.data_path,
                    *run.data.train_data_path,
                    *run.data.valid_data_path,
                    *run.data.test_data_path,
                ),
            )
        )
    ),
    "no dataset is behind an address (s3://...)",
)
_STORES_CHUNKS = used_with("data.object_storage_cache_path")
_ONE_PATH = UsedWhen(
    lambda run: not run.data.mock_data and not run.data.train_data_path, "there is no --data-path to split"
)


def _compiles_functions(run: RunSettings) -> bool:
    """Whether a model has functions without kernels of their own."""
    model = run.model
    if model.normalization != "RMSNorm" or model.activation not in GATED_ACTIVATIONS:
        return True
    recurrent = MAMBA in branch_symbols(all_symbols(model)) or has_linear_attention(model)
    return recurrent or model.activation_func_clamp_value is not None or model.glu_linear_offset != 0.0


_COMPILES = UsedWhen(_compiles_functions, "nothing of this model is compiled: on GPUs it has kernels of its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(AdamSettings, SgdSettings, MuonSettings, LionSettings, AdafactorSettings, SoapSettings):
    """The update rule."""

    feature: ClassVar = Feature("optimizer", role="training")
    # The settings of an optimizer are those of a base class, which names the rule that reads them.

    optimizer: OptimizerName = "adam"
    """adam is AdamW (decoupled weight decay); sgd is SGD with momentum; muon is Muon for the matrices of layers and adam for all else;
    lion is Lion; adafactor is Adafactor; soap is SOAP
    for the matrices of layers and adam for all else. Any other name is that of an optimizer that an imported module registers."""
    optimizer_settings: tuple[str, ...] = ()
    """Settings of an optimizer from an imported module, as NAME=VALUE."""
    lr: LearningRate | None = None
    """Peak learning rate; required to train."""
    decoupled_lr: LearningRate | None = None
    """Peak learning rate of the token embedding and the output head; unset means that of all other parameters."""
    weight_decay: Factor = 0.01
    """Weight decay, added to the gradient in sgd and decoupled in all others; never on biases and other one-dimensional parameters."""
    start_weight_decay: Factor | None = None
    """First value of a weight-decay schedule."""
    end_weight_decay: Factor | None = None
    """Last value of a weight-decay schedule."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from start to end."""
    clip_grad: Factor = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    apply_wd_to_qk_layernorm: bool = False
    """Weight decay on the weights of q/k norms too, which other one-dimensional parameters never have (Qwen3-Next)."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated; bf16 takes half the memory and loses small contributions."""


BUILT_IN_RULES = {base.used_by.name: base for base in OptimizerConfig.__mro__ if "used_by" in vars(base)}
"""The settings class of each optimizer of this package, by the optimizer's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over time."""

    feature: ClassVar = Feature("schedule", role="training")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after warm-up."""
    min_lr: LearningRate = 0.0
    """Learning rate at the end of the decay."""
    decoupled_min_lr: Annotated[LearningRate, _DECOUPLED] | None = None
    """Learning rate at the end of the decay of `--decoupled-lr`; unset means that of `--min-lr`."""
    lr_warmup_init: LearningRate = 0.0
    """Learning rate at the start of warm-up."""
    lr_warmup_iters: Annotated[IterationCount, "at least 0"] = 0
    """Warm-up length in iterations."""
    lr_warmup_samples: Annotated[SampleCount, "at least 0"] = 0
    """Warm-up length in samples, for sample-based runs."""
    lr_warmup_fraction: Annotated[Fraction, "below 1"] | None = None
    """Warm-up length as a fraction of the decay length."""
    lr_decay_iters: IterationCount | None = None
    """Decay length in iterations. Derived: `--train-iters`."""
    lr_decay_samples: SampleCount | None = None
    """Decay length in samples, for sample-based runs. Derived: `--train-samples`."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: IterationCount | None = None
    """Length of the final decay of WSD in iterations."""
    lr_wsd_decay_samples: SampleCount | None = None
    """Length of the final decay of WSD in samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTrainConfig(EvaluationSettings, StepCheckSettings):
    """How long, how much at a time, when to look and when to stop."""

    feature: ClassVar = Feature("training", role="training")
    compile: Annotated[bool, "runtime", _COMPILES] = True
    """Fuse what has no kernel of its own with torch.compile, on GPUs."""
    cuda_graphs: Annotated[Literal["auto", "on", "off"], "switch", "runtime", _ON_DEVICE] = "auto"
    """Record the forward and backward passes of a step once and replay them: faster where kernels are short, on GPUs. With auto, after
    a few steps, if the device was idle for more than a tenth of them, the layout allows it and memory suffices. With on, what
    cannot be recorded is an error, unless `--device` is cpu: a CPU records nothing, and a note says so."""
    objective: str | None = None
    """What to minimize: `next-token` (also if unset: the losses of the model), or a name under which an imported module registered an
    objective."""
    objective_settings: tuple[str, ...] = ()
    """Settings of `--objective`: NAME=VALUE, several."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names (embedding.*, layers.[0-9].*): no gradient, no optimizer state."""
    train_only: tuple[str, ...] = ()
    """The only parameters that are trained, by patterns of their names (layers.15.*, *norm*); all others are frozen."""
    micro_batch_size: Annotated[BatchSize, "at least 1", "runtime"] = 1
    """Samples per forward pass on one rank."""
    global_batch_size: Annotated[BatchSize, "at least 1"] | None = None
    """Samples per optimizer step over all ranks. Derived: micro batch x data parallel."""
    decrease_batch_size_if_needed: bool = False
    """Lower a `--global-batch-size` that micro batch x data parallel does not divide to the next that it does, instead of an error."""
    rampup_batch_size: tuple[SampleCount, ...] = ()
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: str | None = None
    """Global batch sizes, each from a number of tokens on: `0:16 2.4B:320`, with K, M, B and T for 10^3 to 10^12. The last one is
    `--global-batch-size`."""
    train_iters: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations of the whole run, restarts included."""
    train_samples: Annotated[SampleCount, "at least 1"] | None = None
    """Samples of the whole run, restarts included."""
    ema_decay: Annotated[DecayRate, WeightsCopy] | None = None
    """Keep an exponential moving average of the weights with this decay (0.999, ...): saved with them, and evaluated beside them."""
    ema_start: Annotated[IterationCount, _AVERAGES] = 0
    """Updates before the average of `--ema-decay` begins, with a copy of the weights."""
    ema_interval: Annotated[IterationCount, "at least 1", _AVERAGES] = 1
    """Updates between two that the average of `--ema-decay` takes."""
    exit_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: Annotated[RunMinutes, "above 0"] | None = None
    """Save and exit after this many minutes."""
    exit_signal_grace_s: Annotated[Seconds, "at least 0"] = 25.0
    """Seconds after SIGTERM within which the step must end; then the run exits (code 143) without saving. 0 means no limit."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop when the loss or a gradient is not finite (weights are never updated with such gradients)."""
    seed: Annotated[Seed, "at least 0", "runtime"] = 1234
    """Seed of initial weights, dropout and data order."""
    deterministic_mode: Annotated[bool, "runtime"] = False
    """Use only deterministic kernels."""
    device: Annotated[Literal["auto", "cpu", "cuda"], "runtime"] = "auto"
    """Where to compute; auto takes CUDA when there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RawTrainConfig):
    """The resolved settings; by default one sample per step."""

    global_batch_size: BatchSize = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(FillInMiddleSettings, MaskedTextSettings):
    """What to train on."""

    feature: ClassVar = Feature("data", role="training")
    dataset_type: str | None = None
    """How files become samples: `gpt` (Megatron's .bin and .idx files), `best-fit` (the same files, and no document that fits is cut),
    `bert` (masked text), `t5` (text with corrupted spans), or a name under which an imported module registered a kind of dataset. Unset:
    the kind that `--objective` reads, else gpt."""
    dataset_settings: tuple[str, ...] = ()
    """Settings of `--dataset-type`: NAME=VALUE, several."""
    data_path: tuple[FilePath, ...] = ()
    """Dataset prefixes, or weight/prefix pairs; one set of files for all splits, cut by `--split`."""
    train_data_path: tuple[FilePath, ...] = ()
    """Prefixes (or weight/prefix pairs) for training only."""
    valid_data_path: tuple[FilePath, ...] = ()
    """Prefixes (or weight/prefix pairs) for validation only. Several sets have names, `web=PREFIX code=PREFIX`, and are evaluated one by
    one; the first stands for the run."""
    multiple_validation_sets: bool = False
    """Each prefix of `--valid-data-path` is a validation set of its own, with a name of `--validation-set-names`; without weights."""
    validation_set_names: Annotated[tuple[str, ...], used_with("data.multiple_validation_sets")] = ()
    """The names of `--multiple-validation-sets`, in their order. Unset: the last parts of the prefixes."""
    test_data_path: tuple[FilePath, ...] = ()
    """Prefixes (or weight/prefix pairs) for testing only."""
    data_args_path: FilePath | None = None
    """File that holds the value of `--data-path`, for long blends."""
    mid_level_dataset_surplus: Annotated[Fraction, _BLENDS] = 0.005
    """Share of samples that each dataset of a weighted blend is built with beyond what the blend takes of it. It decides how many epochs
    are shuffled together, and thereby the order of samples."""
    split: Annotated[str, _ONE_PATH] = "969,30,1"
    """Shares of documents for training, validation and test, with `--data-path`."""
    data_cache_path: FilePath | None = None
    """Folder for sample indices. Derived: `cache` beside the first dataset."""
    object_storage_cache_path: Annotated[FilePath, _REMOTE_DATA] | None = None
    """Folder of this machine for datasets behind addresses (s3://bucket/corpus, gs://, msc://, https://): copies of their indices, and
    chunks of their tokens. All ranks of the machine share it."""
    object_storage_chunk_bytes: Annotated[ByteCount, "at least 1", _STORES_CHUNKS] = 1 << 20
    """Bytes of a token file that are downloaded at a time from object storage."""
    object_storage_cache_bytes: Annotated[ByteCount, "at least 1", _STORES_CHUNKS] = 1 << 36
    """Bytes of tokens that the folder keeps at most; those that were not used for the longest time are removed."""
    mock_data: bool = False
    """Made-up data: counting sequences, no files needed."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single: one global order fixed at the start; cyclic: reshuffled every epoch of samples; external: micro-batches of your own code,
    which `--import` registers."""
    num_workers: Annotated[SmallCount, "at least 0", _READS_DATASETS] = 2
    """Batches prefetched ahead of training, in background threads; 0 reads in the foreground."""
    reset_position_ids: bool = False
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = False
    """Forbid attention across document boundaries."""
    eod_mask_loss: bool = False
    """Leave out of the loss the positions whose input is the end-of-document token."""

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.reset_attention_mask or self.dataset_type in (BEST_FIT_DATASET, *MASKED_DATASETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(TokenizerOptions):
    """How text becomes token ids."""

    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer, by default that of the files given. The three names of SentencePiece's mean the same."""
    tokenizer_model: FilePath | None = None
    """tokenizer.json, or a folder that holds one; of a TikTokenizer its .json or .tiktoken vocabulary, of SentencePiece the .model."""
    vocab_file: FilePath | None = None
    """GPT-2 vocab.json; of WordPiece the vocab.txt."""
    merge_file: FilePath | None = None
    """GPT-2 merges.txt."""
    force_tokenizer: Annotated[NotSavedFlag, _HAS_TOKENIZED] = False
    """Start from a model with another tokenizer than its folder has, or train on data that was made with another: its ids then mean other
    tokens than the model has learned, or than the data had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where state is kept."""

    save: Annotated[FilePath, "training"] | None = None
    """Folder to save checkpoints in."""
    load: FilePath | None = None
    """Folder to resume from (its newest checkpoint)."""
    pretrained_checkpoint: FilePath | None = None
    """Folder to take the first weights from when `--load` is not given or holds no checkpoint yet: of checkpoints, or of a
    Hugging Face model."""
    save_interval: Annotated[IterationCount, "at least 1", "training", _SAVES] | None = None
    """Iterations between saves; the last state is always saved when `--save` is given."""
    ckpt_step: Annotated[IterationCount, "at least 0", "one load"] | None = None
    """Resume from this iteration instead of the newest."""
    finetune: Annotated[bool, "training"] = False
    """Load weights only and start at iteration 0."""
    no_load_optim: Annotated[NotSavedOnResumeFlag, "training", _LOADS] = False
    """Do not load optimizer state."""
    no_load_rng: Annotated[NotSavedOnResumeFlag, "training", _LOADS] = False
    """Do not load random states."""
    no_save_optim: Annotated[bool, "training", _SAVES] = False
    """Do not save optimizer state; such a checkpoint cannot be resumed, only finetuned."""
    no_save_rng: Annotated[bool, "training", _SAVES] = False
    """Do not save random states."""
    exit_on_missing_checkpoint: bool = False
    """Fail when `--load` holds no checkpoint, instead of starting from scratch."""
    use_checkpoint_args: NotSavedFlag = False
    """Take the model's settings from the checkpoint in `--load`; other values for them give way, with a note."""
    use_mp_args_from_checkpoint_args: NotSavedFlag = False
    """With `--use-checkpoint-args`, take the sizes of tensor, pipeline and expert parallelism and the pipeline's split too."""
    use_tokenizer_model_from_checkpoint_args: Annotated[bool, _FROM] = True
    """With `--use-checkpoint-args` or `--from`, use the tokenizer found there unless another one is given."""
    override_opt_param_scheduler: NotSavedFlag = False
    """On resume take the learning-rate schedule from this run's flags even if the checkpoint's differs."""
    use_checkpoint_opt_param_scheduler: Annotated[NotSavedFlag, _LOADS, _NO_OVERRIDE] = False
    """On resume take the schedules of learning rate and weight decay from the checkpoint, whatever this run's flags say."""
    async_save: Annotated[bool, "training", _SAVES] = False
    """Write checkpoints in the background: the run goes on as soon as the state is copied to host memory."""
    save_total_limit: Annotated[IterationCount, "at least 1", "training", _SAVES] | None = None
    """Keep only this many of the newest checkpoints; unset keeps all."""
    save_retain_interval: Annotated[IterationCount, "at least 1", "training", _SAVES] | None = None
    """Keep the checkpoints whose iteration is a multiple of this, and the newest: one, or those of `--save-total-limit`."""
    sign_key: PrivateKeyPath | None = None
    """File of an Ed25519 private key to sign checkpoints with (extra: sign); their files get SHA-256 digests then."""
    load_fallback: Annotated[bool, "training", _LOADS] = False
    """If the checkpoint to load is damaged, say so and take the newest sound one before it."""
    save_megatron: Annotated[FilePath, "training", _SAVES] | None = None
    """Folder for Megatron's files (torch_dist) of every checkpoint, beside those in `--save`; written in the background."""
    ckpt_format: Literal["petatron"] = "petatron"
    """Checkpoint format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(StepLogSettings):
    """What a run tells."""

    feature: ClassVar = Feature("log", role="training")
    log_interval: Annotated[IterationCount, "at least 1"] = 100
    """Iterations between log lines; the first iteration is always logged."""
    log_throughput: bool = True
    """Report TFLOP/s per device in the log line."""
    log_params_norm: bool = False
    """Report the norm of all parameters."""
    log_num_zeros_in_grad: bool = False
    """Report how many gradient elements are zero."""
    log_dir: FilePath | None = None
    """Folder for metrics.jsonl and the resolved config. Derived: the `--save` folder, else runs/<time>."""
    tensorboard_dir: FilePath | None = None
    """Write TensorBoard events here (extra: log)."""
    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project (extra: log)."""
    wandb_exp_name: str | None = None
    """Name of the W&B run."""
    wandb_entity: Annotated[str, _WANDB] | None = None
    """User or team of the W&B run; unset means the account's default."""
    wandb_save_dir: Annotated[FilePath, _WANDB] | None = None
    """Folder for W&B's own files; unset means the log folder."""
    sample_prompts: FilePath | None = None
    """File of prompts, one per line, that the model continues every `--sample-interval` iterations, to see it learn."""
    sample_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations between text samples; needs `--sample-prompts`."""
    sample_tokens: Annotated[SmallCount, "at least 1", _SAMPLES] = 40
    """New tokens per text sample."""
    sample_temperature: Annotated[Factor, "at least 0", _SAMPLES] = 0.0
    """Temperature of text samples: 0 takes the likeliest token; above 0 tokens are drawn with the same seed every time."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live terminal view; auto shows it when stderr is a terminal and rich is installed."""
    pipeline_timeline: FilePath | None = None
    """File to write the measured timeline of one step to; `petatron plan schedule --measured` draws it."""
    pipeline_timeline_step: Annotated[IterationCount, "at least 1", used_with("log.pipeline_timeline")] = 3
    """Which iteration `--pipeline-timeline` measures."""
    profile: bool = False
    """Write a Chrome trace of some iterations (PyTorch's profiler), to be opened in Perfetto or chrome://tracing."""
    profile_step_start: Annotated[IterationCount, "at least 1", _PROFILES] = 10
    """First iteration that `--profile` traces."""
    profile_step_end: Annotated[IterationCount, _PROFILES] = 12
    """Iteration before which `--profile` stops."""
    profile_ranks: tuple[Annotated[RankCount, _PROFILES], ...] = (0,)
    """Ranks that `--profile` traces."""
    profile_dir: Annotated[FilePath, _PROFILES] | None = None
    """Folder for the traces, made if need be in one that exists; unset: `profile` in the TensorBoard, log or save folder, or runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How ranks are started."""

    nproc_per_node: Annotated[RankCount, "at least 1"] | None = None
    """Ranks to start on this machine. Derived: world size when it is known from the layout, else 1."""
    nnodes: Annotated[RankCount, "at least 1"] = 1
    """Number of machines."""
    node_rank: RankCount = 0
    """Index of this machine."""
    master_addr: str = "127.0.0.1"
    """Address of the first machine."""
    master_port: PortNumber | None = None
    """Port of the first machine; unset means a free one (single machine only)."""
    imports: tuple[ModuleName, ...] = ()
    """Modules of your own to import first, one or several: files or dotted names that register models, objectives, datasets."""
    ranks_per_device: Annotated[RankCount, "at least 1"] = 1
    """Ranks that share each GPU on purpose, to try a layout on fewer GPUs than it needs; speed means nothing then."""
