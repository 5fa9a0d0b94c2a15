# Two commands: `make run` and `make test`. Both set up .venv on a fresh machine; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: run test test-gpu test-long lint fuzz tables docs docs-images wheels clean

run: $(VENV)/.installed
	$(BIN)/fedspa run
	@echo 'Next: ". $(BIN)/activate" puts fedspa on your path; then fedspa --help, and docs/tutorial.md'

# Three at a time on two cores: many tests wait for processes of theirs. Without a GPU, as in CI: tests fork, and a
# forked process cannot use autograd where torch has seen a GPU.
test: $(VENV)/.installed-dev
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 3 --dist worksteal

# What needs a CUDA GPU. CI has none: run this on a machine with one after every change to an engine.
# GPU_PYTHON is a Python that has torch with CUDA, Triton and the extra `dev`.
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -n 4 --dist worksteal -m 'gpu and not long'

# Long versions of tests, and five times as many new random examples for every law that hypothesis draws. TESTS names a
# folder, as TESTS=tests/engine.
test-long: $(VENV)/.installed-dev
	env -u CI HYPOTHESIS_PROFILE=long CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q -n 2 --dist worksteal \
		-m 'hypothesis or long' $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A coverage-guided fuzz of the payload decoder, 20 s of one core; needs the extra `fuzz`.
fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/wire/fuzz_payload.py -runs=600000 -verbosity=0

# Every row of the paper's tables, small enough for two cores and two minutes; no result.
tables: $(VENV)/.installed-dev
	out="$$(mktemp -d)" && trap 'rm -rf "$$out"' EXIT && for name in mnist cifar10; do \
		$(BIN)/python -m reproduction table $$name --quick --jobs 2 --out "$$out/$$name" || exit 1; \
	done

# The documentation, in site/: `python -m http.server -d site` serves it, with its search.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The picture of a report that README.md shows; needs a Chromium.
docs-images: $(VENV)/.installed-dev
	$(BIN)/python docs/report_image.py

# The sdist and this platform's wheel, in dist/.
wheels:
	PYTHON=$(PYTHON) wheels/make

# torch first, from its pin alone: a resolver that is free to choose takes gigabytes of CUDA builds.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
	touch $@

SOURCES := pyproject.toml $(wildcard setup.py) $(wildcard src/fedspa/engine/native/csrc/*)

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(PIP) install -c constraints.txt -e .
	touch $@

# Not after .installed: every install of the package compiles the native engine.
$(VENV)/.installed-dev: $(VENV)/.torch $(SOURCES)
	$(PIP) install -c constraints.txt -e '.[dev,flower,ray,plots,parquet,docs]'
	touch $(VENV)/.installed $(VENV)/.installed-docs $@

# The extra `docs` without a second build of the package.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
