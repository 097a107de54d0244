# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as samplers have them: of logits over a temperature, in a part of the vocabulary."""

from __future__ import annotations

import math
import typing

import numpy as np

Array = typing.Any  # of numpy

class Sampler(typing.NamedTuple):
    """Log-probabilities of logits over a temperature, in a support: all of the vocabulary ("temperature"), the k
    largest logits ("top_k"), the fewest of the largest whose probabilities add up to p or more ("top_p"), or
    probabilities of at least p times the largest ("min_p"). residual: squares of the differences that it leaves."""

    temperature: float = 1.0
    number: float = 0.0
    residual: float = math.inf


Grid = typing.Dict[str, typing.List[float]]  # numbers that are tried, by kind
SUPPORTS = ("temperature", "top_k", "top_p", "min_p")
_K = [1.0, 2, 3, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 200, 256, 400, 512, 800, 1000, 1024]
_MIN_P = [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5]


class Claims(typing.NamedTuple):
    """Numbers of a side, with what the model says there: of the tokens at these indices; rows: their logits [n, V]."""

    token_indices: Array
    claimed: Array
    reference: Array
    rows: Array
    token: Array

    def squares(self, predicted: Array) -> float:
        """Returns the squared differences of a prediction; impossible predictions get a penalty."""
        with np.errstate(invalid="ignore", over="ignore"):
            off = predicted - self.claimed
            return float(np.where(np.isfinite(off), off * off, (self.claimed - self.reference) ** 2 + 1.0).sum())

    def residuals(self, temperatures: typing.Sequence[float], grid: Grid, step: int = 1) -> dict[str, Array]:
        """Returns the residual of each sampler, [temperatures, numbers], over every `step`-th claim."""
        sums = {kind: np.zeros((len(temperatures), len(numbers))) for kind, numbers in grid.items()}
        for i in range(0, len(self.claimed), step):
            for kind, squares in self._residuals_of(i, np.array(temperatures)[:, None], grid).items():
                sums[kind] += squares
        return sums

    def _residuals_of(self, i: int, temperature: Array, grid: Grid) -> dict[str, Array]:
        row = np.sort(self.rows[i])[::-1].astype(np.float64)
        x, penalty = float(self.rows[i, self.token[i]]), (self.claimed[i] - self.reference[i]) ** 2 + 1.0
        mass = np.cumsum(np.exp((row - row[0]) / temperature), axis=1)
        squares = {}
        for kind, numbers in grid.items():
            support_size = np.clip(self._kept(kind, row, mass, temperature, np.array(numbers)), 1, len(row))
            off = (x - row[0]) / temperature - np.log(np.take_along_axis(mass, support_size - 1, 1)) - self.claimed[i]
            out = (x < row[support_size - 1]) | ~np.isfinite(off)  # no sampler takes a token that it has left out
            squares[kind] = np.where(out, penalty, off * off)
        return squares

    @staticmethod
    def _kept(kind: str, row: Array, mass: Array, temperature: Array, numbers: Array) -> Array:
        """Returns how many entries of the sorted row remain, [temperatures, numbers]."""
        if kind == "top_p":
            return 1 + np.stack([np.searchsorted(mass_row, numbers * mass_row[-1]) for mass_row in mass])
        if kind == "min_p":
            return np.searchsorted(-row, -(row[0] + temperature * np.log(numbers)), side="right")
        fixed = numbers if kind == "top_k" else np.full(len(numbers), len(row))
        return np.broadcast_to(fixed.astype(np.int64), (len(temperature), len(numbers)))


def _chosen(kind: str, temperatures: typing.Sequence[float], numbers: typing.Sequence[float],
            residuals: Array) -> Sampler:
    """Chooses the best sampler. A temperature other than 1, the first, must leave less than half of the residual."""
    best_cells = [divmod(int(np.argmin(part)), len(numbers)) for part in (residuals[:1], residuals)]
    plain, any_ = (Sampler(temperatures[t], numbers[n], float(residuals[t, n])) for t, n in best_cells)
    return any_ if kind == "temperature" or any_.residual < 0.5 * plain.residual else plain


def _finer(kind: str, best_sampler: Sampler, pass_: int) -> tuple[list[float], Grid]:
    """Around the best sampler of a kind."""
    step, offsets = (0.005 if pass_ == 1 else 0.0005), range(-20, 21)
    temperatures = [1.0, *(t for i in offsets if (t := best_sampler.temperature + i * step) > 0.02)]
    numbers: list[float] = []
    if kind == "top_k" and pass_ == 1:
        numbers = [best_sampler.number + i for i in offsets if best_sampler.number + i >= 1]
    elif kind == "top_p":
        numbers = [p for i in offsets if 0 < (p := best_sampler.number + i * step / 2) < 1]
    elif kind == "min_p":
        numbers = [best_sampler.number * (1.03 if pass_ == 1 else 1.002) ** i for i in offsets]
    return temperatures, {kind: [*numbers, best_sampler.number]}


def _rounded(claims: Claims, kind: str, best_sampler: Sampler, step: int) -> Sampler:
    """Many a number of a support leaves the same, and a temperature's neighbours nearly so: that of fewest digits."""
    def with_residual(sampler: Sampler, every: int) -> Sampler:
        return sampler._replace(
            residual=float(claims.residuals([sampler.temperature], {kind: [sampler.number]}, every)[kind][0, 0])
        )

    best_sampler = with_residual(best_sampler, step)
    for field in ("temperature", "number"):
        value = getattr(best_sampler, field)
        for digits in range(1, 5 if value > 0 else 0):
            plain = with_residual(best_sampler._replace(**{field: float(f"{value:.{digits}g}")}), step)
            if plain.residual <= 1.02 * best_sampler.residual:
                best_sampler = plain
                break
    return with_residual(best_sampler, 1)


def fit_samplers(claims: Claims) -> dict[str, Sampler]:
    """Finds for each kind the sampler with the smallest residual. The search uses some of the claims, fewer with a
    large vocabulary; the final residual counts all claims."""
    looked = max(16, min(64, (1 << 20) // claims.rows.shape[1]))
    step = max(1, len(claims.claimed) // looked)
    temperatures = [1.0, *np.arange(0.1, 2.01, 0.05), 2.5, 3.5, 4.9]
    grid: Grid = {"temperature": [0.0], "top_k": _K, "min_p": _MIN_P,
                  "top_p": [*np.arange(0.05, 0.96, 0.025), 0.98, 0.99, 0.995, 0.999]}
    residuals = claims.residuals(temperatures, grid, step)
    found = {}
    for kind in SUPPORTS:
        best_sampler = _chosen(kind, temperatures, grid[kind], residuals[kind])
        for pass_ in (1, 2):
            nearer, numbers = _finer(kind, best_sampler, pass_)
            best_sampler = _chosen(kind, nearer, numbers[kind], claims.residuals(nearer, numbers, step)[kind])
        found[kind] = _rounded(claims, kind, best_sampler, step)
    return found
