"""Quantiles, medians and how far rounds differ."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["median", "quantile", "spread"]


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share of `q` does not exceed (nearest rank)."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = -int(-q * len(ordered) // 1)
    return ordered[max(0, rank - 1)]


def spread(rounds: Sequence[float]) -> float:
    """How far rounds differ: the largest less the smallest, as a share of the median."""
    middle = median(rounds)
    return (max(rounds) - min(rounds)) / middle if middle else 0.0
