"""PyTorch's attention kernels that return the log-sum-exp with the output, behind one interface.

`supports` says whether the device has one for these tensors; where it has none, tiles are used. All take [B, H, S, E], with kv
heads not repeated, and a log-sum-exp of [B, H, S] in at least float32. The backward kernels use the output and the log-sum-exp
they are given, so with those over the keys of all blocks the gradients of one block are right.

The kernels take heads of one width. Values narrower than keys (latent attention) are padded with zeros, and the zeros of the output
dropped; what is saved for backward is not padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.attention.visibility import Visibility, VisibilitySupport
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.cpu_matmul import is_widened
from petatron.kernels.size_limits import flash_supports_heads

VARLEN_VISIBILITY = VisibilitySupport.of("causal", "full", window=True, documents=True)
"""Of `varlen_attention`."""

_aten = torch.ops.aten


def supports(q_BHSE: Tensor, v_BKSE: Tensor) -> bool:
    """Whether there is a kernel for full and causal blocks of such tensors."""
    if q_BHSE.shape[-1] < v_BKSE.shape[-1]:
        return False
    return q_BHSE.device.type == "cpu" or _supported_on_cuda(q_BHSE)


def supports_varlen(q: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for windows and documents."""
    return q.shape[-1] >= v.shape[-1] and _supported_on_cuda(q)


def unsupported_reason(device: str, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Returns what a kind of device lacks for windows and documents, whatever the shapes; None: nothing."""
    if device != "cuda" or torch.version.cuda is None:
        return "the device is no NVIDIA GPU"
    if capability < (8, 0):
        return "the device is older than Ampere"
    return None if dtype in (torch.float16, torch.bfloat16) else f"{dtype} is not half precision"


def _supported_on_cuda(q: Tensor) -> bool:
    if q.device.type != "cuda" or not flash_supports_heads(q.shape[-1]):
        return False
    return unsupported_reason("cuda", torch.cuda.get_device_capability(q.device), q.dtype) is None


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp; a causal block is square. The output is float32 where the CPU widens GEMMs."""
    width, v = v.shape[-1], _padded(v, q.shape[-1])
    if q.device.type == "cpu":
        q, k, v = _widened(q, k, v)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return _unpadded(out, width), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, in float32 where the CPU widens GEMMs; `out` and `lse` are those over all keys."""
    lse, width = lse.contiguous(), v.shape[-1]
    grad, v, out = (_padded(x, q.shape[-1]) for x in (grad, v, out))
    if q.device.type == "cpu":
        grad, q, k, v, out = _widened(grad, q, k, v, out)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
        return dq, dk, dv[..., :width]
    # The RNG state is not read without dropout; the lengths of packed sequences are None for a dense batch.
    unread = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unread, unread
    )
    return dq, dk, dv[..., :width]


def _padded(x: Tensor, width: int) -> Tensor:
    """Appends zeros to heads; whatever is as wide is returned as it is."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _unpadded(x: Tensor, width: int) -> Tensor:
    """Drops what was appended; the result is dense, in the memory order of `x`."""
    return x if x.shape[-1] == width else x[..., :width].clone()


def widens(q: Tensor) -> bool:
    """Whether the CPU's kernel computes on operands widened to float32, as GEMMs of such tensors do."""
    return is_widened(q, q)


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(to_compute_dtype, tensors)) if widens(tensors[0]) else tensors


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, max_seqlen: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Causal attention of concatenated documents, [R, H, E]; returns the output, and tensors saved for backward."""
    out, lse, random, unused, _ = _aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False
    )
    return out, (lse, random, unused)


def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    saved: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    lse, random, unused = saved
    return _aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, random, unused
    )


def varlen_attention(
    q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, visibility: Visibility, *, dropout: float = 0.0
) -> Tensor:
    """Attention with windows and documents in one differentiable call."""
    length, batch = q_SBHE.shape[:2]
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q_SBHE, k_SBKE, _padded(v_SBKE, q_SBHE.shape[-1])))
    documents, cu_seqlens, longest = visibility.documents, None, length
    if documents is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu_seqlens, longest = documents.cu_seqlens, documents.max_seqlen
    causal, left = visibility.is_causal, -1 if visibility.window is None else visibility.window - 1
    window = {"window_size_left": left, "window_size_right": 0 if causal else left}
    out, *_ = _aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout, causal, False, **window
    )
    out = out if documents is None else out.unflatten(0, (batch, length))
    return out[..., : v_SBKE.shape[-1]].transpose(0, 1)
