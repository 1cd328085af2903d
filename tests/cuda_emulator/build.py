"""Compiles the CUDA C kernels for this CPU: `python -m tests.cuda_emulator.build [--architecture 75]`.

The library has the handlers of libjaxfused.so, which run on JAX's CPU backend: see emulator.h. CUDA's
headers are needed, a GPU is not.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import jax

HERE = Path(__file__).parent
FFI = HERE.parents[1] / "ffi"
ARCHITECTURES = ("75", "80", "89", "90")
"""Architectures whose paths the kernels can take: Turing, Ampere, Ada and Hopper."""

_DECLARATION = re.compile(r"(?<!extern )__shared__ ([\w:]+(?:<[^;>]*>)?) ([^;]+);")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
_LAUNCH = re.compile(r"(\w+)<<<(.*?)>>>\(", re.DOTALL)
_ASM = re.compile(r"\basm( volatile)?\s*\(")
_BUILT_IN = re.compile(r"(?<![.\w])(grid|block|thread)(Dim|Idx)\b")
_OPERAND = re.compile(r'\s*"([=+]?)(\w)"\s*\(')


def library(architecture: str) -> Path:
    """Returns the path of the library whose kernels take an architecture's paths."""
    return HERE.parents[1] / "build/ffi-emulated" / architecture / "libjaxfused.so"


def as_cpp(source: str) -> str:
    """Returns CUDA C as C++ with emulator.h's functions in place of CUDA's syntax."""
    source = source.replace("__CUDA_ARCH__", "EMULATED_CUDA_ARCH")
    source = source.replace("cudaLaunchKernelEx(", "cuda_emulator::launch(")
    source = source.replace("ffi::PlatformStream<cudaStream_t>", "cuda_emulator::Stream")
    source = source.replace("ffi::ScratchAllocator", "cuda_emulator::Scratch")
    source = _BUILT_IN.sub(
        lambda name: f"cuda_emulator::{name[1]}_{dict(Dim='dim', Idx='index')[name[2]]}()", source
    )
    source = _DYNAMIC.sub(r"auto* \2 = static_cast<\1*>(cuda_emulator::dynamic_shared());", source)
    source = _DECLARATION.sub(_shared, source)
    source = _LAUNCH.sub(r"cuda_emulator::launcher(\1, \2)(", source)
    return _without_asm(source)


def _shared(declaration: re.Match) -> str:
    """Returns separate declarations for `__shared__ float a[2], b[3];`."""
    kind, names = declaration.groups()
    lines = []
    for each in names.split(","):
        name, bracket, sizes = each.strip().partition("[")
        lines.append(f"EMULATED_SHARED({name}, {kind}{bracket}{sizes});")
    return " ".join(lines)


def _without_asm(source: str) -> str:
    """Replaces each asm statement by a call of the emulator with its text and its operands."""
    parts, end = [], 0
    for statement in _ASM.finditer(source):
        start = statement.end()
        stop = _closing(source, start)
        parts += [source[end : statement.start()], _call(source[start:stop])]
        end = stop + 1
    return "".join([*parts, source[end:]])


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one opened before `start`."""
    depth, quoted = 1, False
    for place in range(start, len(text)):
        character = text[place]
        if character == '"':
            quoted = not quoted
        if quoted:
            continue
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    raise ValueError(f"no parenthesis closes the one before {text[start : start + 40]!r}")


def _call(statement: str) -> str:
    text, rest = [], statement
    while piece := re.match(r'\s*"((?:[^"\\]|\\.)*)"', rest):
        text.append(piece[1])
        rest = rest[piece.end() :]
    arguments = [f'"{"".join(text)}"']
    while operand := re.search(_OPERAND, rest):
        stop = _closing(rest, operand.end())
        kind = "output" if operand[1] else "input"
        arguments.append(f"cuda_emulator::{kind}({rest[operand.end() : stop]})")
        rest = rest[stop + 1 :]
    # An empty asm statement is only a barrier for the compiler.
    return f"EMULATED_PTX({', '.join(arguments)})" if "".join(text) else "((void)0)"


def main() -> int:
    """Writes the sources and compiles what has changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_emulator.build")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="90")
    options, for_ninja = parser.parse_known_args()
    out = library(options.architecture).parent
    for path in sorted(FFI.glob("*/*")):
        target = out / "src" / path.relative_to(FFI)
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(
            target.with_suffix(".cc") if path.suffix == ".cu" else target, as_cpp(path.read_text())
        )
    _write_rules(out, options.architecture)
    return subprocess.run([sys.executable, "-m", "ninja", "-C", str(out), *for_ninja]).returncode


def _write(path: Path, text: str) -> None:
    """Writes a file unless it has this text already, so that nothing is compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _write_rules(out: Path, architecture: str) -> None:
    # The import is here because running or translating alone does not need ninja.
    from ninja.ninja_syntax import Writer

    generated = out / "src"
    includes = [generated, HERE, jax.ffi.include_dir(), _cuda_headers()]
    flags = [
        "-std=c++20",
        "$level",
        "-fPIC",
        "-fno-strict-aliasing",
        "-w",
        "-ffp-contract=off",
        "-fvisibility=hidden",
    ]
    flags += [f"-I{folder}" for folder in includes]
    flags += [
        f"-DEMULATED_CUDA_ARCH={architecture}0",
        f'-DJAXFUSED_ARCHITECTURES=\\"{architecture}\\"',
    ]
    flags.append("-include emulator_ffi.h")
    with (out / "build.ninja").open("w") as file:
        ninja = Writer(file)
        ninja.rule(
            "compile",
            f"g++ {' '.join(flags)} -MD -MF $out.d -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
        )
        ninja.rule("link", "g++ -shared $in -o $out -ldl")
        sources = [*sorted(generated.glob("*/*.cc")), *sorted(HERE.glob("*.cc"))]
        objects = [
            ninja.build(f"{path.stem}.o", "compile", str(path), variables=_level(path))[0]
            for path in sources
        ]
        ninja.build(library(architecture).name, "link", objects)


def _level(path: Path) -> dict[str, str]:
    """Returns flags: the emulator itself is small and runs for each instruction, so it is optimised."""
    return {"level": "-O3" if path.parent == HERE else "-O1"}


def _cuda_headers() -> Path:
    """Returns the folder of CUDA's headers, as nvcc reports it."""
    tried = subprocess.run(["nvcc", "--dryrun", "-c", "none.cu"], capture_output=True, text=True)
    return Path(re.search(r"^#\$ TOP=(.*)$", tried.stderr, re.MULTILINE)[1], "include")


if __name__ == "__main__":
    sys.exit(main())
