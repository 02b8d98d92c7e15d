"""`cupyconv grads`: compute the passes on data, explain their shapes and check their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError
from cupyconv.cli import configuration, output, paths
from cupyconv.cli.configuration import Layer
from cupyconv.cli.shapes import axes_table, layer_reasons, tensors_json, title
from cupyconv.explaining.values import OPERANDS, draw
from cupyconv.markup import in_line
from cupyconv.problem import ITEMSIZE, PASSES, REAL_PART, bytes_text, counted, shape_text

# --help must work without NumPy: functions import NumPy and the modules that need it.
if TYPE_CHECKING:
    import numpy as np

    from cupyconv import Plan
    from cupyconv.bench.places import Place
    from cupyconv.checking import Agreement, Operands, Results

STEPS = 6
"""Progress steps of a layer's checks: three for the expected values and their bounds, three for
finite differences."""


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@configuration.data_options
@configuration.place_option(
    "Compute on this device; auto is the device of --impl, or else the GPU if there is one."
)
@configuration.impl_option
@paths.file_option("--save", "Write all tensors to this .npz file.")
@click.option(
    "--no-check",
    is_flag=True,
    help="Skip the checks, which can take far longer than the gradients.",
)
@click.option(
    "--dask",
    "chunked",
    is_flag=True,
    help="Compute data larger than memory, in chunks: --x, --w and --dy may be Zarr folders, "
    "--save writes a folder of Zarr arrays, and only the adjoint identity is checked.",
)
@output.json_option
def command(
    x: str | None,
    w: str | None,
    dy: str | None,
    seed: int,
    device: str,
    impl: str,
    save: str | None,
    no_check: bool,
    chunked: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Compute, explain and check the gradients of a layer.

    The data is random, or read from files and converted to --dtype if given.  The checks compare
    the gradients with central finite differences, with a float64 reference, and with each other by
    the adjoint identity.
    """
    from cupyconv.checking import compute
    from cupyconv.cli import data

    layers = configuration.read_layers(options)
    dy_shape, dy = configuration.shape_or_file("--dy", dy)
    files = {name: path for name, path in zip(OPERANDS, (x, w, dy), strict=True) if path}
    if dy_shape is not None:
        for layer in layers:
            layer.require_output(dy_shape)
    if files or save:
        rule = "--x, --w, --dy and --save must be used with a single layer"
        configuration.require_single(layers, rule)
    paths.require_one_output(save, as_json=as_json)
    target = Path(save) if save else None
    if chunked:
        report = _chunked(layers, files, target, seed, device, impl, no_check, options)
        return _tell([report], target, as_json)
    paths.require_writable("--save", save)
    place = data.place_of(device, impl)
    reports = []
    for layer in layers:
        opened = {name: data.ArrayFile(f"--{name}", path) for name, path in files.items()}
        problem = _problem(layer, opened, options)
        data.require_parts(problem, opened)
        planned = cupyconv.plan(problem, place.device, impl)
        _require_memory(problem, place, check=not no_check)
        loaded = {name: file.read() for name, file in opened.items()}
        operands = _operands(layer, problem, loaded, seed)
        reverse = layer.is_transposed
        with output.progress("computing and checking", 1 if no_check else 1 + STEPS) as advance:
            results = compute(problem, operands, impl, xp=place.xp, is_transposed=reverse)
            advance()
            tensors = {**operands._asdict(), **results._asdict()}
            report = _Report(layer, problem, planned, files, seed, _norms(tensors))
            if not no_check:
                report.check(operands, results, advance)
        if target:
            data.save(target, tensors)
        reports.append(report)
    return _tell(reports, target, as_json)


def _chunked(
    layers: list[Layer],
    files: dict[str, str],
    target: Path | None,
    seed: int,
    device: str,
    impl: str,
    no_check: bool,
    options: Mapping[str, Any],
) -> _Report:
    """Compute a layer in chunks, and return its report."""
    from cupyconv.cli import data

    try:
        from cupyconv.cli import chunked

        import_module("cupyconv.dask")
    except ImportError as error:
        raise ConvTypeError(str(error)) from None
    if device == "gpu" or len(layers) > 1:
        raise ConvError(
            "--dask must be used with one layer, on the CPU",
            f"got {counted(len(layers), 'layer')} and --device {device}",
            "Give one layer and --device cpu; in Python, cupyconv.dask takes CuPy chunks, too",
        )
    if layers[0].is_transposed:
        raise ConvError(
            "--dask must be used only for ordinary convolutions",
            "the layer is transposed",
            "Leave out --dask",
        )
    if paths.STANDARD in (str(target), *files.values()):
        raise ConvError(
            "--dask cannot use standard input or output",
            "got - as a path",
            "Give paths, or leave --dask out",
        )
    if target:
        chunked.require_folder(target)
    opened = {name: chunked.open_array(f"--{name}", path) for name, path in files.items()}
    problem = _problem(layers[0], opened, options)
    data.require_parts(problem, opened)
    planned = cupyconv.plan(problem, "cpu", impl)
    norms, products = chunked.compute(problem, opened, seed, layers[0].values, impl, target)
    report = _Report(layers[0], problem, planned, files, seed, norms, is_chunked=True)
    if not no_check:
        report.products = products
        report.agreements = [chunked.adjoint(problem, norms, products)]
    return report


def _tell(reports: list[_Report], target: Path | None, as_json: bool) -> int:
    """Print the reports; return the exit status, 1 if a check failed."""
    if target and str(target) == paths.STANDARD:
        pass  # standard output has the tensors
    elif as_json:
        everything = [report.as_json() for report in reports]
        output.write_json({"layers": everything, "saved": str(target) if target else None})
    else:
        parts = [part for report in reports for part in report.tables()]
        output.draw(*parts, *([f"saved to {in_line(str(target))}"] if target else []))
    return 0 if all(report.passed for report in reports) else 1


@dataclass
class _Report:
    """Results of one layer, as tables and as JSON.

    Attributes:
        files: paths of the tensors that are read, keyed by tensor; the others are random.
        norms: Euclidean norm of each tensor, keyed by its name in the layer.
        agreements: outcomes of the checks; None if nothing was checked.
        products: inner products that must agree, keyed by texts such as "<y,dy>".
        is_chunked: whether Dask computed the results.
    """

    layer: Layer
    problem: ConvProblem
    planned: Plan
    files: Mapping[str, str]
    seed: int
    norms: Mapping[str, float]
    agreements: list[Agreement] | None = None
    products: Mapping[str, float] = field(default_factory=dict)
    is_chunked: bool = False

    def check(self, operands: Operands, results: Results, advance: Callable[[], None]) -> None:
        """Check the results; call ``advance`` after each of the STEPS."""
        from cupyconv.checking import Truth

        truth = Truth(self.problem, operands, is_transposed=self.layer.is_transposed)
        for _ in truth.prepared():
            advance()
        self.agreements = []
        for agreement in truth.against_finite_differences(results, self.seed):
            self.agreements.append(agreement)
            advance()
        self.agreements += [truth.against_adjoint(results), *truth.against_reference(results)]
        self.products = truth.inner_products(results)

    @property
    def passed(self) -> bool:
        return all(agreement.passed is not False for agreement in self.agreements or ())

    def tables(self) -> list[Any]:
        rows = [
            (tensor, shape_text(shape), f"{self.norms[tensor]:.5g}", reason)
            for tensor, shape, reason in layer_reasons(self.layer, self.problem)
        ]
        tensors = output.table(("tensor", "shape", "norm", "why this shape"), rows, ("norm",))
        parts = [title(self.layer, self.problem), tensors, axes_table(self.layer, self.problem)]
        if self.agreements is not None:
            parts += [_agreement_table(self.agreements), self._reading()]
        return [*parts, self._ran()]

    def _reading(self) -> Any:
        products = ", ".join(f"{name} = {value:.7g}" for name, value in self.products.items())
        if self.is_chunked:
            return output.heading(
                "how to read this",
                f"Inner products: {products}.",
                "Their difference is divided by the largest product of norms, such as |y| |dy|, "
                "because |<y,dy>| is at most |y| |dy|.",
            )
        in_double = REAL_PART.get(self.problem.dtype, self.problem.dtype) == "float64"
        return output.heading(
            "how to read this",
            f"The loss is {'the real part of ' * self.problem.is_complex}the inner product <y,dy>. "
            "It is linear in x, in w and in the bias, so central differences in float64 are exact "
            "apart from rounding.",
            f"Inner products: {products}.",
            "Each difference is divided by the sum of the absolute values of the terms that the "
            "compared value sums. Each bound comes from the error of plain summation on this data, "
            f"in {'float32 and scaled to float64' if in_double else 'the same precision'}.",
        )

    def _ran(self) -> str:
        device = self.planned.device
        where = f"{device.name} ({device.architecture})" if device.architecture else "the CPU"
        names = {pass_: self.planned[pass_].implementation for pass_ in PASSES}
        if len(set(names.values())) == 1:
            ran = f"{names['forward']}: {self.planned['forward'].family.summary}"
        else:
            ran = ", ".join(f"{pass_} {name}" for pass_, name in names.items())
        data = ", ".join(f"{name} from {in_line(path)}" for name, path in self.files.items())
        what = "integers" if self.layer.values == "integers" else "data"
        drawn = "" if len(self.files) == len(OPERANDS) else f"random {what} from seed {self.seed}"
        line = f"ran on {where} with {ran}; {', '.join(filter(None, (data, drawn)))}"
        if self.agreements is None:
            return f"{line}\nnot checked"
        verdicts = [agreement.passed for agreement in self.agreements]
        verdict = f"{counted(len(verdicts), 'check')}, {verdicts.count(False)} failed"
        if None in verdicts:
            verdict += f", {verdicts.count(None)} undecided, because values are not finite"
        return f"{line}\n{verdict}"

    def as_json(self) -> dict[str, Any]:
        return {
            **configuration.as_json(self.layer, self.problem),
            **tensors_json(self.layer, self.problem),
            "data": {name: self.files.get(name, "random") for name in OPERANDS},
            "seed": self.seed,
            "device": self.planned.device.name,
            "architecture": self.planned.device.architecture,
            "implementations": {pass_: self.planned[pass_].implementation for pass_ in PASSES},
            "norms": self.norms,
            "inner_products": self.products or None,
            "agreements": self.agreements
            and [
                {
                    "compared_with": agreement.check,
                    "tensor": agreement.tensor,
                    "comparisons": agreement.count,
                    "difference": agreement.difference,
                    "bound": agreement.bound,
                    "passed": agreement.passed,
                }
                for agreement in self.agreements
            ],
            "passed": None if self.agreements is None else self.passed,
        }


def _agreement_table(agreements: list[Agreement]) -> Any:
    rows, previous = [], None
    for agreement in agreements:
        difference = agreement.difference
        rows.append(
            (
                "" if agreement.check == previous else agreement.check,
                agreement.tensor,
                agreement.compared,
                "not finite" if difference is None else f"{difference:.1e}",
                f"{agreement.bound:.1e}",
                output.verdict(agreement.passed),
            )
        )
        previous = agreement.check
    columns = ("compared with", "tensor", "elements", "difference", "bound", "")
    return output.table(columns, rows, ("difference",))


def _norms(tensors: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the Euclidean norm of every tensor."""
    import numpy as np

    with np.errstate(all="ignore"):
        return {
            tensor: float(np.linalg.norm(array.astype(np.result_type(array, "f8")).ravel()))
            for tensor, array in tensors.items()
        }


def _problem(layer: Layer, loaded: Mapping[str, Any], options: Mapping[str, Any]) -> ConvProblem:
    """Return the layer's problem, with the shapes and the dtype of the opened files."""
    from cupyconv.cli import data

    more: dict[str, Any] = {}
    if loaded and options["dtype"] is None:
        names = {name: array.dtype.name for name, array in loaded.items()}
        common = data.dtype_for(names.values())
        given = ", ".join(f"{name} is {word}" for name, word in names.items())
        if not set(names.values()) <= set(ITEMSIZE):
            known = ", ".join(ITEMSIZE)
            raise ConvTypeError(
                f"dtypes must be among {known}: {given}. Convert the arrays with --dtype {common}"
            )
        if len(set(names.values())) > 1:
            raise ConvTypeError(
                f"all arrays must have one dtype: {given}. Convert them with --dtype {common}"
            )
        more["dtype"] = next(iter(names.values()))

    def remedy(key: str, shape: tuple[int, ...]) -> str:
        if len(shape) <= 2:
            return "Give another file"
        return f"Pass the {key} as {shape_text(shape)}, or another file"

    data.require_given_shapes(layer, loaded, options, remedy)
    shapes = {"input_shape": "x", "filter_shape": "w"}
    more |= {key: loaded[name].shape for key, name in shapes.items() if name in loaded}
    layer = replace(layer, arguments={**layer.arguments, **more})
    problem = layer.problem()
    if "dy" in loaded:
        layer.require_output(loaded["dy"].shape)
    return problem


def _operands(
    layer: Layer, problem: ConvProblem, loaded: dict[str, np.ndarray], seed: int
) -> Operands:
    """Return the layer's operands: ``loaded``, and random ones in place of the others."""
    from cupyconv import arrays
    from cupyconv.checking import Operands

    random = draw(problem, seed, layer.values)
    drawn = {name: random[layer.problem_names[name]] for name in OPERANDS}
    dtype = arrays.numpy_dtype(problem.dtype)
    converted = {name: array.astype(dtype, copy=False) for name, array in loaded.items()}
    return Operands(**{**drawn, **converted})


def _require_memory(problem: ConvProblem, place: Place, *, check: bool) -> None:
    """Check that the layer's tensors fit into memory, before anything is allocated."""
    from cupyconv.cli import data

    # The bytes per element, 10, 50 and 110, are measured. Drawing random numbers and summing 16-bit
    # types makes float32 copies, and the implementation in NumPy allocates temporary arrays. The
    # checks keep operands, results and sums of absolute values in float64.
    elements = problem.bytes // ITEMSIZE[problem.dtype]
    tensors = 2 * problem.bytes  # x, w and dy, and the three results of their shapes
    computing = tensors + 10 * elements + (8 << 20)
    each = 110 if REAL_PART.get(problem.dtype, problem.dtype) == "float64" else 50
    checking = computing + problem.bytes + (1 + problem.is_complex) * each * elements
    needed = checking if check else computing
    rule, remedy = "a layer's tensors must fit into {} memory", "Use a smaller input or batch"
    remedy += "; `cupyconv shapes` needs no data"
    if place.device.is_gpu:
        available = place.free_bytes()
        data.require_memory(tensors, rule.format("GPU"), "they need about", remedy, available)
    available = data.available_memory()
    if check and available is not None and computing <= available:
        remedy = f"Use --no-check, which needs {bytes_text(computing)}, or a smaller batch"
    data.require_memory(needed, rule.format("main"), "they need about", remedy)
