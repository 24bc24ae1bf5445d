# `make quickstart` and `make test` do all set-up on a machine that has only Python (3.11 or newer), pip and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Tests start many processes; where bytecode may not be written, each of them would compile the package again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help quickstart test test-docs test-slow test-matrix test-crash test-ray test-trl test-attacks test-fuzz test-gpu test-gpu-slow test-nccl megatron-core test-megatron check format reference audit browser clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /	/' | expand -t 16

$(VENV)/core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Petatron needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve]' rich
	touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(VENV)/core  ## install, then train a small model on this machine within three minutes
	$(BIN)/petatron quickstart

test: $(VENV)/dev  ## the whole default suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not gpu and not slow and not matrix and not crash and not nccl and not docs and not megatron and not ray and not trl'

test-docs: $(VENV)/dev  ## every command of the README and the guides runs as it stands there, every example as a toy
	$(BIN)/python -m pytest -n 2 --dist worksteal -m docs tests/docs tests/examples tests/cli/train/test_mixtral_listing.py

test-slow: $(VENV)/dev  ## the long forms; installs what runs the example notebook
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebook]'
	$(BIN)/python -m pytest -m slow

test-matrix: $(VENV)/dev  ## the long forms of parity: the whole proof matrix, 20 steps in float32 and float64, random models, and all cases of what the default suite samples (over an hour on 2 cores)
	$(BIN)/python -m pytest -m matrix

test-crash: $(VENV)/dev  ## the long form of the crash tests: training is killed some hundred times (ten minutes on 2 cores)
	$(BIN)/python -m pytest -m crash tests/crash

test-trl: $(VENV)/dev  ## losses, gradients and batches beside those of TRL's trainers (two minutes)
	$(BIN)/python -m pytest -m trl tests/trl

test-ray: $(VENV)/dev  ## preprocessing on a Ray cluster of two nodes on this machine, whose workers and nodes are killed; installs Ray (a minute)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]' || echo "Ray cannot be fetched here: the tests on it are skipped"
	$(BIN)/python -m pytest -m ray tests/unit/data/inputs

test-attacks: $(VENV)/dev  ## attacks on launch, files and server, long forms too (as root also by another user, and between network namespaces)
	$(BIN)/python -m pytest -m 'not gpu and not nccl' tests/security

test-fuzz: $(VENV)/dev  ## mutated files of every kind for half an hour; MINUTES=5 or CASES=100000, KIND=dataset, JOBS=4, FIRST=1000000 (other cases)
	$(BIN)/python -m tests.fuzz $(if $(CASES),--cases $(CASES),--minutes $(or $(MINUTES),30)) --jobs $(or $(JOBS),2) --kind $(or $(KIND),all) --first $(or $(FIRST),0)

test-gpu:  ## GPU checks, with the Python and packages of the machine
	PYTHONPATH=. $(PYTHON) -m pytest -m "gpu and not slow" tests/gpu tests/kernels tests/unit/layers

test-nccl:  ## every layout over NCCL, 8 ranks on one GPU or one per GPU; SLICE=1/4 runs a quarter (under ten minutes each), JSON=FILE reports
	PYTHONPATH=. $(PYTHON) -m pytest -m nccl tests/nccl $(if $(SLICE),--slice $(SLICE)) $(if $(JSON),--nccl-json $(JSON))

test-gpu-slow:  ## FP8 loss curves over 200 steps, and bench kernels at full size
	PYTHONPATH=. $(PYTHON) -m pytest -m "gpu and slow" tests/gpu tests/kernels

browser: $(VENV)/dev  ## what the tests of the playground page need: playwright and Chromium (as root on Debian; elsewhere it tells how)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	command -v chromium || command -v chromium-browser || command -v google-chrome || { test "$$(id -u)" = 0 && apt-get install --yes chromium; } || \
	{ echo "Install Chromium, then run the tests: sudo apt-get install chromium (Debian), or this machine's package manager."; exit 1; }

megatron-core: $(VENV)/dev  ## unpack the published megatron-core beside the environment (not into it), for test-megatron
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/megatron-core \
	  "$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["megatron"])')" \
	  || echo "megatron-core cannot be fetched here: the tests that run it are skipped"

test-megatron: megatron-core  ## checkpoints both ways with real Megatron-Core on CPU, tp 2 x pp 2 too (ten minutes on 2 cores)
	$(BIN)/python -m pytest -m megatron tests/megatron_core

check: $(VENV)/dev  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/dev  ## rewrite in house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(VENV)/core  ## regenerate docs/flags.md from the schema
	$(BIN)/petatron config reference --out docs/flags.md

audit:  ## hold the pinned dependencies against the published advisories (needs the network)
	$(PYTHON) -m venv .audit
	.audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	.audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

clean:  ## remove the environment and caches
	rm -rf $(VENV) .audit .pytest_cache .ruff_cache .hypothesis
