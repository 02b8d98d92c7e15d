"""Parameters of launches as the driver gets them."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from cupyconv.gpu.runtime import Series
from cupyconv.gpu.tensormaps import MAP_BYTES
from cupyconv.kernels.strides import Strides
from cupyconv.launch import ROLES, Launch, Part, TensorMaps, TiledMap
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from tests.configurations import HOPPER_CASES
from tests.emulator import tensormap
from tests.parameters import decoded


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


def test_parameters_follow_the_addresses_of_each_call():
    """Addresses are new, known or swapped; w is a prepared filter, and no addend is given."""
    recorder = Recorder()
    maps = [
        TiledMap(role, 2, (64, 100), (128,), (64, 64), at) for role, at in (("y", 0), ("w", 32))
    ]
    arguments = ("y", "add", np.int32(7), Part("workspace", 48), TensorMaps(maps), "x", "w")
    launch = Launch("", "", (), (1,), (1,), 0, arguments)
    w = SimpleNamespace(ptr=1 << 20)
    series = Series([launch], recorder, ("x", "w", "y"), 64, {"w": w})
    for x, y, workspace in ((16, 32, 64), (16, 48, 64), (48, 32, 80), (32, 16, 64), (16, 32, 64)):
        recorder.workspace = workspace
        series((x, 0, y))
        words = [y, 0, workspace + 48, x, w.ptr]
        first, second, third, *others = (word.to_bytes(8, "little") for word in words)
        encoded = b"".join(
            tensormap.encode(*one) for one in zip(maps, (y, w.ptr + 32), strict=True)
        )
        number = np.int32(7).tobytes()
        assert recorder.found.pop() == (launch, [first, second, number, third, encoded, *others])


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
