# Everything a newcomer needs: `make serve`, `make test`. Needs Python >= 3.11 (with venv), a C++20 compiler, cmake.
#
# Stamp files in the virtual environment say what is installed there; nothing runs twice for nothing.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m
HOST   ?= 127.0.0.1
PORT   ?= 8000
ARGS   ?=

BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check -q
CPPS := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl')
PYS  := $(shell find src -name '*.py' -o -path 'src/octavo/server/ui/*' -type f)
SAY  := @printf '==> %s\n'

.PHONY: help serve test soak fuzz check format bench wheel clean

help:
	@echo 'make serve   install Octavo into $(VENV) and serve $(MODEL) on http://$(HOST):$(PORT)'
	@echo 'make test    run all tests (installs the test tools, torch for CPU among them)'
	@echo 'make soak    random clients and engine kills for ten minutes (SOAK_SECONDS, SOAK_SEED, SOAK_MODEL)'
	@echo 'make fuzz    coverage-guided fuzzing of the readers of files and bodies (FUZZ_SECONDS each)'
	@echo 'make check   lint, formatting and types: ruff, mypy, clang-format'
	@echo 'make format  format Python and C++'
	@echo 'make bench   64 sequences of 128 + 128 tokens, offline'
	@echo 'make wheel   build a wheel into dist/'
	@echo 'make clean   remove what was built, keep $(VENV)'
	@echo
	@echo 'Variables: PYTHON VENV MODEL HOST PORT, and ARGS for more flags:'
	@echo "  make serve ARGS='--max-model-len 2048 --threads 2'"
	@echo "  make test ARGS='tests/core -k pool'"

serve: $(VENV)/.installed
	@exec $(BIN)/octavo serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.installed $(VENV)/.test $(VENV)/.llamaindex
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed $(VENV)/.dev
	$(SAY) 'ruff'
	@$(BIN)/ruff check --quiet src tests bench && $(BIN)/ruff format --quiet --diff src tests bench
	$(SAY) 'mypy --strict'
	@$(BIN)/mypy
	$(SAY) 'clang-format'
	@$(BIN)/clang-format --dry-run --Werror $(CPPS)

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix --quiet src tests bench; $(BIN)/ruff format --quiet src tests bench
	@$(BIN)/clang-format -i $(CPPS)

soak: $(VENV)/.installed $(VENV)/.test
	@SOAK_SECONDS=$${SOAK_SECONDS:-600} $(BIN)/python -m pytest tests/server/test_soak.py -s \
	  -o faulthandler_exit_on_timeout=false $(ARGS)

fuzz: $(VENV)/.installed $(VENV)/.test
	@$(PIP) install $$($(BIN)/python .ci/extras.py fuzz)
	@for target in gguf safetensors model bodies; do \
	  echo "==> $$target"; \
	  $(BIN)/python tests/fuzz/fuzz.py $$target -max_total_time=$${FUZZ_SECONDS:-60} -print_final_stats=1 $(ARGS) || exit 1; \
	done

bench: $(VENV)/.installed
	@$(BIN)/octavo bench offline $(MODEL) --num-prompts 64 --input-len 128 --output-len 128 $(ARGS)

wheel: $(VENV)/.tools
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist .

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.installed
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment and the tools that build the kernels. They live in it, rather than in pip's throw-away
# build environment, so that a second build compiles only what changed.
$(VENV)/.tools:
	$(SAY) 'Making the virtual environment $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo 'make: needs python3-venv' >&2; exit 1; }
	@$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.4' ninja
	@command -v cmake >/dev/null || $(PIP) install 'cmake>=3.22'
	@touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml CMakeLists.txt README.md $(CPPS) $(PYS)
	$(SAY) 'Installing Octavo and compiling its kernels'
	@PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation .
	@touch $@

$(VENV)/.test: $(VENV)/.tools pyproject.toml
	$(SAY) 'Installing the test tools'
	@$(PIP) install $$($(BIN)/python .ci/extras.py test)
	@touch $@

$(VENV)/.llamaindex: $(VENV)/.tools pyproject.toml
	$(SAY) 'Installing LlamaIndex into an environment of its own'
	@test -x $(VENV)/llamaindex/bin/python || $(BIN)/python -m venv $(VENV)/llamaindex
	@$(VENV)/llamaindex/bin/python -m pip --disable-pip-version-check -q install \
	  $$($(BIN)/python .ci/extras.py test-llamaindex)
	@touch $@

$(VENV)/.dev: $(VENV)/.tools pyproject.toml
	$(SAY) 'Installing the lint and type tools'
	@$(PIP) install $$($(BIN)/python .ci/extras.py dev)
	@touch $@
