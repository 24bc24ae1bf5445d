"""`petatron checkpoint`: inspects, verifies, compares, prunes and converts checkpoints."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.errors import CheckpointError, ConfigError, Problem, raise_problems
from petatron.base.format_text import align_columns, format_bytes
from petatron.base.log import configure_logging
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files.step_list import naming_step_flag
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.subcommands.megatron_convert_flags import from_megatron_flags, is_megatron_command
from petatron.cli.subcommands.stderr_progress import StderrProgress

if TYPE_CHECKING:
    from petatron.checkpoint.inspect.diff_checkpoints import CheckpointDiff
    from petatron.checkpoint.inspect.summarize_checkpoint import CheckpointSummary
    from petatron.checkpoint.inspect.verify_checkpoint import Finding, VerificationReport

_CONVERT = "petatron.cli.subcommands.checkpoint_convert"
_SHOWN_KEYS = 5
_NAMED_EQUAL_KEYS = 12


def main(argv: Sequence[str]) -> int:
    """Run one subcommand of `petatron checkpoint`; the flags of Megatron-LM's converter are understood too."""
    if argv[:1] == ["convert"] and is_megatron_command(argv[1:]):
        argv = ["convert", *from_megatron_flags(argv[1:])]
    options = parser(converting=bool(argv) and argv[0] == "convert").parse_args(argv)
    configure_logging()
    actions = {"inspect": _inspect, "verify": _verify, "diff": _diff, "prune": _prune}
    action = importlib.import_module(_CONVERT).run if options.subcommand == "convert" else actions[options.subcommand]
    with naming_step_flag("--step") if hasattr(options, "step") else nullcontext():
        return action(options)


def parser(*, converting: bool = False) -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron checkpoint",
        description="Look into checkpoints, prove that they are whole, compare, prune and convert them. PATH is a folder that "
        "--save wrote to, or one step-N in it.",
    )
    subcommands = root.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    add = subcommands.add_parser("inspect", help="what a checkpoint holds").add_argument
    add("path", type=Path, metavar="PATH")
    add("--step", type=int, metavar="N", help="which step (default: the newest)")
    add("--tensors", action="store_true", help="list every logical tensor")
    add("--json", action="store_true", help="print everything as JSON")
    checking = subcommands.add_parser(
        "verify",
        help="whether checkpoints are what was saved",
        description="Reads every file of a checkpoint and compares it with the manifest. Exits with 1 if anything is wrong, and "
        "names the newest step that is good.",
    )
    checking.add_argument("path", type=Path, metavar="PATH")
    which = checking.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="which step (default: the newest)")
    which.add_argument("--all", action="store_true", help="every step of the folder")
    text = "the checkpoint must be signed by a public key of this file (a .pub file of ssh-keygen, or PEM)"
    checking.add_argument("--require-signature", type=Path, metavar="KEY", help=text)
    checking.add_argument("--json", action="store_true", help="print the findings as JSON")
    comparing = subcommands.add_parser(
        "diff",
        help="how two checkpoints differ",
        description="Compares configuration, and weights and optimizer state tensor by tensor, whatever layouts saved them. The "
        "relative difference of a tensor is the largest difference of an element over the largest element. Exits with 1 if "
        "the tensors differ.",
    )
    comparing.add_argument("first", type=Path, metavar="A")
    comparing.add_argument("second", type=Path, metavar="B")
    comparing.add_argument("--rtol", type=float, default=0.0, metavar="R", help="relative difference to let pass (0)")
    comparing.add_argument("--top", type=int, default=10, metavar="K", help="how many tensors to list (10)")
    comparing.add_argument("--json", action="store_true", help="print everything as JSON")
    add = subcommands.add_parser("prune", help="remove old steps").add_argument
    add("path", type=Path, metavar="PATH", help="folder that --save wrote to")
    add("--keep", type=int, required=True, metavar="N", help="how many of the newest steps stay")
    add("--retain-interval", type=int, metavar="K", help="steps at a multiple of this stay too")
    add("--dry-run", action="store_true", help="only say what would be removed")
    convert = subcommands.add_parser("convert", help="to and from Hugging Face and Megatron-LM", add_help=converting)
    if converting:
        importlib.import_module(_CONVERT).add_arguments(convert)
    return root


# inspect


def _inspect(options: argparse.Namespace) -> int:
    from petatron.checkpoint.files.step_folder import damaged_error
    from petatron.checkpoint.inspect.summarize_checkpoint import summarize_checkpoint
    from petatron.checkpoint.inspect.verify_checkpoint import find_checkpoint

    summary = summarize_checkpoint(find_checkpoint(options.path, options.step))
    if options.json:
        print(json.dumps(summary.as_json(), indent=1))
        return 0
    with reading_untrusted(summary.source / "manifest.json", damaged_error):
        text = _summary_text(summary, every=options.tensors)
    print(text)
    return 0


def _summary_text(summary: CheckpointSummary, *, every: bool) -> str:
    rows = [
        ("checkpoint", str(summary.source)),
        ("step", str(summary.step)),
        ("time of files", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.file_time_s))),
        ("layout", summary.layout_text),
        ("weights", format_bytes(summary.bytes_in("model"))),
        ("state", format_bytes(summary.bytes_in("state"))),
        *((name.replace("_", " "), f"{value:,}") for name, value in summary.progress.items()),
    ]
    files = align_columns([("  " + name, format_bytes(size)) for name, size in summary.files.items()])
    parts = [align_columns(rows), _tensors_text(summary, every=every), f"files\n{files}"]
    changed = list(_changed_settings(summary.config))
    if changed:
        parts.append("configuration, where it is not the default (--json has all)\n" + align_columns(changed))
    return "\n\n".join(parts)


def _tensors_text(summary: CheckpointSummary, *, every: bool) -> str:
    from petatron.checkpoint.inspect.summarize_checkpoint import summarize_kinds

    if every:
        rows = [
            ("  " + tensor.key, str(list(tensor.shape)), tensor.dtype, format_bytes(tensor.num_bytes))
            for tensor in summary.tensors
        ]
    else:
        rows = [
            (f"  {kind}/", f"{count} tensors", dtypes, format_bytes(size))
            for kind, (count, dtypes, size) in summarize_kinds(summary).items()
        ]
    return "logical tensors\n" + (align_columns(rows) if rows else "  none")


def _changed_settings(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    from petatron.config.schema.run import RawRunConfig

    defaults = json.loads(json.dumps(asdict(RawRunConfig())))
    for section, values in config.items():
        for name, value in values.items():
            if defaults.get(section, {}).get(name) != value:
                yield f"  {section}.{name}", _setting_text(value)


# verify


def _verify(options: argparse.Namespace) -> int:
    from petatron.checkpoint.files.signature import read_public_keys
    from petatron.checkpoint.files.step_folder import list_steps
    from petatron.checkpoint.inspect.verify_checkpoint import (
        VerificationReport,
        find_checkpoint,
        latest_findings,
        newest_valid,
        steps_without_manifest,
        verify_checkpoint,
    )

    folder: Path = options.path
    complete = list(list_steps(folder).values())
    lost = steps_without_manifest(folder) if folder.is_dir() and options.step is None else []
    if options.all and complete:
        chosen = complete
    else:
        chosen = [] if lost and not complete else [find_checkpoint(folder, options.step, warn=False)]
    with _progress("verifying") as progress:
        trusted = read_public_keys(options.require_signature) if options.require_signature else None
        reports = [verify_checkpoint(source, progress, trusted_keys=trusted) for source in [*lost, *chosen]]
        of_folder = latest_findings(folder, lost) if (complete or lost) and options.step is None else ()
        around = [VerificationReport(folder, 0, 0, of_folder)] if of_folder else []
        broken = [report for report in (*reports, *around) if not report.is_valid]
        known = {report.source: report.is_valid for report in reports}
        newest = newest_valid(reports[-1].source.parent, known, progress) if broken or options.json else None
    if options.json:
        print(json.dumps(_report_values(reports, newest, of_folder), indent=1))
    else:
        _print_reports([*reports, *around], newest)
    return 1 if broken else 0


def _report_values(
    reports: Sequence[VerificationReport], newest: Path | None, of_folder: Sequence[Finding]
) -> dict[str, Any]:
    def as_values(findings: Sequence[Finding]) -> list[dict[str, str]]:
        return [{"file": str(finding.file), "problem": finding.text} for finding in findings]

    return {
        "sound": all(report.is_valid for report in reports) and not of_folder,
        "findings": as_values(of_folder),
        "checkpoints": [
            {
                "checkpoint": str(report.source),
                "sound": report.is_valid,
                "files": report.num_files,
                "bytes": report.num_bytes,
                "findings": as_values(report.findings),
            }
            for report in reports
        ],
        "newest_good": str(newest) if newest else None,
    }


def _print_reports(reports: Sequence[VerificationReport], newest: Path | None) -> None:
    for report in reports:
        verdict = f"good: {report.num_files} files, {format_bytes(report.num_bytes)}" if report.is_valid else "BROKEN"
        print(f"{report.source}  {verdict}")
        for finding in report.findings:
            print(f"  {printable(finding.text)}")
    if all(report.is_valid for report in reports):
        return
    if newest is None:
        print("No step of this folder is good.")
    else:
        number = newest.name.partition("-")[2].partition(".")[0].lstrip("0") or "0"
        print(f"The newest good step is {number}: --load {newest.parent} --ckpt-step {number}")


def _progress(action: str) -> StderrProgress:
    return StderrProgress(lambda done, total: f"{action}: {done / max(total, 1):.0%}")


# diff


def _diff(options: argparse.Namespace) -> int:
    from petatron.checkpoint.inspect.diff_checkpoints import diff_checkpoints
    from petatron.checkpoint.inspect.verify_checkpoint import find_checkpoint

    if options.rtol < 0 or options.top < 0:
        flag, value = ("--rtol", options.rtol) if options.rtol < 0 else ("--top", options.top)
        raise ConfigError([Problem(flag, str(value), "is below 0", "Leave it out.")])
    sources = find_checkpoint(options.first), find_checkpoint(options.second)
    with _progress("comparing") as progress:
        diff = diff_checkpoints(*sources, progress)
    if options.json:
        tensors = [
            {**asdict(tensor), "largest": _finite(tensor.largest), "relative": _finite(tensor.relative)}
            for tensor in diff.tensors
        ]
        print(json.dumps({**asdict(diff), "tensors": tensors}, indent=1))
    else:
        _print_comparison(diff, sources, rtol=options.rtol, top=options.top)
    return 0 if diff.allclose(options.rtol) else 1


def _print_comparison(diff: CheckpointDiff, sources: tuple[Path, Path], *, rtol: float, top: int) -> None:
    print(f"A  {sources[0]}\nB  {sources[1]}")
    if diff.settings:
        rows = [(f"  {name}", _setting_text(a), "->", _setting_text(b)) for name, a, b in diff.settings]
        print("\nsettings\n" + align_columns(rows))
    for name, keys in (("A", diff.only_first), ("B", diff.only_second)):
        if keys:
            more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
            print(f"\nonly in {name}: {', '.join(map(printable, keys[:_SHOWN_KEYS]))}{more}")
    if diff.unlike:
        print("\n" + "\n".join(map(printable, diff.unlike)))
    differing = [tensor for tensor in diff.tensors if tensor.relative > rtol]
    equal = len(diff.tensors) - len(differing)
    print(f"\n{equal} of {len(diff.tensors)} tensors are equal" + (f" within {rtol:g}" if rtol else ""))
    if differing:
        print("; ".join(_equal_by_component(diff, rtol)))
        keys = sorted(tensor.key for tensor in diff.tensors if tensor.relative <= rtol)
        if 0 < len(keys) <= _NAMED_EQUAL_KEYS:
            print(f"equal: {', '.join(map(printable, keys))}")
    if differing[:top]:
        head = ("  tensor", "worst relative", "absolute", "elements that differ")
        rows = [
            (
                f"  {tensor.key}" + (f" (B: {tensor.second_key})" if tensor.second_key != tensor.key else ""),
                f"{tensor.relative:.2e}",
                f"{tensor.largest:.2e}",
                f"{tensor.differing:,} of {tensor.elements:,}",
            )
            for tensor in differing[:top]
        ]
        print(align_columns([head, *rows]))
    if len(differing) > top:
        print(f"  and {len(differing) - top} more; --top {len(differing)} lists all")


def _equal_by_component(diff: CheckpointDiff, rtol: float) -> Iterator[str]:
    """Yields how many tensors of each component are equal: weights, master weights, moments by their names."""
    from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, ROUTER_PREFIX, WEIGHT_PREFIX

    names = {WEIGHT_PREFIX: "weights", MASTER_PREFIX: "master weights", ROUTER_PREFIX: "routers"}
    prefixes = [tensor.key.partition("/")[0] + "/" for tensor in diff.tensors]
    for prefix in sorted(set(prefixes), key=lambda prefix: (prefix not in names, prefix != WEIGHT_PREFIX, prefix)):
        equal = sum(tensor.relative <= rtol for tensor, of_tensor in zip(diff.tensors, prefixes) if of_tensor == prefix)
        name = printable(names.get(prefix, prefix.removesuffix("/")))
        yield f"{name}: {equal} of {prefixes.count(prefix)} equal"


# prune


def _prune(options: argparse.Namespace) -> int:
    from petatron.checkpoint.files import step_folder
    from petatron.checkpoint.files.digested_file_io import Disk
    from petatron.checkpoint.inspect.verify_checkpoint import find_checkpoint, verify_checkpoint
    from petatron.train.state.check_run_dirs import lock_save_dir

    class DryRunDisk(Disk):
        """Changes nothing."""

        def rename(self, old: Path, new: Path) -> None: ...
        def remove(self, path: Path) -> None: ...
        def sync_folder(self, path: Path) -> None: ...

    raise_problems(
        Problem(flag, str(value), "is below 1", "Use 1 or more.")
        for flag, value in (("--keep", options.keep), ("--retain-interval", options.retain_interval))
        if value is not None and value < 1
    )
    folder: Path = options.path
    newest = find_checkpoint(folder)
    if newest == folder:
        raise CheckpointError(f"{folder} is one checkpoint. Give {folder.parent}.")
    findings = verify_checkpoint(newest, read_content=False).findings
    if findings:
        raise CheckpointError(f"Nothing was removed, because the newest step is not whole: {findings[0].text}")
    sizes = {
        step: sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        for step, path in step_folder.list_steps(folder).items()
    }
    links = [path.name for path in step_folder.stray_symlinks(folder)]
    try:
        with lock_save_dir(None if options.dry_run else str(folder), rank=0):
            gone = step_folder.prune_steps(
                folder,
                keep=options.keep,
                retain_interval=options.retain_interval,
                disk=DryRunDisk() if options.dry_run else Disk(),
            )
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{folder} cannot be pruned: {why}. Make it writable, or ask its owner.") from error
    doing = "would remove" if options.dry_run else "removed"
    if links:
        print(f"{doing} symbolic links, not what they point to: {printable(', '.join(links))}")
    if gone:
        print(f"{doing} {', '.join(map(str, gone))} ({format_bytes(sum(sizes[step] for step in gone))})")
    elif not links:
        print("nothing to remove")
    print(f"{'would keep' if options.dry_run else 'kept'} {', '.join(str(step) for step in sizes if step not in gone)}")
    return 0


def _finite(value: float) -> float | None:
    """JSON cannot represent infinity."""
    return value if math.isfinite(value) else None


def _setting_text(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
