# make demo    a tiny hybrid model serves long and short requests from one buffer
# make test    lint, types, C warnings, a short run under sanitizers, and the test suite
# make soak    the long versions of the tests
# make bench   every benchmark, quickly; QUICK= runs them in full
#
# TORCH names another torch:   make test TORCH="torch==2.14.1"
#                              make demo TORCH="torch --index-url URL_OF_A_TORCH_INDEX"
# PYTHON makes the environment, VENV says where it lies.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CC ?= cc
QUICK ?= --quick
BENCHMARKS ?= allocator placement prefix_tree hit_rate replay
JOBS ?= 2
PYTEST_ARGS ?= -n $(JOBS) --dist worksteal

export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := $(VENV)/native.stamp
C_SOURCES := $(wildcard csrc/*.c)
C_WARNINGS := -std=c11 -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wstrict-prototypes \
	-Wmissing-prototypes -Wvla -Wundef -Werror
SANITIZE ?= address,undefined
ASAN_TREE := build/asan
# The tests that work the C core hard and need no model mark themselves.
ASAN_TESTS ?= $(shell grep -l 'mark\.native' tests/test_*.py)

.PHONY: demo test pytest lint lint-c asan soak bench dist clean FORCE

demo: $(NATIVE)
	$(BIN)/python examples/mixed_requests.py $(ARGS)

test: lint asan pytest

pytest: $(NATIVE)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(NATIVE) lint-c
	$(BIN)/ruff check .
	$(BIN)/mypy

lint-c:
	for source in $(C_SOURCES); do $(CC) $(C_WARNINGS) -O2 -c $$source -o /dev/null || exit 1; done

# A copy of the tree with its own extension: python -m pytest finds the copy first. The leaks that Python itself and
# torch leave at exit would drown ours, so leaks are looked for by the C tests alone.
asan: $(NATIVE)
	rm -rf $(ASAN_TREE) && mkdir -p $(ASAN_TREE)
	cp -R csrc kernels unifiedpool tests examples benchmarks pyproject.toml setup.py README.md LICENSE $(ASAN_TREE)
	rm -f $(ASAN_TREE)/unifiedpool/*.so
	cd $(ASAN_TREE) && UNIFIEDPOOL_SANITIZE=$(SANITIZE) $(abspath $(BIN)/python) setup.py -q build_ext --inplace
	cd $(ASAN_TREE) && LD_PRELOAD="$(foreach name,libasan.so libstdc++.so.6,$(shell $(CC) -print-file-name=$(name)))" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc UNIFIEDPOOL_SANITIZED=1 \
		$(abspath $(BIN)/python) -m pytest -p no:cacheprovider -m native $(PYTEST_ARGS) $(ASAN_TESTS)

soak: $(NATIVE)
	$(BIN)/python -m pytest --soak $(PYTEST_ARGS)

bench: $(NATIVE)
	missed=0; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(QUICK) || missed=1; done; exit $$missed

dist: $(NATIVE)
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info unifiedpool/*.so

# Without its own line for torch, pip would take the newest one that the ranges allow, with several GB of CUDA libraries.
# Another torch than the default brings the triton it wants.
$(VENV)/packages.stamp: pyproject.toml constraints.txt $(VENV)/torch.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),torch==2.13.0)
	cp constraints.txt $(VENV)/constraints.txt
else
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(VENV)/constraints.txt
endif
	$(PIP) install -q -c $(VENV)/constraints.txt $(foreach word,$(TORCH),'$(word)')
	$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" >> $(VENV)/constraints.txt
	$(PIP) install -q 'setuptools>=77' 'cffi>=1.17' wheel
	touch $@

# Rewritten only when TORCH has changed, so that only then torch is installed again.
$(VENV)/torch.txt: FORCE
	mkdir -p $(VENV)
	echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(NATIVE): $(VENV)/packages.stamp setup.py csrc/build_native.py $(wildcard csrc/*.c csrc/*.h)
	$(PIP) install -q --no-build-isolation -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@
