"""Parameters of launches as the driver gets them, for all families, passes and dtypes."""

from __future__ import annotations

import ctypes
import random
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from cupyconv.gpu.runtime import Series
from cupyconv.gpu.tensormaps import MAP_BYTES
from cupyconv.kernels.bias import prepare_bias
from cupyconv.kernels.request import PLAIN, Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.launch import ROLES, Launch, Part, TensorMaps, TiledMap
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests.configurations import CASES, FAMILY_CASES, HOPPER_CASES
from tests.emulator import tensormap
from tests.parameters import decoded

DTYPES = (
    *(("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float64", "ieee")),
    *(("float32", "tf32"), ("float32", "bf16x6"), ("complex64", "ieee")),
)
EPILOGUES = (PLAIN, Epilogue("relu"), Epilogue("gelu", adds=True))
GPU = [name for name, family in FAMILIES.items() if family.on_gpu]


class Recorder:
    """Runtime that records the bytes of the parameters of each launch."""

    def __init__(self) -> None:
        self.found: list[tuple[Launch, list[bytes]]] = []
        self.workspace = 0

    def load(self, launches):
        pass

    def launcher(self, launch):
        def record(stream, parameters, extra):
            assert (stream, extra) == (77, 0)
            values = decoded(launch, parameters)
            self.found.append((launch, [np.asarray(value).tobytes() for value in values]))

        return record, None

    def stream(self):
        return SimpleNamespace(ptr=77)

    def scratch(self, size):
        return SimpleNamespace(ptr=self.workspace)

    encoder = staticmethod(tensormap.encoder)


def expected(argument, addresses: dict[str, int]) -> bytes:
    """Return the bytes of an argument, written by the definition of a launch's arguments."""
    if isinstance(argument, str):
        return addresses.get(argument, 0).to_bytes(8, "little")
    if isinstance(argument, Part):
        return (addresses[argument.role] + argument.offset).to_bytes(8, "little")
    if isinstance(argument, TensorMaps):
        parts = (tensormap.encode(m, addresses[m.role] + m.offset) for m in argument.maps)
        return b"".join(parts)
    return np.asarray(argument).tobytes()


def require_parameters(launches, roles, workspace_bytes, fixed=()) -> None:
    """Check the parameters of calls with new, known and swapped addresses, some of them at once."""
    draw = random.Random(0)
    recorder = Recorder()
    held = {role: SimpleNamespace(ptr=draw.randrange(1, 1 << 40) << 4) for role in fixed}
    series = Series(launches, recorder, roles, workspace_bytes, held)
    calls = [[draw.randrange(1, 1 << 40) << 4 for _ in (*roles, "workspace")] for _ in range(2)]
    calls += [calls[0], [*reversed(calls[1])], calls[0]]
    for *addresses, workspace in calls:
        recorder.found.clear()
        recorder.workspace = workspace
        by_role = dict(zip(roles, addresses, strict=True))
        if workspace_bytes:
            by_role["workspace"] = workspace
        by_role |= {role: one.ptr for role, one in held.items()}
        series(tuple(addresses))
        assert [launch for launch, _ in recorder.found] == list(series.launches)
        for launch, values in recorder.found:
            assert values == [expected(one, by_role) for one in launch.arguments]


@pytest.mark.parametrize("impl", GPU)
def test_parameters_have_the_bytes_of_the_arguments(impl):
    device, family = Device.of("sm_90a"), FAMILIES[impl]
    cases = (*CASES, *FAMILY_CASES, *HOPPER_CASES)
    for (dtype, precision), pass_ in product(DTYPES, PASSES):
        done = 0
        for case in cases:
            problem = case.problem.replace(dtype=dtype)
            strides = Strides.contiguous(problem)
            request = Request(problem, pass_, device, precision, None, strides).reduced
            if done == 3 or family.refuses(request) is not None:
                continue
            done += 1
            candidates = family.candidates(request)
            chosen = max(candidates, key=lambda one: (one.splits > 1, bool(one.copies)))
            for epilogue in EPILOGUES if pass_ != "backprop_filter" else (PLAIN,):
                if epilogue.activation and problem.is_complex:
                    continue
                launches = family.launches(request, chosen, epilogue)
                require_parameters(launches, ROLES[:-1], chosen.workspace_bytes)
            form = family.filter_form(request, chosen)
            if form is not None:
                require_parameters((form.launch,), ("w", "x", "workspace"), 0)
                launches = family.launches(request, chosen, copied_w=True)
                size = chosen.workspace_bytes - form.bytes
                require_parameters(launches, ROLES[:-1], size, ("w",))


def test_bias_gradient_has_the_bytes_of_its_arguments():
    problem = CASES[0].problem
    launches, size = prepare_bias(problem, Strides.contiguous(problem), Device.of("sm_80"))
    require_parameters(launches, ("y", "w", "bias", "add", "x"), size)


def test_loading_twice_keeps_constants_of_both_blocks():
    """Two threads may load a series at the same time."""
    recorder = Recorder()
    one = Launch("", "", (), (1,), (1,), 0, (np.int64(7), "x", "add"))
    series = Series([one], recorder, ("x", "w", "y"))
    for _ in range(2):
        series.load()
    freed = [np.full(1, 9) for _ in range(50)]  # would get the memory of lost constants
    recorder.stream = lambda: (series._free and series((1, 2, 3)), SimpleNamespace(ptr=77))[1]
    series((1, 2, 3))
    assert [np.frombuffer(b"".join(v), "i8").tolist() for _, v in recorder.found] == [[7, 1, 0]] * 2
    assert len(freed) == 50


@pytest.mark.parametrize("interrupt", ["error", "other thread"])
def test_unfinished_tensor_map_is_not_reused(interrupt):
    """Another call gets no map whose encoding failed or is still under way."""
    recorder = Recorder()
    one = TiledMap("x", 2, (64, 100), (128,), (64, 64))
    launch = Launch("", "", (), (1,), (1,), 0, (TensorMaps((one,)),))
    series = Series([launch], recorder, ("x",))
    encode = tensormap.encoder(one)

    def interrupted(address, destination):
        encodes.remove(interrupted)
        if interrupt == "error":
            raise KeyboardInterrupt
        series((address,))
        encode(address, destination)

    encodes = [interrupted, encode]
    recorder.encoder = lambda _: lambda *where: encodes[0](*where)
    with pytest.raises(KeyboardInterrupt) if interrupt == "error" else nullcontext():
        series((1 << 20,))
    series((1 << 20,))
    expected = tensormap.encode(one, 1 << 20)
    assert recorder.found
    assert all(values == [expected] for _, values in recorder.found)


def test_tensor_maps_are_aligned():
    """The driver requires 64 bytes; the struct of a launch has all its maps."""
    one = HOPPER_CASES[0].problem.replace(dtype="float16")
    assert MAP_BYTES == 128
    request = Request(one, "forward", Device.of("sm_90a"), strides=Strides.contiguous(one)).reduced
    family = FAMILIES["cuda-hopper"]
    launches, addresses = family.launches(request, family.candidates(request)[0]), []

    class Aligned(Recorder):
        def launcher(self, launch):
            def record(stream, parameters, extra):
                pointers = (ctypes.c_void_p * len(launch.arguments)).from_address(parameters)
                addresses.extend(
                    pointer
                    for pointer, argument in zip(pointers, launch.arguments, strict=True)
                    if isinstance(argument, TensorMaps)
                )

            return record, None

    runtime = Aligned()
    runtime.workspace = 1 << 30
    Series(launches, runtime, ROLES[:-1], 4)((16, 32, 64, 0, 0))
    assert addresses
    assert not any(address % 64 for address in addresses)
