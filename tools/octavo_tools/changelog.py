"""A package's changelog: what stands under "Unreleased", and moving it under a version. Text in, text out."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

UNRELEASED = "## [Unreleased]"
_HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?P<rest>.*)$", re.MULTILINE)


class Section(NamedTuple):
    """Where the unreleased part stands: its heading and what follows until the next one."""

    heading: str
    body: str
    start: int
    end: int


def unreleased(text: str) -> Section | None:
    """The part under `## [Unreleased]`, or under `## [1.2.3] - unreleased`; None where there is neither."""
    headings = list(_HEADING.finditer(text))
    for heading, following in itertools.zip_longest(headings, headings[1:]):
        if "unreleased" in (heading["version"] + heading["rest"]).lower():
            end = len(text) if following is None else following.start()
            return Section(heading[0], text[heading.end() : end].strip("\n"), heading.start(), end)
    return None


def has_entries(section: Section) -> bool:
    """Something is listed."""
    return any(line.lstrip().startswith(("- ", "* ")) for line in section.body.splitlines())


def released(text: str, version: str, date: str) -> str:
    """The changelog with what was unreleased under a version and its date, and an empty "Unreleased" above.

    Raises:
        ValueError: There is no such part.
    """
    section = unreleased(text)
    if section is None:
        raise ValueError(f"wanted a heading '{UNRELEASED}' in the changelog, found none")
    made = f"{UNRELEASED}\n\n## [{version}] - {date}\n\n{section.body.strip()}\n"
    rest = text[section.end :]
    return text[: section.start] + made + (f"\n{rest}" if rest else "")
