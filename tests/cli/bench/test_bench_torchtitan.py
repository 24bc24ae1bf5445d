"""torchtitan as a peer: a package with its names and its conventions, made up here, and the real one where its source lies.

The made-up one has files that cannot be imported wherever the real one imports what a measurement has no use for, and a model
that rotates neighbouring channels, as the real one does. With our weights under its names it must have our loss.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.bench.peers import BenchSpec, build, problems
from petatron.bench.peers.bench_model import bench_spec
from petatron.models.batch import Batch

SOURCE = Path(__file__).parents[3] / ".carry" / "torchtitan"
FLAGS = (
    "--preset tiny-llama --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 80 --seq-length 16 --vocab-size 67 --micro-batch-size 2 --rotary-base 500 --lr 1e-2"
)
BFLOAT16 = 5e-3  # how far either side is from float32 after a few steps of this size
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
        if name.split(".")[0] in ("torchtitan", "torchao"):
            del sys.modules[name]
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


@pytest.mark.skipif(not SOURCE.is_dir(), reason="the source of torchtitan is not here")
def test_the_real_one_trains_our_model():
    spec = replace(bench_spec(FLAGS.split()), peer_paths=(SOURCE, SOURCE.parent / "torchao"))
    assert losses("torchtitan", spec) == pytest.approx(losses("petatron", spec), rel=BFLOAT16)


@pytest.mark.skipif(not (SOURCE.parent / "torchao").is_dir(), reason="the source of torchao is not here")
def test_the_real_one_in_float8():
    spec = replace(bench_spec(FLAGS.split()), peer_paths=(SOURCE, SOURCE.parent / "torchao"))
    assert losses("torchtitan", replace(spec, fp8_recipe="tensorwise")) == pytest.approx(
        losses("petatron", spec), rel=2e-2
    )
