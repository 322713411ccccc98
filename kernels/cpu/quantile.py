"""The inverse of the normal distribution function, accurate to about 1e-16: algorithm AS 241 (Wichura 1988), PPND16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Coefficients from the highest power down.
_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def normal_quantile(u: np.ndarray, buffers: dict[str, np.ndarray]) -> None:
    """u = quantile of u, in place; ``buffers`` drawn, r, num, den are float64 and at least as long."""
    q, r, num, den = (buffers[name][: u.size] for name in ("drawn", "r", "num", "den"))
    np.subtract(u, 0.5, q)
    np.multiply(q, q, r)
    np.subtract(0.180625, r, r)
    outside = np.flatnonzero(r < 0)  # |q| > 0.425
    _ratio(_CENTRE, r, num, den)
    if outside.size:
        tail = u[outside]
        upper = tail > 0.5
        np.subtract(1.0, tail, out=tail, where=upper)
        np.multiply(num, q, u)
        u[outside] = np.where(upper, 1.0, -1.0) * _tail_quantile(tail)
    else:
        np.multiply(num, q, u)


def _ratio(coefficients: Sequence[Sequence[float]], r: np.ndarray, num: np.ndarray, den: np.ndarray) -> None:
    """num = the quotient of the two polynomials in r, by Horner's rule."""
    for powers, value in zip(coefficients, (num, den), strict=True):
        np.multiply(r, powers[0], value)
        for c in powers[1:-1]:
            np.add(value, c, value)
            np.multiply(value, r, value)
        np.add(value, powers[-1], value)
    np.divide(num, den, num)


def _tail_quantile(p: np.ndarray) -> np.ndarray:
    """The (positive) distance of the quantile of p < 0.075 from the mean."""
    r = np.sqrt(-np.log(p))
    far = np.flatnonzero(r > 5)
    value, den = np.empty_like(r), np.empty_like(r)
    _ratio(_TAIL, r - 1.6, value, den)
    if far.size:
        extreme = np.empty(far.size)
        _ratio(_FAR_TAIL, r[far] - 5, extreme, np.empty(far.size))
        value[far] = extreme
    return value
