"""What all tests share: Hypothesis without a clock, since a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("mindgrid", deadline=None, print_blob=True)
settings.load_profile("mindgrid")
