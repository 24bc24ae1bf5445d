"""Starts the ranks of a server: the first one listens, the others follow it."""

from __future__ import annotations

import argparse
import gc
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import LaunchError
from petatron.base.log import get_logger
from petatron.cli.serve.arguments import checkpoint_folder, engine_options, parser, read_text, serve_options
from petatron.cli.subcommands.run_on_ranks import run_on_ranks
from petatron.mesh.launch.environment import read_environment
from petatron.serve.item_names import ItemNames
from petatron.serve.serve_options import BODY_BYTES_WITH_IMAGES, ServeOptions

if TYPE_CHECKING:
    from petatron.data.image_text.image_prompt import ImagePrompts
    from petatron.infer.sampling_params import SamplingDefaults
    from petatron.serve.engine_process import EngineProcess
    from petatron.serve.open_engine import ModelSettings

_log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    # First, and not read by argparse: it would take the 2 of `--tp 2` for it.
    first = [] if not argv or argv[0].startswith("-") else [argv[0]]
    args, flags = parser().parse_known_args(argv[len(first) :])
    if args.ignored is not None:
        print("note: sampling and lengths are set by each request here; flags for them are ignored", file=sys.stderr)
    checkpoint = checkpoint_folder([*first, *([args.load] if args.load else [])])
    options = serve_options(args, checkpoint)
    _check_extra()
    from petatron.serve.open_engine import model_settings

    def read_models() -> list[ModelSettings]:
        return [model_settings(checkpoint, flags, options=engine_options(args), weights=args.weights)]

    code = run_on_ranks("serve", argv, read_models, lambda models: _serve(args, models[0], options))
    gc.freeze()  # what is left ends with the process: to look through all of torch for cycles would take most of a second
    return code


def _serve(args: argparse.Namespace, settings: ModelSettings, options: ServeOptions) -> int:
    """Runs on every rank: the first one listens, the others follow it."""
    from petatron.serve.engine_process import EngineProcess
    from petatron.serve.http.server import open_listener
    from petatron.serve.open_engine import CheckpointEngine

    if read_environment().rank:
        for number in (signal.SIGTERM, signal.SIGINT):  # the first rank drains, and then ends this one
            signal.signal(number, signal.SIG_IGN)
        CheckpointEngine(settings).follow()
        return 0
    if args.item_names is not None:
        options = replace(options, item_names=ItemNames.read(args.item_names, num_items=settings.vocab_size))
    template = None if args.chat_template is None else read_text(args.chat_template, "--chat-template")
    images = settings.image_prompts_or_reason()
    if not isinstance(images, str) and args.max_body_bytes is None:
        options = replace(options, limits=replace(options.limits, max_body_bytes=BODY_BYTES_WITH_IMAGES))
    if not isinstance(images, str) and template is None and images.chat_format is not None:
        template = images.chat_template()
    listener = open_listener(options)
    engine = EngineProcess(settings)
    try:
        _answer(args, Path(settings.checkpoint), options, engine, listener, template, images)
    finally:
        engine.close()  # a server that fails to start, or ends at once, has not done it
    return 0


def _answer(
    args: argparse.Namespace,
    checkpoint: Path,
    options: ServeOptions,
    engine: EngineProcess,
    listener: socket.socket,
    template: str | None,
    images: ImagePrompts | str,
) -> None:
    from petatron.serve.http.app import build_app
    from petatron.serve.http.follow_training_run import follow_run
    from petatron.serve.http.server import address_of, build_server
    from petatron.serve.served_model_properties import ModelCard

    name = options.served_model_name or checkpoint.resolve().name
    defaults = _sampling_defaults(args, checkpoint)

    def describe() -> ModelCard:
        return ModelCard.of_engine(
            engine,
            name=name,
            created_s=int(time.time()),
            stop_ids=engine.stop_ids,
            chat_template=template,
            step=engine.step_number,
            sampling_defaults=defaults,
            images=images,
        )

    watch = follow_run(checkpoint, engine, describe, interval_s=args.watch_interval) if args.watch else None
    app = build_app(engine, describe(), options, background=watch)
    step = "" if engine.step_number is None else f", step {engine.step_number}"
    ready = f"serving {name}{step} at {address_of(listener)} (Ctrl-C finishes what is open, and ends)"
    gc.freeze()  # a collection need not look through what was imported: streams would wait for it
    build_server(app, on_ready=lambda: print(ready, flush=True)).run(sockets=[listener])


def _sampling_defaults(args: argparse.Namespace, checkpoint: Path) -> SamplingDefaults:
    """Those of the model that is opened; the steps of a run that is followed have one generation_config.json."""
    from petatron.infer.sampling_params import NO_DEFAULTS, read_sampling_defaults
    from petatron.pretrained.detect_model_format import find_model, model_files

    if args.generation_config == "off":
        return NO_DEFAULTS
    defaults = read_sampling_defaults(model_files(find_model(checkpoint)))
    if given := defaults.given():
        shown = ", ".join(f"{name} {value:g}" for name, value in given.items())
        _log.info("requests that do not say otherwise sample by the model's generation_config.json: %s", shown)
    return defaults


def _check_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"A server needs {error.name}. Install it: pip install 'petatron[serve]'") from error
