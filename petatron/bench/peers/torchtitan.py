"""torchtitan's Llama 3, trained as its own trainer does on one device, from its source in a folder that `--peer-path` gives.

Two generations of it are known, told apart by their files: 0.2 (`torchtitan_v0_2`) and 0.3 (`torchtitan_v0_3`), which computes its
head and loss in chunks and captures its forward and backward passes in a CUDA graph. Where several folders are given, the first is
taken that can do the work with the installed torch; what keeps others from it is logged.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.bench.peers import BenchSpec, Contender
from petatron.bench.peers.bench_workload import precision_problems
from petatron.bench.peers.peer_source import PeerSource, folder_problems, peer_sources
from petatron.config.schema.model_identity import variant_defaults

_log = get_logger(__name__)


def problems(spec: BenchSpec) -> Iterator[Problem]:
    """Yields what its Llama does not support, and what its source is missing."""
    for part in _unsupported_features(spec):
        yield Problem("--against", "torchtitan", f"has no {part}", "Compare with hf, or choose a Llama.")
    yield from precision_problems("torchtitan", spec)
    if spec.peer_attention == "flex" and spec.device.type != "cuda":
        yield Problem("--peer-attention", "flex", "needs a CUDA device for its backward pass", "Leave it out.")
    faults = list(_path_problems(spec))
    yield from faults
    sources = peer_sources("torchtitan", spec.peer_paths)
    if not faults and not sources:
        fix = "Give --peer-path the folder that holds torchtitan/, for instance an unpacked wheel."
        yield Problem("--against", "torchtitan", "needs its source", fix)
    has_torchao = peer_sources("torchao", spec.peer_paths) or importlib.util.find_spec("torchao") is not None
    if not faults and spec.fp8_recipe is not None and not has_torchao:
        fix = "Give --peer-path a second time: the folder that holds torchao/."
        yield Problem("--against", "torchtitan", "needs torchao for FP8", fix)
    known = _recipes(None)
    if not sources and spec.fp8_recipe is not None and spec.fp8_recipe not in known:
        yield Problem("--fp8-recipe", spec.fp8_recipe, "is no recipe of torchtitan's", f"Use {' or '.join(known)}.")
    of_sources = [source_problems(source, spec.fp8_recipe) for source in sources]
    if all(of_sources):
        yield from (problem for of_source in of_sources for problem in of_source)


def source_problems(source: PeerSource, fp8_recipe: str | None) -> list[Problem]:
    """Returns what keeps one version of it from this work."""
    problems: list[Problem] = []
    recipes = _recipes(source)
    if fp8_recipe is not None and fp8_recipe not in recipes:
        fix = f"Use {' or '.join(recipes)}."
        problems.append(Problem("--fp8-recipe", fp8_recipe, f"is no recipe of {source}'s", fix))
    if has_chunked_loss(source):
        from petatron.bench.peers.torchtitan_v0_3 import missing_needs

        problems += missing_needs(source)
    return problems


def has_chunked_loss(source: PeerSource) -> bool:
    """Whether this is 0.3 or later, by its files."""
    return (source.root / "models" / "common" / "decoder.py").is_file()


def _recipes(source: PeerSource | None) -> tuple[str, ...]:
    return ("rowwise",) if source is not None and has_chunked_loss(source) else ("tensorwise", "rowwise")


def chosen_source(spec: BenchSpec, *, log: bool = False) -> PeerSource | None:
    """Returns the first source that can do the work; `log`: says what keeps those before it."""
    for source in peer_sources("torchtitan", spec.peer_paths):
        problems = source_problems(source, spec.fp8_recipe)
        if not problems:
            return source
        if log:
            _log.info("%s is left out: %s", source, " ".join(map(str, problems)))
    return None


def has_usable_source(paths: Sequence[Path], fp8_recipe: str | None) -> bool:
    """Whether one of the folders has what this work needs."""
    if fp8_recipe is not None and not peer_sources("torchao", paths):
        return False
    return any(not source_problems(source, fp8_recipe) for source in peer_sources("torchtitan", paths))


def version(spec: BenchSpec) -> str | None:
    source = chosen_source(spec)
    return None if source is None else source.version


def build(spec: BenchSpec) -> Contender:
    source = chosen_source(spec, log=True)
    assert source is not None
    for torchao in peer_sources("torchao", spec.peer_paths):
        torchao.make_importable()
    name = "torchtitan_v0_3" if has_chunked_loss(source) else "torchtitan_v0_2"
    ignored = {"--peer-attention": spec.peer_attention != "sdpa", "--peer-eager": not spec.peer_cuda_graphs}
    for flag, given in ignored.items():
        if given and not has_chunked_loss(source):
            _log.info("note: %s has no effect: it is for torchtitan 0.3, and this is %s", flag, source)
    return importlib.import_module(f"petatron.bench.peers.{name}").build(spec, source)


def _unsupported_features(spec: BenchSpec) -> list[str]:
    model, heads = spec.run.model, spec.run.model.num_attention_heads
    parts = {
        "mixture of experts in its Llama": spec.run.moe.num_experts is not None,
        f"{model.model_type} in place of a decoder": model.model_type != "decoder",
        "layers of a hybrid": model.hybrid_layer_pattern is not None,
        "latent attention": model.multi_latent_attention,
        "normalized query and key heads": model.qk_layernorm,
        "head that shares the embedding": not model.untie_embeddings_and_output_weights,
        "head width other than hidden size / heads": model.kv_channels != model.hidden_size // max(heads, 1),
        "biases": model.add_bias_linear or model.add_qkv_bias,
        f"{model.activation} activation": model.activation != "swiglu",
        f"{model.normalization}": model.normalization != "RMSNorm",
        f"{model.position_embedding_type} positions": model.position_embedding_type != "rope",
        "sliding window": model.window_size is not None,
        "variants of layers": any(getattr(model, name) != plain for name, plain in variant_defaults().items()),
        "dropout": bool(model.hidden_dropout or model.attention_dropout),
    }
    return [name for name, there in parts.items() if there]


def _path_problems(spec: BenchSpec) -> Iterator[Problem]:
    """Finds wrong folders: missing ones, and those with an empty folder for a package that is nowhere else."""
    fix = "Give the folder that holds torchtitan/, for instance an unpacked wheel."
    yield from folder_problems(spec.peer_paths, fix)
    for package in ("torchtitan",) if spec.fp8_recipe is None else ("torchtitan", "torchao"):
        if not peer_sources(package, spec.peer_paths):
            for place in (path / package for path in spec.peer_paths if (path / package).is_dir()):
                yield Problem("--peer-path", str(place), "has no Python package", fix.replace("torchtitan", package))
