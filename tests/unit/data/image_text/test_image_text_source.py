"""Files of images and texts: every form, and every way in which a record fails: counted, named, nothing lost."""

from __future__ import annotations

import base64
import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from petatron.base.errors import DataError
from petatron.data.image_text import image_text_dataset
from petatron.data.image_text.image_text_settings import ImageTextSettings
from petatron.data.image_text.image_text_source import ImageTextSource
from petatron.data.image_text.tar_records import tar_paths
from petatron.data.images.patch_grid import PatchGrid
from tests.heard import heard
from tests.unit.data.image_text.image_records import (
    FEATURES,
    GRID,
    IMAGE_TOKEN,
    open_source,
    png,
    request,
    samples_of,
    shades_of,
    text_of,
    write_records,
    write_tar,
)
from tests.unit.data.images.image_files import animation, encoded, noise, png_header

GOOD = {"image": "good.png", "text": "<image>good"}
PHOTO = Image.fromarray(noise(40, 30))
# A record of each kind of failure, and the kind; those of the second list show only when an image is decoded.
BAD: list[tuple[str, bytes | None, dict[str, Any], str]] = [
    ("none.png", None, {}, "missing"),
    ("empty.png", b"", {}, "empty"),
    ("text.png", b"this is no image", {}, "unknown format"),
    ("bomb.png", png_header(30_000, 30_000), {}, "too many pixels"),
    ("float.tiff", encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), {}, "unsupported"),
    ("../outside.png", None, {}, "outside"),
    ("https://example.org/a.png", None, {}, "outside"),
    ("data:image/png;base64,%%%", None, {}, "unreadable"),
    ("good.png", png(7), {"text": "<image><image>two tags"}, "tag without image"),
    ("good.png", png(7), {"image": ["good.png", "good.png"], "text": "<image>one tag"}, "image without tag"),
    ("good.png", png(7), {"text": None}, "no text"),
    ("good.png", png(7), {"image": 7}, "wrong form"),
]
BAD_PIXELS: list[tuple[str, bytes, str]] = [
    ("cut.png", encoded(PHOTO, "PNG")[:-300], "damaged"),
    ("cut.jpg", encoded(PHOTO, "JPEG")[:-200], "damaged"),
    ("header.png", png_header(30, 30), "damaged"),
]


def with_bad_records(folder: Path, *, with_pixels: bool) -> Path:
    records, images = [GOOD], {"good.png": png(7)}
    for name, content, changes, _ in BAD:
        records.append({"image": name, "text": "<image>bad", **changes})
        images |= {} if content is None else {name: content}
    for name, content, _ in BAD_PIXELS if with_pixels else ():
        records.append({"image": name, "text": "<image>bad"})
        images[name] = content
    return write_records(folder, [*records, {**GOOD, "text": "<image>last"}], images)


def test_a_sample(tmp_path: Path):
    records = [
        {"images": ["a.png", "b.png"], "text": "<image>one<image>two"},
        {"text": "text"},
        {"image": "a.png", "text": "front"},
    ]
    path = write_records(tmp_path, records, {"a.png": png(10), "b.png": png(20, (30, 11))})
    samples = {text_of(sample): sample for sample in samples_of(open_source(path))}
    assert set(samples) == {"onetwo", "ext", "front"}
    sample = samples["onetwo"]
    features = [IMAGE_TOKEN] * FEATURES
    ids = [*features, *b"one", *features, *b"two", 256]
    assert sample["tokens"].tolist() == [*ids, *[256] * (33 - len(ids))]
    assert sample["loss_mask"].tolist() == [0] * 4 + [1] * 3 + [0] * 4 + [1] * 4 + [0] * (33 - len(ids))
    assert sample["grids"].tolist() == [[1, 2, 2], [1, 2, 2]] and shades_of(sample) == [10, 20]
    assert sample["patches"].shape == (8, 48) and sample["patches"].dtype == np.uint8
    assert (
        sample["tokens"].dtype == np.int64
        and sample["loss_mask"].dtype == np.float32
        and sample["grids"].dtype == np.int64
    )
    assert samples["ext"]["patches"].shape == (0, 48) and samples["ext"]["grids"].shape == (0, 3)
    assert samples["front"]["tokens"][:4].tolist() == features


def test_every_failure_is_counted_and_named(tmp_path: Path):
    """Those that headers show are known before training; the images behind right headers are replaced, and counted too."""
    path = with_bad_records(tmp_path / "data", with_pixels=True)
    with heard("petatron", level=logging.WARNING) as messages:
        source = open_source(path, on_error="skip", cache_folder=tmp_path / "cache")
        assert sorted(record.kind for record in source.left_out) == sorted(kind for *_, kind in BAD)
        assert source.num_units == 2 + len(BAD_PIXELS)
        samples = samples_of(source, 2 * source.num_units)
    assert {text_of(sample) for sample in samples} == {"good", "last"}
    assert source.report.counts == {"damaged": len(BAD_PIXELS)}
    assert {record.reason.split()[0] for record in source.report.left_out} == {name for name, *_ in BAD_PIXELS}
    said = "\n".join(messages)
    assert f"{len(BAD)} of {2 + len(BAD) + len(BAD_PIXELS)} records cannot be used" in said
    assert (
        "too many pixels (" in said
        and "bomb.png has more than 67,108,864 pixels" in said
        and "none.png is missing" in said
    )
    assert "cut.jpg" in said and "takes its place" in said
    (listed,) = (tmp_path / "cache").glob("*-left-out.jsonl")
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [line["kind"] for line in lines] == [kind for *_, kind in BAD] and str(listed) in said


@pytest.mark.parametrize("number", range(len(BAD)))
def test_every_failure_is_an_error_by_default(tmp_path: Path, number: int):
    name, content, changes, kind = BAD[number]
    images = {"good.png": png(7)} | ({} if content is None else {name: content})
    path = write_records(tmp_path, [GOOD, {"image": name, "text": "<image>bad", **changes}], images)
    with pytest.raises(DataError, match=f"1 of 2 records cannot be used: 1 {kind} .*line 2: .*on_error=skip"):
        open_source(path)


def test_damaged_pixels_are_an_error_by_default(tmp_path: Path):
    name, content, _ = BAD_PIXELS[0]
    path = write_records(tmp_path, [{"image": name, "text": "x"}], {name: content})
    with pytest.raises(DataError, match=r"line 1: cut\.png cannot be decoded .*on_error=skip"):
        samples_of(open_source(path))
    with pytest.raises(DataError, match="1 of 1 records cannot be used: 1 damaged"):
        open_source(path, check_images="decode")
    assert open_source(path, check_images="decode", on_error="skip").num_units == 0
    with pytest.raises(DataError, match="1 records one after the other make no samples"):
        samples_of(open_source(path, on_error="skip"))


def test_no_check_leaves_all_to_training(tmp_path: Path):
    path = with_bad_records(tmp_path, with_pixels=True)
    source = open_source(path, on_error="skip", check_images="none")
    assert {text_of(sample) for sample in samples_of(source)} == {"good", "last"}
    assert sum(source.report.counts.values()) + len(source.left_out) == len(BAD) + len(BAD_PIXELS)


def test_images_of_all_sorts(tmp_path: Path):
    """Animated, CMYK, 16 bits, a palette with transparency, gray: all become samples."""
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([200, 0, 0])
    images = {
        "animated.gif": animation("GIF"),
        "cmyk.jpg": encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"),
        "deep.png": encoded(Image.fromarray(np.full((8, 8), 32_896, np.uint16)), "PNG"),
        "clear.png": encoded(palette, "PNG", transparency=0),
        "gray.png": encoded(Image.new("L", (8, 8), 77), "PNG"),
    }
    path = write_records(tmp_path, [{"image": name, "text": f"<image>{name}"} for name in images], images)
    samples = {text_of(sample): shades_of(sample) for sample in samples_of(open_source(path))}
    assert samples == {"animated.gif": [0], "cmyk.jpg": [255], "deep.png": [128], "clear.png": [255], "gray.png": [77]}


def test_samples_are_functions_of_their_number(tmp_path: Path):
    """In any order, from several threads, and opened again; a record that fails is replaced by the same one."""
    names = [f"{number}.png" for number in range(9)]
    images = {name: png(20 * number) for number, name in enumerate(names)} | {"4.png": BAD_PIXELS[0][1]}
    path = write_records(tmp_path, [{"image": name, "text": name} for name in names], images)

    def dataset():
        source = open_source(path, on_error="skip")
        return source.dataset(range(2, 9), request(count=30))

    first, second = dataset(), dataset()
    assert first.fingerprint == second.fingerprint
    expected = [first[index]["tokens"].tobytes() for index in range(30)]
    results: dict[int, bytes] = {}
    threads = [
        threading.Thread(
            target=lambda part=part: results.update(
                {i: second[i]["tokens"].tobytes() for i in range(29 - part, -1, -3)}
            )
        )
        for part in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(30)] == expected
    texts = [text_of(first[index]) for index in range(7)]
    assert set(texts) == {f"{number}.png" for number in (2, 3, 5, 6, 7, 8)}, "those of other splits take no place"
    assert str(first.trace(0).documents[0]).endswith(f"from {path}:{int(text_of(first[0])[0]) + 1}")
    traced = [first.trace(index).documents[0].place.document for index in range(7)]
    assert [f"{number}.png" for number in traced] == texts
    with pytest.raises(IndexError):
        first[30]


def test_the_check_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And what was left out is looked at again: it may have been repaired."""
    path = with_bad_records(tmp_path / "data", with_pixels=False)
    cache = tmp_path / "cache"
    checked: list[int] = []
    check = ImageTextSource._checked
    monkeypatch.setattr(
        ImageTextSource, "_checked", lambda self, number: (checked.append(number), check(self, number))[1]
    )
    first = open_source(path, on_error="skip", cache_folder=cache)
    assert len(checked) == 2 + 2 * len(BAD)
    checked.clear()
    again = open_source(path, on_error="skip", cache_folder=cache)
    assert sorted(checked) == list(range(1, len(BAD) + 1)) and again.fingerprint == first.fingerprint
    (tmp_path / "data" / "none.png").write_bytes(png(1))
    repaired = open_source(path, on_error="skip", cache_folder=cache)
    assert repaired.num_units == first.num_units + 1 and repaired.fingerprint != first.fingerprint


def test_long_samples(tmp_path: Path):
    """Text is cut, images are not; a sample in which nothing is left to learn is left out."""
    records = [
        {"image": "a.png", "text": "<image>" + "x" * 50},
        {"images": ["a.png", "b.png"], "text": "<image>" + "y" * 10 + "<image>z"},
        {"images": ["a.png"] * 5, "text": "<image>" * 5 + "too many"},
    ]
    path = write_records(tmp_path, records, {"a.png": png(1), "b.png": png(2)})
    source = open_source(path)
    samples = {text_of(sample): sample for sample in samples_of(source, seq_length=16)}
    assert set(samples) == {"x" * 13, "y" * 10}
    assert shades_of(samples["y" * 10]) == [1] and (samples["y" * 10]["tokens"] == IMAGE_TOKEN).sum() == FEATURES
    assert source.report.num_truncated == 3 and source.report.counts == {"too long": 1}
    source = open_source(path, long_samples="skip")
    assert {text_of(sample) for sample in samples_of(source, seq_length=28)} == {"y" * 10 + "z", "too many"}
    assert source.report.counts == {"too long": 1}
    with pytest.raises(DataError, match=r"has 55 tokens, and a sample 28\. Use a larger --seq-length"):
        samples_of(open_source(path, long_samples="fail"), seq_length=28)


def test_too_many_patches(tmp_path: Path):
    records = [{"images": ["a.png"] * 3, "text": "a<image>b<image>c<image>d"}, {"images": ["a.png"] * 3, "text": "e"}]
    path = write_records(tmp_path, records, {"a.png": png(1)})
    grid = PatchGrid(patch_size=4, image_size=8, image_token_id=IMAGE_TOKEN, max_patches=10, extra_patches=1)
    source = open_source(path, grid=grid)
    assert {text_of(sample) for sample in samples_of(source)} == {"bc"}
    assert source.report.counts == {"too many patches": 1}
    with pytest.raises(DataError, match="has images of 15 patches, and a sample at most 10"):
        samples_of(open_source(path, grid=grid, long_samples="fail"))


def test_videos(tmp_path: Path):
    """A list of frames, a folder of them, an animated file; pairs of frames are one patch in time."""
    frames = {f"frames/{number}.png": png(10 * number) for number in range(6)}
    images = {**frames, "film.gif": animation("GIF", 5, (8, 8)), "empty/readme": b"x"}
    records = [
        {"video": ["frames/1.png", "frames/2.png", "frames/3.png"], "text": "<video>list"},
        {"video": "frames", "text": "<video>folder"},
        {"video": "film.gif", "text": "<video>film"},
        {"image": "film.gif", "text": "<image>image"},
        {"video": "empty", "text": "<video>empty"},
    ]
    path = write_records(tmp_path, records, images)
    grid = PatchGrid(patch_size=4, temporal_patch_size=2, image_size=8, image_token_id=IMAGE_TOKEN)
    source = open_source(path, grid=grid, max_frames=4, on_error="skip")
    samples = {text_of(sample): sample for sample in samples_of(source)}
    assert {name: sample["grids"].tolist() for name, sample in samples.items()} == {
        "list": [[2, 2, 2]],
        "folder": [[2, 2, 2]],
        "film": [[2, 2, 2]],
        "image": [[1, 2, 2]],
    }
    shades = {
        name: sample["patches"][::4].reshape(-1, 3, 2, 16)[:, 0, :, 0].ravel() for name, sample in samples.items()
    }
    assert shades["list"].tolist() == [10, 20, 30, 30] and shades["folder"].tolist() == [0, 20, 30, 50]
    assert [round(shade / 40) for shade in shades["film"].tolist()] == [0, 1, 3, 4]
    assert shades["image"].tolist() == [0, 0]
    assert [record.reason for record in source.left_out] == ["empty is a folder without images"]
    shown = open_source(path, grid=grid, max_frames=4, on_error="skip", animations_are_videos=True)
    samples = {text_of(sample): sample["grids"].tolist() for sample in samples_of(shown)}
    assert samples["image"] == [[2, 2, 2]]


def test_data_urls(tmp_path: Path):
    url = f"data:image/png;base64,{base64.b64encode(png(9)).decode()}"
    messages = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}],
        },
        {"role": "assistant", "content": "gray"},
    ]
    path = write_records(tmp_path, [{"messages": messages}], {})
    (sample,) = samples_of(open_source(path, chat_format="chatml"), seq_length=128)
    assert shades_of(sample) == [9] and text_of(sample) == "gray<|im_end|>\n"
    with pytest.raises(DataError, match="too large"):
        open_source(path, chat_format="chatml", max_image_bytes=20)


def test_webdataset(tmp_path: Path):
    """Records of several tars; images in their order, a text beside a JSON, long names, files of no use."""
    record = {"conversations": [{"from": "human", "value": "<image>?<image>"}, {"from": "gpt", "value": "said"}]}
    long = "deep/" * 40 + "name"
    write_tar(tmp_path / "a-00.tar", {"0.png": png(1), "0.txt": "zero", "0.cls": "7", "1.txt": "one", "1.png": png(2)})
    members = {"2.0.png": png(3), "2.json": json.dumps(record), "2.1.jpg": encoded(Image.new("RGB", (8, 8)), "JPEG")}
    write_tar(tmp_path / "a-01.tar", {**members, "3.txt": "alone", f"{long}.png": png(4), f"{long}.txt": "long"})
    for name in ("a-{00..01}.tar", "a-*.tar", "a-0{0,1}.tar"):
        source = open_source(tmp_path / name, chat_format="chatml", cache_folder=tmp_path / "cache")
        samples = {text_of(sample): shades_of(sample) for sample in samples_of(source, seq_length=128)}
        assert str(source.provenance(3)) == f"{tmp_path / 'a-01.tar'}:2 (id 3)"
        assert samples == {"zero": [1], "one": [2], "said<|im_end|>\n": [3, 0], "lone": [], "long": [4]}
    assert source.fingerprint == open_source(tmp_path / "a-{00..01}.tar", chat_format="chatml").fingerprint


@pytest.mark.parametrize("format_number", [0, 1, 2])
def test_tars_of_every_format(tmp_path: Path, format_number: int):
    long = "d" * 90 + "/" + "n" * 90
    path = write_tar(tmp_path / "a.tar", {f"{long}.png": png(4), f"{long}.txt": "é"}, format=format_number)
    (sample,) = samples_of(open_source(path))
    assert text_of(sample) == "é" and shades_of(sample) == [4]


def test_failures_in_tars(tmp_path: Path):
    members: dict[str, bytes | str] = {"0.png": png(1), "0.txt": "zero"}
    for number, (name, content, _) in enumerate(BAD_PIXELS):
        members |= {f"p{number}.{name[-3:]}": content, f"p{number}.txt": "bad"}
    headers = {"empty": b"", "text": b"no image", "bomb": png_header(30_000, 30_000)}
    for name, content in headers.items():
        members |= {f"{name}.png": content, f"{name}.txt": "bad"}
    members |= {"none.txt": "<image> tag", "lone.png": png(3), "bytes.txt": b"\xff", "json.json": "{"}
    members |= {"two.png": png(1), "two.txt": "<image><image>"}
    path = write_tar(tmp_path / "a.tar", members)
    source = open_source(path, on_error="skip")
    assert {record.title.rpartition(": ")[2]: record.kind for record in source.left_out} == {
        "empty": "empty",
        "text": "unknown format",
        "bomb": "too many pixels",
        "none": "tag without image",
        "lone": "no text",
        "bytes": "wrong form",
        "json": "no json",
        "two": "tag without image",
    }
    assert {text_of(sample) for sample in samples_of(source)} == {"zero"}
    assert source.report.counts == {"damaged": len(BAD_PIXELS)}


def test_tars_that_cannot_be_read(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", {"0.png": png(1, (400, 400)), "0.txt": "x" * 2000})
    content = path.read_bytes()
    for cut in (100, 700, 1500):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError, match="Check the file"):
            open_source(path)
    path.write_bytes(b"x" * 2048)
    with pytest.raises(DataError, match="no tar, or damaged"):
        open_source(path)
    for packed in ("w:gz", "w:xz", "w:bz2"):
        write_tar(path, {"0.png": noise(40, 40).tobytes()}, mode=packed)
        with pytest.raises(DataError, match="packed"):
            open_source(path)
    with pytest.raises(DataError, match="cannot be read"):
        open_source(tmp_path / "none.tar")
    with pytest.raises(DataError, match="matches no file"):
        open_source(tmp_path / "none-*.tar")
    with pytest.raises(DataError, match="more than 100,000"):
        tar_paths("a-{0..999999}.tar")


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read"):
        open_source(tmp_path / "none.jsonl")
    path = write_records(tmp_path, [GOOD], {"good.png": png(1)})
    with pytest.raises(DataError, match="image_folder=FOLDER"):
        open_source(path, image_folder=str(tmp_path / "none"))
    path.write_text("\n \n\n")
    with pytest.raises(DataError, match="has no records"):
        open_source(path)
    path.write_text(json.dumps([GOOD]))
    with pytest.raises(DataError, match="one JSON list"):
        open_source(path)
    path.write_text(f"x\n{json.dumps(GOOD)}\n\n   \n")
    source = open_source(path, on_error="skip")
    assert source.num_units == 1 and [str(record)[:18] for record in source.left_out] == ["line 1: is no JSON"]
    assert str(source.provenance(1)) == f"{path}:2"


def test_links_that_lead_outside(tmp_path: Path):
    (tmp_path / "secret.png").write_bytes(png(1))
    path = write_records(tmp_path / "data", [GOOD], {})
    (tmp_path / "data" / "good.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match="1 outside"):
        open_source(path)
    assert open_source(path, image_folder=str(tmp_path), on_error="skip").num_units == 0
    (tmp_path / "good.png").write_bytes(png(2))
    assert open_source(path, image_folder=str(tmp_path)).num_units == 1


def test_what_samples_need(tmp_path: Path):
    path = write_records(tmp_path, [GOOD], {"good.png": png(1)})
    source = open_source(path)
    with pytest.raises(DataError, match="need a tokenizer"):
        source.dataset(range(1), request(tokenizer=None))
    with pytest.raises(DataError, match="--image-token-id 300 is no id of the vocabulary, which has 257"):
        source.dataset(range(1), request(vocab_size=257))


def test_many_failures_in_a_row_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_text_dataset, "_MAX_TRIES", 3)
    bad = BAD_PIXELS[0][1]
    path = write_records(tmp_path, [{"image": "a.png", "text": str(number)} for number in range(6)], {"a.png": bad})
    with pytest.raises(DataError, match="3 records one after the other make no samples"):
        samples_of(open_source(path, on_error="skip"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"on_error": "ignore"}, "on_error=ignore is no choice. Use one of fail, skip."),
        ({"check_images": "all"}, "check_images=all"),
        ({"long_samples": "cut"}, "long_samples=cut"),
        ({"images": "stretch"}, "images=stretch"),
        ({"resample": "nearest"}, "resample=nearest"),
        ({"image_markup": "html"}, "image_markup=html"),
        ({"chat_format": "html"}, "chat_format=html"),
        ({"max_frames": 0}, "max_frames=0 is below 1"),
        ({"max_pixels": 5}, "max_pixels=5 is below min_pixels"),
        ({"max_image_pixels": 1 << 30}, "beyond which Pillow decodes nothing"),
    ],
)
def test_settings(settings: dict[str, Any], problem: str):
    (found,) = ImageTextSettings(**settings).setting_problems()
    assert problem in str(found)
    assert not ImageTextSettings().setting_problems()


@pytest.mark.parametrize("images", ["squash", "pad", "dynamic", "tiles", "ratio"])
def test_every_policy_makes_samples(tmp_path: Path, images: str):
    """Of as many tokens as features."""
    path = write_records(tmp_path, [{"image": "a.png", "text": "x"}], {"a.png": encoded(PHOTO, "PNG")})
    limits = {"min_pixels": 64, "max_pixels": 640, "longest_side": 16, "max_tiles": 4}
    grid = PatchGrid(patch_size=4, merge_size=2, image_size=8, image_token_id=IMAGE_TOKEN)
    (sample,) = samples_of(open_source(path, images=images, grid=grid, resample="bilinear", **limits), seq_length=64)
    patches = sum(int(np.prod(of_image)) for of_image in sample["grids"])
    assert patches == len(sample["patches"]) == 4 * (sample["tokens"] == IMAGE_TOKEN).sum() > 0


def test_grids_of_the_tests():
    assert GRID.num_features(GRID.of_size((8, 8))) == FEATURES


def packed_texts(sample: dict[str, np.ndarray]) -> list[str]:
    """The texts of a row, one for each record."""
    begins = sample["begins"]
    ids = [sample["tokens"][:-1][begins == begin] for begin in np.unique(begins[begins >= 0])]
    return [bytes(of_record[of_record < 256].tolist()).decode() for of_record in ids]


def test_packing(tmp_path: Path):
    """Every record is in one row, whole; images follow in the order of the records; a record that fails leaves a gap and no more."""
    random = np.random.default_rng(1)
    images = {f"{number}.png": png(5 * number) for number in range(30)} | {"7.png": BAD_PIXELS[0][1]}
    records = [
        {"images": [name] * int(random.integers(0, 3)), "text": f"{number:02}" * int(random.integers(1, 9))}
        for number, name in enumerate(images)
    ]
    records[7]["images"] = ["7.png"]
    path = write_records(tmp_path / "data", records, images)
    for _ in range(2):  # the second time from the cache
        source = open_source(path, packed=True, on_error="skip", cache_folder=tmp_path / "cache")
        epoch = source.samples_per_epoch(range(30), request())
        assert epoch < 30
        samples = samples_of(source, epoch, seq_length=32)
        texts = [text for sample in samples for text in packed_texts(sample)]
        assert sorted(texts) == sorted(record["text"] for number, record in enumerate(records) if number != 7)
        assert source.report.counts == {"damaged": 1}
    for sample in samples:
        shown = [int(text[:2]) for text in packed_texts(sample)]
        expected = [5 * number for number in shown for _ in records[number]["images"]]
        assert shades_of(sample) == expected
        begins = sample["begins"]
        first = np.unique(begins[begins >= 0])
        assert (sample["loss_mask"][first] == 0).all() and (sample["loss_mask"][:-1][begins < 0] == 0).all()
        assert (sample["tokens"] == IMAGE_TOKEN).sum() == FEATURES * len(expected)
    traced = source.dataset(range(30), request(count=epoch)).trace(0)
    assert {document.place.document for document in traced.documents} == {
        int(text[:2]) for text in packed_texts(samples[0])
    }


def test_packing_heeds_patches(tmp_path: Path):
    """Records that would fit a row by their tokens, and not by their patches, are in several."""
    path = write_records(tmp_path, [{"image": "a.png", "text": str(number)} for number in range(8)], {"a.png": png(1)})
    grid = PatchGrid(patch_size=4, image_size=8, image_token_id=IMAGE_TOKEN, max_patches=9)
    source = open_source(path, packed=True, grid=grid)
    assert source.samples_per_epoch(range(8), request(seq_length=64)) == 4
    assert all(len(sample["patches"]) == 8 for sample in samples_of(source, 4, seq_length=64))
    assert open_source(path, packed=True).samples_per_epoch(range(8), request(seq_length=64)) == 1


def test_packing_cuts_what_is_longer_than_a_row(tmp_path: Path):
    records = [{"image": "a.png", "text": "x" * 50}, {"images": ["a.png"] * 9, "text": "none fits"}]
    path = write_records(tmp_path, records, {"a.png": png(1)})
    source = open_source(path, packed=True)
    (sample,) = samples_of(source, 1, seq_length=32)
    assert packed_texts(sample) == ["x" * 28] and source.report.counts == {"too long": 1}
    with pytest.raises(DataError, match="no record of these makes a sample"):
        open_source(path, packed=True).dataset(range(1, 2), request())


def test_videos_are_measured_as_they_are_read(tmp_path: Path):
    """By headers alone, so that packed rows are filled as planned."""
    frames = {f"frames/{number}.png": png(10 * number, (20, 12)) for number in range(5)}
    records = [
        {"video": "frames", "text": "folder"},
        {"video": list(frames)[:3], "text": "list"},
        {"video": "film.gif", "text": "film"},
        {"image": "film.gif", "text": "image"},
        {"image": "frames/1.png", "text": "one"},
    ]
    path = write_records(tmp_path, records, {**frames, "film.gif": animation("GIF", 7, (20, 12))})
    grid = PatchGrid(patch_size=4, temporal_patch_size=2, image_size=8, image_token_id=IMAGE_TOKEN)
    for settings in (
        {"images": "crop"},
        {"images": "dynamic", "min_pixels": 64, "max_pixels": 256},
        {"animations_are_videos": True},
    ):
        source = open_source(path, grid=grid, max_frames=4, **settings)
        reader = source._options.reader
        for number in range(len(records)):
            (visual,) = source._store.read(number).visuals
            read = reader.read(source._store, number, visual)
            measured = reader.measure(source._store, number, visual)
            assert read.size == measured
            assert measured.grids(grid) == [grid.of_size(part[0].shape[:2], len(part)) for part in read.parts]
