"""What a package promises by its public names, read from source without importing it, and what a change of them breaks.

Public is what modules without an underscore define or list in `__all__`. griffe reads the source and knows which calls a changed
signature no longer takes; what only shows in a signature's text (types, an added parameter) is told and breaks nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import griffe

SEAMS = ("octavo_core.seams", "octavo_core.plan")
"""Modules whose every change is a matter for whoever implements them."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two surfaces compared. Each is a list of sorted lines that begin with the dotted name.

    Attributes:
        breaking: What programs written for the old surface may not survive.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    breaking: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def lines(self) -> list[str]:
        """For people."""
        signs = (("+", self.added), ("-", self.removed), ("~", self.changed))
        return [f"{sign} {line}" for sign, found in signs for line in found]


def compare(module: str, old: Path, new: Path) -> Difference:
    """The surfaces of one package in two folders of sources."""
    before, after = _load(module, old), _load(module, new)
    theirs, ours = dict(_surface(before)), dict(_surface(after))
    removed = sorted(_outermost(theirs.keys() - ours.keys()))
    changed = sorted(
        f"{name}: {theirs[name]} is now {ours[name]}" for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]
    )
    added = sorted(_outermost(ours.keys() - theirs.keys()))
    breaking = [f"{name}: removed" for name in removed]
    breaking += [
        _told(one) for one in griffe.find_breaking_changes(before, after) if one.kind is not griffe.BreakageKind.OBJECT_REMOVED
    ]
    breaking += [f"{line}: a seam" for line in (*added, *changed) if line.startswith(SEAMS)]
    return Difference(tuple(added), tuple(removed), tuple(changed), tuple(sorted(set(breaking))))


def _load(module: str, folder: Path) -> griffe.Module:
    loaded = griffe.load(module, search_paths=[folder], resolve_aliases=True, allow_inspection=False)
    if not isinstance(loaded, griffe.Module):
        raise TypeError(f"wanted the module {module} below {folder}, found {type(loaded).__name__}")
    return loaded


def _surface(owner: griffe.Object) -> Iterator[tuple[str, str]]:
    """Dotted names and what stands behind each."""
    for name, member in owner.members.items():
        if not member.is_public:
            continue
        try:
            target = member.final_target if isinstance(member, griffe.Alias) else member
        except (griffe.AliasResolutionError, griffe.CyclicAliasError):
            yield f"{owner.path}.{name}", "from elsewhere"
            continue
        yield from _entries(f"{owner.path}.{name}", target)


def _entries(path: str, target: griffe.Object) -> Iterator[tuple[str, str]]:
    if isinstance(target, griffe.Module):
        yield path, "module"
        yield from _surface(target)
    elif isinstance(target, griffe.Class):
        yield path, f"class({', '.join(map(str, target.bases))})"
        for name, member in target.members.items():
            if member.is_public and not isinstance(member, griffe.Alias):
                yield from _entries(f"{path}.{name}", member)
    elif isinstance(target, griffe.Function):
        yield path, str(target.signature())
    else:
        yield path, str(getattr(target, "annotation", None) or "value")


def _outermost(names: set[str]) -> Iterator[str]:
    """Names none of whose owners is among them."""
    return (name for name in names if not any(name.startswith(other + ".") for other in names))


def _told(breakage: griffe.Breakage) -> str:
    part = getattr(breakage.old_value, "name", None) or getattr(breakage.new_value, "name", None)
    what = str(breakage.kind.value)
    return f"{breakage.obj.path}{f'({part})' if part else ''}: {what[0].lower()}{what[1:]}"
