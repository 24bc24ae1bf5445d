"""The example notebooks run: their cells as one script with the guides, and in a real kernel in the long form."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load_deadline import scaled

FOLDER = Path(__file__).parents[2] / "examples/notebooks"
NOTEBOOK, POSTTRAINING = FOLDER / "first_model.ipynb", FOLDER / "posttraining.ipynb"


@pytest.mark.parametrize("notebook", [NOTEBOOK, POSTTRAINING], ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(notebook: Path):
    cells = json.loads(notebook.read_text())["cells"]
    assert len(cells) > 5
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def run_cells(notebook: Path, folder: Path, *, timeout_s: float) -> str:
    """Runs the cells as one script, as they follow one another; returns what they print."""
    pytest.importorskip("matplotlib")
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    script = folder / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    environment = {
        "PYTHONPATH": str(FOLDER.parents[1]),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(timeout_s),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.docs
@pytest.mark.timeout(1200)
def test_a_model_learns_the_task_in_every_way(tmp_path: Path):
    lines = run_cells(POSTTRAINING, tmp_path, timeout_s=1000).splitlines()
    scores = ast.literal_eval(lines[-1])
    assert list(scores) == ["texts", "SFT", "LoRA", "DPO", "GRPO"]
    assert scores.pop("texts") < 0.2 and min(scores.values()) > 0.7, scores
    assert (tmp_path / "posttraining-run/lora-adapter/adapter_config.json").is_file()


@pytest.mark.docs
def test_cells_run_in_order(tmp_path: Path):
    output = run_cells(NOTEBOOK, tmp_path, timeout_s=200)
    lines = output.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if " loss " in line]
    validations = [float(line.split()[1]) for line in lines if line.startswith("validation")]
    assert len(losses) >= 6 and losses[-1] < 0.8 * losses[0] and validations[1] < validations[0]
    assert (tmp_path / "notebook-run/model/config.json").is_file()


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path: Path):
    nbclient = pytest.importorskip("nbclient", reason="make test-slow installs it (extra: notebook)")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=round(scaled(200)), resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the curve is shown"
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"], "no prints"
