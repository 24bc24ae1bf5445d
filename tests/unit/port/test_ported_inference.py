"""Scripts that answer prompts or serve become commands of ours, and every flag has its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.generation.generate import parser as generate_parser
from petatron.cli.main import main
from petatron.cli.serve.arguments import parser as serve_parser
from petatron.port.inference_flags import WITHOUT_EFFECT
from petatron.port.ported_inference import PortedInference, answers_prompts, port_inference
from petatron.port.read_script import read_script

MODEL = "--num-layers 24 --hidden-size 1152 --num-attention-heads 16 --bf16 --use-mcore-models --no-load-optim"
ENGINE = "--inference-max-seq-length 512 --inference-dynamic-batching-buffer-size-gb 20 --attention-backend flash"


def port(text: str, tmp_path: Path, name: str = "run.sh", **options: object) -> PortedInference:
    (tmp_path / name).write_text(text)
    given = options.pop("given", {})
    script = read_script(tmp_path / name, given)  # type: ignore[arg-type]
    assert answers_prompts(script)
    return port_inference(script, **options)  # type: ignore[arg-type]


def test_a_script_that_generates(tmp_path: Path):
    launch = "torchrun --nproc_per_node 8 examples/inference/gpt/gpt_dynamic_inference.py"
    sampling = "--temperature 1.0 --top_k 1 --num-tokens-to-generate 16 --return-log-probs"
    more = "--prompts 'Two words' Hello --tensor-model-parallel-size 2 --use-coordinator"
    run = port(f"{launch} --load /run {MODEL} {ENGINE} {sampling} {more}", tmp_path)
    assert not run.blocks and run.command.startswith("petatron generate /run --prompt 'Two words' --prompt Hello ")
    options, layout = generate_parser().parse_known_args(run.argv[1:])
    assert (options.max_length, options.max_tokens, options.top_k, options.logprobs) == (512, 16, 1, 0)
    assert layout == ["--bf16", "--tensor-model-parallel-size", "2", "--dp", "4"], "eight ranks are four replicas"
    accepted = "\n".join(run.accepted)
    assert "--attention-backend is accepted and changes nothing" in accepted
    assert "--use-coordinator is accepted" in accepted and "the checkpoint says the model: --num-layers" in accepted


def test_a_functional_test_with_a_file_of_prompts(tmp_path: Path):
    text = (
        "MODE: inference\nMODEL_ARGS:\n  --load: ${ROOT}/x\n  --prompt-file: ${ROOT}/p.jsonl\n  --output-path: ${OUT}\n"
    )
    text += "  --prompt-file-num-truncate: 128\n  --termination-id: -1\n  --incoming-requests-per-sec: -1\n"
    run = port(text, tmp_path, "model_config.yaml", given={"ROOT": "/data", "OUT": "o.json"})
    assert run.argv[:6] == ("generate", "/data/x", "--prompts", "/data/p.jsonl", "--out", "o.json")
    assert "--ignore-eos" in run.argv and "keep 128 of its lines" in "\n".join(run.accepted)
    unknown = port(text, tmp_path, "model_config.yaml")
    assert unknown.blocks and [item.name for item in unknown.missing] == ["ROOT", "OUT"]


def test_names_of_the_environment_stay_names(tmp_path: Path):
    run = port("python gpt_static_inference.py --load $HOME/x --prompts 'of $USER' \"of $USER\"", tmp_path)
    assert not run.blocks
    assert run.command.startswith(
        'petatron generate "${HOME}/x" --prompt \'of $USER\' --prompt "of ${USER}" --max-tokens'
    )


def test_prompts_that_are_in_the_python_script(tmp_path: Path):
    run = port("torchrun --nproc-per-node 2 -m examples.inference.offline_inference --load /x --async-mode", tmp_path)
    assert run.argv[:4] == ("generate", "/x", "--prompt", "Once upon a time") and not run.blocks
    assert "give them with --prompt TEXT" in "\n".join(run.accepted)


def test_a_script_that_serves(tmp_path: Path):
    flags = f"--load /run {MODEL} {ENGINE} --port 5001 --inference-max-requests 8 --temperature 1 --termination-id -1"
    for start in (
        "python tools/run_text_generation_server.py",
        "torchrun -m examples.inference.launch_inference_server",
    ):
        run = port(f"{start} {flags} --seed 3", tmp_path)
        assert not run.blocks
        options, layout = serve_parser().parse_known_args(run.argv[2:])
        assert (options.port, options.max_length, options.max_sequences, layout) == (5001, 512, 8, ["--bf16"])
        assert "each request says it: --temperature, --ignore-eos, --seed" in "\n".join(run.accepted)


@pytest.mark.parametrize("kind", ["requests", "tokens"])
def test_limits_of_the_engine_have_earlier_names_too(kind: str, tmp_path: Path):
    text = "python gpt_dynamic_inference.py --load /x --prompts a --inference-dynamic-batching-max"
    now, before = (port(f"{text}-{kind}{ending} 4096", tmp_path) for ending in ("", "-override"))
    assert not before.blocks and before.argv == now.argv and "4096" in now.argv


def test_flags_of_tests_of_an_engine_change_nothing(tmp_path: Path):
    """Answers do not depend on them: how caches, graphs and replicas are made, and how often prompts are repeated."""
    flags = " ".join(f"{flag} 1" for flag in sorted(WITHOUT_EFFECT))
    run = port(f"python gpt_dynamic_inference.py --load /x --prompts a {flags}", tmp_path)
    assert not run.blocks and len([line for line in run.accepted if "changes nothing" in line]) == len(WITHOUT_EFFECT)
    assert run.argv == port("python gpt_dynamic_inference.py --load /x --prompts a", tmp_path).argv


def test_what_blocks_is_told_at_once_and_can_be_left_out(tmp_path: Path):
    text = "python gpt_static_inference.py --prompts a --lora-path x --no-such-flag --termination-id 7 $EMPTY"
    run = port(text, tmp_path)
    said = "\n".join(run.groups()[0][1])
    assert run.blocks and all(
        part in said for part in ("--lora-path", "--no-such-flag", "--termination-id 7", "--load")
    )
    assert "EMPTY (line 1): the script does not set it" in said and "--set EMPTY= if it is empty" in said
    removed = ["lora-path", "no-such-flag", "termination-id"]
    assert port(f"{text} --load /x", tmp_path, left_out=removed).blocks
    rest = port(f"{text} --load /x", tmp_path, left_out=removed, given={"EMPTY": ""})
    assert not rest.blocks
    with pytest.raises(ConfigError, match="--without --nope is not a flag"):
        port(text, tmp_path, left_out=["nope"])


def test_the_command_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("python gpt_static_inference.py --load $1 --prompts 'a b'")
    assert main(["port", "run.sh"]) == 1
    assert "something blocks" in capsys.readouterr().out
    assert main(["port", "run.sh", "--set", "1=/x"]) == 0
    assert "start it with:\n  petatron generate /x --prompt 'a b'" in capsys.readouterr().out
    assert main(["port", "run.sh", "--set", "1=/x", "--run", "--toy"]) == 2
    assert "this script answers prompts" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.yaml"))
