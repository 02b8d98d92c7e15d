"""Compilation of kernels ahead of time, in parallel and without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cupyconv import arrays, backends, binding, cache_folder, markup, measuring, settings
from cupyconv.backends import GpuBackend, Run
from cupyconv.cpu.threads import cores
from cupyconv.errors import ConvError, DeviceError, naming_arguments, require_word, shown, words_of
from cupyconv.formats import CHANNELS_FIRST, CHANNELS_LAST
from cupyconv.gpu import compiler, runtime
from cupyconv.gpu.compiler import Variant
from cupyconv.kernels.device import DEVICES
from cupyconv.kernels.request import PLAIN, Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.launch import ROLES
from cupyconv.planning import Activation, Device, PassPlan, Plan, Precision, Request
from cupyconv.problem import PASSES, ConvProblem, counted, require_problem

LAYOUTS = (CHANNELS_FIRST, CHANNELS_LAST)
"""Values of the argument ``layout`` of ``warm``, besides None."""

BIAS_GRADIENT = "backprop_bias"
"""Name of the bias gradient where passes are listed."""


class Use(NamedTuple):
    """A pass of a layer that loads a kernel.

    Attributes:
        problem: the layer, or the convolution that underlies a transposed convolution.
        pass_: name of the pass.
        transposed: whether the layer is the transposed convolution of ``problem``.
    """

    problem: ConvProblem
    pass_: str
    transposed: bool = False


@dataclass(frozen=True)
class WarmKernel:
    """Kernel that some layers load: a CUDA file compiled with some macro definitions (a variant).

    Attributes:
        source: file name in cuda/.
        macros: macro definitions of the variant, by name.
        uses: passes that load the variant.
        seconds: wall time of the compilation; None if the cache had the variant.
        cpu_seconds: CPU time of the compilation; None if the cache had the variant.
    """

    source: str
    macros: dict[str, str | int]
    uses: tuple[Use, ...]
    seconds: float | None
    cpu_seconds: float | None

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes that load the variant, each once."""
        return tuple(dict.fromkeys(use.pass_ for use in self.uses))

    @property
    def layers(self) -> int:
        """Number of different layers that load the variant."""
        return len({(use.problem, use.transposed) for use in self.uses})

    @property
    def tile(self) -> str:
        """Block tile in elements (M x N x K), such as "128x64x32"; empty if the kernel has none."""
        sizes = [self.macros.get(f"BLOCK_{axis}") for axis in "MNK"]
        return "x".join(str(size) for size in sizes if size is not None)


@dataclass(frozen=True)
class Warmed:
    """Kernels that were compiled ahead of time; prints as a table.

    Attributes:
        device: GPU for which the kernels are compiled.
        folder: cache folder that contains the kernels.
        kernels: all kernels that the layers load.
        seconds: wall time of all compilations together.
        threads: number of threads that compiled kernels.
    """

    device: Device
    folder: Path
    kernels: tuple[WarmKernel, ...]
    seconds: float
    threads: int

    @property
    def compiled(self) -> tuple[WarmKernel, ...]:
        """Kernels that were compiled because the cache lacked them."""
        return tuple(kernel for kernel in self.kernels if kernel.seconds is not None)

    @property
    def cpu_seconds(self) -> float:
        """Total CPU time of the compilations."""
        return sum(kernel.cpu_seconds or 0.0 for kernel in self.kernels)

    @property
    def table(self) -> markup.Table:
        """Table with a row per kernel."""
        rows = tuple(
            (
                kernel.source,
                ", ".join(dict.fromkeys(use.problem.dtype for use in kernel.uses)),
                kernel.tile,
                ", ".join(kernel.passes),
                str(kernel.layers),
                "cached" if kernel.seconds is None else f"{kernel.seconds:.2f}",
            )
            for kernel in self.kernels
        )
        columns = ("kernel", "dtype", "tile", "passes", "layers", "seconds")
        return markup.Table(columns, rows, ("layers", "seconds"))

    @property
    def summary(self) -> str:
        """One-line summary: number of kernels, target, time and folder."""
        count, new = len(self.kernels), len(self.compiled)
        chip = ", compiled as ".join(filter(None, (self.device.architecture, self.device.fallback)))
        what = f"{counted(count, 'kernel')} for {chip}"
        if not count:
            return f"no kernels for {chip}: these layers load no kernels"
        if not new:
            return f"{what}: all cached, in {self.folder}"
        return (
            f"{what}: {new} compiled in {self.seconds:.1f} s on {counted(self.threads, 'thread')} "
            f"({self.cpu_seconds:.1f} s of CPU time), "
            f"{count - new} already cached, in {self.folder}"
        )

    def __str__(self) -> str:
        return "\n".join([*self.table.lines(markup.UNBOUND), self.summary])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for Jupyter."""
        section = markup.Section("", (self.table, markup.Paragraph(self.summary)))
        return markup.Document("Kernels compiled ahead", (section,)).html()


@naming_arguments
def warm(
    problems: ConvProblem | Iterable[ConvProblem],
    device: str | Device | None = None,
    *,
    passes: str | Iterable[str] = PASSES,
    transposed: bool = False,
    activation: Activation | None = None,
    add: bool = False,
    layout: str | None = None,
    precision: Precision = "ieee",
    impl: str | Plan = "auto",
    workspace_limit: int | None = None,
    measure: bool | None = None,
    threads: int | None = None,
) -> Warmed:
    """Compile the kernels that the passes of some layers will load, and store them in the cache.

    Only kernels that the cache lacks are compiled, in parallel.  The function needs CuPy, but no
    GPU.  Calls with other arguments, or with arrays that are not contiguous and aligned, may load
    other kernels.

    Args:
        problems: the layers, with their dtype and formats.
        device: an architecture such as "sm_90a", or a Device; by default the current GPU.
        passes: any of "forward", "backprop_input" and "backprop_filter"; "backprop_filter" includes
            the bias gradient.
        transposed: whether the layers are transposed convolutions of these problems, so that
            ``conv_transpose`` is their forward pass.
        activation: activation of the forward pass.
        add: whether the forward pass is called with the argument ``add``.
        layout: memory order of all tensors, "channels_first" or "channels_last", if it differs from
            the axis order of the formats, as in PyTorch; by default the order of the formats.
        precision, impl: as for ``conv_forward``.
        workspace_limit: as for ``plan``.
        measure: whether to compile all kernels that autotuning would measure, instead of only the
            planned one; by default ``cupyconv.benchmark``.
        threads: number of threads that compile; by default one per core.

    Returns:
        The kernels, each with its compile time and the passes that load it.

    Raises:
        ConvTypeError: ``problems`` contains an object that is not a ConvProblem.
        ConvError: an option value is unknown, the device is not a GPU, an implementation does not
            support a problem, or the cache cannot store the kernels.
        DeviceError: CuPy or its compiler is missing; or there is no GPU and ``device`` is None.
        KernelCompileError: a kernel does not compile; the other kernels are in the cache.
        MemoryError: a tensor has more than 2^63 - 1 bytes.

    >>> problem = cupyconv.ConvProblem((1, 8, 8, 8), (8, 8, 3, 3))
    >>> warmed = cupyconv.warm(problem, "sm_80", passes="forward", impl="cuda-generic")
    >>> [(kernel.source, kernel.passes) for kernel in warmed.kernels]
    [('conv_forward.cu', ('forward',))]
    """
    ahead = Ahead(
        device, precision=precision, impl=impl, workspace_limit=workspace_limit, measure=measure
    )
    how = transposed, activation, add, layout
    for problem in problems if isinstance(problems, Iterable) else (problems,):
        ahead.add(problem, passes, *how)
    return ahead.compile(threads)


_REVERSED = {"forward": "backprop_input", "backprop_input": "forward"}
"""Pass of the underlying convolution that a pass of a transposed convolution is."""


class Ahead:
    """Collection of the kernels that layers will load; its arguments are those of ``warm``."""

    def __init__(
        self,
        device: str | Device | None = None,
        *,
        precision: str = "ieee",
        impl: str | Plan = "auto",
        workspace_limit: int | None = None,
        measure: bool | None = None,
    ) -> None:
        self.device = compiler.fitted(_gpu(device))
        self._precision, self._impl = precision, impl
        self._limit = settings.workspace_limit if workspace_limit is None else workspace_limit
        self._measure = settings.benchmark if measure is None else measure
        assert self.device.target is not None
        # This backend only prepares runs; it loads nothing.
        self._backend = GpuBackend(self.device, runtime.CupyRuntime(self.device.target))
        self._uses: dict[Variant, dict[Use, None]] = {}

    def add(
        self,
        problem: ConvProblem,
        passes: str | Iterable[str] = PASSES,
        transposed: bool = False,
        activation: str | None = None,
        add: bool = False,
        layout: str | None = None,
    ) -> None:
        """Add the kernels that some passes of a layer will load; arguments are as for ``warm``."""
        require_problem("warm", problem)
        binding.require_words(activation, self._precision, self._impl, self.device)
        binding.require_activation(activation, problem)
        require_word("layout", layout, (None, *LAYOUTS))
        strides = Strides.contiguous(problem) if layout is None else Strides.of(problem, layout)
        for word in words_of("passes", "pass", passes, PASSES):
            pass_ = _REVERSED.get(word, word) if transposed else word
            epilogue = Epilogue(activation, add) if word == "forward" else PLAIN
            use = Use(problem, pass_, bool(transposed))
            request = Request(problem, pass_, self.device, self._precision, self._limit, strides)
            for planned in self._planned(request):
                self._add(use, self._backend.prepare(request, planned, ROLES[:3], epilogue))
            if word == "backprop_filter":
                run = self._bias_gradient(problem, strides, transposed)
                self._add(use._replace(pass_=BIAS_GRADIENT), run)

    def compile(
        self, threads: int | None = None, done: Callable[[], None] = lambda: None
    ) -> Warmed:
        """Compile the kernels that the cache lacks.

        Args:
            threads: as for ``warm``.
            done: function that is called once per kernel, when it is compiled or found in the
                cache.

        Raises:
            ConvError, DeviceError, KernelCompileError: as for ``warm``.
        """
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ConvError(
                "threads must be an integer of at least 1",
                f"got {shown(threads)}",
                "Leave it out to use one thread per core",
            )
        folder = _cache()
        start = time.perf_counter()
        results = compiler.compile_missing(list(self._uses), threads, done)
        seconds = time.perf_counter() - start
        kernels = tuple(
            WarmKernel(
                variant.source.name, dict(variant.defines), tuple(uses), *result.result()[1:]
            )
            for (variant, uses), result in zip(self._uses.items(), results, strict=True)
        )
        if unwritten := sum(not compiler.is_kept(variant) for variant in self._uses):
            what = f"{unwritten} of {len(kernels)} kernels"
            raise _unusable_cache(f"{what} could not be written to {folder}")
        compiled = sum(kernel.seconds is not None for kernel in kernels)
        return Warmed(self.device, folder, kernels, seconds, min(threads or cores(), compiled))

    def __len__(self) -> int:
        return len(self._uses)

    def _planned(self, request: Request) -> tuple[PassPlan, ...]:
        if self._measure and not isinstance(self._impl, Plan):
            return measuring.candidates_of(request, self._impl)
        return (binding.chosen(request, self._impl),)

    def _bias_gradient(self, problem: ConvProblem, strides: Strides, transposed: bool) -> Run:
        shape, steps = problem.output_shape, strides.y
        if transposed:
            shape, steps = problem.input_shape, strides.x
        summed = binding.bias_problem("dy", shape, problem.data_format, problem.dtype)
        sum_strides = Strides.of_sum(steps, 1, strides.alignment)
        return self._backend.prepare_bias(summed, sum_strides, self._limit)

    def _add(self, use: Use, run: Run) -> None:
        assert isinstance(run, runtime.Series)
        assert self.device.target is not None
        for kernel in run.launches:
            variant = runtime.variant_of(kernel, self.device.target)
            self._uses.setdefault(variant, {})[use] = None


def _gpu(device: str | Device | None) -> Device:
    """Return the GPU to compile for; None selects the current GPU.

    Raises:
        DeviceError: ``device`` is None, and there is no GPU.
        ConvError: ``device`` is unknown or not a GPU.
    """
    chosen = backends.current_device() if device is None else Device.of(device)
    if chosen.is_gpu:
        return chosen
    if device is None:
        arrays.cupy()  # raises if CuPy is missing
        raise DeviceError(
            "kernels are compiled for the current GPU by default, and there is no GPU. Pass a "
            "device, for example device='sm_90a'"
        )
    gpus = [word for word in DEVICES if word != "cpu"]
    raise ConvError(
        "the device must be a GPU", f"got {chosen.name!r}", f"Use one of {', '.join(gpus)}"
    )


def _cache() -> Path:
    """Return the cache folder.

    Raises:
        ConvError: the folder is unknown, cannot be written, or other users may write it.
    """
    folder = cache_folder.cache_directory()
    if folder is None:
        raise _unusable_cache("this user has no home folder for the cache")
    if distrust := cache_folder.distrust(folder):
        raise _unusable_cache(*distrust)
    if reason := cache_folder.unwritable(folder):
        raise _unusable_cache(reason)
    return folder


def _unusable_cache(values: str, remedy: str = "") -> ConvError:
    rule = "the cache for kernels that are compiled ahead of time must be usable"
    other = f"Set {cache_folder.CACHE_VARIABLE} to a folder that you own"
    return ConvError(rule, values, f"To fix this: {remedy}" if remedy else other)
