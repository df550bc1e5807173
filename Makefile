# Everything a newcomer needs. `make demo` and `make test` set up what they use, on a fresh machine, again and again.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# PyPI's torch for Linux brings gigabytes of CUDA packages; the CPU build has an index of its own.
TORCH_CPU = https://download.pytorch.org/whl/cpu
RUN     = $(VENV)/bin/python
STAMP   = $(VENV)/.rlkernel-ready

.PHONY: help setup demo test check conform evidence bench docs fresh site hosts build wheelhouse clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## a virtual environment with torch's CPU build and everything the tests need

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)+cpu" || $(RUN) -m pip install --quiet --index-url $(TORCH_CPU) "$(TORCH)"
	$(RUN) -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(STAMP) ## watch a small model learn arithmetic by GRPO on this machine, in two minutes
	$(VENV)/bin/rlkernel demo

test: $(STAMP) ## all tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal

check: $(STAMP) ## ruff and mypy
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

conform: $(STAMP) ## attack plain torch with every clause at length, and write the report and README's table
	$(VENV)/bin/rlkernel conformance run torch --profile standard --report conformance/reports/torch
	$(VENV)/bin/rlkernel conformance table README.md

evidence: $(STAMP) ## which reports and results are of other sources than are here, and the command that renews each
	$(VENV)/bin/rlkernel conformance evidence
	$(VENV)/bin/rlkernel bench evidence

bench: $(STAMP) ## what dispatch and importing cost, and every other suite at a toy size
	$(VENV)/bin/rlkernel bench run --suite dispatch --size full
	$(VENV)/bin/rlkernel bench run --size toy --peers torch,cublas,launches

docs: $(STAMP) ## run every code block and command of README and docs
	$(RUN) -m pytest -q tests/test_docs.py

# Pages and tests alone are copied, so that nothing of the clone can be imported. What backends have is run with them.
FRESH = build/fresh
PAGES = README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md Makefile pyproject.toml mkdocs.yml docs examples tests benchmarks/notes
fresh: build ## the same from the built wheels, in a new environment without the clone
	rm -rf $(FRESH) && mkdir -p $(FRESH)/clone
	$(PYTHON) -m venv $(FRESH)/env
	$(FRESH)/env/bin/python -m pip install --quiet "$(TORCH)+cpu" || $(FRESH)/env/bin/python -m pip install --quiet --index-url $(TORCH_CPU) "$(TORCH)"
	$(FRESH)/env/bin/python -m pip install --quiet "$$(ls dist/rlkernel-*.whl)[dev]"
	for page in $(PAGES) backends/*/README.md backends/rocm/simulator/README.md; do mkdir -p $(FRESH)/clone/$$(dirname $$page) && cp -r $$page $(FRESH)/clone/$$page || exit 1; done
	cd $(FRESH)/clone && ../env/bin/python -c "import rlkernel, rlkernel_core, sys; assert all(m.__file__.startswith(sys.prefix) for m in (rlkernel, rlkernel_core))"
	cd $(FRESH)/clone && ../env/bin/python -m pytest -q -o pythonpath=. -k "(block_runs or page) and not jetson.md and not rocm.md" tests/test_docs.py tests/test_docs_ops.py tests/test_new_backend_page.py
	$(FRESH)/env/bin/python -m pip install --quiet --no-deps dist/rlkernel_triton-*.whl dist/rlkernel_rocm-*.whl dist/cdna_simulator-*.whl dist/rlkernel_jetson-*.whl
	cd $(FRESH)/clone && ../env/bin/python -m pytest -q -o pythonpath=. -k "block_runs and (jetson.md or rocm.md)" tests/test_docs.py

site: $(STAMP) ## the documentation as a site in site/, and every page looked at in Chromium where that is installed
	$(RUN) -m pip install --quiet -e '.[docs]'
	$(VENV)/bin/mkdocs build --strict
	$(RUN) -m pytest -q tests/test_site.py

hosts: $(STAMP) ## TRL, transformers and torchao, stock and with rlkernel inside, compared
	$(RUN) -m pip install --quiet -e '.[hosts]'
	$(RUN) -m pytest -q tests/test_trl.py tests/test_transformers.py tests/test_torchao.py tests/test_host_contracts.py tests/test_agree.py

DISTS = . $(dir $(wildcard backends/*/pyproject.toml backends/*/*/pyproject.toml))
build: $(STAMP) ## sdists and wheels of all distributions in dist/, the same bytes every time; minutes, for Jetson's kernels
	rm -rf dist
	for d in $(filter-out $(SKIP),$(DISTS)); do PYTHONPATH=$(CURDIR)/backends/triton $(RUN) -m build --no-isolation --outdir dist $$d || exit 1; done
	cd dist && sha256sum *.tar.gz *.whl > SHA256SUMS

wheelhouse: build ## the same, and an index of the wheels in dist/simple for pip; SKIP=backends/jetson/ leaves out the slow one
	$(RUN) tools/index.py dist

clean: ## remove what the other targets made
	rm -rf $(VENV) dist build runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
