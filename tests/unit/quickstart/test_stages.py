"""The quickstart's folder and its stages: what is kept, what is done again, what is never touched."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from petatron.base.errors import ConfigError, DataError
from petatron.quickstart import stages
from petatron.quickstart.corpus import Corpus, SourceFile
from petatron.quickstart.options import QuickstartOptions
from petatron.quickstart.stages import (
    Workspace,
    chosen_steps,
    prepare_corpus,
    prepare_data,
    prepare_settings,
    prepare_tokenizer,
    record_chosen_steps,
    stage_key,
    stop_message,
    training_flags,
    training_settings,
)
from petatron.validate import load_config

TEXT = "def main(argv):\n    return [word for word in argv if word]\n\n\n"
CORPUS = Corpus(
    tuple(SourceFile(f"m{number}.py", TEXT * (number + 1)) for number in range(6)), (SourceFile("held.py", TEXT * 9),)
)


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    space = Workspace(tmp_path / "quick")
    space.open()
    return space


def all_stages(space: Workspace, corpus: Corpus, options: QuickstartOptions) -> list[bool]:
    """Whether each stage was kept; the corpus comes from here instead of the standard library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "read_corpus", lambda *args, **kwargs: corpus)
        found, first = prepare_corpus(space, options)
    _, second = prepare_tokenizer(space, found, options.vocab_size)
    data, third = prepare_data(space)
    assert data["train"].num_documents == len(corpus.train)
    assert data["held_out"].num_documents == len(corpus.held_out)
    before = space.stage_keys().get("training")
    prepare_settings(space, options, steps=options.steps or 800)
    return [first, second, third, before == space.stage_keys()["training"]]


def test_finished_stages_are_kept_and_changes_redo_what_follows(space: Workspace) -> None:
    options = QuickstartOptions(vocab_size=300)
    assert all_stages(space, CORPUS, options) == [False, False, False, False]
    assert all_stages(space, CORPUS, options) == [True, True, True, True]
    assert all_stages(space, CORPUS, dataclasses.replace(options, vocab_size=320)) == [True, False, False, False]
    other = dataclasses.replace(CORPUS, train=CORPUS.train[1:])
    assert all_stages(space, other, dataclasses.replace(options, vocab_size=320)) == [False, False, False, False]
    assert all_stages(space, other, dataclasses.replace(options, vocab_size=320, steps=99)) == [True, True, True, False]


def test_a_lost_file_redoes_its_stage(space: Workspace) -> None:
    options = QuickstartOptions(vocab_size=300)
    all_stages(space, CORPUS, options)
    Path(f"{space.data('held_out')}.idx").unlink()
    assert all_stages(space, CORPUS, options) == [True, True, False, True]


def test_training_is_kept_for_another_layout_and_time_limit_but_not_for_other_settings(space: Workspace) -> None:
    options = QuickstartOptions(vocab_size=300)
    all_stages(space, CORPUS, options)
    space.training.mkdir()
    (space.training / "checkpoint").write_text("here")
    prepare_settings(space, dataclasses.replace(options, tensor_parallel=1, minutes=9.0), steps=800)
    assert (space.training / "checkpoint").is_file()
    prepare_settings(space, options, steps=801)
    assert not space.training.exists()


def test_a_stage_that_fails_is_not_finished(space: Workspace) -> None:
    output = space.root / "result"

    def work() -> None:
        output.write_text("half")
        raise DataError("the disk is full")

    with pytest.raises(DataError):
        space.run_stage("any", "key", [output], work)
    assert space.run_stage("any", "key", [output], lambda: output.write_text("whole")) is False
    assert space.run_stage("any", "key", [output], work) is True


def test_fresh_removes_what_the_quickstart_made_and_nothing_else(space: Workspace) -> None:
    all_stages(space, CORPUS, QuickstartOptions(vocab_size=300))
    (space.root / "notes.txt").write_text("mine")
    space.open()
    assert space.tokenizer.is_file()
    space.open(fresh=True)
    assert sorted(path.name for path in space.root.iterdir()) == ["notes.txt", "stages.json"]
    assert space.stage_keys() == {}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is a folder with other files in it. Give a new or an empty folder"):
        Workspace(tmp_path).open(fresh=fresh)
    assert (tmp_path / "data" / "thesis.txt").is_file()


def test_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"--out .*file cannot be used: .* Give a writable folder"):
        Workspace(tmp_path / "file").open()
    with pytest.raises(ConfigError, match="cannot be used"):
        Workspace(tmp_path / "file" / "below").open()


@pytest.mark.parametrize("text", ["", "{half", "[1, 2]"])
def test_an_unreadable_list_of_stages_means_nothing_is_finished(space: Workspace, text: str) -> None:
    (space.root / "stages.json").write_text(text)
    assert space.stage_keys() == {}


def test_keys_depend_on_every_part() -> None:
    assert stage_key("a", 1) == stage_key("a", 1)
    assert (
        len(
            {
                stage_key("a", 1),
                stage_key("a", 2),
                stage_key("b", 1),
                stage_key("a1"),
                stage_key({"x": 1}),
                stage_key({"x": 2}),
            }
        )
        == 6
    )


def test_the_settings_are_a_valid_run(space: Workspace) -> None:
    options = QuickstartOptions()
    space.settings.write_text(yaml.safe_dump(training_settings(space, options, steps=800)))
    run = load_config(training_flags(space, options, minutes=2.5)).config
    assert run.parallel.tensor_model_parallel_size == run.launch.nproc_per_node == 2
    assert run.train.train_iters == 800 and run.train.exit_duration_in_mins == 2.5
    assert run.checkpoint.save == run.checkpoint.load == run.log.log_dir == str(space.training)
    assert run.data.valid_data_path == (str(space.data("held_out")),)


def test_why_a_run_stopped(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    messages = ["stopping at iteration 3: old", "resumed", "stopping at iteration 5: new", "saved checkpoint"]
    records = [*({"kind": "event", "message": message} for message in messages), {"kind": "train"}]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    assert stop_message(metrics) == "stopping at iteration 5: new"
    metrics.write_text('{"kind": "train"}\n{"kind": "event", "message": "saved"}\n')
    assert stop_message(metrics) == ""
    metrics.write_text("{half")
    with pytest.raises(DataError, match=r"cannot be read.*--fresh"):
        stop_message(metrics)


def test_the_chosen_steps_belong_to_the_data(space: Workspace) -> None:
    assert chosen_steps(space) is None
    space.set_stage_key("data", "one")
    record_chosen_steps(space, 120)
    assert chosen_steps(space) == 120, "an interrupted training goes on with the same schedule"
    space.set_stage_key("data", "two")
    assert chosen_steps(space) is None
