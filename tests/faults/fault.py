"""What a planted fault is: other text at a place of a file."""

from __future__ import annotations

import dataclasses
import hashlib
import random


@dataclasses.dataclass(frozen=True)
class Fault:
    """Other text at one place.

    Attributes
    ----------
    file : str
        Path within the tree.
    line : int
        From 1.
    kind : str
    begin, end : int
        The characters that it replaces.
    text : str
        By what.
    """

    file: str
    line: int
    kind: str
    begin: int
    end: int
    text: str

    def planted(self, source: str) -> str:
        """The file with the fault."""
        return source[: self.begin] + self.text + source[self.end :]

    def described(self, source: str) -> str:
        """One line that shows both texts."""
        before = " ".join(source[self.begin : self.end].split())
        after = " ".join(self.text.split())
        if len(before) < 12 and "\n" not in source[self.begin : self.end]:  # too little to be understood alone
            line_begin = source.rfind("\n", 0, self.begin) + 1
            line_end = source.find("\n", self.end)
            around = source[line_begin : self.begin].strip() + " [{}] " + source[self.end : line_end].strip()
            return around.replace("{}", f"{before} -> {after}", 1)
        return f"[{before} -> {after}]"

    def key(self, source: str) -> str:
        """A name for it, which changes when the file does."""
        parts = (self.file, source, self.kind, str(self.begin), self.text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def draw(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """So many of them, all kinds alike as far as there are enough, and never two at the same place."""
    chance = random.Random(seed)
    by_kind: dict[str, list[Fault]] = {}
    for fault in sorted(faults, key=lambda one: (one.kind, one.file, one.begin, one.text)):
        by_kind.setdefault(fault.kind, []).append(fault)
    for of_kind in by_kind.values():
        chance.shuffle(of_kind)
    drawn: list[Fault] = []
    places: set[tuple[str, int]] = set()
    while len(drawn) < count and any(by_kind.values()):
        for of_kind in by_kind.values():
            while of_kind and (of_kind[-1].file, of_kind[-1].line) in places:
                of_kind.pop()
            if of_kind and len(drawn) < count:
                fault = of_kind.pop()
                places.add((fault.file, fault.line))
                drawn.append(fault)
    return drawn
