# make run: measure the smoke grid with whatever this machine has, and print its tables
# make check: linters, types, and the tests that need no Slurm and no browser and start no training process
# make test: install what the tests need and run them all; make test-slow: those that check leaves out, and those of
# which it draws few examples; make test-alone: those that time processes, one after the other
# make docs: the site of these pages, build/site/site/index.html
# make lint, make bench, make bench-gpu, make jobs, make words, make schema
# make results: write the measured figures of README.md and docs/ anew from the records in published/
# make golden: compare what the commands write with the digests in benchmarks/golden.json
# make campaign: what is measured on the GPUs of a node, in sittings; each call goes on where the last one stopped
# make faults: the tests of docs/faults.md; make faults-page: write their names into it
# make mutations: apply each known defect to a copy, and see that a test fails
# make TARGET CONSTRAINTS=constraints-volta.txt: on a V100, or with an older NVIDIA driver (docs/cluster.md)
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
INSTALLED = $(VENV)/.installed-$(notdir $(CONSTRAINTS))
export PATH := $(abspath $(VENV))/bin:$(PATH)

# of each configuration that `make run` measures
REPEATS ?= 1

WORKERS ?= 2
# most of the slow tests wait: for Slurm, or for a time limit
SLOW_WORKERS ?= 4
# a worker runs its half in order, so that a file's tests share its fixtures, and takes from the other's half at the end
PYTEST = python -m pytest -q -ra --numprocesses $(WORKERS) --dist worksteal
# what check leaves out
SLOW = slurm or training or browser or seconds

.PHONY: run check test test-fast test-slow test-alone golden lint bench bench-gpu campaign mutations faults faults-page jobs words schema results docs slurm browser

run: $(INSTALLED)
	python -m pipeline.submit --grid smoke --wait --skip-unsatisfiable --points-per-element 4 --repeats $(REPEATS)
	@python -m pipeline.collect outputs/smoke --brief
	@test $(REPEATS) -ge 6 || echo "Next: make run REPEATS=6    # six runs of each show smaller differences"

test: $(INSTALLED)-test slurm browser
	$(MAKE) --jobs=1 --keep-going test-fast test-slow test-alone golden

# at once: mypy is one process, and the linters end while the tests run
check: $(INSTALLED)-test
	$(MAKE) --jobs=2 --output-sync=target lint test-fast

test-fast: $(INSTALLED)-test
	$(PYTEST) -m "not ($(SLOW) or alone)"

test-slow: WORKERS = $(SLOW_WORKERS)
test-slow: $(INSTALLED)-test slurm browser
	$(PYTEST) -m "($(SLOW) or hypothesis) and not alone" --hypothesis-profile=all

test-alone: $(INSTALLED)-test
	python -m pytest -q -ra -m alone

golden: $(INSTALLED)
	python benchmarks/golden.py

faults: $(INSTALLED)-test slurm browser
	$(PYTEST) -m fault

faults-page:
	$(PYTHON) benchmarks/fault_matrix.py docs/faults.md

docs: $(INSTALLED)-test
	python benchmarks/docs_site.py build/site

lint: $(INSTALLED)-test
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	python benchmarks/docs_site.py build/site
	@if command -v shellcheck >/dev/null; then shellcheck jobs/*.sbatch .ci/run; \
	else echo "shellcheck is not installed: the job files were not checked" >&2; fi

# benchmarks import helpers of the tests
bench bench-gpu campaign: export PYTHONPATH := tests$(if $(PYTHONPATH),:$(PYTHONPATH))

bench: $(INSTALLED)-test
	python benchmarks/bench_commands.py
	python benchmarks/bench_link_of_known_rate.py

# on a node with a GPU, whose image folder PIPELINE_DATA names; with lightning and accelerate where they are installed
bench-gpu: $(INSTALLED)-test
	python benchmarks/bench_gpu.py --json bench-gpu.json
	torchrun --standalone --nproc-per-node=gpu benchmarks/bench_gpu.py --json bench-ddp.json
	python benchmarks/bench_memory.py --json bench-memory.json

# OUT is the folder that grows; some benches need packages that the tests do not: transformers, lightning, accelerate
campaign: OUT ?= campaign
campaign: $(INSTALLED)-test
	python benchmarks/campaign.py benchmarks/campaign.yaml --out $(OUT)

mutations: $(INSTALLED)-test
	python benchmarks/run_mutations.py

results: $(INSTALLED)
	python benchmarks/render_results.py

words: $(INSTALLED)
	python benchmarks/words_page.py docs

schema: $(INSTALLED)
	python benchmarks/schema_files.py docs/schema

jobs: $(INSTALLED)
	for grid in q1 q2 q3 q4 q4-study quantize; do python -m pipeline.jobfile $$grid > jobs/$$grid.sbatch; done

# the throwaway Slurm of the tests: only where packages may be installed; elsewhere its tests say why they are skipped
slurm:
	@if command -v slurmctld munged shellcheck >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge shellcheck >/dev/null; \
	else echo "Slurm is not installed and cannot be: the tests on it will be skipped" >&2; fi

# the browser that reads and prints report.html in the tests; without it they say why they are skipped
browser:
	@if command -v chromium pdftotext >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium poppler-utils >/dev/null; \
	else echo "chromium or poppler-utils is not installed and cannot be: the tests of the page in it will be skipped" >&2; fi

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): setup.cfg $(CONSTRAINTS) $(VENV)/bin/python
	python -m pip install --quiet --constraint $(CONSTRAINTS) --editable .
	rm -f $(VENV)/.installed*  # also those of other constraints, whose versions are gone
	touch $@

$(INSTALLED)-test: setup.cfg $(CONSTRAINTS) $(INSTALLED)
	python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test,docs]'
	touch $@
