"""Every setting is described, stands in the sample file, and reaches what it sets."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mindgrid.cluster.settings.model import Cluster, Engine
from mindgrid.cluster.settings.page import each_setting, page
from mindgrid.cluster.settings.yaml_lines import read
from mindgrid.cluster.spec import Bounds
from mindgrid.shards.config import ShardConfig

ROOT = Path(__file__).parents[2]
SETTINGS = dict(each_setting())
SET_ELSEWHERE = {"space", "recall", "history", "text_search", "skew_max"}


@pytest.mark.parametrize("path", SETTINGS)
def test_each_setting_has_a_sentence(path: str) -> None:
    assert (SETTINGS[path].description or "").endswith("."), path


def test_the_sample_shows_every_setting() -> None:
    shown = {
        ".".join("" if isinstance(step, int) else step for step in path).replace("..", "[].")
        for path in read(ROOT / "deploy" / "mindgrid.yaml").lines
    }
    missing = [path for path in SETTINGS if path.removesuffix("[]") not in shown]
    assert missing == []


def test_the_reference_is_fresh() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), "run `make docs`"


@pytest.mark.parametrize(
    ("section", "bounds", "elsewhere"),
    [(Engine, ShardConfig, SET_ELSEWHERE), (Cluster, Bounds, set[str]())],
)
def test_each_bound_of_the_code_is_a_setting(
    section: type, bounds: type, elsewhere: set[str]
) -> None:
    names = {field.name.removesuffix("_s") for field in fields(bounds)} - elsewhere
    settings = set(section.model_fields) - {"hosts"}  # type: ignore[attr-defined]
    assert settings == names
