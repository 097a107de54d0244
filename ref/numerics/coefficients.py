#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Derives the polynomial coefficients of ref/numerics/elementary.h, and of ref/cpu/rows/gelu.h: Chebyshev fits in 60
decimal digits, rounded to binary64.

Needs mpmath (1.3.0 was used). Prints each table, highest power first, with the
largest error of the fit.
"""
from mpmath import mp, mpf, chebyfit, cos, erfc, exp, log, nstr, pi, sin, sqrt

mp.dps = 60


def series(f, terms):
    """f near 0 loses all digits to cancellation, so the first terms of its series stand in there."""
    def g(x):
        return sum(c * x**i for i, c in enumerate(terms)) if abs(x) < mpf(10)**-9 else f(x)
    return g


def erfcx_over_v(t):
    v = (1 - t) / 8          # t = 1 - 8 v, v = 1/(y + 4)
    y = 1 / v - 4
    return exp(y * y) * erfc(y) * (y + 4)


TABLES = [
    # name, function, interval, number of coefficients
    ("EXPM1: (e^r - 1 - r)/r^2, |r| <= ln(2)/2",
     series(lambda r: (exp(r) - 1 - r) / r**2, [mpf(1) / 2, mpf(1) / 6, mpf(1) / 24]),
     [-log(2) / 2 * 1.0001, log(2) / 2 * 1.0001], 10),
    ("LOG: (log((1+s)/(1-s)) - 2s)/(s z), z = s^2 <= (sqrt(2)-1)^4 of s = (m-1)/(m+1), m in [sqrt(1/2), sqrt(2)]",
     series(lambda z: (log((1 + sqrt(z)) / (1 - sqrt(z))) / sqrt(z) - 2) / z,
            [mpf(2) / 3, mpf(2) / 5, mpf(2) / 7]), [0, ((sqrt(2) - 1)**4) * 1.0001], 8),
    ("SIN: (sin(r) - r)/r^3 in z = r^2, |r| <= pi/4",
     series(lambda z: (sin(sqrt(z)) / sqrt(z) - 1) / z, [-mpf(1) / 6, mpf(1) / 120, -mpf(1) / 5040]),
     [0, (pi / 4)**2 * 1.0001], 6),
    ("COS: (cos(r) - 1 + r^2/2)/r^4 in z = r^2, |r| <= pi/4",
     series(lambda z: (cos(sqrt(z)) - 1 + z / 2) / z**2, [mpf(1) / 24, -mpf(1) / 720, mpf(1) / 40320]),
     [0, (pi / 4)**2 * 1.0001], 6),
    ("ERFCX: e^(y^2) erfc(y) (y + 4) in t = 1 - 8/(y + 4), 0 <= y <= 28", erfcx_over_v, [-1, mpf(3) / 4], 22),
]


def normal_tail(a):
    return erfc(a / sqrt(2)) / 2


def normal_slope(a):
    return normal_tail(a) - a * exp(-a * a / 2) / sqrt(2 * pi)


TABLES += [(f"GELU: {f.__name__}({j}*11/32 + d), |d| <= 11/64", lambda d, f=f, j=j: f(mpf(11 * j) / 32 + d),
            [-mpf(11) / 64 * 1.0001, mpf(11) / 64 * 1.0001], 10) for f in (normal_tail, normal_slope) for j in range(16)]

if __name__ == "__main__":
    for name, f, interval, count in TABLES:
        coefficients, error = chebyfit(f, interval, count, error=True)
        print(f"{name}\n  largest absolute error of the fit {nstr(error, 3)}")
        for c in coefficients:
            print(f"    {float(c).hex()},")
    for name, value in [("ln2", log(2)), ("log2e", 1 / log(2)), ("pi/2", pi / 2), ("2/pi", 2 / pi),
                        ("sqrt(2/pi)", sqrt(2 / pi)), ("1/sqrt(2 pi)", 1 / sqrt(2 * pi)),
                        ("sqrt(1/2)", sqrt(mpf(1) / 2)), ("2 pi", 2 * pi)]:
        parts, rest = [], value
        for bits in (33, 33, 53):   # two parts of 33 bits and a tail, for Cody-Waite reductions
            scale = mpf(2) ** (bits - 1 - int(mp.floor(log(abs(rest), 2))))
            part = mp.floor(rest * scale) / scale if bits == 33 else mpf(float(rest))
            parts.append(float(part).hex())
            rest -= part
        print(f"{name}: {float(value).hex()}  split {parts}")
