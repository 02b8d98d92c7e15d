"""Compile the emulator's runtime, and unchanged ``.cu`` files with a set of macros.

Products are cached in a user folder (``CUPYCONV_EMULATOR_CACHE`` overrides it), keyed by a digest
of the compiled text, the flags and the compiler's version.  They are created atomically, so several
processes may build at once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .alignment import with_alignment_checks

HOST_DIRECTORY = Path(__file__).resolve().parent / "host"
REPOSITORY = Path(__file__).resolve().parents[2]
KERNEL_DIRECTORY = REPOSITORY / "cuda"
INCLUDE_DIRECTORY = KERNEL_DIRECTORY / "include"
MINIMUM_CLANG = 16
LOCAL_BOUNDS_CLANG = 20  # older versions can only abort the process on this check

COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-mavx2",
    "-mf16c",
    "-mfma",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-gline-tables-only",
    "-fdebug-default-version=4",  # -gdwarf-4 would enable full debug information
    "-fno-sanitize=undefined",
)
RUNTIME_FLAGS = (
    *("-O2", "-Wall", "-Wextra", "-fno-exceptions", "-fno-rtti"),
    "-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_abort()",
)
SOURCE_FLAGS: tuple[str, ...] = ("-xc++", "-include", "cuda_builtins.h")
KERNEL_FLAGS = (
    "-femulated-tls",
    "-fvisibility=hidden",
    "-ftrivial-auto-var-init=pattern",
    "-Wno-unknown-pragmas",
    "-Wno-pass-failed",
    "-Wno-ignored-attributes",
)
# Kernel-address-sanitizer mode turns every load and store, of any size, into a call with its
# address, without its own shadow memory.  (Thread-sanitizer mode skips odd sizes.)
CHECKED_FLAGS = (
    "-O1",
    # Vectorisation changes the width of accesses, tail calls the caller.
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fno-optimize-sibling-calls",
    "-fsanitize=kernel-address",
    "-fsanitize=signed-integer-overflow,array-bounds,shift-exponent,integer-divide-by-zero,"
    "implicit-integer-truncation",
    # The last array of a struct is not a flexible array: check its declared bound.
    "-fstrict-flex-arrays=3",
    *(
        word
        for option in (
            "-asan-instrumentation-with-call-threshold=0",
            "-asan-stack=0",
            "-asan-globals=0",
            "-asan-opt-same-temp=0",
            "-asan-kernel-mem-intrinsic-prefix=1",
            # Accesses on different source lines are not merged, so each report has its line.
            "-sink-common-insts=0",
            "-hoist-common-insts=0",
            "-enable-tail-merge=0",
        )
        for word in ("-mllvm", option)
    ),
)
# Accesses past a local variable through a pointer into it, where no bound is declared.
LOCAL_BOUNDS_FLAGS = (
    "-fsanitize=local-bounds",
    "-fno-sanitize-trap=local-bounds",
    "-fsanitize-recover=local-bounds",
    "-fno-sanitize-merge=local-bounds",  # each report has its line
)
UNCHECKED_FLAGS = ("-O2",)


class BuildError(RuntimeError):
    """A kernel or the runtime does not compile, or no compiler is available."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: command, version for the cache key, and major version of its clang.

    ``link_flags`` omit a C++ library that the compiler would first build, which takes a minute.
    """

    command: tuple[str, ...]
    version: str
    clang: int
    link_flags: tuple[str, ...] = ()

    def run(self, arguments: Sequence[str], doing: str) -> None:
        """Run the compiler with absolute paths; BuildError with its messages if it fails."""
        # Always run in the same folder: zig's cache has paths relative to the folder.  In another
        # folder, zig would rebuild its libraries.
        result = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, cwd=HOST_DIRECTORY
        )
        if result.returncode:
            raise BuildError(f"{doing} failed:\n{result.stderr.strip() or result.stdout.strip()}")

    def link(self, product: Path, *arguments: object) -> None:
        """Link a shared library."""
        words = (*COMMON_FLAGS, "-O2", "-shared", *self.link_flags, *arguments, "-o", product)
        self.run([str(word) for word in words], f"linking {product.name}")


def _clang_version(command: Sequence[str]) -> tuple[str, int]:
    """Return the first line of a compiler's version text, and the major version of its clang."""
    text = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", text)
    return text.partition("\n")[0], int(match[1]) if match else 0


@functools.cache
def find_compiler() -> Compiler:
    """Return an installed clang with all checks, else the ziglang wheel's, else an older one.

    Raises:
        BuildError: no clang of at least version 16 is available.
    """
    installed = _installed_clang()
    if installed is not None and installed.clang >= LOCAL_BOUNDS_CLANG:
        return installed
    compiler = _wheels_clang() or installed
    if compiler is None:
        raise BuildError(
            "running kernels on the CPU needs a compiler: pip install ziglang"
            f" (or install clang {MINIMUM_CLANG} or later)"
        )
    return compiler


def _installed_clang() -> Compiler | None:
    for name in ("clang++", *(f"clang++-{version}" for version in range(30, 15, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        text, clang = _clang_version((path,))
        if clang >= MINIMUM_CLANG:
            return Compiler((path,), text, clang)
    return None


def _wheels_clang() -> Compiler | None:
    try:
        wheel = importlib.metadata.distribution("ziglang")
    except importlib.metadata.PackageNotFoundError:
        return None
    # An explicit target selects the wheel's own headers and a generic CPU.  The path avoids the
    # start-up time of python -m ziglang.
    zig = str(wheel.locate_file("ziglang/zig"))
    command = (zig, "c++", "-target", "x86_64-linux-gnu.2.28")
    version = f"ziglang {wheel.version}"
    return Compiler(command, version, _clang_version(command)[1], ("-nostdlib++",))


def cache_directory() -> Path:
    """Return the folder of build products; it is created if missing."""
    override = os.environ.get("CUPYCONV_EMULATOR_CACHE")
    if override:
        directory = Path(override).absolute()
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "cupyconv" / "emulator"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


# --------------------------------------------------------------------------------------------------
# Declarations of a kernel file
# --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KernelEntry:
    """A kernel in a source text; the expressions are C++ text."""

    name: str
    launch_bounds: str = "0"
    cluster: str = "1, 1, 1"


_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\b')
_ATTRIBUTE = re.compile(r"\s*(__\w+__)\s*\(")
_NAME = re.compile(r"\s*(\w+)\s*\(")
_DYNAMIC_SHARED = re.compile(
    r"\bextern\s+(?:__shared__\b([^;]*?)|([^;]*?)\b__shared__([^;]*?))"
    r"\b(\w+)\s*\[\s*\]\s*;"
)
_ALIGNMENT = re.compile(r"(?:__align__|alignas)\s*\(")


def _strip_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


def _balanced(text: str, opening: int) -> int:
    """Return the position after the parenthesis that closes the one at ``opening``."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise BuildError("unbalanced parentheses in a kernel's declaration")


def find_entries(text: str) -> list[KernelEntry]:
    """Return the ``extern "C" __global__ void`` kernels of a preprocessed text, in order."""
    entries = []
    for match in _ENTRY.finditer(text):
        position = match.end()
        attributes = {"__launch_bounds__": "0", "__cluster_dims__": "1, 1, 1"}
        while attribute := _ATTRIBUTE.match(text, position):
            end = _balanced(text, attribute.end() - 1)
            attributes[attribute[1]] = text[attribute.end() : end - 1]
            position = end
        name = _NAME.match(text, position)
        if name is None:
            continue
        threads = _first_argument(attributes["__launch_bounds__"])
        cluster = attributes["__cluster_dims__"]
        missing = 2 - _top_level_commas(cluster)
        entries.append(KernelEntry(name[1], threads, cluster + ", 1" * missing))
    return entries


def _top_level_commas(text: str) -> int:
    depth = commas = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        commas += character == "," and depth == 0
    return commas


def _first_argument(text: str) -> str:
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            return text[:position]
    return text


def find_dynamic_shared(text: str) -> dict[str, str]:
    """Return the names of ``extern __shared__`` arrays, with the text of their alignment."""
    arrays = {}
    for match in _DYNAMIC_SHARED.finditer(text):
        declaration = match[0]
        alignment = "16"  # the GPU's default
        if declared := _ALIGNMENT.search(declaration):
            alignment = declaration[declared.end() : _balanced(declaration, declared.end() - 1) - 1]
        arrays[match[4]] = alignment
    return arrays


def reachable_files(path: Path, include_directories: Sequence[Path]) -> dict[Path, str]:
    """Return the file and all files it includes by quoted names, with their texts."""
    texts: dict[Path, str] = {}
    pending = [path.resolve()]
    while pending:
        current = pending.pop()
        if current in texts:
            continue
        texts[current] = current.read_text()
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', texts[current], re.M):
            for directory in (current.parent, *include_directories):
                candidate = (directory / name).resolve()
                if candidate.is_file():
                    pending.append(candidate)
                    break
    return texts


_DECLARATION = re.compile(
    r"(template\s*<[^>]*>\s*)?(?:\[\[noreturn\]\]\s*)?__device__\s+__forceinline__\s+"
    r"([\w ]+?[\s*&]+)(\w+)\s*\(",
)


def declared_wrappers(text: str) -> set[str]:
    """Return each wrapper of ptx.cuh (or its twin) as a normalised declaration."""
    text = _strip_comments(text)
    declarations = set()
    for match in _DECLARATION.finditer(text):
        end = _balanced(text, match.end() - 1)
        declaration = (match[1] or "") + match[2] + match[3] + text[match.end() - 1 : end]
        declarations.add(re.sub(r"\s+", " ", re.sub(r"\s*([(),*&<>\[\]])\s*", r"\1", declaration)))
    return declarations


def check_twin(
    shipped: Path = INCLUDE_DIRECTORY / "ptx.cuh", twin: Path = HOST_DIRECTORY / "ptx_twin.cuh"
) -> None:
    """Raise BuildError unless the twin declares exactly what the shipped header declares."""
    declared, twins = declared_wrappers(shipped.read_text()), declared_wrappers(twin.read_text())
    problems = [f"no twin for: {name}" for name in sorted(declared - twins)]
    problems += [f"twin of nothing: {name}" for name in sorted(twins - declared)]
    if problems:
        raise BuildError(f"{twin.name} does not match {shipped.name}:\n" + "\n".join(problems))


# --------------------------------------------------------------------------------------------------
# Builds
# --------------------------------------------------------------------------------------------------
def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Let one process at a time build a product."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def build_runtime() -> Path:
    """Build the runtime as a shared library; about ten seconds once, then cached."""
    texts = [path.read_text() for path in sorted(HOST_DIRECTORY.iterdir())]
    return build_library("runtime", sorted(HOST_DIRECTORY.glob("*.cpp")), texts)


def build_library(
    name: str,
    sources: Sequence[Path],
    texts: Sequence[str],
    include_directories: Sequence[Path] = (),
) -> Path:
    """Build a shared library of C++ files.

    Args:
        name: Name of the product.
        sources: The files to compile.
        texts: All texts that are compiled, including headers.
        include_directories: Folders of bracketed includes.
    """
    compiler = find_compiler()
    flags = [*COMMON_FLAGS, *RUNTIME_FLAGS]
    product = cache_directory() / f"{name}-{digest(compiler.version, flags, *texts)}.so"
    with exclusively(product):
        if not product.exists():
            with tempfile.TemporaryDirectory(dir=product.parent) as scratch:
                unit = Path(scratch) / "library.cpp"  # compiles the headers of the files once
                unit.write_text("".join(f'#include "{path}"\n' for path in sources))
                object_file, partial = unit.with_suffix(".o"), unit.with_suffix(".so")
                folders = [f"-isystem{folder}" for folder in include_directories]
                compiler.run(
                    [*flags, *folders, "-c", str(unit), "-o", str(object_file)],
                    f"compiling the emulator's {name}",
                )
                compiler.link(partial, f"-Wl,-soname,{product.name}", object_file)
                os.replace(partial, product)
    return product


def _preprocessed(compiler: Compiler, path: Path, flags: Sequence[str], scratch: Path) -> str:
    """Return the source with macros expanded, except CUDA's keywords."""
    output = scratch / "expanded.cpp"
    # The include guard skips ptx.cuh, which declares no kernel.
    compiler.run(
        ["-xc++", "-E", "-P", "-DCUPYCONV_PTX_CUH", *flags, str(path), "-o", str(output)],
        f"preprocessing {path.name}",
    )
    return output.read_text()


def _kernel_translation_unit(path: Path, expanded: str) -> str:
    entries = find_entries(expanded)
    if not entries:
        raise BuildError(f'{path.name} declares no extern "C" __global__ void kernel')
    lines = [f'#include "{path}"']
    for name, alignment in find_dynamic_shared(expanded).items():
        lines.append(
            f'extern "C" EmulatorSharedControl emulator_dynamic_{name}'
            f' __asm__("__emutls_v.{name}") = {{0, {alignment}, nullptr, nullptr}};'
        )
    for entry in entries:
        lines.append(f"EMULATOR_EXPORT({entry.name}, {entry.launch_bounds}, {entry.cluster})")
    return "\n".join(lines) + "\n"


def build_kernel(
    path: Path,
    defines: Mapping[str, str] | None = None,
    include_directories: Sequence[Path] = (INCLUDE_DIRECTORY,),
    checked: bool = True,
) -> Path:
    """Build a shared library with the kernels of one ``.cu`` file.

    Args:
        path: The unchanged source file.
        defines: Macros, name to text.
        include_directories: Folders of quoted includes, besides the file's own folder.
        checked: Instrument for the checker; otherwise optimised and unchecked.

    Raises:
        BuildError: No compiler, a compile error, or an incomplete instruction twin.
    """
    check_twin()
    compiler = find_compiler()
    path = path.resolve()
    texts = reachable_files(path, include_directories)
    macros = [
        *(f"-I{directory}" for directory in include_directories),
        *(f"-D{name}={value}" for name, value in (defines or {}).items()),
    ]
    flags = [
        *COMMON_FLAGS,
        *KERNEL_FLAGS,
        *(CHECKED_FLAGS if checked else UNCHECKED_FLAGS),
        *(LOCAL_BOUNDS_FLAGS if checked and compiler.clang >= LOCAL_BOUNDS_CLANG else ()),
        f"-I{HOST_DIRECTORY}",
        *macros,
    ]
    host_texts = [
        file.read_text() for file in sorted(HOST_DIRECTORY.iterdir()) if file.suffix != ".cpp"
    ]
    runtime = build_runtime()
    own_texts = [
        Path(__file__).with_name(f"{name}.py").read_text() for name in ("build", "alignment")
    ]
    key = digest(
        compiler.version,
        SOURCE_FLAGS,
        flags,
        *own_texts,
        *texts.values(),
        *host_texts,
        runtime.name,
    )
    product = cache_directory() / f"{path.stem}-{key}.so"
    if product.exists():
        return product
    with exclusively(product), tempfile.TemporaryDirectory(dir=product.parent) as scratch:
        if product.exists():
            return product
        source, object_file = Path(scratch) / "unit.cpp", Path(scratch) / "unit.o"
        partial = Path(scratch) / "unit.so"
        expanded = _preprocessed(compiler, path, macros, Path(scratch))
        source.write_text(_kernel_translation_unit(path, expanded))
        to_compile = [*SOURCE_FLAGS, str(source)]
        if checked:  # in two steps: alignment checks are inserted between them
            code = source.with_suffix(".ll")
            to_code = ["-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes", "-o", str(code)]
            compiler.run([*flags, *to_compile, *to_code], f"compiling {path.name}")
            code.write_text(with_alignment_checks(code.read_text()))
            to_compile = [str(code)]
        compiler.run([*flags, *to_compile, "-c", "-o", str(object_file)], f"optimising {path.name}")
        # Linked without -fsanitize: the runtime defines the functions that instrumentation calls.
        compiler.link(partial, object_file, runtime)
        os.replace(partial, product)
    return product
