# make demo     learn handwritten digits on 4 ranks; `make demo RANKS=8` on 8
# make quick    tests of a minute, while you work
# make test     the tests of CI, under mpirun where a test needs ranks
# make mutants  which changes of the product tests notice; K=heap: those named so
# make check    lint, format, types
# make nightly  the rest: every kernel's machine code, whole packages with their tests,
#               the oldest and newest dependencies on each Python
# make gpu      tests and times on one or two GPUs, in ten minutes, against NCCL's
# make pages    what the pages show of programs, recorded runs and the code
# make docs     the site, into build/site; it begins at docs/index.html
# make dist     sdist and wheel, into dist; checked, installed and run
# make two-nodes LAUNCH='mpirun -n 16 --hostfile hosts'    a report of several nodes
# make clean    remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

RANKS ?= 4
# Fewer GPUs than ranks: the simulator, unless ranks may share a GPU.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
SHARED := $(filter 1,$(NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES))
SIMULATE := $(shell [ $(GPUS) -ge $(if $(SHARED),1,$(RANKS)) ] || echo --simulate)
# The CUDA version of the driver, if there is one, picks the toolkit's packages.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA [UMD ]*Version: \(1[23]\).*/,cu\1/p')

EXTRAS_demo := mpi,demo$(CUDA)
EXTRAS_test := test
EXTRAS_dev := dev
EXTRAS_docs := docs
ALSO_dev := $(VENV)/test.installed # dev has all that test has

.PHONY: demo quick test mutants check nightly gpu pages docs dist two-nodes clean

demo: $(VENV)/demo.installed
	$(BIN)/numba-symm run -n $(RANKS) $(SIMULATE) examples/digits.py

# Many tests start processes. If these may not write bytecode, each compiles this tree again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
NIGHTLY := tests/explore tests/test_packages.py tests/test_mpi4py_suite.py tests/test_torch_suite.py \
	$(addprefix tests/host/test_,kernel_set.py machine_code.py machine_code_types.py \
	device_machine_code.py)
# Those of tests/host that cost seconds, as they start processes or compile.
SLOW := cli code_cache compile_command compiling device_machine_code doctor host_backend \
	island_schedules kernel_set machine_code machine_code_types packaging runner \
	simulated_device
QUICK := tests/host $(SLOW:%=--ignore=tests/host/test_%.py)

test: $(VENV)/test.installed
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/lint

quick: $(VENV)/test.installed
	$(PYTEST) -q $(QUICK)

nightly: $(VENV)/dev.installed
	$(BIN)/python -m tox run
	NUMBA_SYMM_TEST_WHOLE=1 $(PYTEST) $(NIGHTLY)
	NUMBA_SYMM_TEST_WHOLE=1 NUMBA_SYMM_TEST_RANKS=2,4 $(PYTEST) tests/test_mpirun.py

mutants: $(VENV)/test.installed
	$(BIN)/python -m tests.mutants $(if $(K),-k '$(K)')

check: $(VENV)/dev.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict -p numba_symm
	$(BIN)/python -m pytest -q tests/lint

# A PYTHON that is passed has the packages: `make gpu PYTHON=python3` installs nothing.
OWN := $(if $(filter file,$(origin PYTHON)),1)
gpu: $(if $(OWN),$(VENV)/test.installed)
	$(if $(OWN),$(BIN)/python,$(PYTHON)) -m tests.gpu_check $(GPU)

pages: $(VENV)/test.installed
	$(BIN)/python docs/pages.py

# Warnings are errors, such as those of links that lead nowhere.
docs: $(VENV)/docs.installed
	$(BIN)/python -m sphinx -EnWq --keep-going -b html -c docs . build/site

# Tests and examples run with the wheel, in an environment that has nothing else.
dist: $(VENV)/dev.installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.dist_check dist

two-nodes: $(if $(OWN),$(VENV)/test.installed)
	$(if $(OWN),$(BIN)/python,$(PYTHON)) -m tests.nodes_report '$(LAUNCH)' $(NODES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that what runs is this tree.
$(VENV)/%.installed: pyproject.toml | $(BIN)/python
	@echo "Installing packages into $(VENV) with pip: about a minute, without output."
	$(BIN)/python -m pip install -qq --disable-pip-version-check \
		--editable '.[$(EXTRAS_$*)]'
	touch $@ $(ALSO_$*)
