"""Kernels compiled ahead of the calls that load them: side by side, and without a GPU too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cupyconv
from cupyconv import arrays, backends, markup, measuring, operations
from cupyconv.backends import GpuBackend, Run
from cupyconv.cpu.threads import cores
from cupyconv.errors import ConvError, DeviceError, require_word, shown, words_of
from cupyconv.formats import CHANNELS_FIRST, CHANNELS_LAST
from cupyconv.gpu import compiler, launch
from cupyconv.gpu.compiler import Variant
from cupyconv.planning import (
    Activation,
    Device,
    PassPlan,
    Plan,
    Precision,
    Request,
)
from cupyconv.planning.device import DEVICES
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES, ConvProblem, require_problem

LAYOUTS = (CHANNELS_FIRST, CHANNELS_LAST)
"""Memory orders that all tensors of a layer may have."""

BIAS_GRADIENT = "backprop_bias"
"""What the bias's gradient is called among passes."""


class Use(NamedTuple):
    """What loads a kernel: a pass of a problem, or of the transposed convolution of one."""

    problem: ConvProblem
    pass_: str
    transposed: bool = False


@dataclass(frozen=True)
class WarmKernel:
    """A kernel file as it is compiled for some layers.

    Attributes:
        source: its name in cuda/.
        macros: what makes the variant, by name.
        uses: the passes that load it.
        seconds: that the compiler took; None if the cache had it.
        cpu_seconds: of a core, likewise.
    """

    source: str
    macros: dict[str, str | int]
    uses: tuple[Use, ...]
    seconds: float | None
    cpu_seconds: float | None

    @property
    def passes(self) -> tuple[str, ...]:
        """Those that load it, each once."""
        return tuple(dict.fromkeys(use.pass_ for use in self.uses))

    @property
    def layers(self) -> int:
        """How many different layers load it."""
        return len({(use.problem, use.transposed) for use in self.uses})

    @property
    def tile(self) -> str:
        """Its block tile, if it has one."""
        sizes = [self.macros.get(f"BLOCK_{axis}") for axis in "MNK"]
        return "x".join(str(size) for size in sizes if size is not None)


@dataclass(frozen=True)
class Warmed:
    """Kernels that were compiled ahead; prints as a table.

    Attributes:
        device: that they are for.
        folder: of the cache that has them.
        kernels: all that the layers load.
        seconds: in all.
        threads: that compiled.
    """

    device: Device
    folder: Path
    kernels: tuple[WarmKernel, ...]
    seconds: float
    threads: int

    @property
    def compiled(self) -> tuple[WarmKernel, ...]:
        """Those that were not in the cache before."""
        return tuple(kernel for kernel in self.kernels if kernel.seconds is not None)

    @property
    def cpu_seconds(self) -> float:
        """Of a core, that the compiler took for all of them."""
        return sum(kernel.cpu_seconds or 0.0 for kernel in self.kernels)

    @property
    def table(self) -> markup.Table:
        """A line for each kernel."""
        rows = tuple(
            (
                kernel.source,
                ", ".join(dict.fromkeys(use.problem.dtype for use in kernel.uses)),
                kernel.tile,
                ", ".join(kernel.passes),
                str(kernel.layers),
                "there" if kernel.seconds is None else f"{kernel.seconds:.2f}",
            )
            for kernel in self.kernels
        )
        columns = ("kernel", "dtype", "tile", "passes", "layers", "seconds")
        return markup.Table(columns, rows, ("layers", "seconds"))

    @property
    def summary(self) -> str:
        """What was done, in a line."""
        count, new = len(self.kernels), len(self.compiled)
        what = f"{count} kernel{'' if count == 1 else 's'} for {self.device.architecture}"
        if not count:
            return f"no kernels for {self.device.architecture}: these layers load none"
        if not new:
            return f"{what}: all there, in {self.folder}"
        return (
            f"{what}: {new} compiled in {self.seconds:.1f} s on {self.threads} "
            f"thread{'' if self.threads == 1 else 's'} ({self.cpu_seconds:.1f} s of a core), "
            f"{count - new} there before, in {self.folder}"
        )

    def __str__(self) -> str:
        return "\n".join([*self.table.lines(markup.UNBOUND), self.summary])

    def _repr_html_(self) -> str:
        """The kernels as a table, for Jupyter."""
        section = markup.Section("", (self.table, markup.Paragraph(self.summary)))
        return markup.Document("Kernels compiled ahead", (section,)).html()


def warm(
    problems: ConvProblem | Iterable[ConvProblem],
    device: str | Device | None = None,
    *,
    passes: str | Iterable[str] = PASSES,
    transposed: bool = False,
    activation: Activation | None = None,
    layout: str | None = None,
    precision: Precision = "ieee",
    impl: str | Plan = "auto",
    workspace_limit: int | None = None,
    measure: bool | None = None,
    threads: int | None = None,
) -> Warmed:
    """Compile every kernel that the passes of some layers will load, into the cache.

    Those that the cache has are not compiled again; the others are compiled side by side.  Needs
    CuPy, but no GPU.  What is compiled depends on the arguments below as a call's kernels do; calls
    that differ in them, or whose arrays are not contiguous and aligned, may load others.

    Args:
        problems: the layers, with their dtype and formats.
        device: an architecture such as "sm_90a", or a Device; by default the current GPU.
        passes: of them, any of "forward", "backprop_input" and "backprop_filter"; the last brings
            the kernels of the bias's gradient along.
        transposed: whether the layers are transposed convolutions of these problems, so that
            ``conv_transpose`` is their forward pass.
        activation: of their forward pass.
        layout: "channels_first" or "channels_last" for tensors that all lie in memory like that,
            whatever their formats say, as PyTorch's may; by default as the formats say.
        precision, impl: as for ``conv_forward``.
        workspace_limit: as for ``plan``.
        measure: compile what measuring would try, and not only what is planned; by default what
            ``cupyconv.benchmark`` says.
        threads: that compile; by default one on each core.

    Returns:
        The kernels, with what loads each and how long it took.

    Raises:
        ConvTypeError: what should be a problem is none.
        ConvError: a word is unknown, the device is no GPU, an implementation does not take a
            problem, or the cache cannot keep what is compiled.
        DeviceError: CuPy or its compiler is missing; or there is no GPU and no device is given.
        KernelCompileError: a kernel does not compile; the others are in the cache then.
        MemoryError: a tensor has more bytes than can be counted.
    """
    ahead = Ahead(
        device,
        precision=precision,
        impl=impl,
        workspace_limit=workspace_limit,
        measure=measure,
    )
    for problem in problems if isinstance(problems, Iterable) else (problems,):
        ahead.add(problem, passes, transposed=transposed, activation=activation, layout=layout)
    return ahead.compile(threads)


class Ahead:
    """The kernels that layers will load on a device; arguments as for ``warm``."""

    def __init__(
        self,
        device: str | Device | None = None,
        *,
        precision: str = "ieee",
        impl: str | Plan = "auto",
        workspace_limit: int | None = None,
        measure: bool | None = None,
    ) -> None:
        self.device = _gpu(device)
        self._precision, self._impl = precision, impl
        self._limit = cupyconv.workspace_limit if workspace_limit is None else workspace_limit
        self._measure = cupyconv.benchmark if measure is None else measure
        assert self.device.architecture is not None
        # Nothing is loaded.
        self._backend = GpuBackend(self.device, launch.CupyRuntime(self.device.architecture))
        self._uses: dict[Variant, dict[Use, None]] = {}

    def add(
        self,
        problem: ConvProblem,
        passes: str | Iterable[str] = PASSES,
        *,
        transposed: bool = False,
        activation: str | None = None,
        layout: str | None = None,
    ) -> None:
        """Add what some passes of a layer will load."""
        require_problem("warm", problem)
        operations.require_words(activation, self._precision, self._impl)
        operations.require_activation(activation, problem)
        require_word("layout", layout, (None, *LAYOUTS))
        strides = Strides.contiguous(problem) if layout is None else Strides.of(problem, layout)
        for word in words_of("passes", "pass", passes, PASSES):
            pass_ = word
            if transposed:
                pass_ = {"forward": "backprop_input", "backprop_input": "forward"}.get(word, word)
            how = activation if word == "forward" else None
            use = Use(problem, pass_, bool(transposed))
            for planned in self._planned(problem, pass_, strides):
                self._add(use, self._backend.prepare(planned, problem, strides, how))
            if word == "backprop_filter":
                run = self._bias_gradient(problem, strides, transposed)
                self._add(use._replace(pass_=BIAS_GRADIENT), run)

    def compile(
        self, threads: int | None = None, done: Callable[[], None] = lambda: None
    ) -> Warmed:
        """Compile those that the cache lacks; ``done`` is called after each of all.

        Raises:
            ConvError, DeviceError, KernelCompileError: as for ``warm``.
        """
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ConvError(
                "threads must be how many compile, 1 at least",
                f"got {shown(threads)}",
                "Leave it out for one on each core",
            )
        folder = _cache()
        begun = time.perf_counter()
        made = compiler.compile_missing(list(self._uses), threads, done)
        seconds = time.perf_counter() - begun
        kernels = tuple(
            WarmKernel(
                variant.source.name,
                dict(variant.defines),
                tuple(self._uses[variant]),
                *one.result()[1:],
            )
            for variant, one in zip(self._uses, made, strict=True)
        )
        lost = sum(not compiler.is_kept(variant) for variant in self._uses)
        if lost:
            raise _not_kept(f"{lost} of {len(kernels)} could not be written to {folder}")
        compiled = sum(kernel.seconds is not None for kernel in kernels)
        return Warmed(self.device, folder, kernels, seconds, min(threads or cores(), compiled))

    def __len__(self) -> int:
        return len(self._uses)

    def _planned(self, problem: ConvProblem, pass_: str, strides: Strides) -> tuple[PassPlan, ...]:
        device, precision, limit, impl = self.device, self._precision, self._limit, self._impl
        request = Request(problem, pass_, device, precision, limit, strides)
        if self._measure and not isinstance(impl, Plan):
            return measuring.candidates_of(request, impl)
        return (operations.chosen(request, impl),)

    def _bias_gradient(self, problem: ConvProblem, strides: Strides, transposed: bool) -> Run:
        shape, steps = problem.output_shape, strides.y
        if transposed:
            shape, steps = problem.input_shape, strides.x
        summed = operations.bias_problem("dy", shape, problem.data_format, problem.dtype)
        of_sum = Strides.of_sum(steps, 1, strides.alignment)
        return self._backend.prepare_bias(summed, of_sum, self._limit)

    def _add(self, use: Use, run: Run) -> None:
        assert isinstance(run, launch.Series)
        assert self.device.architecture is not None
        for one in run.launches:
            variant = launch.variant_of(one, self.device.architecture)
            self._uses.setdefault(variant, {})[use] = None


def _gpu(device: str | Device | None) -> Device:
    """The GPU that is compiled for."""
    chosen = backends.current_device() if device is None else Device.of(device)
    if chosen.is_gpu:
        return chosen
    if device is None:
        arrays.cupy()  # which may be what is missing
        raise DeviceError(
            "kernels are compiled for the current GPU unless a device is given, and there is none. "
            "Say which, for example device='sm_90a'"
        )
    gpus = [word for word in DEVICES if word != "cpu"]
    raise ConvError(
        "kernels are compiled for a GPU", f"got {chosen.name!r}", f"Use one of {', '.join(gpus)}"
    )


def _cache() -> Path:
    """The cache's folder, which keeps what is put there."""
    folder = compiler.cache_directory()
    if folder is None:
        raise _not_kept("this user has no home folder for it")
    wrong = compiler.distrust(folder)
    if wrong is not None:
        raise _not_kept(wrong[0], wrong[1])
    reason = compiler.unwritable(folder)
    if reason is not None:
        raise _not_kept(reason)
    return folder


def _not_kept(values: str, mending: str = "") -> ConvError:
    return ConvError(
        "kernels that are compiled ahead need a cache that keeps them",
        values,
        f"Mend it: {mending}" if mending else f"Set {compiler.CACHE_VARIABLE} to a folder of yours",
    )
