"""`python -m mindgrid` is the command `mindgrid`."""

from __future__ import annotations

from mindgrid.jobs.cli import app

app(prog_name="mindgrid")
