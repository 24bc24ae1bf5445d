"""torchtitan as a peer: a package with its names and its conventions, made up here, and the real one where its source lies.

The made-up one has files that cannot be imported wherever the real one imports what a measurement has no use for, and a model
that rotates neighboring channels, as the real one does. With our weights under its names it must have our loss.
"""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from petatron.bench.peers import BenchSpec, build, problems, version
from petatron.bench.peers.bench_workload import bench_spec
from petatron.bench.peers.torchtitan import has_usable_source
from petatron.bench.peers.torchtitan_weights import load_torchtitan_weights
from petatron.models.batch import Batch

CARRIED = Path(__file__).parents[3] / ".carry"
FLAGS = (
    "--preset tiny-llama --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 80 --seq-length 16 --vocab-size 67 --micro-batch-size 2 --rotary-base 500 --lr 1e-2"
)
BFLOAT16 = 5e-3  # how far either side is from float32 after a few steps of this size
IMPORTED: dict[str, Any] = {}
"""Modules of torchao, which registers operators and so can be imported only once in a process."""
UNUSABLE = "raise ImportError('a library that is not here')\n"
PACKAGE = {
    "__init__.py": UNUSABLE,
    "models/__init__.py": "",
    "models/llama3/__init__.py": UNUSABLE,
    "models/llama3/model/__init__.py": "",
    "protocols/__init__.py": UNUSABLE,
    "protocols/model.py": "import torch\nclass ModelProtocol(torch.nn.Module): ...\n",
    "protocols/train_spec.py": UNUSABLE,
    "config/__init__.py": "from .manager import ConfigManager\n",
    "config/manager.py": UNUSABLE,
    "components/__init__.py": "",
    "components/loss.py": """
        import torch
        import torchtitan.config
        def cross_entropy_loss(pred, labels):
            return torch.nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")
    """,
    "models/llama3/model/args.py": """
        from dataclasses import dataclass
        @dataclass
        class RoPEScalingArgs:
            scaling_factor: float = 8.0
            low_freq_factor: float = 1.0
            high_freq_factor: float = 4.0
            original_max_position_embeddings: int = 8192
        @dataclass
        class TransformerModelArgs:
            dim: int
            n_layers: int
            n_heads: int
            n_kv_heads: int
            vocab_size: int
            multiple_of: int
            ffn_dim_multiplier: float
            norm_eps: float
            rope_theta: float
            rope_scaling_args: RoPEScalingArgs
            max_seq_len: int
    """,
    "models/llama3/model/model.py": """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torchtitan.protocols.train_spec import ModelProtocol
        def linear(a, b):
            return nn.Linear(a, b, bias=False)
        def rotated(x, angles):
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(x)
        class Attention(nn.Module):
            def __init__(self, a):
                super().__init__()
                self.width = a.dim // a.n_heads
                self.wq, self.wo = linear(a.dim, a.dim), linear(a.dim, a.dim)
                self.wk, self.wv = (linear(a.dim, a.n_kv_heads * self.width) for _ in range(2))
            def forward(self, x, angles):
                q, k, v = (w(x).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
                q, k, v = (t.transpose(1, 2) for t in (rotated(q, angles), rotated(k, angles), v))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                return self.wo(out.transpose(1, 2).flatten(2))
        class FeedForward(nn.Module):
            def __init__(self, a):
                super().__init__()
                inner = int(a.ffn_dim_multiplier * int(2 * 4 * a.dim / 3))
                inner = a.multiple_of * ((inner + a.multiple_of - 1) // a.multiple_of)
                self.w1, self.w2, self.w3 = linear(a.dim, inner), linear(inner, a.dim), linear(a.dim, inner)
            def forward(self, x):
                return self.w2(F.silu(self.w1(x)) * self.w3(x))
        class Block(nn.Module):
            def __init__(self, a):
                super().__init__()
                self.attention, self.feed_forward = Attention(a), FeedForward(a)
                self.attention_norm, self.ffn_norm = (nn.RMSNorm(a.dim, eps=a.norm_eps) for _ in range(2))
            def forward(self, x, angles):
                x = x + self.attention(self.attention_norm(x), angles)
                return x + self.feed_forward(self.ffn_norm(x))
        class Transformer(ModelProtocol):
            def __init__(self, a):
                super().__init__()
                assert a.rope_scaling_args.scaling_factor == 1.0
                self.a = a
                self.tok_embeddings = nn.Embedding(a.vocab_size, a.dim)
                self.register_buffer("angles", torch.empty(a.max_seq_len, a.dim // a.n_heads // 2, dtype=torch.complex64))
                self.layers = nn.ModuleDict({str(i): Block(a) for i in range(a.n_layers)})
                self.norm, self.output = nn.RMSNorm(a.dim, eps=a.norm_eps), linear(a.dim, a.vocab_size)
            def init_weights(self, buffer_device):
                width = self.a.dim // self.a.n_heads
                rates = self.a.rope_theta ** (-torch.arange(0, width, 2).float() / width)
                turns = torch.outer(torch.arange(self.a.max_seq_len), rates)
                self.angles = torch.polar(torch.ones_like(turns), turns).to(buffer_device)
            def forward(self, tokens):
                x = self.tok_embeddings(tokens)
                for layer in self.layers.values():
                    x = layer(x, self.angles)
                return self.output(self.norm(x))
    """,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Importing a peer and starting a process group change this process; other tests must not notice."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("torchtitan", "spmd_types"):
            del sys.modules[name]
        elif name.split(".")[0] == "torchao":
            IMPORTED[name] = sys.modules.pop(name)
    if dist.is_initialized():
        dist.destroy_process_group()


def made_up(folder: Path) -> BenchSpec:
    for name, text in PACKAGE.items():
        path = folder / "torchtitan" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return replace(bench_spec(FLAGS.split()), peer_paths=(folder,))


def losses(name: str, spec: BenchSpec, steps: int = 4) -> list[float]:
    text = torch.randint(67, (2, 17), generator=torch.Generator().manual_seed(3))
    batch = Batch(text[:, :-1], text[:, 1:].contiguous(), torch.ones(2, 16))
    contender = build(name, spec)
    return [float(contender.step(batch)) for _ in range(steps)]


def test_it_trains_our_model(tmp_path: Path):
    spec = made_up(tmp_path)
    assert problems("torchtitan", spec) == []
    theirs, ours = losses("torchtitan", spec), losses("petatron", spec)
    assert theirs == pytest.approx(ours, rel=BFLOAT16) and theirs[-1] < 0.95 * theirs[0]
    assert (tmp_path / "torchtitan" / "__init__.py").read_text() == UNUSABLE, "the source given is left alone"


def test_kept_weights_change_nothing(tmp_path: Path):
    spec = made_up(tmp_path)
    assert losses("torchtitan", replace(spec, keep_gathered=True)) == losses("torchtitan", spec)


def test_float32_is_trained_in_float32(tmp_path: Path):
    spec = replace(made_up(tmp_path), run=bench_spec([*FLAGS.split(), "--no-bf16"]).run)
    assert losses("torchtitan", spec) == pytest.approx(losses("petatron", spec), rel=1e-6)
    (told,) = problems("torchtitan", replace(spec, run=bench_spec([*FLAGS.split(), "--fp16"]).run))
    assert str(told) == "--against torchtitan is measured in bf16 and float32 alone. Use --bf16 or --no-bf16."


def newer(folder: Path, **files: str) -> Path:
    """A source whose files say that it is 0.3.0, with nothing in them but imports."""
    texts = {
        "__init__.py": "",
        "models/__init__.py": "",
        "models/common/__init__.py": "from .decoder import Decoder\n",
        "models/common/decoder.py": "import torch\nclass Decoder: ...\n",
        "models/llama3/__init__.py": "",
        "models/llama3/parallelize.py": "from torchtitan.models.common import Decoder\n",
        **files,
    }
    for name, text in texts.items():
        path = folder / "torchtitan" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "torchtitan-0.3.0.dist-info").mkdir()
    return folder


def test_what_a_newer_one_needs_is_told(tmp_path: Path):
    """All names that torch lacks and all packages that are not there, through every file that is imported; not what can be absent."""
    decoder = "from torch.distributed.fsdp import DataParallelMeshDims\nfrom torch.nn import NoSuchLayer\nimport no_such.part\n"
    optional = "try:\n    import no_other\nexcept ImportError: ...\ndef f():\n    import no_third\n"
    folder = newer(tmp_path, **{"models/common/decoder.py": decoder + optional})
    spec = replace(bench_spec(FLAGS.split()), peer_paths=(folder,))
    assert [str(problem) for problem in problems("torchtitan", spec)] == [
        f"--peer-path {folder} lacks what torchtitan 0.3.0 needs: no_such. Unpack their wheels in {folder} too "
        "(pip download --no-deps no_such).",
        f"--against torchtitan 0.3.0 needs another torch than {torch.__version__}, which has no torch.nn.NoSuchLayer. "
        "Give --peer-path a folder with torchtitan 0.2.2, or install the torch that it was released for.",
    ]
    (folder / "no_such").mkdir()
    assert len(problems("torchtitan", spec)) == 1


def test_the_first_version_that_can_do_the_work_is_taken(tmp_path: Path):
    """0.3 has no tensorwise FP8, and one that needs another torch leaves the place to 0.2."""
    older = tmp_path / "older"
    spec, new = made_up(older), newer(tmp_path / "newer")
    (older / "torchtitan-0.2.2.dist-info").mkdir()
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    spec = replace(spec, peer_paths=(new, older, tmp_path))
    assert version("torchtitan", spec) == "0.3.0" and problems("torchtitan", spec) == []
    assert version("torchtitan", replace(spec, fp8_recipe="rowwise")) == "0.3.0"
    assert version("torchtitan", replace(spec, fp8_recipe="tensorwise")) == "0.2.2"
    assert problems("torchtitan", replace(spec, fp8_recipe="tensorwise")) == []
    assert has_usable_source([new, tmp_path], "rowwise") and not has_usable_source([new, tmp_path], "tensorwise")
    (told,) = problems("torchtitan", replace(spec, peer_paths=(new, tmp_path), fp8_recipe="tensorwise"))
    assert str(told) == "--fp8-recipe tensorwise is no recipe of torchtitan 0.3.0's. Use rowwise."
    (new / "torchtitan" / "models" / "common" / "decoder.py").write_text("from torch import no_such_name\n")
    assert version("torchtitan", spec) == "0.2.2" and problems("torchtitan", spec) == []


def test_the_other_version_is_named_when_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("petatron"), "propagate", True)
    older = tmp_path / "older"
    spec = made_up(older)
    new = newer(tmp_path / "newer", **{"models/common/decoder.py": "from torch import no_such_name\n"})
    with caplog.at_level("INFO", logger="petatron"):
        build("torchtitan", replace(spec, peer_paths=(new, older)))
    told = caplog.text
    assert "torchtitan 0.3.0 is left out: --against torchtitan 0.3.0 needs another torch" in told
    assert "which has no torch.no_such_name" in told


def test_what_only_newer_ones_have(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("petatron"), "propagate", True)
    spec = replace(made_up(tmp_path), peer_attention="flex", peer_cuda_graphs=False)
    assert [str(problem) for problem in problems("torchtitan", spec)] == [
        "--peer-attention flex needs a CUDA device for its backward pass. Leave it out."
    ]
    with caplog.at_level("INFO", logger="petatron"):
        build("torchtitan", spec)
    for flag in ("--peer-attention", "--peer-eager"):
        assert f"note: {flag} has no effect: it is for torchtitan 0.3, and this is torchtitan" in caplog.text


def test_queries_keys_and_values_of_one_weight_are_those_of_three():
    spec = bench_spec(FLAGS.split())
    rows = {"attention.wq": 32, "attention.wk": 16, "attention.wv": 16, "attention.qkv_linear.wqkv": 64}
    model = nn.Module()
    for name, size in rows.items():
        place = model
        for part in f"layers.1.{name}".split("."):
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter("weight", nn.Parameter(torch.empty(size, 32)))
    load_torchtitan_weights(model, spec)
    q, k, v, fused = (model.get_parameter(f"layers.1.{name}.weight") for name in rows)
    groups = [torch.cat([q[16 * i : 16 * i + 16], k[8 * i : 8 * i + 8], v[8 * i : 8 * i + 8]]) for i in range(2)]
    assert torch.equal(fused, torch.cat(groups))


def carried(*folders: str) -> BenchSpec:
    """A run beside real sources, where somebody unpacked them."""
    paths = tuple(CARRIED / folder for folder in folders)
    if not all(path.is_dir() for path in paths):
        pytest.skip(f"{', '.join(folders)}: not unpacked in .carry/")
    return replace(bench_spec([*FLAGS.split(), "--no-bf16"]), peer_paths=paths)


@pytest.mark.parametrize("folder", ["torchtitan-0.2.2", "torchtitan-0.3.0"])
def test_the_real_one_trains_our_model(folder: str):
    spec = carried(folder)
    assert problems("torchtitan", spec) == [] and folder == f"torchtitan-{version('torchtitan', spec)}"
    assert losses("torchtitan", spec, steps=10) == pytest.approx(losses("petatron", spec, steps=10), rel=1e-6)


@pytest.mark.parametrize(("folder", "recipe"), [("torchtitan-0.2.2", "tensorwise"), ("torchtitan-0.3.0", "rowwise")])
def test_the_real_one_in_float8(folder: str, recipe: str):
    spec = replace(carried(folder, "torchao"), run=bench_spec(FLAGS.split()).run)
    sys.modules.update(IMPORTED)
    assert losses("torchtitan", replace(spec, fp8_recipe=recipe)) == pytest.approx(losses("petatron", spec), rel=2e-2)
