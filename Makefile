# make run: measure the smoke grid with whatever this machine has, and print its tables
# make check: linters, types, and the tests that need no Slurm and start no training process, within a minute
# make test: install what the tests need and run them all; make lint, make bench, make bench-gpu, make jobs
PYTHON ?= python3
VENV ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)

WORKERS ?= 2
# a file's tests stay on one worker, and share its fixtures
PYTEST = python -m pytest -q -ra --numprocesses $(WORKERS) --dist loadfile

.PHONY: run check test test-fast lint bench bench-gpu jobs slurm

run: $(VENV)/.installed
	python -m pipeline.submit --grid smoke --wait --skip-unsatisfiable
	python -m pipeline.collect outputs/smoke
	@echo "The report lies in outputs/smoke/report.md" >&2

test: $(VENV)/.installed-test slurm
	$(PYTEST)

# at once: mypy is one process, and the linters end while the tests run
check: $(VENV)/.installed-test
	$(MAKE) --jobs=2 --output-sync=target lint test-fast

test-fast: $(VENV)/.installed-test
	$(PYTEST) -m "not slurm and not training"

lint: $(VENV)/.installed-test
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	@if command -v shellcheck >/dev/null; then shellcheck jobs/*.sbatch .ci/run; \
	else echo "shellcheck is not installed: the job files were not checked" >&2; fi

bench: $(VENV)/.installed-test
	python tests/benchmarks/bench_commands.py
	python tests/benchmarks/bench_cpu.py

# on a node with a GPU, whose image folder PIPELINE_DATA names; with lightning and accelerate where they are installed
bench-gpu: $(VENV)/.installed-test
	python tests/benchmarks/bench_gpu.py --json bench-gpu.json
	torchrun --standalone --nproc-per-node=gpu tests/benchmarks/bench_ddp.py --json bench-ddp.json
	python tests/benchmarks/bench_memory.py --json bench-memory.json

jobs: $(VENV)/.installed
	for grid in q1 q2 q3 q4 quantize; do python -m pipeline.jobfile $$grid > jobs/$$grid.sbatch; done

# the throwaway Slurm of the tests: only where packages may be installed; elsewhere its tests say why they are skipped
slurm:
	@if command -v slurmctld munged shellcheck >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge shellcheck >/dev/null; \
	else echo "Slurm is not installed and cannot be: the tests on it will be skipped" >&2; fi

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg constraints.txt $(VENV)/bin/python
	python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: setup.cfg constraints.txt $(VENV)/.installed
	python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
