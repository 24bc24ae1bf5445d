"""What is checked of every recurrent layer kind: its equation in plain PyTorch, packed documents, transformers' module, FLOPs.

S seq, B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config import RunConfig
from petatron.kernels.attention.document_layout import Documents
from petatron.layers.forward_context import ForwardContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec
from petatron.sharding.shard_spec import TensorShard
from petatron.validate import load_config

T = TypeVar("T")
S, B, D = 11, 2, 16
EXACT = {"rtol": 1e-10, "atol": 1e-10}
_BASE = (
    f"--hidden-size {D} --seq-length {S} --vocab-size 90 --normalization RMSNorm --position-embedding-type none --hidden-dropout 0 "
    "--make-vocab-size-divisible-by 2 --untie-embeddings-and-output-weights"
)


def run_of(flags: str) -> RunConfig:
    return load_config([*_BASE.split(), *flags.split()], require_training=False).config


def mixer_of(kind: type[T], flags: str) -> T:
    mixer = model_spec(run_of(flags)).layers[0].mixer
    assert isinstance(mixer, kind)
    return mixer


def module_of(spec) -> nn.Module:
    module = spec.build(0).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def random_hidden(seed: int = 1) -> Tensor:
    return torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_conv(channels_SBC: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu of the causal convolution of each channel."""
    padded = F.pad(channels_SBC.permute(1, 2, 0), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=channels_SBC.shape[-1])).permute(2, 0, 1)


def check_outputs_and_gradients(spec, plain: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> None:
    """Assert that a layer and `plain`, from an input and named weights, have one output and one gradient of each weight."""
    module, x, target = module_of(spec), random_hidden().requires_grad_(), random_hidden(2)
    y = module(x, ForwardContext())
    names, parameters = zip(*module.named_parameters())
    theirs = plain(x, dict(zip(names, parameters)))
    torch.testing.assert_close(y, theirs, **EXACT)
    found = torch.autograd.grad((y * target).sum(), [x, *parameters])
    expected = torch.autograd.grad((theirs * target).sum(), [x, *parameters])
    for name, ours, right in zip(["x", *names], found, expected):
        torch.testing.assert_close(ours, right, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def check_packed_documents(spec) -> None:
    """Assert that a packed document's output is the one it has alone."""
    module, x = module_of(spec), random_hidden()
    begins = ((0, 2, 7), (0, 5))
    starts = torch.zeros(B, S, dtype=torch.int64)
    for row, first in enumerate(begins):
        for begin in first:
            starts[row, begin:] = begin
    packed = module(x, ForwardContext(documents=Documents.of(starts)))
    for row, first in enumerate(begins):
        for begin, end in zip(first, (*first[1:], S)):
            alone = module(x[begin:end, row : row + 1], ForwardContext())
            torch.testing.assert_close(packed[begin:end, row : row + 1], alone, **EXACT)


def check_transformers_module(
    theirs: nn.Module, spec, stored: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    """Assert that their module has our output; `stored` names our weights as they do, all of theirs and no other."""
    ours = module_of(spec).float()
    weights = dict(stored(dict(ours.named_parameters())))
    with torch.no_grad():
        for name, parameter in theirs.eval().named_parameters():
            parameter.copy_(weights.pop(name).reshape(parameter.shape))
        assert not weights
        x = random_hidden().float()
        y = theirs(x.transpose(0, 1))
        torch.testing.assert_close(ours(x, ForwardContext()), y.transpose(0, 1), rtol=1e-4, atol=1e-5)


def check_forward_flops(spec, run: RunConfig, *, inner_size: int) -> None:
    """Assert that forward is a third of the layer's FLOPs, and that recomputing its region leaves out the last GEMM alone."""
    shape = ActivationShape.from_config(run, device="cpu")
    gemms = sum(param.num_elements for param in spec.params().values() if param.is_gemm)
    forward, mixing = spec.forward_flops(shape), spec.mixing_flops(S, causal=True) / 3
    assert forward - spec.norm_flops(shape) == pytest.approx(2 * gemms * S + mixing)
    assert spec.recompute_flops(shape, spec.region) == pytest.approx(forward - 2 * S * inner_size * D)


def shard(start: int, size: int, *, name: str = "layers.0.mamba.A_log", whole: int = 64) -> TensorShard:
    return TensorShard(name, (whole,), (start,), (size,), (0,), True)
