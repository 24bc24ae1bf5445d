from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.cli.curation import mix as mix_command
from petatron.cli.main import main
from petatron.data.curate import mix_sources as module
from petatron.data.curate.mix_sources import Source, mix_sources
from petatron.validate import load_config
from tests.unit.data.conftest import MakeDataset


@pytest.fixture
def prefixes(make_dataset: MakeDataset) -> list[str]:
    return [make_dataset([[1] * 10] * count, name) for name, count in (("web", 90), ("my code", 10))]


@pytest.mark.parametrize("examples", [module, mix_command])
def test_examples_in_docstrings(examples) -> None:
    result = doctest.testmod(examples)
    assert result.attempted > 0 and result.failed == 0


def test_the_printed_blend_is_one_that_a_run_takes(
    tmp_path: Path, prefixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "blend.yaml"
    flags = ("--temperature", "2", "--target-tokens", "4K", "--yaml", str(file))
    assert main(["data", "mix", f"{prefixes[0]}.idx", prefixes[1], *flags]) == 0
    printed = capsys.readouterr().out
    assert f"0.2500  100           1,000        10.00   {prefixes[1]}" in printed and "4,000 tokens in all" in printed
    assert f"warning: {prefixes[1]} is read 10.0 times; more than 4 epochs add little." in printed
    assert f"--data-path 0.75 {prefixes[0]} 0.25 '{prefixes[1]}'" in printed and file.read_text() in printed
    loaded = load_config(
        ["--config", str(file), "--lr", "1e-3", "--train-iters", "1", "--vocab-size", "9"], preset="tiny-llama"
    )
    assert loaded.config.data.data_path == ("0.75", prefixes[0], "0.25", prefixes[1])


def test_shares() -> None:
    sources = [Source("a", 800), Source("b", 200)]
    assert [part.weight for part in mix_sources(sources).sources] == [0.8, 0.2]
    weighted = mix_sources(sources, weights=[1, 3], target_tokens=2000)
    assert [(part.tokens, part.epochs) for part in weighted.sources] == [(500, 0.625), (1500, 7.5)]
    assert [part.source.prefix for part in weighted.repeated] == ["b"]
    hot = mix_sources(sources, temperature=1e6)
    assert [round(part.weight, 4) for part in hot.sources] == [0.5, 0.5]
    assert [part.weight for part in mix_sources(sources, temperature=1e-9).sources] == [1, 0]


def test_what_is_beyond_the_epochs_goes_to_the_others() -> None:
    sources = [Source("a", 1000), Source("b", 100), Source("c", 100)]
    mix = mix_sources(sources, weights=[1, 2, 1], target_tokens=1000, max_epochs=3)
    assert [part.tokens for part in mix.sources] == [400, 300, 300]  # b is capped at first, and then c
    assert [part.epochs for part in mix.sources] == pytest.approx([0.4, 3, 3])
    with pytest.raises(ConfigError, match=r"all sources together have 84\.0% of the tokens then"):
        mix_sources(sources, target_tokens=1_000_0 // 7, max_epochs=1)
    with pytest.raises(ConfigError, match="only sources of weight 0"):
        mix_sources(sources, weights=[0, 1, 1], target_tokens=1000, max_epochs=2)


@given(
    st.lists(st.tuples(st.integers(1, 10**12), st.floats(0.01, 1)), min_size=1, max_size=6), st.floats(0.5, 10), st.floats(1, 9)
)  # fmt: skip
def test_a_mix_is_complete_and_within_its_epochs(
    parts: list[tuple[int, float]], temperature: float, most: float
) -> None:
    sources = [Source(str(index), tokens) for index, (tokens, _) in enumerate(parts)]
    weights = [weight for _, weight in parts]
    for options in ({"temperature": temperature}, {"weights": weights}, {"weights": weights, "max_epochs": most}):
        mix = mix_sources(sources, **options)
        assert sum(part.weight for part in mix.sources) == pytest.approx(1)
        assert max(part.epochs for part in mix.sources) <= options.get("max_epochs", float("inf")) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--weights", "1"), "--weights 1 are 1 for 2 datasets"),
        (("--weights", "-1", "2"), "--weights -1 2 are not all at least 0"),
        (("--weights", "0", "0"), "are not all at least 0"),
        (("--weights", "1", "2", "--temperature", "2"), "--temperature is of no use beside --weights"),
        (("--temperature", "0"), "--temperature 0 is not above 0"),
        (("--target-tokens", "0"), "--target-tokens 0 is below 1"),
        (("--target-tokens", "many"), "--target-tokens"),
        (("--max-epochs", "0"), "--max-epochs 0 is not above 0"),
        (("--yaml", "no/where.yaml"), "is in a folder that does not exist"),
    ],
)
def test_problems(
    prefixes: list[str], capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    try:
        code = main(["data", "mix", *prefixes, *flags])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


def test_other_prefixes(prefixes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "mix", prefixes[0], prefixes[0]]) == 2
    assert "names a dataset twice" in capsys.readouterr().err
    assert main(["data", "mix", "nothing"]) == 1
    assert "nothing.idx does not exist" in capsys.readouterr().err
