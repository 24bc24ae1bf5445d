"""YAML whose aliases stand for gigabytes: dataset cards, configurations, lists of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from petatron.base.errors import ConfigError, DataError
from petatron.config import yaml_limits
from petatron.config.yaml_file import read_yaml_file
from petatron.config.yaml_limits import limited_loader
from petatron.data.fetch.dataset_hub import FolderHub
from petatron.evaluate.task_list import read_task_list
from tests.security.limits import limited

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
LONG_TEXT = f"text: &text {'x' * 100_000}\n"
BOMBS = {
    "aliases of aliases": f"{LAUGHS}license: *a9\n",
    "a long text often": f"{LONG_TEXT}license: [{', '.join(['*text'] * 10_000)}]\n",
    "merged tables": "a0: &a0 {k: v}\n"
    + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)),
    "itself": "license: &list [1, *list]\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_dataset_card_whose_aliases_explode_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    card = tmp_path / "owner" / "name" / "README.md"
    card.write_text(f"---\n{text}---\n# Text\n")
    with limited(), pytest.raises(DataError, match=str(card)) as caught:
        FolderHub(tmp_path).describe("owner/name", None)
    assert "alias" in str(caught.value)


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_config_and_a_list_of_tasks_too(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with limited():
        [problem] = read_yaml_file(path).problems
    assert "alias" in problem.rule and str(path) in problem.where
    with limited(), pytest.raises(ConfigError, match="alias"):
        read_task_list(path)


def test_aliases_as_people_write_them_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "base: &base {lr: 1, text: hello}\none: {<<: *base, lr: 2}\ntwo: [*base, *base]\n"
    found = yaml.load(text, limited_loader())
    assert found["one"] == {"lr": 2, "text": "hello"} and found["two"] == [found["base"]] * 2
    monkeypatch.setattr(yaml_limits, "MAX_ALIASED_SIZE", 20)
    assert len(yaml.load(f"text: {'x' * 1000}", limited_loader())["text"]) == 1000, "a long text without aliases"
    with pytest.raises(yaml.YAMLError, match="stand for more than 20 values"):
        yaml.load(text, limited_loader())
