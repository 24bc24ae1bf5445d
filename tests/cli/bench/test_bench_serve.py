"""`petatron bench serve`: both sides answer all requests, arithmetic of the report, and every refusal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from petatron.base.errors import CheckpointError, ConfigError, LaunchError
from petatron.bench import serve
from petatron.bench.arguments import add_arguments
from petatron.bench.serve import (
    FirstTokenTimes,
    ServeMeasurements,
    make_requests,
    percentile,
    server_process,
    word_tokenizer,
)
from petatron.bench.serving.http_clients import BenchRequest, HttpClients
from petatron.cli.bench import main
from tests.serve.fake_engine import FakeEngine

pytest.importorskip("fastapi")
from tests.serve.live_server import live_server

TINY = "--device cpu --no-bf16 --num-layers 1 --clients 3 --requests 1 --prompt-tokens 6 --new-tokens 4".split()


@pytest.mark.slow
def test_both_sides_answer_all_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "found.json"
    assert main(["serve", "tiny-llama", *TINY, "--repeat", "1", "--first-tokens", "3", "--json", str(file)]) == 0
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    assert all(
        label in printed for label in ("engine alone", "HTTP, streamed", "HTTP, plain", "first token, half load")
    )
    assert {name: len(times) for name, times in found["seconds"].items()} == {
        "engine alone": 2,
        "HTTP, streamed": 2,
        "HTTP, plain": 2,
    }
    assert set(found["ratio"]) == {"HTTP, streamed", "HTTP, plain"} and min(found["ratio"].values()) > 0
    assert len(found["first_token_alone_ms"]) == len(found["first_token_half_load_ms"]) == 3
    assert min(found["first_token_alone_ms"]) > 0 and found["half_load_requests_per_s"] > 0


def test_the_report_is_computed_from_what_was_measured():
    requests = make_requests(4, prompt_tokens=3, new_tokens=10, vocab_size=7)
    assert all(len(one.prompt_ids) == 3 and 5 <= one.new_tokens <= 10 for one in requests)
    tokens = sum(one.new_tokens for one in requests)
    seconds = {serve.ENGINE: [1.0, 2.0, 3.0], serve.STREAMED: [2.0, 4.0, 5.0], serve.PLAIN: [2.0, 2.0, 6.0]}
    first = FirstTokenTimes([0.01] * 19 + [0.02], [0.03] * 19 + [0.5], half_rate_per_s=2.0)
    found = ServeMeasurements(requests, seconds, {name: [0.1, 0.1, 0.1] for name in seconds}, first)
    args = main_arguments()
    result = serve._result(args, found)
    assert result.values["tokens_per_s"] == {
        serve.ENGINE: tokens / 2,
        serve.STREAMED: tokens / 4,
        serve.PLAIN: tokens / 2,
    }
    assert result.values["ratio"] == {serve.STREAMED: 0.5, serve.PLAIN: 0.5}
    assert result.values["first_token_ratio"] == pytest.approx(3.0)
    assert result.values["client_core_share"] == {
        serve.STREAMED: pytest.approx(0.3 / 11),
        serve.PLAIN: pytest.approx(0.03),
    }
    assert dict(result.rows)["first token, alone"] == "median 10.0 ms, p95 10.0 ms"
    assert percentile([5.0], 95) == 5.0


def test_a_folder_that_is_not_there_is_no_preset(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"nope is not a folder. Give the folder of a run"):
        serve._checkpoint(["--preset", str(tmp_path / "nope")], tmp_path)


def main_arguments():
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments("serve", parser)
    return parser.parse_args([])


def test_wrong_arguments_are_named_together(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        main(["serve", "--clients", "0", "--new-tokens", "1", "--api-key-file", "x"])
    assert {problem.where for problem in caught.value.problems} == {"--clients", "--new-tokens", "--api-key-file"}
    with pytest.raises(ConfigError, match="has no effect on a server that runs already"):
        main(["serve", "tiny-llama", "--url", "http://127.0.0.1:1"])
    for name, content in (("none", None), ("empty", "")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=r"--api-key-file .* cannot be read"):
            main(["serve", "--url", "http://127.0.0.1:1", "--api-key-file", str(tmp_path / name)])


def test_packages_of_a_server_are_missed_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petatron.bench.serve.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs fastapi and uvicorn.*petatron\[serve\]"):
        main(["serve", "tiny-llama"])


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(LaunchError, match="is no address of a server"):
        main(["serve", "--url", "127.0.0.1:1"])
    with pytest.raises(LaunchError, match=r"http://127.0.0.1:1 does not answer"):
        main(["serve", "--url", "http://127.0.0.1:1"])
    with live_server(FakeEngine(max_length=20)) as server, pytest.raises(LaunchError, match=r"answered 400 .*tokens"):
        main(["serve", "--url", server.url])


def test_a_server_that_runs_already_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "key").write_text("a" * 20)
    numbers = "--clients 4 --requests 2 --repeat 1 --first-tokens 5 --new-tokens 8".split()
    with live_server(FakeEngine(), api_keys=("a" * 20,)) as server:
        words = ["--url", server.url, "--api-key-file", str(tmp_path / "key"), "--json", str(tmp_path / "found.json")]
        assert main(["serve", *words, *numbers]) == 0
        server.wait_until(server.is_idle)
        asked = server.engine.seen
    found = json.loads((tmp_path / "found.json").read_text())
    assert "engine alone" not in capsys.readouterr().out and found["ratio"] == {}
    assert len(asked) == 2 * 3 * 8 + 5 + 5, "two ways, two rounds after a warm-up, and first tokens"
    assert {len(prompt) for prompt, _ in asked} == {64} and {one.max_new_tokens for _, one in asked} <= set(range(4, 9))
    assert found["tokens"] == sum(one.max_new_tokens for _, one in asked[:8])


def test_a_server_that_does_not_start_says_why(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"(?s)The server has ended. It said: .*is not a folder"):
        server_process(str(tmp_path / "none"), []).__enter__()
    with pytest.raises(LaunchError, match=r"has not started within 0 s. It said: nothing"):
        server_process(str(tmp_path), [], timeout_s=0).__enter__()


def _answered(answer: bytes, *, stream: bool) -> object:
    """What a client makes of raw bytes, which come in pieces."""

    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        for at in range(0, len(answer), 40):
            writer.write(answer[at : at + 40])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    async def ask() -> object:
        server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        clients = HttpClients(f"http://127.0.0.1:{port}", api_key="secret")
        try:
            return await clients.ask(BenchRequest([1, 2], 5), stream=stream)
        finally:
            clients.close()
            server.close()

    return asyncio.run(ask())


def test_clients_read_both_forms_of_answers():
    usage = b'{"usage":{"prompt_tokens":2,"completion_tokens":5}}'
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(usage), usage)
    chunks = [b"data: x\n\n", b"data: %s\n\ndata: [DONE]\n\n" % usage, b""]
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%s\r\n" % (len(one), one) for one in chunks
    )
    for answer, streamed in ((plain, False), (stream, True)):
        found = _answered(answer, stream=streamed)
        assert found.tokens == 5 and 0 < found.first_token_s <= found.end_s


def test_a_connection_that_the_server_closed_is_not_used_again():
    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        usage = b'{"usage":{"completion_tokens":5}}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(usage), usage))
        writer.close()

    async def ask_twice() -> list[int]:
        server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
        clients, found = HttpClients(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), []
        for _ in range(2):
            answer = await asyncio.wait_for(clients.ask(BenchRequest([1, 2], 5), stream=False), 10)
            found.append(answer.tokens)
            while not all(one.closed for one in clients._idle):
                await asyncio.sleep(0.001)
        server.close()
        return found

    assert asyncio.run(ask_twice()) == [5, 5]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "answered 429 .*full"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "answered 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "does not answer: the connection was closed"),
    ],
)
def test_answers_that_are_none_end_the_bench(answer: bytes, why: str):
    with pytest.raises(LaunchError, match=why):
        _answered(answer, stream=False)


def test_every_id_of_the_tokenizer_is_a_word(tmp_path: Path):
    tokenizer = word_tokenizer(300, tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 300 and tokenizer.decode([0, 299]) == " w0 w299"


def test_more_than_one_rank_is_refused(tmp_path: Path):
    from petatron.bench.peers.bench_workload import bench_spec
    from petatron.bench.serve import save_random_checkpoint

    save_random_checkpoint(bench_spec(["--preset", "tiny-llama", "--device", "cpu", "--no-bf16"]), tmp_path / "run")
    with pytest.raises(ConfigError, match="asks for 2 ranks"):
        main(["serve", str(tmp_path / "run"), "--tp", "2"])
