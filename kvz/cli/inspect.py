"""``kvz inspect``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvz.cli import options
from kvz.cli.text import aligned, emit, emit_json, printable

if TYPE_CHECKING:
    from kvz.inspection import Inspection, SectionLine


@click.command()
@click.argument("path", metavar="FILE", type=options.PATH)
@click.option("--sections", "with_sections", is_flag=True, help="List every section.")
@click.option("--tags", is_flag=True, help="Count the tags of gaac; reads all of its sections.")
@options.json_option
def command(path: str, with_sections: bool, tags: bool, as_json: bool) -> None:
    """Show what is in an archive.

    Whether it is lossless, whose cache it is, its layers, and what each byte does. Only the head
    and the index are read, so this is quick for a file of any size and says nothing of damage to
    the rest: that is what kvz verify is for. FILE may be a URL; then it is also said what reading
    the archive transfers.

    \b
    Example:
      kvz inspect cache.kvz
    """
    from kvz import inspection
    from kvz.cli.inspect_text import lines

    found = inspection.inspect(path, tags=tags)
    listed: list[SectionLine] = []
    if with_sections:
        with inspection.open_for_inspection(path) as archive:
            listed = list(inspection.sections(archive))
    if as_json:
        document = _document(found)
        if with_sections:
            document["sections"] = [asdict(section) for section in listed]
        emit_json(document)
        return
    for line in lines(found):
        emit(line)
    if with_sections:
        emit("")
        for line in _table(listed):
            emit(line)


def _document(found: Inspection) -> dict[str, Any]:
    document = asdict(found)
    for codec, use in zip(document["codecs"], found.codecs, strict=True):
        codec["bits_per_element"] = use.bits_per_element
    return document


def _table(listed: list[SectionLine]) -> list[str]:
    rows = [("offset", "length", "kind", "tensor", "chunk", "crc32")]
    for s in listed:
        name = printable(s.tensor)
        rows.append((str(s.offset), str(s.length), s.kind, name, str(s.chunk), s.checksum))
    return aligned(rows, ">><<><")
