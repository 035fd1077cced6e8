"""The one interval that every pass rate is shown with."""

from __future__ import annotations

import math


def wilson(passes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a rate, (low, high) in [0, 1]; (0, 1) without trials. z: 1.959964 is 95 %.

    Unlike the normal approximation it stays inside [0, 1] and keeps a width at 0 and at n passes (Wilson, 1927).
    `passes` may be a sum of partial credits; the interval is then too wide, never too narrow.
    """
    if n == 0:
        return 0.0, 1.0
    if not 0 <= passes <= n:
        raise ValueError(f"passes={passes} of n={n}: expected 0 <= passes <= n")
    rate = passes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
