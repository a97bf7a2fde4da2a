"""The page on KV events names every setting with its default, and every field in its place."""

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from octavo_engine._src import kv_events_wire as wire
from octavo_engine._src.kv_events_config import KVEventsConfig

PAGE = (Path(__file__).parents[1] / "docs" / "kv-events.md").read_text()


def test_the_settings_of_the_page_are_those_there_are():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.split("## A message")[0], re.M))
    shown = {name: text.strip("` ").replace(",", "") for name, text in rows.items()}
    real = {f.name: f.default for f in dataclasses.fields(KVEventsConfig)}
    words = {None: "none", False: "false"}
    assert shown == {k: f'"{v}"' if isinstance(v, str) else words.get(v, str(v)) for k, v in real.items()}


@pytest.mark.parametrize("event", [wire.BlockStored, wire.BlockRemoved, wire.AllBlocksCleared])
def test_the_fields_of_the_page_stand_in_the_order_of_the_layout(event):
    (row,) = re.findall(rf"^\| `{event.__name__}` \| (.*) \|$", PAGE, re.M)
    assert re.findall(r"`(\w+)`", row) == [field.name for field in msgspec.structs.fields(event)]
