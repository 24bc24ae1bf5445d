"""Scripts in the styles of Megatron's examples become configurations; every flag has its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from petatron.base.errors import ConfigError, DataError
from petatron.config.schema.fields import flatten_config
from petatron.port.find_launch_command import find_launches, scheduler_variables
from petatron.port.plan_and_toy_settings import toy_yaml
from petatron.port.port_flags import port_flags
from petatron.port.ported_run import PortedRun, port_script
from petatron.port.ported_yaml import is_unchanged
from petatron.port.read_script import MAX_SCRIPT_BYTES, read_script
from petatron.port.shell_interpreter import interpret
from petatron.port.shell_values import ShellText
from petatron.validate import resolve_config

SCRIPTS = Path(__file__).parent / "scripts"
COMMENTED = {
    "TP": "4",
    "PP": "4",
    "CP": "1",
    "NUM_LAYERS": "80",
    "HIDDEN_SIZE": "8192",
    "NUM_HEADS": "64",
    "SEQ_LENGTH": "4096",
}
GIVEN = {
    "gpt3_175b.sh": {"1": "/ckpt", "2": "/tb", "3": "/v.json", "4": "/m.txt", "5": "/data"},
    "variables_in_comments.sh": COMMENTED,
    "functional_test.yaml": {"DATA_PATH": "/d", "CHECKPOINT_SAVE_PATH": "/s", "CHECKPOINT_LOAD_PATH": "/s"},
}
# World size, flags, and some settings of each.
EXPECTED = {
    "gpt3_175b.sh": (1024, 35, {"num_layers": 96, "rampup_batch_size": (128, 128, 5859375), "split": "949,50,1", "save": "/ckpt"}),
    "llama3_8b_fp8.sh": (8, 53, {"fp8_format": "hybrid", "fp8_recipe": "delayed", "split": "99,1,0", "activation": "swiglu"}),
    "mixtral_8x7b.sh": (32, 43, {"num_experts": 8, "expert_model_parallel_size": 8, "moe_aux_loss_coeff": 0.01, "add_bias_linear": False}),
    "mamba_hybrid.sh": (8, 36, {"hidden_size": 1024, "lr_decay_samples": 73192188, "hybrid_mlp_ratio": 0.5}),
    "llama_70b_sbatch.sh": (64, 32, {"global_batch_size": 256, "num_query_groups": 8, "tensor_model_parallel_size": 4}),
    "env_defaults.sh": (2, 17, {"global_batch_size": 64, "bf16": True, "recompute_granularity": "selective"}),
    "quotes_heredoc.sh": (1, 17, {"num_layers": 4, "hidden_size": 128, "moe_layer_freq": "([0]*1+[1]*3)", "wandb_exp_name": "run one"}),
    "lost_continuation.sh": (64, 23, {"num_layers": 80, "hidden_size": 8192, "data_path": ("/path/to/data",)}),
    "variables_in_comments.sh": (64, 24, {"num_layers": 80, "tensor_model_parallel_size": 4, "lr": 3e-4, "global_batch_size": 1024}),
    "deepseek_srun.sh": (16, 36, {"multi_latent_attention": True, "micro_batch_size": 1, "moe_layer_freq": "([0]*1+[1]*27)"}),
    "mini_moe.sh": (2, 22, {"moe_router_topk": 2, "sequence_parallel": True}),
    "functional_test.yaml": (None, 36, {"lr": 0.00015, "deterministic_mode": True, "save": "/s"}),
}  # fmt: skip
GELU = {"activation": "gelu_tanh"}
"""The activation of Megatron's default, a fused kernel of bias and gelu, which a script has that names no other."""


MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --position-embedding-type none --vocab-size 64 --mock-data "
    "--micro-batch-size 1 --lr 0.1 --train-iters 2"
)


def port(text: str, tmp_path: Path, name: str = "train.sh", **options: object) -> PortedRun:
    (tmp_path / name).write_text(text)
    return port_file(tmp_path / name, **{"given": {}, **options})  # type: ignore[arg-type]


def port_file(source: Path, *, given: Mapping[str, str], **options: Any) -> PortedRun:
    return port_script(read_script(source, given), **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_scripts_of_every_style(name: str, tmp_path: Path):
    world_size, count, settings = EXPECTED[name]
    run = port_file(SCRIPTS / name, given=GIVEN.get(name, {}))
    assert not run.blocks, run.groups()
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert {key: made[key] for key in settings} == settings
    assert (run.world_size, len(run.flags.all_flags)) == (world_size, count)
    file = tmp_path / "ported.yaml"
    file.write_text(run.yaml())
    assert is_unchanged(run.yaml()) and not is_unchanged(f"{run.yaml()}#")
    from_file, problems = resolve_config(files=(file,), world_size=run.world_size)
    from_flags, _ = resolve_config(run.flags.argv, world_size=run.world_size)
    assert not problems and flatten_config(from_file.config) == flatten_config(from_flags.config)


def test_a_toy_in_one_process_has_no_settings_of_replicas(tmp_path: Path):
    flags = "--num-layers 2 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer"
    run = port(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}", tmp_path)
    one, all_ranks = (toy_yaml(run, keeps_layout=keeps) for keeps in (False, True))
    assert "fp8_param_gather" not in one and "fp8_format: hybrid" in one
    assert "fp8_param_gather: true" in all_ranks and "use_distributed_optimizer: true" in all_ranks


def test_a_command_in_a_variable_that_a_scheduler_would_run(tmp_path: Path):
    text = 'ARGS=(--num-layers 4 --bf16)\nRUN="\ncd $HERE;\npython $HERE/pretrain_gpt.py ${ARGS[@]}"\n'
    text += 'sbatch <<EOF\nsrun bash -c "${RUN}"\nEOF\n'
    run = port(text, tmp_path, given={"HERE": "/m"})
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert made == {"num_layers": 4, "bf16": True, **GELU} and "runs $RUN: it is read as one" in str(run.groups())


def test_settings_that_a_checkpoint_adds_are_left_to_the_start(tmp_path: Path):
    run = port("torchrun pretrain_gpt.py --bf16 --load /none --use-checkpoint-args", tmp_path)
    assert "--use-checkpoint-args" not in str(run.problems)
    assert "--use-checkpoint-args is applied when the run starts" in str(run.groups())


def test_a_default_that_assigns(tmp_path: Path):
    run = port(": ${KIND=gpt}\n: ${N:=4}\ntorchrun pretrain_${KIND}.py --num-layers $N", tmp_path)
    assert run.launch.script == "pretrain_gpt.py" and run.settings[-1][0].value == 4


def test_megatrons_positions_beside_latent_attention(tmp_path: Path):
    run = port("torchrun pretrain_gpt.py --multi-latent-attention --num-layers 2", tmp_path)
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert (made["position_embedding_type"], made["learned_position_table"]) == ("rope", True)
    overlap = (
        "--overlap-moe-expert-parallel-comm --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    )
    (answer,) = (
        item for item in port(f"torchrun pretrain_gpt.py {overlap}", tmp_path).flags.all_flags if "overlap" in item.text
    )
    assert answer.kind == "implied" and "does not overlap; no number changes" in answer.why


def test_a_fragment_is_blocked_by_what_it_leaves_out_alone():
    run = port_file(SCRIPTS / "mixtral_fragment.sh", given={})
    assert run.world_size == 8 and not run.flags.of_kind("blocking", "missing")
    assert {problem.where for problem in run.problems} == {"--train-iters", "--lr"}
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert (made["expert_model_parallel_size"], made["num_experts"], made["moe_aux_loss_coeff"]) == (4, 8, 0.01)


@pytest.mark.parametrize("name", EXPECTED)
def test_no_flag_is_lost(name: str):
    """Every flag of the command is a setting with its line as a comment, or a comment below."""
    run = port_file(SCRIPTS / name, given={})
    text = run.yaml()
    assert all(answer.flag.text.partition("=")[0] in text for answer in run.flags.all_flags)
    assert not [key for section in yaml.safe_load(text).values() for key in section if key.startswith("-")]


def test_every_kind_of_answer(tmp_path: Path):
    flags = "--num-layers 4 --swiglu --use-mcore-models --num-frames 2 --lr $LR --window-size 127,0 --num-layers 8 --bogus-thing 3"
    run = port(f"torchrun pretrain_gpt.py {flags} --fp16 --tp 3 --fp8-margin 0", tmp_path, left_out=["fp16"])
    kinds = [(answer.flag.text, answer.kind) for answer in run.flags.all_flags]
    assert kinds[:-1] == [
        ("--num-layers", "implied"),
        ("--swiglu", "translated"),
        ("--use-mcore-models", "implied"),
        ("--num-frames", "blocking"),
        ("--lr", "missing"),
        ("--window-size", "translated"),
        ("--num-layers", "kept"),
        ("--bogus-thing", "blocking"),
        ("--fp16", "left out"),
        ("--tp", "translated"),
    ]
    groups = {heading: "\n".join(lines) for heading, lines in run.groups()}
    assert "--num-frames 2 (line 1) needs a count of frames" in groups["Blocking"]
    assert "Or --without num-frames" in groups["Blocking"]
    assert "--window-size 127,0 (line 1) is window_size: 128" in groups["Translated"]
    assert "--num-layers 8 (line 1) takes its place" in groups["Dropped as implied"]
    assert "LR (line 1): the script does not set it" in groups["Blocking"]
    assert "for --lr: --set LR=VALUE" in groups["Blocking"]
    assert "--hidden-size is not set" in groups["Problems of the settings together"]
    assert "--lr" not in groups["Problems of the settings together"]
    assert run.blocks and "3 blocking (1 variable without a value)" in run.summary


def test_the_tables_of_flags_are_asked():
    """No answer is made up here: what `config/flags` accepts, refuses or translates decides."""
    texts = [
        "--hybrid-override-pattern",
        "M*M*",
        "--cuda-graph-impl",
        "none",
        "--rope-theta=5e5",
        "--use_flash_attn",
        "--learning-rate",
        "1",
    ]
    answers = port_flags([ShellText(text, 1) for text in texts], set()).all_flags
    assert [answer.kind for answer in answers] == ["translated", "translated", "translated", "implied", "blocking"]
    assert "Did you mean --lr?" in answers[-1].why


def test_the_strategy_of_fsdp_wins_over_its_switch(tmp_path: Path):
    run = port("torchrun pretrain_gpt.py --data-parallel-sharding-strategy optim_grads --use-megatron-fsdp", tmp_path)
    assert {setting.value for setting, _ in run.settings} == {"optim_grads", *GELU.values()}
    assert [answer.kind for answer in run.flags.all_flags] == ["kept", "kept", "implied"]


def test_a_name_without_a_value_in_place_of_flags_blocks(tmp_path: Path):
    """It may be empty, but flags may have been lost with it: a list of a file that is sourced, or a misspelled one."""
    text = 'MODEL_ARGS=(--num-layers 2)\ntorchrun pretrain_gpt.py "${MODEL_ARG[@]}" --bf16 $EXTRA --num-layers 2 \\\n $MORE'
    run = port(text, tmp_path)
    assert [answer.kind for answer in run.flags.all_flags] == ["kept"] * 3
    assert run.blocks and "3 flags: 3 kept" in run.summary and "3 blocking (3 variables without" in run.summary
    told = "\n".join(dict(run.groups())["Blocking"])
    assert "EXTRA (line 2): the script does not set it, and the environment is not read; a word of the command" in told
    assert "--set EXTRA=VALUE, or --set EXTRA= if it is empty" in told and "MORE (line 3)" in told
    assert "MODEL_ARG (line 2)" in told
    given = {"EXTRA": "--seed 2 --lr 1e-3", "MODEL_ARG": "", "MORE": ""}
    rest = port(text, tmp_path, given=given)
    assert len(rest.flags.all_flags) == 5 and not rest.missing and "0 blocking" in rest.summary


def test_the_line_of_a_missing_value_is_that_of_its_flag(tmp_path: Path):
    run = port('ARGS="\n  --num-layers 2\n  --lr $LR\n"\nC="torchrun pretrain_gpt.py $ARGS"\neval $C', tmp_path)
    assert [(variable.name, variable.line) for variable in run.missing] == [("LR", 3)]
    assert {answer.flag.text: answer.flag.line for answer in run.flags.all_flags if answer.flag.line != 5} == {
        "--num-layers": 2,
        "--lr": 3,
    }
    assert run.title.startswith("train.sh, line 5: torchrun")


def test_values_that_decide_nothing_may_be_unknown(tmp_path: Path):
    run = port("torchrun pretrain_gpt.py --bf16 --attention-backend $BACKEND --use-mcore-models $MORE", tmp_path)
    assert [answer.kind for answer in run.flags.all_flags][-2:] == ["implied", "implied"]
    assert [variable.name for variable in run.missing] == ["MORE"]


def test_names_of_the_environment_are_typed(tmp_path: Path):
    """The shell that starts the run has them; what they are here and now is not read."""
    text = "BASE=$(pwd)/runs\nROOT=$HOME\ntorchrun pretrain_gpt.py --save $BASE/${SLURM_JOB_ID} --load ${ROOT}/x $MORE "
    text += '--tensorboard-dir ~/tb --wandb-exp-name "of $USER" --seed 5 --data-path 1 ~/a --data-path $PWD/b'
    run = port(text, tmp_path, given={"MORE": ""})
    assert not run.missing and not run.flags.of_kind("blocking")
    assert "5 to type" in run.summary and "${" not in "".join(str(setting.value) for setting, _ in run.settings)
    assert run.typed_flags == [
        *("--save", "${PWD}/runs/${SLURM_JOB_ID}", "--load", "${HOME}/x", "--tensorboard-dir", "${HOME}/tb"),
        *("--wandb-exp-name", "of ${USER}", "--data-path", "${PWD}/b"),
    ]
    assert "save:" not in run.yaml() and "#   --save ${PWD}/runs/${SLURM_JOB_ID} (line 3)" in run.yaml()
    given = {"HOME": "/h", "PWD": "/p", "SLURM_JOB_ID": "7", "USER": "me", "MORE": ""}
    known = {setting.path: setting.value for setting, _ in port(text, tmp_path, given=given).settings}
    assert (known["checkpoint.save"], known["checkpoint.load"]) == ("/p/runs/7", "/h/x")
    counted = port("torchrun pretrain_gpt.py --num-layers $SLURM_NTASKS --save '$HOME' --bogus $HOME", tmp_path)
    assert [answer.kind for answer in counted.flags.all_flags][-3:] == ["missing", "kept", "blocking"]


def test_a_value_in_a_comment_is_shown(tmp_path: Path):
    """A web page may lose the line ends between assignments, and comments take the rest of the line."""
    run = port("N=8 # ranks TP=4 # split\ntorchrun --nproc_per_node $N pretrain_gpt.py --tp $TP", tmp_path)
    assert "(a comment has TP=4); for --tp: --set TP=VALUE" in str(run.missing[0])


@pytest.mark.parametrize(
    ("line", "nodes", "per_node", "launcher"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4", 4, 8, "torchrun"),
        ("torchrun --nproc-per-node=8 --nnodes=2:4", 2, 8, "torchrun"),
        ("python -m torch.distributed.run --nproc_per_node=4", 1, 4, "torchrun"),
        ("python3 -m torch.distributed.launch --nproc_per_node 4 --nnodes 2", 2, 4, "torchrun"),
        ("srun -N 4 --ntasks-per-node=8 python -u", 4, 8, "srun"),
        ("srun --nodes=4 --ntasks=32 python", 4, 8, "srun"),
        ("srun -l torchrun --nnodes $SLURM_NNODES --nproc_per_node 8", 3, 8, "torchrun"),
        ("srun python", 3, 4, "srun"),
        ("mpirun -np 16 python", 1, 16, "mpirun"),
        ("torchrun --nnodes $NODES --nproc_per_node 8", None, 8, "torchrun"),
        ("CUDA_VISIBLE_DEVICES=0 python -u", 1, 1, "python"),
        ("nohup numactl --membind=0 torchrun --nproc_per_node 2", 1, 2, "torchrun"),
    ],
)  # fmt: skip
def test_nodes_and_ranks(line: str, nodes: int | None, per_node: int | None, launcher: str):
    text = f"#SBATCH -N 3\n#SBATCH --ntasks-per-node=4  # four\n{line} pretrain_gpt.py --bf16"
    scheduler = scheduler_variables(text)
    (launch,) = find_launches(interpret(text, given={}, preset=scheduler).commands, scheduler)
    assert (launch.nodes, launch.ranks_per_node, launch.launcher) == (nodes, per_node, launcher)
    assert launch.unknown_counts == (("NODES",) if nodes is None else ())
    assert [flag.text for flag in launch.flags] == ["--bf16"]


def test_the_training_command_among_others(tmp_path: Path):
    text = "python tools/preprocess_data.py --input x\ncp pretrain_gpt.py /tmp\n"
    text += "torchrun pretrain_gpt.py --bf16\ntorchrun pretrain_gpt.py --fp16"
    run = port(text, tmp_path)
    assert run.launch.line == 3 and "line 4: another command, of pretrain_gpt.py, is not ported" in str(run.groups())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("examples/multimodal/train.py", "use `petatron train --from FOLDER`"),
        ("tools/merge_datasets.py", "use `petatron data merge`"),
        ("tools/preprocess_data.py", "use `petatron data preprocess`"),
    ],
)
def test_other_programs_block_with_what_to_use(script: str, why: str, tmp_path: Path):
    run = port(f"torchrun {script} --num-layers 2", tmp_path)
    assert run.blocks and why in dict(run.groups())["Blocking"][0]


def test_a_mamba_script_is_a_hybrid_model(tmp_path: Path):
    run = port("torchrun pretrain_mamba.py --num-layers 2", tmp_path)
    assert {setting.path: setting.value for setting, _ in run.settings}["model.is_hybrid_model"] is True


def test_bars_of_a_pattern_on_one_rank_are_no_layout(tmp_path: Path):
    flags = f"{MODEL} --hybrid-layer-pattern 'M*|M-M-' --mamba-num-groups 1"
    run = port(f"torchrun --nproc_per_node 1 pretrain_hybrid.py {flags}", tmp_path)
    (tmp_path / "ported.yaml").write_text(run.yaml())
    assert not run.blocks and not resolve_config(files=(tmp_path / "ported.yaml",))[1]
    assert "pipeline_model_parallel_layout" not in run.yaml() and "M*M-M-" in run.yaml()
    run = port(f"torchrun --nproc_per_node 2 pretrain_hybrid.py {flags} --pipeline-model-parallel-size 2", tmp_path)
    assert "pipeline_model_parallel_layout: Ett|ttttL" in run.yaml()


def test_the_fewest_ranks_hold_the_experts_too(tmp_path: Path):
    layout = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 8"
    )
    flags = f"--num-layers 4 --ffn-hidden-size 64 {layout} --expert-tensor-parallel-size 1 {MODEL}".split(" --")
    text = "MODEL_ARGS:\n" + "".join(
        "  --{}: {}\n".format(*f"{flag.removeprefix('--')} true".split()[:2]) for flag in flags
    )
    run = port(text, tmp_path, "model_config.yaml")
    assert (run.world_size, run.fewest_ranks, run.problems) == (None, 16, ())
    assert port(text, tmp_path, "model_config.yaml", world_size=8).problems


def test_files_that_are_not_here_do_not_block():
    run = port_file(SCRIPTS / "mini_moe.sh", given={})
    assert not run.blocks and len(run.absent_files) == 3
    assert "/path/to/vocab.json does not exist" in str(run.groups())


def test_functional_tests(tmp_path: Path):
    text = "ENV_VARS:\n  ROOT: /data\nMODEL_ARGS:\n  --rampup-batch-size: 16 16 1000\n  --bf16: true\n  --load: ${ROOT}/x\n"
    text += "  --data-path: [0.5, a, 0.5, b]\nMODEL_ARGS_2:\n  --lr: 1\n"
    run = port(text, tmp_path, "model_config.yaml")
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert made == {
        "rampup_batch_size": (16, 16, 1000),
        "bf16": True,
        "load": "/data/x",
        "data_path": ("0.5", "a", "0.5", "b"),
        **GELU,
    }
    assert "flags of a second run are not ported" in str(run.groups())
    assert [answer.flag.line for answer in run.flags.all_flags][1:] == [4, 5, 6, 7]


def test_functional_tests_are_unquoted_twice_and_brackets_hold_several_values(tmp_path: Path):
    text = """MODEL_ARGS:
  --recompute-modules: "[layernorm moe_act]"
  --rampup-batch-size: "[16 16 1000]"
  --pipeline-model-parallel-layout: Et*2\\\\|\\\\(tt\\\\|\\\\)*2mL
  --moe-layer-freq: ([0]*2+[1]*4)
  --hybrid-layer-pattern: \\"*E\\"
  --wandb-exp-name: one name
  --data-path: 0.5 a 0.5 b
  --split: "'99,1,0'"
  --save: it's
"""
    run = port(text, tmp_path, "model_config.yaml")
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert not run.flags.of_kind("blocking") and made == {
        "recompute_modules": ("layernorm", "moe_act"),
        "rampup_batch_size": (16, 16, 1000),
        "pipeline_model_parallel_layout": "Et*2|(tt|)*2mL",
        "moe_layer_freq": "([0]*2+[1]*4)",
        "hybrid_layer_pattern": "*E",
        "wandb_exp_name": "one name",
        "data_path": ("0.5", "a", "0.5", "b"),
        "split": "99,1,0",
        "save": "it's",
        **GELU,
    }


def test_functional_tests_with_anchors_and_merge_keys(tmp_path: Path):
    """A mapping's own values win, then those of the first mapping that is merged; lines are those of the values."""
    text = """BASE: &BASE
  --num-layers: 2
  --lr: &RATE 0.1
MORE: &MORE
  <<: *BASE
  --num-layers: 3
  --bf16: true
ENV_VARS: &VARIABLES {ROOT: /data}
OTHER: *VARIABLES
MODEL_ARGS:
  <<: [*MORE, {--seed: 5, --num-layers: 7}]
  --min-lr: *RATE
  --lr: 0.2
  --save: ${ROOT}
"""
    run = port(text, tmp_path, "model_config.yaml")
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    expected = {"num_layers": 3, "bf16": True, "seed": 5, "min_lr": 0.1, "lr": 0.2, "save": "/data", **GELU}
    assert made == expected and not run.flags.of_kind("blocking")
    lines = {answer.flag.text: answer.flag.line for answer in run.flags.all_flags}
    assert (lines["--num-layers"], lines["--bf16"], lines["--lr"]) == (6, 7, 13)
    notes = " ".join(note.text for note in run.notes)
    assert "OTHER: is not a setting" in notes and "BASE" not in notes and "MORE" not in notes


def test_functional_tests_with_values_that_are_none(tmp_path: Path):
    text = """MODEL_ARGS:
  --bf16:
  --lr: ~
  --num-layers: null
  --save: ""
  --swiglu: "true"
  --seed: 5
  --tokenizer-library: null
"""
    run = port(text, tmp_path, "model_config.yaml")
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert made == {"bf16": True, "activation": "swiglu", "seed": 5}
    blocking = {answer.flag.text: answer.why for answer in run.flags.of_kind("blocking")}
    assert set(blocking) == {"--lr", "--num-layers"} and blocking["--lr"].startswith("needs a value")
    notes = {note.line: note.text for note in run.notes}
    assert "--lr is null" in notes[3] and "--bf16 is null: it counts as the flag alone" in notes[2]
    assert "--save is an empty text, and left out" in notes[5]


def test_flags_that_no_command_uses_are_those_of_a_training_script(tmp_path: Path):
    """Scripts that others source have nothing but a list of flags."""
    run = port('FLAGS=" $MORE \\\n  --num-layers ${N} --swiglu"\nexport FLAGS\n', tmp_path, given={"N": "4"})
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert made == {"num_layers": 4, "activation": "swiglu"} and run.world_size is None
    assert "no command uses the flags of FLAGS: they are read as those of pretrain_gpt.py" in str(run.groups())


@pytest.mark.parametrize(
    ("pattern", "more", "made"),
    [
        ("G-*-/-", {"--num-layers": 4, "--mtp-num-layers": 1}, ("G-*-", "-", 1, False, None)),
        ("G-*-/*-/*-", {"--mtp-use-repeated-layer": True}, ("G-*-", "*-", 2, True, None)),
        ("M*|ME/*E/*E", {"--num-experts": 4, "--mtp-num-layers": 2}, ("M*ME", "*E", 2, False, "Ett|ttL")),
        (
            "M*ME",
            {"--mtp-hybrid-override-pattern": "*E", "--mtp-num-layers": 1, "--num-experts": 4},
            ("M*ME", "*E", 1, False, None),
        ),
    ],
)
def test_functional_tests_of_hybrids_with_depths(
    tmp_path: Path, pattern: str, more: dict[str, object], made: tuple[object, ...]
):
    flags = {
        "--hybrid-layer-pattern": pattern,
        "--hidden-size": 64,
        "--num-attention-heads": 4,
        "--seq-length": 32,
        "--position-embedding-type": "none",
        "--mock-data": True,
        "--mamba-num-groups": 2,
        "--vocab-size": 256,
        "--micro-batch-size": 1,
        "--train-iters": 2,
        "--lr": 0.001,
        **more,
    }
    flags |= {
        "--spec": "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]",
        "--pipeline-model-parallel-size": 2,
    }
    text = "MODEL_ARGS:\n" + "".join(f"  {flag}: {json.dumps(value)}\n" for flag, value in flags.items())
    run = port(text, tmp_path, "model_config.yaml")
    assert not run.blocks, run.groups()
    values = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    names = ("hybrid_layer_pattern", "mtp_hybrid_override_pattern", "mtp_num_layers", "mtp_use_repeated_layer")
    found = [values.get(name) for name in (*names, "pipeline_model_parallel_layout")]
    assert found == [*made[:3], made[3] or None, made[4]]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.sh", b"", "is empty"),
        ("blank.sh", b" \n\n", "is empty"),
        ("binary.sh", b"\x7fELF\x02\xff\xfe", "is not UTF-8 text"),
        ("nul.sh", b"torchrun\0x.py", "NUL characters"),
        ("huge.sh", b"#" * (MAX_SCRIPT_BYTES + 1), "cannot be read: it has"),
        ("nothing.sh", b"echo hello\n", "no command starts a Python script"),
        ("outer.sh", b"TP=2 bash examples/inner.sh | tee log", "It runs examples/inner.sh: port that one"),
        ("open.sh", b"torchrun pretrain_gpt.py --x 'open\n", "line 1: this quote (') has no end"),
        ("ours.yaml", b"model:\n  num_layers: 4\n", "it has no MODEL_ARGS"),
        ("list.yaml", b"- 1\n", "it has no MODEL_ARGS"),
        ("open.yaml", b"MODEL_ARGS: {\n", "it is not valid YAML"),
        ("deep.yaml", b"MODEL_ARGS: " + b"[" * 50 + b"]" * 50, "nested too deeply"),
        ("mapping.yaml", b"MODEL_ARGS:\n  --lr:\n    a: 1\n", "line 2: --lr has a mapping"),
        ("merged.yaml", b"MODEL_ARGS:\n  <<: 5\n", "line 2: it is not valid YAML: expected a mapping"),
        ("key.yaml", b"MODEL_ARGS:\n  ? [a]\n  : 1\n", "line 2: a sequence is a key, where a name is expected"),
        ("top.yaml", b"? {a: 1}\n: 1\n", "line 1: a mapping is a key"),
        ("items.yaml", b"MODEL_ARGS:\n  --data-path: [a, null]\n", "line 2: --data-path has null in its list"),
        ("nested.yaml", b"MODEL_ARGS:\n  --data-path: [[a]]\n", "line 2: --data-path has a sequence in its list"),
        ("objects.yaml", b"MODEL_ARGS: !!python/object/apply:os.system ['touch x']\n", "it has no MODEL_ARGS"),
    ],
)  # fmt: skip
def test_files_that_are_no_scripts(name: str, content: bytes, why: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        port_file(tmp_path / name, given={})
    assert why in str(caught.value) and name in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "none.sh", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            port_file(path, given={})


def test_options_that_fit_nothing_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        port("torchrun pretrain_gpt.py --bf16", tmp_path, given={"NOPE": "1"}, left_out=["nope"])
    assert "--without --nope is not a flag of this script" in str(caught.value)
    assert "--set NOPE is not a variable of this script" in str(caught.value)


def test_foreign_text_stays_inside_its_comment(tmp_path: Path):
    """A value with line breaks or controls cannot add a line to the file."""
    value = "x\\nmodel: {num_layers: 9}\\n# \\x1b[2J"
    run = port(f"torchrun pretrain_gpt.py --save $'{value}' --bogus $'a\\nb: 1' --num-layers 2", tmp_path)
    loaded = yaml.safe_load(run.yaml())
    assert loaded["model"] == {"num_layers": 2, **GELU} and set(loaded) == {"model", "checkpoint"}
    assert "\x1b" not in run.yaml()


def test_flags_that_mean_something_only_together(tmp_path: Path):
    """YaRN of latent attention, another tokenizer than tiktoken's, and Megatron's default recipe of FP8."""
    flags = "--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 40 --fp8-format hybrid"
    run = port(f"torchrun pretrain_gpt.py {flags} --tokenizer-type NullTokenizer --tiktoken-pattern v2", tmp_path)
    assert run.flags.of_kind("blocking") == []
    made = {setting.path: setting.value for setting, _ in run.settings}
    assert (made["model.position_embedding_type"], made["precision.fp8_recipe"]) == ("yarn", "delayed")
