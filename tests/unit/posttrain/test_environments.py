"""Episodes of several turns: the same in every layout and when resumed, exact where asked for, and never encoded again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from petatron.base.errors import ConfigError, TrainError
from petatron.config.schema.rollout import RolloutConfig
from petatron.data.conversations.following_messages import FollowingMessages
from petatron.data.tokenizer import ByteTokenizer
from petatron.posttrain.environments.environment_pool import EnvironmentPool
from petatron.posttrain.environments.environment_spec import environment_backend
from petatron.posttrain.environments.tool_schema import tool_schema
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.run_posttraining import RolloutSource
from petatron.train.check_and_open_run import check_start
from tests.dist import RankPool
from tests.longform import later
from tests.unit.data.conversations.chat_tokenizers import published
from tests.unit.posttrain.rollouts import Learned, learn, load, open_here, write_environment, write_prompts
from tests.unit.posttrain.test_rollout_loader import check_equal

ROOM = "--seq-length 40 --max-position-embeddings 40 --max-answer-tokens 4"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("environment")
    file, prompts = write_environment(folder / "early.py"), write_prompts(folder / "prompts.jsonl")
    return f"--rollout-prompts {prompts} --environment {file}:Early --max-turns 3 {ROOM}"


@pytest.fixture(scope="module")
def alone(flags: str) -> list[Learned]:
    return learn(load(flags))


def rollouts_of(flags: str, **environment: str) -> list[Rollout]:
    """The rollouts of the first step of a run."""
    opened = open_here(load(f"{flags} --updates-per-rollout 2"))
    state = next(component for component in opened.state.added_components if component.name == "rollouts")
    opened.loaders.train.next_step(16, 0)
    opened.loaders.train.close()
    return state.waiting[0]  # pyright: ignore[reportAttributeAccessIssue]


def test_an_episode_is_its_turns_token_by_token(flags: str):
    rollouts = rollouts_of(flags)
    assert {rollout.num_turns for rollout in rollouts} == {1, 2, 3}
    for rollout in rollouts:
        assert len(rollout.observed_spans) == rollout.num_turns - 1 and rollout.finished
        assert (
            len(rollout.log_probs) == rollout.drawn_mask().sum() == len(rollout.ids) - 4 * len(rollout.observed_spans)
        )
        prompt, text = bytes(rollout.prompt_ids).decode(), ByteTokenizer().decode(rollout.ids)
        assert prompt.endswith(":") and rollout.transcript == prompt + text
        for begin, end in rollout.observed_spans:
            observed = ByteTokenizer().decode(rollout.ids[begin:end])
            assert observed[0] == "<" and observed[2] in "xy" and observed[3] == ">"
        assert rollout.reward == sum(rollout.turn_rewards)
        learned = rollout.segment().learned
        assert learned.sum() == len(rollout.log_probs) and not learned[: len(rollout.prompt_ids)].any()


def test_episodes_are_learned_from(flags: str):
    learned = learn(load(f"{flags} --lr 1e-2 --lr-decay-style constant"), steps=16)
    assert learned[-1].metrics["reward"] > learned[0].metrics["reward"] + 0.3
    assert all(step.metrics["rollout difference"] < 1e-6 for step in learned), (
        "the context of a turn is that of training"
    )


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        ("--pp 2", 2),
        ("--dp 2 --use-distributed-optimizer", 2),
        later("--dp 2 --tp 2", 4),
    ],
)
def test_every_layout_learns_from_the_same_episodes(
    ranks: RankPool, flags: str, alone: list[Learned], layout: str, world_size: int
):
    for learned in ranks.run(learn, world_size, load(f"{flags} {layout}", world_size=world_size)):
        check_equal(learned, alone)


@pytest.mark.parametrize(("layout", "world_size"), [("", 1), ("--tp 2 --sequence-parallel", 2)])
def test_exact_log_probabilities_are_those_of_training(ranks: RankPool, flags: str, layout: str, world_size: int):
    exact = load(f"{flags} --exact-rollouts --no-fp64 {layout}", world_size=world_size)
    for learned in ranks.run(learn, world_size, exact) if world_size > 1 else [learn(exact)]:
        assert [step.metrics["rollout difference"] for step in learned] == [0.0] * 3


def test_a_resumed_run_meets_the_same_environments(flags: str, tmp_path: Path):
    save = f"{flags} --save {tmp_path}/run"
    complete = learn(load(save), steps=5, save_after=3)
    check_equal(learn(load(f"{save} --load {tmp_path}/run"), steps=2), complete[3:])


def test_a_room_that_is_full_ends_an_episode(flags: str):
    for rollout in rollouts_of(f"{flags} --seq-length 16 --max-answer-tokens 4"):
        assert len(rollout.prompt_ids) + len(rollout.ids) <= 17


def test_held_out_prompts_are_answered_in_turns(flags: str):
    prompts = flags.split()[1]
    opened = open_here(load(f"{flags} --eval-prompts {prompts} --eval-rollouts 2 --correct-reward 0.5"))
    assert opened.task_evaluator is not None
    [result] = opened.task_evaluator.evaluate(1).results.values()
    assert result.counts == {"prompts": 6, "answers": 12} and 0 <= result.metrics["reward"].value <= 1.5
    opened.loaders.train.close()


def test_last_answers_are_rewarded_besides(flags: str):
    for rollout in rollouts_of(f"{flags} --rewards 10*regex:(?s).*"):
        assert rollout.reward == 10 + sum(rollout.turn_rewards)


FAILING = """
import os, time

class Failing:
    stop = ["z"]

    def reset(self, record):
        self.place = int(record["answer"])
        if self.place == 0:
            raise KeyError("reset")

    def step(self, answer):
        print("to the error stream")
        if self.place == 1:
            os._exit(3)
        if self.place == 2:
            time.sleep(60)
        if self.place == 3:
            return "no tuple"
        if self.place == 4:
            return [{"role": "user", "content": "x"}], 0.0, False
        return None, float(len(answer)), True
"""


def test_a_failure_costs_one_episode(flags: str, tmp_path: Path):
    file = write_environment(tmp_path / "failing.py", FAILING)
    prompts = flags.split()[1]
    settings = (
        f"--rollout-prompts {prompts} --environment {file}:Failing {ROOM} --reward-timeout-s 1 --reward-workers 4"
    )
    opened = open_here(load(f"{settings} --global-batch-size 24 --rollouts-per-prompt 4 --updates-per-rollout 2"))
    state = next(component for component in opened.state.added_components if component.name == "rollouts")
    opened.loaders.train.next_step(24, 0)
    rollouts: list[Rollout] = state.waiting[0]  # pyright: ignore[reportAttributeAccessIssue]
    opened.loaders.train.close()
    failures = {rollout.prompt: str(rollout.failure) for rollout in rollouts}
    wanted = (
        "KeyError: 'reset'",
        "has ended",
        "did not answer within 1 s",
        "not (observation, reward, done)",
        "Use --rollout-chat",
    )
    for place, text in enumerate(wanted):
        assert text in failures[place]
    assert failures[5] == "None" and all(r.reward == len(r.text) for r in rollouts if r.prompt == 5)
    assert all(not rollout.segment().counted for rollout in rollouts if rollout.prompt < 5)


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        ("class Other: pass", "Early", "has no class Early"),
        ("class Early: pass", "Early", "Early of .* has no method reset"),
        ("import nothing_there", "Early", "nothing_there"),
        (
            "class Early:\n    stop = 'x'\n    def reset(self, r): ...\n    def step(self, a): ...",
            "Early",
            "no list of texts",
        ),
    ],
)
def test_a_file_that_is_no_environment_ends_the_run(flags: str, tmp_path: Path, content: str, name: str, text: str):
    file, prompts = write_environment(tmp_path / "file.py", content), flags.split()[1]
    with pytest.raises(TrainError, match=f"--environment .* cannot be used: .*{text}"):
        RolloutSource(check_start(load(f"--rollout-prompts {prompts} --environment {file}:{name}")))


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ("none.py:Early", "names the file none.py, which does not exist"),
        ("early.py", "names no environment. Write FILE.py:CLASS"),
        ("tools:early", "names no Python file. Write tools:FILE.py"),
        (f"tools:{__file__}", "needs a chat template that shows calls"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(flags: str, environment: str, text: str):
    with pytest.raises(ConfigError) as refused:
        RolloutSource(check_start(load(f"--rollout-prompts {flags.split()[1]} --environment {environment}")))
    assert text in str(refused.value)


def test_turns_are_of_environments_alone(flags: str):
    loaded = load(f"--rollout-prompts {flags.split()[1]} --max-turns 3")
    assert any("--max-turns" in str(notice) for notice in loaded.notices), "it has no effect"


def test_a_rollout_is_read_as_it_was_written(flags: str):
    for rollout in rollouts_of(flags)[:4]:
        assert Rollout.from_json(json.loads(json.dumps(rollout.to_json()))) == replace(rollout)


TOOLS = '''
def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: A number.
        second: Another.
    """
    return first + second

def _hidden(): ...
'''


def test_tools_are_called_through_the_chat_template(tmp_path: Path):
    _, tokenizer = published(tmp_path / "tokenizer", "qwen3")
    file = write_environment(tmp_path / "tools.py", TOOLS)
    settings = RolloutConfig(rollout_prompts=("x",), environment=f"tools:{file}", reward_workers=1)
    backend = environment_backend(settings, tokenizer)
    assert backend is not None
    [tool] = backend.properties.tools
    assert tool["function"]["parameters"]["required"] == ["first", "second"]
    pool = EnvironmentPool(backend, workers=2)
    try:
        assert pool.start([({}, 0)] * 3) == [None] * 3
        called = (
            "<think>\nhm <tool_call>\n</think>\n\n" + CALL.format('"first": 2, "second": 3') + CALL.format('"first": 1')
        )
        results = pool.step([(0, called), (1, "It is 5."), (2, CALL.format('"first": "a", "second": 3'))])
    finally:
        pool.close()
    contents = [
        [message["content"] for message in result.observation or []]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        for result in results
    ]
    assert contents[0][0] == "5" and contents[0][1].startswith("Error: TypeError: ") and contents[1] == []
    assert contents[2][0].startswith("Error: TypeError")
    assert [result.done for result in results] == [False, True, False]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    text = FollowingMessages(tokenizer, tools=backend.properties.tools).text(results[0].observation)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert text.startswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\nError: "
    )
    assert text.endswith("<|im_start|>assistant\n")


CALL = '<tool_call>\n{{"name": "add", "arguments": {{{}}}}}\n</tool_call>'


def test_the_schema_of_a_function_is_that_of_transformers():
    def look(
        city: str, days: int, where: list[str], scale: Literal["C", "F"] = "C", more: dict[str, float] | None = None
    ):
        """Returns the weather.

        Args:
            city: Its name.
            days: How many days ahead,
                beginning today.
            where: Parts of it.
            scale: Of temperatures.
            more: Whatever else.

        Returns:
            A text.
        """

    theirs = get_json_schema(look)
    theirs["function"].pop("return", None)
    assert tool_schema(look) == theirs
    for function in (lambda city: city, lambda *cities: cities):
        with pytest.raises(ValueError, match=r"has no type for city|which no call by names has"):
            tool_schema(function)
