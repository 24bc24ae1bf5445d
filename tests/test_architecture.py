"""The promises of docs/design.md that can be read off the source: imports go down, nothing is ambient, only the command
line prints, and the core imports with nothing but its five dependencies."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from petatron.config.schema.fields import fields_by_name, sections

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "petatron"
ROWS = (
    ("base",),
    ("kernels", "config"),
    ("mesh",),
    ("schedule",),
    ("sharding",),
    ("layers",),
    ("models",),
    ("validate",),
    ("estimate",),
    ("parallel", "optim", "data", "checkpoint"),
    ("history",),
    ("pretrained",),
    ("infer", "plan", "evaluate"),
    ("train",),
    ("posttrain",),
    ("serve",),
    ("verify",),
    ("bench", "quickstart", "dashboard", "integrations", "port"),
    ("cli",),
)
ROW_OF = {folder: row for row, folders in enumerate(ROWS) for folder in folders}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
GENERATION = ("petatron.infer", "petatron.evaluate.task_list")
CORE = ("torch", "numpy", "safetensors", "yaml", "tokenizers")
TRITON = PACKAGE / "kernels" / "triton"  # loaded by name, and only where Triton is there
HTTP = PACKAGE / "serve" / "http"  # imported by `cli/serve` alone, and only where the extra is there
TRANSFORMERS = PACKAGE / "integrations" / "transformers"  # imported by users alone
LM_EVAL = PACKAGE / "integrations" / "lm_eval"  # imported by its starter alone, and only where the extra is there


def _folder(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def _imports(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
    return found


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a source, its module first; each file is parsed and walked once."""
    return tuple(ast.walk(ast.parse(path.read_text(), filename=str(path))))


@pytest.fixture(autouse=True, scope="module")
def _nodes_are_no_garbage() -> Iterator[None]:
    """All nodes of the package are kept, and the collector would search them again and again while they become more."""
    gc.disable()
    yield
    gc.enable()


def test_imports_go_down():
    found = []
    for path in SOURCES:
        folder = _folder(path)
        if folder is None:  # petatron/__init__.py and __main__.py stand above everything
            continue
        assert folder in ROW_OF, f"{folder}/ has no row in the architecture"
        for line, name in _imports(nodes_of(path)):
            parts = name.split(".")
            if parts[0] != "petatron" or len(parts) < 2 or parts[1] == folder:
                continue
            if parts[1] not in ROW_OF:
                found.append(f"{path}:{line} imports {name}, which is in no row")
            elif ROW_OF[parts[1]] >= ROW_OF[folder]:
                found.append(f"{path}:{line} imports {name}: not below {folder}/")
    assert not found, "\n".join(found)


def _module_names(module: str) -> set[str] | None:
    """Returns what can be imported from a module: its submodules, and what it defines, assigns or imports; None if it does not exist."""
    path = ROOT / module.replace(".", "/")
    submodules = {entry.stem for entry in path.iterdir()} if path.is_dir() else set()
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return submodules | set(_names_at_the_top(ast.parse(file.read_text()).body))
    return submodules or None


def _names_at_the_top(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names that statements bind, outside of the functions and classes among them."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif not isinstance(node, ast.expr) or isinstance(node, ast.Tuple):
            yield from _names_at_the_top(ast.iter_child_nodes(node))


def _missing_imports(nodes: Iterable[ast.AST], names_of: Callable[[str], set[str] | None]) -> Iterator[str]:
    """Yields the imports of a source that the package cannot satisfy, with their lines."""
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for module in (module for module in modules if module.split(".")[0] == "petatron"):
            names = names_of(module)
            if names is None:
                yield f"{node.lineno} imports {module}, which does not exist"
            elif isinstance(node, ast.ImportFrom) and (missing := {alias.name for alias in node.names} - names):
                yield f"{node.lineno} imports {', '.join(sorted(missing))} from {module}, which does not have it"


def test_imports_from_the_package_exist():
    """Tests for GPUs too, which are not collected elsewhere, so that only this shows an import that a rename or a cut has left behind."""
    names_of = cache(_module_names)
    missing = [
        f"{path.relative_to(ROOT)}:{problem}"
        for folder in ("tests", "examples", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for problem in _missing_imports(ast.walk(ast.parse(path.read_text())), names_of)
    ]
    assert not missing, "\n".join(missing)


def test_an_import_that_does_not_exist_is_named():
    source = (
        "import petatron.base.errors, petatron.nowhere\n"
        "from petatron.base.errors import Missing, DataError\n"
        "from petatron.base import errors\n"
        "def later():\n"
        "    from petatron.base.nowhere import anything\n"
    )
    assert sorted(_missing_imports(ast.walk(ast.parse(source)), _module_names)) == [
        "1 imports petatron.nowhere, which does not exist",
        "2 imports Missing from petatron.base.errors, which does not have it",
        "5 imports petatron.base.nowhere, which does not exist",
    ]


def test_no_ambient_state():
    found = []
    for path in SOURCES:
        relative = path.relative_to(PACKAGE).as_posix()
        # One place reads the environment; one writes a variable of a third-party library into its own children.
        has_environment = relative in ("mesh/launch/environment.py", "data/preprocess_parts/encode_blocks.py")
        for node in nodes_of(path):
            if isinstance(node, ast.Global):
                found.append(f"{relative}:{node.lineno} uses a global")
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and not has_environment:
                found.append(f"{relative}:{node.lineno} touches the environment")
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if prints and not relative.startswith("cli/"):
                found.append(f"{relative}:{node.lineno} prints")
    assert not found, "\n".join(found)


def test_imports_inside_functions_have_a_reason():
    """Optional libraries anywhere; our own or torch only where a fast start is the point."""
    starts_fast = (
        "mesh/launch/environment.py",
        "mesh/launch/rank_exit.py",
        "mesh/launch/local_launcher.py",
        "__init__.py",
        "train/report/text_samples.py",
        "train/report/task_evaluation.py",
        "train/hooks/megatron_copies.py",
    )
    found = []
    for path in SOURCES:
        relative = path.relative_to(PACKAGE).as_posix()
        if relative.startswith(("cli/", "bench/", "quickstart/")) or relative in starts_fast:
            continue
        functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for line, name in (seen for function in functions for seen in _imports(ast.walk(function))):
            # fully_shard takes longer to import than all of this package, and few runs need it.
            slow = name in ("torch.utils.tensorboard", "yaml") or name.startswith("petatron.parallel.data.fsdp")
            if not slow and name.split(".")[0] in ("petatron", *CORE):
                found.append(f"{relative}:{line} imports {name} inside a function")
    assert not found, "\n".join(found)


def test_triton_stays_in_its_folder():
    """Its kernels import it at the top, as they must; nobody else does, and nobody else imports them."""
    found = [
        f"{path}:{line} imports {name}: ask the registry for it"
        for path in SOURCES
        if not path.is_relative_to(TRITON)
        for line, name in _imports(nodes_of(path))
        if name.split(".")[0] == "triton" or name.startswith("petatron.kernels.triton")
    ]
    assert not found, "\n".join(found)


def test_http_stays_in_its_folder():
    """Its routes import the framework at the top, as they must; nobody else does, and only the subcommand imports them, when it runs."""
    libraries = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client")
    found = [
        f"{path}:{line} imports {name}"
        for path in SOURCES
        if not path.is_relative_to(HTTP) and not path.is_relative_to(PACKAGE / "cli" / "serve")
        for line, name in _imports(nodes_of(path))
        if name.split(".")[0] in libraries or name.startswith("petatron.serve.http")
    ]
    assert not found, "\n".join(found)


def test_lm_eval_stays_in_its_folder():
    """The model imports it at the top, since it is a subclass; only the subcommand starts it, and nobody else imports the model."""
    starter = PACKAGE / "cli" / "subcommands" / "lm_eval_starter.py"
    found = [
        f"{path}:{line} imports {name}"
        for path in SOURCES
        if path != starter and not path.is_relative_to(LM_EVAL)
        for line, name in _imports(nodes_of(path))
        if name.split(".")[0] == "lm_eval" or name.startswith("petatron.integrations.lm_eval")
    ]
    assert not found, "\n".join(found)


def test_models_of_transformers_are_imported_by_users_alone():
    """They are subclasses, so they import it at the top; and importing them registers them."""
    found = [
        f"{path}:{line} imports {name}"
        for path in SOURCES
        if not path.is_relative_to(TRANSFORMERS)
        for line, name in _imports(nodes_of(path))
        if name.startswith("petatron.integrations.transformers")
    ]
    assert not found, "\n".join(found)


def test_no_file_outgrows_a_screenful():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 450}
    assert not long, f"what are these really two of? {long}"


def test_a_class_name_means_one_thing():
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.fixture(scope="module")
def new_process() -> list[str]:
    """What a process without the extras says after every module and operation was tried; and, of a copy of it with the extras, whether
    what starts a run brought generation along. The two share the import of torch."""
    sources = [
        path
        for path in SOURCES
        if path.name != "__main__.py"
        and not any(path.is_relative_to(extra) for extra in (TRITON, HTTP, LM_EVAL, TRANSFORMERS))
    ]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources]
    program = f"""
import importlib, os, sys
extras = ("rich", "tensorboard", "wandb", "transformers", "zstandard", "triton", "fastapi", "uvicorn", "pytest",
          "hypothesis", "pyarrow", "huggingface_hub", "tqdm", "matplotlib", "pydantic", "starlette", "prometheus_client",
          "llguidance", "lm_eval", "datasets", "tenacity", "fsspec", "ray")
for name in extras:
    sys.modules[name] = None  # as if it were not installed
import torch
copy = os.fork()
if copy == 0:
    for name in extras:
        del sys.modules[name]
    import petatron.train.run_training
    loaded = any(name in sys.modules for name in {GENERATION})
    print("with generation" if loaded else "without generation", flush=True)
    os._exit(0)
os.waitpid(copy, 0)
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
from petatron.kernels.registry import OPERATIONS, KernelContext, choose_all_kernels
here = KernelContext.of(torch.device("cpu"), torch.bfloat16, allow_compile=True)
for context in (here, KernelContext("cuda", (9, 0), torch.bfloat16, True, here.missing_tools)):
    choices = choose_all_kernels(context)
    assert [choice.operation for choice in choices] == list(OPERATIONS)
    without_compiler = {{"emulation in bfloat16"}} if context.device == "cuda" else set()
    assert {{choice.name for choice in choices}} == {{"reference", "emulation", "torch fused", *without_compiler}}, choices
print("all modules and operations")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    return [*done.stdout.splitlines(), done.stderr]


def test_every_module_imports_with_the_core_alone(new_process: list[str]):
    """And every operation has an implementation then."""
    assert "all modules and operations" in new_process, new_process


def test_help_and_checked_configs_import_no_torch():
    """Nor numpy, which takes half as long as all rules together."""
    commands = (
        "main(['--help']); main(['train', '--help']); main(['config', 'show', 'tiny-llama', '--cuda-graphs', 'on'])"
    )
    program = f"import sys; from petatron.cli.main import main; {commands}; sys.exit(bool({{'torch', 'numpy'}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_without_samples_and_tasks_starts_without_generation(new_process: list[str]):
    """Every rank of every start would import it."""
    assert "without generation" in new_process, new_process


def test_only_checked_configs_are_resolved():
    """What takes a resolved config checks no settings, so nothing else may make one of what a user wrote."""
    made = {
        f"{path.relative_to(PACKAGE)} calls {node.func.id}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("LoadedConfig", "resolve_derived")
    }
    assert made == {
        "validate/load_checked_config.py calls LoadedConfig",
        "validate/load_checked_config.py calls resolve_derived",
    }


def test_no_room_imports_a_constant_from_a_rule():
    """Other rooms ask `validate/` for problems, and import no constant from it: kernels and layers declare their own limits."""
    imported = {
        f"{path.relative_to(PACKAGE)} imports {alias.name}"
        for path in SOURCES
        if _folder(path) != "validate"
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("petatron.validate")
        for alias in node.names
        if alias.name.isupper()
    }
    assert not imported


PICKLES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
UNPICKLING = {
    "petatron/bench/loading/time_checkpoint_load.py": "measures torch.load on a file that it wrote itself",
}


def pickle_problems(nodes: Iterable[ast.AST], relative: str) -> Iterator[str]:
    """Where a source reads a pickle, or may."""
    for node in nodes:
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if {name.split(".")[0] for name in imported} & set(PICKLES):
            yield f"{relative} imports a pickle"
        if isinstance(node, ast.Call):
            load = isinstance(node.func, ast.Attribute) and node.func.attr == "load"
            if load and (called := ast.unparse(node.func)) in ("torch.load", "torch.serialization.load"):
                yield f"{relative}:{node.lineno} {called}"
            allows = [word for word in node.keywords if word.arg == "allow_pickle"]
            if any(ast.unparse(word.value) != "False" for word in allows):
                yield f"{relative}:{node.lineno} allow_pickle"


def test_nothing_is_unpickled():
    names = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    found = [
        problem
        for path, name in names.items()
        if name not in UNPICKLING
        for problem in pickle_problems(nodes_of(path), name)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["import pickle", "from dill import loads", "torch.load(path)", "np.load(path, allow_pickle=True)"]
)
def test_unpickling_is_noticed(line: str):
    assert list(pickle_problems(ast.walk(ast.parse(line)), "petatron/train/new.py"))
    assert not list(pickle_problems(ast.walk(ast.parse("np.load(path, allow_pickle=False)")), "petatron/train/new.py"))


# torch pickles what these carry, and who receives a pickle runs it; `mesh/json_collectives.py` carries JSON.
OBJECT_COLLECTIVES = re.compile(
    r"\b(all_gather_object|gather_object|broadcast_object_list|scatter_object_list|send_object_list|recv_object_list)\b"
)


def test_ranks_send_each_other_no_pickles():
    found = [str(path.relative_to(ROOT)) for path in SOURCES if OBJECT_COLLECTIVES.search(path.read_text())]
    assert not found, f"{', '.join(found)}: send JSON through mesh/json_collectives.py"


FILES = "petatron/base/safe_files.py"
ASKS_WHO_IT_IS = {
    "petatron/mesh/launch/local_launcher.py": "so that ranks can notice that their launcher is gone",
    "petatron/mesh/launch/rendezvous_store_server.py": "so that the server can notice that rank 0 is gone",
    "petatron/mesh/launch/environment.py": "so that a rank tells what it has joined from what its parent has",
    "petatron/posttrain/environments/environment_process.py": "so that rank 0 can end an episode",
}
REMOVES_TREES = ("rmtree", "rmdir", "removedirs")
WRITES = ("write_text", "write_bytes", "save_file", "mkstemp", "mktemp", "NamedTemporaryFile")
WRITES_BY_NAME = {
    FILES: "the rule itself",
    "petatron/base/check_output_file.py": "a file that the user names",
    "petatron/pretrained/settings_as_config_file.py": "in a temporary folder of its own",
    "petatron/verify/record_trace.py": "in a folder that `petatron verify` made for it",
    "petatron/data/bpe/train_bpe.py": "a file that the user names",
    "petatron/schedule/measured_timeline.py": "a file that the user names",
}


def link_problems(nodes: Iterable[ast.AST], relative: str) -> list[str]:
    """Where a source may follow a link that somebody put into a folder of ours, or guess a name that others can guess too.

    The command line writes to files that users name, and through whatever links they like.
    """
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        words = [ast.unparse(word) for word in (*node.args, *(keyword.value for keyword in node.keywords))]
        follows = (
            any(keyword.arg == "followlinks" for keyword in node.keywords) or ast.unparse(node.func) == "shutil.move"
        )
        if relative != FILES and (name in REMOVES_TREES or follows):
            found.append(f"{relative}:{node.lineno} {name}: petatron.base.safe_files.remove_tree follows no links")
        if relative.startswith(("petatron/cli/", "petatron/bench/")):
            continue
        modes = [word[1:-1] for word in words if word[0] in "\"'"]
        writes = name in WRITES or (name == "open" and any(set(mode) & set("wax+") for mode in modes if len(mode) < 4))
        if relative not in WRITES_BY_NAME and writes:
            found.append(
                f"{relative}:{node.lineno} {name}: petatron.base.safe_files.create_file and write_atomic follow no links"
            )
        if any("O_CREAT" in word and "O_NOFOLLOW" not in word for word in words):
            found.append(f"{relative}:{node.lineno} opens without O_NOFOLLOW")
        if name == "getpid" and relative not in ASKS_WHO_IT_IS:
            found.append(
                f"{relative}:{node.lineno} a process id in a name can be guessed: petatron.base.safe_files.tmp_path_for"
            )
    return found


def test_no_link_is_followed():
    found = [problem for path in SOURCES for problem in link_problems(nodes_of(path), str(path.relative_to(ROOT)))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "shutil.rmtree(folder)",
        "path.rmdir()",
        "os.walk(folder, followlinks=True)",
        "path.write_text(text)",
        "path.open('wb', buffering=0)",
        "open(path, mode='a')",
        "os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)",
        "f'state-{os.getpid()}.bin'",
        "tempfile.mkstemp(dir=folder)",
    ],
)
def test_following_a_link_is_noticed(line: str):
    allowed = "path.open('rb'); open(path); path.unlink(); safe_files.remove_tree(path)"
    assert link_problems(ast.walk(ast.parse(line)), "petatron/train/new.py")
    assert not link_problems(ast.walk(ast.parse(allowed)), "petatron/train/new.py")


def _optional_setting(node: ast.AST) -> bool:
    """Whether an expression reads a setting that may be unset: `run.train.train_iters`, `config.lr`, `self._config.lr`."""
    if not isinstance(node, ast.Attribute) or (info := fields_by_name().get(node.attr)) is None or not info.optional:
        return False
    owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    owner = owner.lstrip("_").removesuffix("_config")
    return owner == info.section or (owner not in sections() and owner in ("run", "config", "settings", "loaded"))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _possible_values(node: ast.AST | None) -> list[ast.AST]:
    """The expressions whose value an expression may have."""
    match node:
        case ast.IfExp():
            return [*_possible_values(node.body), *_possible_values(node.orelse)]
        case ast.BoolOp():
            return [found for value in node.values for found in _possible_values(value)]
        case ast.NamedExpr():
            return _possible_values(node.value)
    return [] if node is None else [node]


def _assigned(target: ast.AST, value: ast.AST | None) -> set[str]:
    """The names that an assignment gives the value of a setting to."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return set().union(*(_assigned(one, other) for one, other in zip(target.elts, value.elts)))
    from_setting = any(_optional_setting(found) for found in _possible_values(value))
    return {target.id} if isinstance(target, ast.Name) and from_setting else set()


def _setting_names(scope: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            names |= set().union(*(_assigned(target, node.value) for target in node.targets))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            names |= _assigned(node.target, node.value)
    return names


def _narrowed(test: ast.AST, *, holds: bool = True) -> list[ast.AST]:
    """The expressions that cannot be None if a condition holds, or does not."""
    match test:
        case ast.BoolOp():
            return [found for value in test.values for found in _narrowed(value, holds=holds)]
        case ast.UnaryOp(op=ast.Not()):
            return _narrowed(test.operand, holds=not holds)
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq() as op], comparators=[right]):
            excludes_none = (_is_none(left) or _is_none(right)) and isinstance(op, ast.IsNot | ast.NotEq) == holds
            return _possible_values(left if _is_none(right) else right) if excludes_none else []
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[ast.Tuple() | ast.List() as held]):
            return list(held.elts) if _is_none(left) and isinstance(op, ast.NotIn) == holds else []
        case ast.Call(func=ast.Name(id="isinstance"), args=[value, *_]):
            return [value] if holds else []
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp(elt=each, generators=[one, *_])]):
            return [
                *_narrowed(each, holds=holds),
                *(getattr(one.iter, "elts", []) if _narrowed(each, holds=holds) else []),
            ]
    return _possible_values(test) if holds else []


def narrowing_asserts(tree: ast.AST) -> list[int]:
    """The lines of asserts that a setting is there: either its resolved type says so, or a user must be told that it is missing."""
    lines: set[int] = set()
    nodes = tuple(ast.walk(tree))
    if not any(isinstance(node, ast.Assert) for node in nodes):
        return []
    for scope in nodes:
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            asserts = [node for node in ast.walk(scope) if isinstance(node, ast.Assert)]
            names = _setting_names(scope) if asserts and not isinstance(scope, ast.Module) else set()
            for node in asserts:
                for found in _narrowed(node.test):
                    if _optional_setting(found) or (isinstance(found, ast.Name) and found.id in names):
                        lines.add(node.lineno)
    return sorted(lines)


def test_no_assert_narrows_a_setting():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in narrowing_asserts(nodes_of(path)[0])]
    assert not found, f"{', '.join(found)}: take the resolved config, or `petatron.config.required_settings.required`"


@pytest.mark.parametrize(
    "line",
    [
        "assert run.train.train_iters is not None",
        "assert config.lr is not None, 'the config is not derived'",
        "assert self._config.lr is not None",
        "assert spec.run.model.vocab_size is not None",
        "assert export.moe is not None and export.moe.num_experts is not None",
        "assert parallel.world_size and parallel.data_parallel_size, 'the config is not derived'",
        "assert model.kv_channels",
        "assert not model.kv_channels is None",
        "assert None is not model.kv_channels",
        "assert model.kv_channels != None",
        "assert isinstance(model.kv_channels, int)",
        "assert None not in (model.kv_channels, model.num_query_groups)",
        "assert all(size is not None for size in (model.kv_channels, 2))",
        "size = state.run.train.global_batch_size; assert size is not None",
        "size: int | None = train.global_batch_size; assert size",
        "layout, size = build(run), run.parallel.ddp_bucket_size; assert size is not None",
        "lr = self._config.lr if lr is None else lr; assert lr is not None",
        "assert (size := train.global_batch_size) is not None",
        "model_config = 1; assert model_config.vocab_size is not None",
    ],
)
def test_an_assert_that_narrows_a_setting_is_noticed(line: str):
    assert narrowing_asserts(ast.parse(f"def f():\n    {line}")) == [2]


@pytest.mark.parametrize(
    "line",
    [
        "assert self.embedding is not None and self.head is not None",
        "assert tokenizer.vocab_size is not None",  # a tokenizer has one too
        "assert checkpoint.model is not None",
        "assert config.hidden_size % 8 == 0",
        "assert parallel.sequence_parallel and axis.size > 1",  # may not be unset
        "assert train.global_batch_size > 4",
        "size = width(model.kv_channels); assert size is not None",
        "assert config.lr is None",
        "assert not config.lr",
        "assert model.kv_channels == 64",
        "if config.lr is not None: pass",
    ],
)
def test_other_asserts_stay(line: str):
    assert narrowing_asserts(ast.parse(f"def f():\n    {line}")) == []
