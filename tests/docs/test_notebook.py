"""The example notebook runs: its cells as one script with the guides, and in a real kernel in the long form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load_deadline import scaled

NOTEBOOK = Path(__file__).parents[2] / "examples/notebooks/first_model.ipynb"


def test_the_notebook_is_stored_without_output():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert len(cells) > 5
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.docs
def test_cells_run_in_order(tmp_path: Path):
    pytest.importorskip("matplotlib")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    command = [sys.executable, str(script)]
    environment = {
        "PYTHONPATH": str(NOTEBOOK.parents[2]),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=scaled(200))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
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
