"""The weights of a model while an engine generates with them: as they are, with copies that a CPU computes faster with, or in FP8.

In FP8 a weight of a layer's large GEMMs, or of the output head, is quantized to e4m3 once, with a scale per output row, and on a GPU the
memory of the original is given back: a decode step is the reading of all weights, and they are half as many bytes. Embeddings, norms,
experts and the absorbed up-projections of latent attention stay as they are; a head that is tied to the embedding is quantized as a
copy. `release` leaves the model with the dequantized weights, in its own precision.

On a CPU the GEMMs of layers and output head may make copies of their weights, once and not in every step, where all of them fit a quarter
of its memory. Two kinds of copies, each where it pays: in float32, where the CPU has no instructions for the weight's dtype and a GEMM
would convert it (`kernels/cpu_matmul.py`); and packed, for decode steps of several sequences. Both compute what the GEMM without them does,
up to the order of its sums. They are read within the engine's steps only: whatever else runs the model reads the weight itself.

A BLAS copies both operands of a GEMM into the order in which its kernel reads them. With thousands of rows that costs nothing; with 2 to 64
the copy of the weight is most of the GEMM. Two other orders of the weight are cheaper. [D, O] in place of [O, D] is copied faster. And
oneDNN has operations, those that PyTorch's own compiler uses for frozen weights, that take a weight in oneDNN's order and copy nothing,
but spend some 100 microseconds before they multiply. On Arm (OpenBLAS, float32, 8 rows, one thread) the first takes 0.5 to 0.88 of the
time at any size, the second 0.4 to 0.65 from a million elements and a width of 768 on. One row is a matrix-vector product, for which
nothing is copied. MKL copies less, so where PyTorch has it weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.base.device import host_memory_bytes
from petatron.base.log import get_logger
from petatron.kernels.compute_dtype import compute_dtype, to_compute_dtype
from petatron.kernels.cpu_matmul import is_widened, matmul, unsupported_reason
from petatron.kernels.few_rows_gemm import FewRowsGemmKernels, Fp8Weight, many_rows_gemm
from petatron.kernels.fp8.cast_and_gemm import E4M3, Fp8Operand
from petatron.kernels.linear_gemms import PLAIN_GEMM, PlainGemm, Tensors, WeightGrad
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.layers.linear import Linear, LinearOp
from petatron.layers.vocabulary.output_head import OutputHead, plain_logits_gemm
from petatron.models.decoder import Decoder
from petatron.parallel.install_fp8_gemms import fp8_linears
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.tensor_parallel import gemm_of, set_gemm

_OPERATIONS = ("_linear_pointwise", "_reorder_linear_weight")
_MIN_ONEDNN_ELEMENTS, _MIN_ONEDNN_WIDTH = 500_000, 512
"""Of a weight, and of its input."""
_MAX_FEW_ROWS = 64
_CALLS_BEFORE_PACKING = 3
"""So many GEMMs of few rows come before a weight is packed: a short prompt is one."""
CastRows = Callable[[Tensor, torch.dtype], Fp8Operand]
_log = get_logger(__name__)
_COPIES_SHARE = 0.25
"""Of a machine's memory, for copies of one kind of all its ranks' weights."""
_NUM_COUNTERS = 8192
"""One for 64 output rows of a GEMM: enough for half a million of them."""
_FEW_ROWS = 16
"""Up to so many rows a kernel of its own is faster than the library; with FP8 weights, which the library needs widened, it decides."""


@dataclass(frozen=True, slots=True)
class GenerationGemm:
    """x W^T of a decode step's few rows by a kernel of its own, of a prompt's many by the library."""

    kernels: FewRowsGemmKernels
    counters: Tensor
    fp8_weight: Fp8Weight | None = None

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        y_RO = self.product(x_RD, weight)
        return (y_RO if bias is None else y_RO.add_(bias)), ()

    def product(self, x_RD: Tensor, weight: Tensor) -> Tensor:
        """x W^T; with an FP8 weight the other is not read."""
        if self.fp8_weight is None and x_RD.shape[0] > _FEW_ROWS:
            return many_rows_gemm(x_RD, weight)
        return self.kernels.few_rows_gemm(x_RD, weight if self.fp8_weight is None else self.fp8_weight, self.counters)

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`."""
        for x, out in zip(x_NRD, out_NRO):
            out.copy_(self.forward(x, weight)[0])

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        raise AssertionError("an engine computes no gradients")


class GenerationWeights:
    """Replaces the GEMMs of a model's layers, until `release`, and not between `pause` and `resume`."""

    def __init__(self, model: ParallelModel, *, fp8: bool, copies: bool = True) -> None:
        """`copies`: a CPU may hold weights a second time."""
        context = KernelContext.of(model.mesh.device, model.dtype, allow_compile=False)
        choice = choose_kernel("GEMM of few rows", context)
        self._replaced: list[tuple[Linear, LinearOp]] = []
        self._heads: list[OutputHead] = []
        self._paused: list[tuple[Linear, LinearOp]] = []
        self._quantized: list[tuple[nn.Parameter, Tensor, Fp8Weight]] = []
        self._kernels: FewRowsGemmKernels = choice.functions
        self._moved: list[tuple[nn.Parameter, Tensor]] = []
        self._freed: list[tuple[Tensor, int]] = []
        self.host_gemms = HostGemms()
        self._fp8_gemms = model.fp8_gemms
        self.forget_copies()
        if copies and not fp8 and model.mesh.device.type == "cpu" and not model.fully_sharded:
            self._copy_weights(model)
            return
        if not fp8 and choice.name == "reference":
            return
        counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=model.mesh.device)
        cast = choose_kernel("FP8 casts and GEMMs", context).functions.cast_rowwise_operand
        for module in _large_linears(model):
            quantized = self._quantize(module.weight, cast) if fp8 else None
            if quantized is None and gemm_of(module) is not PLAIN_GEMM:
                continue
            self._replaced.append((module, module.linear_op))
            set_gemm(module, GenerationGemm(self._kernels, counters, quantized))
        if fp8:
            for head, weight in _output_heads(model):
                quantized = self._quantize(weight, cast, keeps_original=head.weight is None)
                head.logits_gemm = GenerationGemm(self._kernels, counters, quantized).product
                self._heads.append(head)
            self._free_originals(model)
            _log.info(
                "%d weights of this rank are in FP8; GEMMs of more than %d rows, as prompts have, dequantize them first; %s",
                len(self._quantized),
                self._kernels.MAX_FP8_ROWS,
                choice,
            )

    def forget_copies(self) -> None:
        """Drops what was computed from the weights, which have changed; those that FP8 training casts too, whose amax histories pause."""
        self.host_gemms.forget_copies()
        self._fp8_gemms.end_step()

    def pause(self) -> None:
        """Lets the model train: its GEMMs are its own, those of an engine compute no gradients."""
        assert not self._heads, "output heads have their GEMM for as long as there is an engine"
        self.forget_copies()
        self._paused = [(module, module.linear_op) for module, _ in self._replaced]
        for module, linear_op in self._replaced:
            module.linear_op = linear_op

    def resume(self) -> None:
        """Replaces the GEMMs again; the weights may have changed."""
        self.forget_copies()
        for module, linear_op in self._paused:
            module.linear_op = linear_op
        self._paused = []

    def release(self) -> None:
        """Gives the model its GEMMs back, and the dequantized weights."""
        self.forget_copies()
        for module, linear_op in self._replaced:
            module.linear_op = linear_op
        for head in self._heads:
            head.logits_gemm = plain_logits_gemm
        for buffer, size in self._freed:
            buffer.untyped_storage().resize_(size)
            buffer.zero_()
        for param, original, quantized in self._quantized:
            param.data = original.copy_(self._kernels.dequantize_weight(quantized, original.dtype))
        for param, original in self._moved:
            param.data = original.copy_(param.data)
        self._replaced, self._heads, self._quantized, self._moved, self._freed = [], [], [], [], []
        self._paused = []
        self.host_gemms = HostGemms()

    def _copy_weights(self, model: ParallelModel) -> None:
        """Makes plain GEMMs such that copy their weights when it pays."""
        linears = [module for module in _large_linears(model) if isinstance(gemm_of(module), PlainGemm | HostGemm)]
        elements = sum(param.numel() for stage in model.stages.values() for param in stage.parameters())
        needed = elements * torch.float32.itemsize * model.mesh.world.size
        available = host_memory_bytes() * _COPIES_SHARE
        if available and needed > available:
            _log.info(
                "weights are not copied for faster steps: %.0f GB are more than a quarter of memory", needed / 1e9
            )
            return
        if (reason := unsupported_reason("cpu", model.dtype)) is not None:
            _log.info("weights are converted to float32 once: %s", reason)
        for module in linears:
            self._replaced.append((module, module.linear_op))
            set_gemm(module, self.host_gemms.new())
        for head, _ in _output_heads(model):
            head.logits_gemm = self.host_gemms.new().product
            self._heads.append(head)

    def _quantize(self, weight: nn.Parameter, cast: CastRows, *, keeps_original: bool = False) -> Fp8Weight:
        packed = self._kernels.pack_fp8(cast(weight.detach(), E4M3), weight.dtype)
        if not keeps_original:
            self._quantized.append((weight, weight.data, packed))
        return packed

    def _free_originals(self, model: ParallelModel) -> None:
        """Frees the buffers of quantized weights; other parameters in them get memory of their own.

        Host memory that NumPy has seen (a checkpoint was read into it) cannot be given back, and is kept.
        """
        originals = [original for _, original, _ in self._quantized if original.untyped_storage().resizable()]
        buffers = {original.untyped_storage().data_ptr(): original for original in originals}
        quantized = {param for param, _, _ in self._quantized}
        for param in {param for stage in model.stages.values() for param in stage.parameters()} - quantized:
            if param.data.untyped_storage().data_ptr() in buffers:
                self._moved.append((param, param.data))
                param.data = param.data.clone()
        for original in buffers.values():
            storage = original.untyped_storage()
            buffer = torch.empty(0, dtype=torch.uint8, device=original.device).set_(storage)
            self._freed.append((buffer, storage.nbytes()))
            storage.resize_(0)


def _large_linears(model: ParallelModel) -> Iterator[Linear]:
    for stage in model.stages.values():
        for layer in stage.layers.values():
            # Weights that a module multiplies itself while it generates, in the model's precision.
            absorbed = {
                getattr(owner, name) for owner in layer.modules() for name in getattr(owner, "absorbed_linears", ())
            }
            for _, module in fp8_linears(layer):
                if isinstance(module, Linear) and module not in absorbed:
                    yield module


def _output_heads(model: ParallelModel) -> Iterator[tuple[OutputHead, nn.Parameter]]:
    """Yields the output head of this rank, if it has the last stage, with the weight that it uses."""
    for stage in model.stages.values():
        if isinstance(stage, Decoder) and stage.head is not None:
            weight = stage.head.used_weight(None if stage.embedding is None else stage.embedding.weight)
            assert isinstance(weight, nn.Parameter)
            yield stage.head, weight


@dataclass(slots=True, eq=False)
class HostGemm:
    """x W^T of one weight, which changes only before `forget_copies`."""

    owner: HostGemms
    _widened: Tensor | None = None
    _packed: Tensor | None = None
    _few_rows_calls: int = 0

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        y_RO = self.product(x_RD, weight)
        return (y_RO if bias is None else y_RO.add_(bias)), ()

    def product(self, x_RD: Tensor, weight: Tensor) -> Tensor:
        """x W^T in the precision of both."""
        if not self.owner.in_step:
            return matmul(x_RD, weight.t())
        if x_RD.dtype == torch.float32 or not is_widened(x_RD, weight):
            return self._multiply(x_RD, weight)
        if self._widened is None:
            with torch.inference_mode(False), torch.no_grad():
                self._widened = weight.detach().to(compute_dtype(weight.dtype))
        return self._multiply(to_compute_dtype(x_RD), self._widened).to(x_RD.dtype)

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`."""
        for x, out in zip(x_NRD, out_NRO):
            out.copy_(self.product(x, weight))

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return PLAIN_GEMM.backward(grad_RO, weight, saved)

    def forget_copies(self) -> None:
        """Forgets the copies: the weight has changed."""
        self._widened, self._packed, self._few_rows_calls = None, None, 0

    def _multiply(self, x_RD: Tensor, weight: Tensor) -> Tensor:
        rows = x_RD.shape[0]
        if self._packed is None and 1 < rows <= _MAX_FEW_ROWS:
            self._few_rows_calls += 1
            if self._few_rows_calls == _CALLS_BEFORE_PACKING and packing_unsupported_reason(weight.dtype) is None:
                self._packed = pack_weight(weight)
        return x_RD @ weight.t() if self._packed is None or rows == 1 else packed_gemm(x_RD, self._packed)


class HostGemms:
    """The GEMMs of one engine."""

    def __init__(self) -> None:
        self.in_step = False
        self._gemms: list[HostGemm] = []

    def new(self) -> HostGemm:
        self._gemms.append(HostGemm(self))
        return self._gemms[-1]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it copies are made and read."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def forget_copies(self) -> None:
        """Forgets the copies: weights have changed."""
        for gemm in self._gemms:
            gemm.forget_copies()


def packing_unsupported_reason(dtype: torch.dtype) -> str | None:
    """Returns why weights of a dtype are not packed; None: they can be."""
    if dtype != torch.float32:
        return f"weights in {str(dtype).removeprefix('torch.')} are not packed"
    if torch.backends.mkl.is_available():
        return "MKL multiplies few rows without packing the weight"
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATIONS):
        return "this PyTorch has no oneDNN"
    return None


@torch.inference_mode(False)
@torch.no_grad()
def pack_weight(weight_OD: Tensor) -> Tensor:
    """Returns a copy of a weight that only `packed_gemm` reads: [D, O], or an opaque tensor of oneDNN."""
    weight = weight_OD.detach()
    if weight.numel() < _MIN_ONEDNN_ELEMENTS or weight.shape[1] < _MIN_ONEDNN_WIDTH:
        return weight.t().contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_gemm(x_RD: Tensor, packed: Tensor) -> Tensor:
    if packed.layout is torch.strided:
        return x_RD @ packed
    return torch.ops.mkldnn._linear_pointwise(x_RD, packed, None, "none", [], "")
