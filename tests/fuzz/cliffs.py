"""``python -m tests.fuzz.cliffs``: look for layers whose planned passes are far too slow.

A pass of a random layer is a finding if its modelled time is more than FAR times the roofline and
more than FAR times the fastest pass of the layer.  Nothing is computed, so a minute tries hundreds
of layers on several chips.  The times are the planner's estimates, not measurements: a finding
shows that a fast kernel for such layers is missing.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from cupyconv import ConvProblem
from cupyconv.kernels.cost import duration
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.estimates import roofline
from cupyconv.problem import PASSES
from tests.configurations import in_formats

FAR = 8
"""Ratio of times that makes a finding (hand-set)."""

DEVICES = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_120")

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""dtypes of the layers; complex layers run on cuda-generic alone, which has no splits."""

MOST_FLOPS, MOST_BYTES = 1e12, 2 << 30
"""Limits on a layer: FLOP per pass, and bytes of all its tensors (hand-set)."""

LAUNCHING = 5.0
"""Microseconds of a launch, which are added to the roofline (modelled)."""

LAYERS = {
    "vit-patches-16": ConvProblem((8, 3, 224, 224), (768, 3, 16, 16), stride=16),
    "vit-patches-14": ConvProblem((8, 3, 224, 224), (1280, 3, 14, 14), stride=14),
    "swin-patches-4": ConvProblem((8, 3, 224, 224), (96, 3, 4, 4), stride=4),
    "fcn-upsampling": ConvProblem((1, 21, 568, 568), (21, 21, 16, 16), stride=8, padding=4),
    "grouped-upsampling": ConvProblem(
        (4, 21, 256, 256), (21, 1, 16, 16), stride=8, padding=4, groups=21
    ),
    "hifigan-upsampling": ConvProblem((1, 256, 4096), (512, 256, 16), stride=8, padding=4),
    "wav2vec-stem": ConvProblem((4, 1, 16000), (512, 1, 10), stride=5),
    "frames-of-320": ConvProblem((2, 1, 32000), (256, 1, 320), stride=160),
    "alexnet-stem": ConvProblem((16, 3, 227, 227), (96, 3, 11, 11), stride=4),
    "resnet-stem": ConvProblem((16, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3),
    "vgg-fc6": ConvProblem((8, 512, 7, 7), (4096, 512, 7, 7)),
    "discriminator-head": ConvProblem((16, 512, 4, 4), (1, 512, 4, 4)),
    "stride-6x6": ConvProblem((4, 64, 96, 96), (64, 64, 6, 6), stride=6),
    "stride-4x8": ConvProblem((4, 64, 96, 96), (64, 64, 4, 8), stride=(4, 8)),
    "video-patches": ConvProblem((2, 3, 16, 224, 224), (768, 3, 2, 16, 16), stride=(2, 16, 16)),
}
"""Layers of networks with large strides, large filters or few channels, by name."""


@dataclass(frozen=True)
class Cliff:
    """A pass that takes far longer than the roofline and than another pass of its layer.

    Attributes:
        problem, device, pass_: the pass.
        implementation: the planned kernel.
        microseconds: modelled time.
        least: roofline with the overhead of one launch, in microseconds.
        fastest: time of the fastest pass of the layer, in microseconds.
    """

    problem: ConvProblem
    device: str
    pass_: str
    implementation: str
    microseconds: float
    least: float
    fastest: float

    def __str__(self) -> str:
        times = duration(self.microseconds), duration(self.least), duration(self.fastest)
        return (
            f"{self.device} {self.pass_} of {self.problem!r}: {self.implementation} takes "
            "{}, the limit of memory is {}, the fastest pass takes {}".format(*times)
        )


def draw_layer(rng: random.Random) -> ConvProblem:
    """Return a random layer: strides up to 64, filters up to the input, 1 to 4,096 channels."""
    while True:
        rank = rng.choice((1, 2, 2, 2, 3))
        taps = [_between(rng, 1, (400, 32, 9)[rank - 1]) for _ in range(rank)]
        if rng.random() < 0.5:
            taps = [taps[0]] * rank
        dilation = [rng.choice((1, 1, 1, 2, 3))] * rank
        spans = [(t - 1) * d + 1 for t, d in zip(taps, dilation, strict=True)]
        stride = [rng.choice((1, 1, 2, _between(rng, 1, 64), min(taps[0], 64)))] * rank
        outputs = [_between(rng, 1, (4000, 256, 48)[rank - 1]) for _ in range(rank)]
        padding = [rng.choice((0, span // 2)) for span in spans]
        sizes = [
            max((o - 1) * s + span - 2 * pad, 1) + rng.randrange(s)
            for o, s, span, pad in zip(outputs, stride, spans, padding, strict=True)
        ]
        groups, channels, filters = _channels(rng)
        try:
            problem = ConvProblem(
                (_between(rng, 1, 64), groups * channels, *sizes),
                (groups * filters, channels, *taps),
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
                dtype=rng.choice(DTYPES),
            )
        except ValueError:
            continue
        if problem.flops <= MOST_FLOPS and problem.bytes <= MOST_BYTES:
            axes = "DHW"[-rank:]
            return rng.choice((problem, in_formats(problem, f"N{axes}C", f"O{axes}I")))


def _between(rng: random.Random, least: int, most: int) -> int:
    """Return a random integer whose logarithm is evenly distributed."""
    return min(int(least * ((most + 1) / least) ** rng.random()), most)


def _channels(rng: random.Random) -> tuple[int, int, int]:
    """Return groups, and channels and filters per group."""
    form = rng.random()
    if form < 0.15:
        return _between(rng, 2, 2048), 1, rng.choice((1, 1, 2))
    if form < 0.25:
        return rng.choice((2, 4, 8, 32)), _between(rng, 1, 64), _between(rng, 1, 64)
    return 1, _between(rng, 1, 4096), _between(rng, 1, 4096)


def cliffs(problem: ConvProblem, device: str, far: float = FAR) -> Iterator[Cliff]:
    """Yield the passes of a layer that are more than ``far`` times too slow on a device."""
    plans = {pass_: plan_pass(Request(problem, pass_, Device.of(device))) for pass_ in PASSES}
    times = {pass_: planned.microseconds or 0.0 for pass_, planned in plans.items()}
    fastest = min(times.values())
    for pass_, planned in plans.items():
        request = Request(problem, pass_, Device.of(device))
        least = roofline(request).microseconds + LAUNCHING
        if times[pass_] > far * max(least, fastest):
            name = planned.implementation
            yield Cliff(problem, device, pass_, name, times[pass_], least, fastest)


def main(arguments: list[str] | None = None) -> int:
    """Print the findings of some layers; return 1 if there are any."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.cliffs", description=__doc__)
    parser.add_argument("--layers", type=int, default=1000, help="try N layers (1000)")
    parser.add_argument("--seed", default="0", help="set the seed of all draws (0)")
    given = parser.parse_args(arguments)
    rng, findings = random.Random(given.seed), 0
    for _ in range(given.layers):
        problem = draw_layer(rng)
        for cliff in cliffs(problem, rng.choice(DEVICES)):
            findings += 1
            print(cliff, flush=True)
    print(f"{given.layers} layers, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
