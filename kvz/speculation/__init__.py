"""Speculative decoding: draft on one cache, verify on another of the same prompt.

Made for archives that arrive in two parts, a coarse cache first and its refinement later; works
with any two caches of one prompt.
"""

from __future__ import annotations

from kvz.speculation.rollback import check_metadata
from kvz.speculation.rules import Sampling
from kvz.speculation.speculating import SpeculationReport, sample, speculate

__all__ = ["Sampling", "SpeculationReport", "check_metadata", "sample", "speculate"]
