# Each target sets up .venv first, which takes minutes once and nothing afterwards. PYTHON=... names another interpreter.
.PHONY: help lab test demo handouts check clean setup setup-dev
.DEFAULT_GOAL := help

LAB_ARGS ?=
TEST_ARGS ?=
HANDOUT_ARGS ?=
BIN := .venv/bin
# JupyterLab refuses to run as root unless told; a container's only user is root.
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

help:
	@echo 'make lab       JupyterLab on the first notebook       (LAB_ARGS="--no-browser --port=9000")'
	@echo 'make demo      the main job without a browser: four real ranks, a summary, demo.html'
	@echo 'make handouts  notebooks as pages that play with no network, in handouts/'
	@echo 'make test      every test                              (TEST_ARGS="tests/unit -x")'
	@echo 'make check     style, layers, types, notebook rules'
	@echo 'make clean     removes what the targets above made, .venv included'

setup:
	@.ci/setup user

setup-dev:
	@.ci/setup dev

lab: setup
	$(BIN)/python -m jupyterlab --ip=127.0.0.1 $(AS_ROOT) --ServerApp.root_dir=notebooks \
		--LabApp.default_url=/lab/tree/00_start_here.ipynb $(LAB_ARGS)

demo: setup
	$(BIN)/python -m vizkit demo

handouts: setup
	$(BIN)/python -m vizkit.handouts notebooks handouts $(HANDOUT_ARGS)

test: setup-dev
	$(BIN)/python -m pytest $(TEST_ARGS)

check: setup-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m mypy
	$(BIN)/python -m pre_commit validate-config
	$(BIN)/python -m pytest -q tests/notebooks/test_lint.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build vizkit.egg-info demo.html handouts
	find vizkit tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | while read -r folder; do rm -rf "$$folder"; done
