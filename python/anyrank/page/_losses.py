# SPDX-License-Identifier: Apache-2.0
"""A training run as a picture: its losses, a smoothed line, and the learning rate."""

from __future__ import annotations

import math
import typing

from anyrank import _html
from anyrank._errors import AnyrankError
from anyrank._input import Json, anything, integer, list_of, nullable, number, record, string
from anyrank.page._parts import label, svg

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, MOST_POINTS = 860, 440, 70, 790, 66, 390, 20000
LEAST_SMOOTHED, WINDOWS = 20, 20  # with fewer steps there is nothing to smooth; a window is this part of the curve
LEAST_EXTENT, LEAST_VALUE = 1e-9, 1e-290  # of an axis, in parts of its largest value; what is smaller is 0
_CURVE = list_of(nullable(number(words=True)))
_SIZE = integer(1)
RUN = record({"model": string, "result": string, "batch": _SIZE, "seq": _SIZE, "steps": integer(0),
              "first_step": _SIZE, "loss": _CURVE, "lr": _CURVE,
              "layout": record({}, {**dict.fromkeys(("dp", "pp", "cp", "tp", "micro_batches"), _SIZE),
                                    "zero": anything})},
             {"weights_hash": string})
Points = typing.Sequence[typing.Tuple[float, float]]


class Axis(typing.NamedTuple):
    """A range of values, and the pixels of its ends."""

    low: float
    high: float
    begin: float
    end: float

    def pixel(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        step = tick(self.high - self.low)
        first_tick = math.ceil(self.low / step - 1e-6)
        return [i * step for i in range(first_tick, math.floor(self.high / step + 1e-6) + 1)]


def tick(extent: float) -> float:
    """Returns the distance of ticks: 1, 2 or 5 times a power of ten, so that an extent > 0 has 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(extent / 4))
    units = extent / 4 / power  # of [1, 10)
    return power * (5 if units >= 5 else 2 if units >= 2 else 1)


def rounded(values: list[float], begin: float, end: float) -> Axis:
    """Returns an axis that ends on ticks; nearly equal values get a range around them."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if high - low <= max(LEAST_EXTENT * largest, LEAST_VALUE):
        margin = largest * 0.1 if largest > 10.0 * LEAST_VALUE else 1.0
        low, high = low - margin, high + margin
    step = tick(high - low)
    return Axis(math.floor(low / step) * step, math.ceil(high / step) * step, begin, end)


def smoothed(values: list[float], window: float) -> list[float]:
    """Returns the mean of all values weighted by (1 - a)^distance, a = 2/(window + 1): an exponential average to both
    sides, which does not lag behind the curve."""
    decay = 1 - 2 / (window + 1)

    def before(series: typing.Iterable[float]) -> list[float]:
        total, sums = 0.0, []
        for value in series:
            sums.append(total)
            total = (total + value) * decay
        return sums

    def two_sided(series: list[float]) -> list[float]:
        return [a + x + b for a, x, b in zip(before(series), series, reversed(before(reversed(series))))]

    return [total / weight for total, weight in zip(two_sided(values), two_sided([1.0] * len(values)))]


def line(points: Points, style: str, x: Axis, y: Axis) -> str:
    """Draws a line that breaks where a value is not finite. A long line has evenly chosen points."""
    stride = math.ceil(len(points) / MOST_POINTS) or 1
    chosen = points if stride == 1 else [*points[:-1:stride], points[-1]]
    path, broken = [], True
    for step, value in chosen:
        if math.isfinite(value):
            path.append(f"{'M' if broken else 'L'}{x.pixel(step):.2f} {y.pixel(value):.2f}")
        broken = not math.isfinite(value)
    return f'<path class="{style}" d="{"".join(path)}"/>'


def _axes(x: Axis, left_axis: Axis, right: Axis | None) -> list[str]:
    out = []
    for value in left_axis.ticks():
        y = left_axis.pixel(value)
        out += [f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>', label(LEFT - 8, y + 4, 'text-anchor="end"',
                                                                         f"{value:.6g}")]
    for value in x.ticks():
        out += [f'<path class="axis" d="M{x.pixel(value):.1f} {BOTTOM}v5"/>',
                label(x.pixel(value), BOTTOM + 19, 'text-anchor="middle"', f"{value:.6g}")]
    out += [f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>',
            label((LEFT + RIGHT) / 2, BOTTOM + 40, 'text-anchor="middle"', "step"),
            label(LEFT - 8, TOP - 12, 'text-anchor="end"', "loss")]
    if right is not None:
        out += [label(RIGHT + 8, right.pixel(value) + 4, 'class="quiet"', f"{value:.6g}") for value in right.ticks()]
        out.append(label(RIGHT + 8, TOP - 12, 'class="quiet"', "lr"))
    return out


def _legend(names: list[tuple[str, str]]) -> list[str]:
    out, x = [], float(RIGHT)
    for name, style in reversed(names):
        x -= 7 * len(name) + 40
        out += [f'<path class="{style}" d="M{x:.1f} {TOP - 16}h22"/>', label(x + 28, TOP - 12, 'class="quiet"', name)]
    return out


def _numbers(values: list[typing.Any]) -> list[float]:
    """NaN and infinities are texts in JSON, and what is not known is null."""
    return [math.nan if value is None else float(value) for value in values]


def _head(run: Json) -> tuple[str, str]:
    end = (f"weights after step {run['steps']}: {run['weights_hash'][:12]}" if run.get("weights_hash")
           else f"{run['result']} after step {run['steps']}")
    return (f"{run['model']}, {_html.layout_name(run['layout'])}",
            f"{run['batch']} sequences of {run['seq']} tokens a step; {end}")


def picture(run: Json) -> str:
    """Draws the picture of `anyrank train --json`. Errors: AnyrankError for a run without a step whose loss is
    known."""
    losses = list(enumerate(_numbers(run["loss"]), start=1))
    finite_losses = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if not finite_losses:
        raise AnyrankError("no step was taken whose loss is a number: there is nothing to draw")
    rates = list(enumerate(_numbers(run["lr"]), start=run["first_step"]))
    low_step, high_step = (
        (finite_losses[0][0], finite_losses[-1][0])
        if len(finite_losses) > 1
        else (finite_losses[0][0] - 0.5, finite_losses[0][0] + 0.5)
    )
    x, left_axis = Axis(low_step, high_step, LEFT, RIGHT), rounded([loss for _, loss in finite_losses], BOTTOM, TOP)
    known_rates = [rate for _, rate in rates if math.isfinite(rate)]
    right = rounded([0.0, *known_rates], BOTTOM, TOP) if rates else None  # a constant rate is no noise
    body = _axes(x, left_axis, right)
    if run["first_step"] > 1 and x.low <= run["first_step"] - 0.5 <= x.high:
        resume_x = x.pixel(run["first_step"] - 0.5)
        body += [
            f'<path class="mark" d="M{resume_x:.1f} {TOP}V{BOTTOM}"/>',
            label(resume_x + 4, TOP + 12, 'class="quiet"', "resumed"),
        ]
    body.append(line(losses, "faint", x, left_axis))
    names = [("loss", "faint")]
    if right:
        body.append(line(rates, "aside", x, right))
        names.append(("learning rate", "aside"))
    if len(losses) >= LEAST_SMOOTHED:
        means = smoothed([loss for _, loss in finite_losses], len(losses) / WINDOWS + 1)
        body.append(line([(step, mean) for (step, _), mean in zip(finite_losses, means)], "bold", x, left_axis))
        names.append(("smoothed", "bold"))
    return svg((WIDTH, HEIGHT), LEFT, *_head(run), [*body, *_legend(names)])
