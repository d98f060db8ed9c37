"""Parser of a Lua script's header, which is the script's contract.

    --! claim: summary in one line
    --! KEYS    due queues {ready[10] delayed inprog}*      names become locals; `name[n]` is a table; `{…}*` repeats
    --! ARGV    worker lease_ms {command}*
    --! SHARED  …                                           optional: the words of a call for several workers
    --! FLAGS   allow-oom                                   optional: the flags of `#!lua`
    --! RETURNS …   --! EFFECTS …   --! COST …              for the reader; required
    --@ include write, now                                  files of lua/lib, each once, in this order
    --@ lazy maintenance(reap_expired): end_attempt, reap   `local reap_expired = maintenance()` creates it on demand

The library `keys` is not a file; its source is in `queues.engine.keys`. `queues.engine.script_loader` documents how
Python passes values for the names. `queues.engine.script_source` replaces the directives `--@` with code.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REQUIRED_SECTIONS = ("KEYS", "ARGV", "RETURNS", "EFFECTS", "COST")
_HEADER_LINE = re.compile(r"^--! (?:(?P<section>[A-Z]+) +(?P<text>.*)|(?P<name>[a-z_]+): (?P<summary>.+))$")
_PARAMETER = re.compile(r"^(?P<name>[a-z_]+)(?:\[(?P<length>\d+)\])?$")
_INCLUDE = "--@ include "
_LAZY = re.compile(r"^--@ lazy (?P<factory>\w+)\((?P<functions>[\w, ]+)\): (?P<libraries>[\w, ]+)$")


class ScriptError(Exception):
    """A Lua file does not exist, or has an invalid header."""


class Parameter(NamedTuple):
    """A name in KEYS or ARGV.

    A parameter with a length takes that many positions, and is a table in the script.
    """

    name: str
    length: int | None = None

    @property
    def width(self) -> int:
        return self.length or 1


class Parameters(NamedTuple):
    """The names in KEYS or ARGV: fixed ones, and a group that repeats after them."""

    fixed: tuple[Parameter, ...] = ()
    repeated: tuple[Parameter, ...] = ()

    @property
    def width(self) -> int:
        """The number of positions of the fixed names."""
        return sum(parameter.width for parameter in self.fixed)


class LazyFactory(NamedTuple):
    """A Lua function that creates functions of some libraries when the script needs them."""

    name: str
    functions: str
    libraries: list[str]


class Header(NamedTuple):
    """The parsed header of a script. `sections` has the texts of KEYS, ARGV and so on."""

    name: str
    summary: str
    sections: dict[str, str]
    keys: Parameters
    args: Parameters
    includes: list[str]
    lazy_factories: list[LazyFactory]


def split_header(text: str, file_name: str) -> tuple[Header, str]:
    """Return the header of a script and the Lua code below it.

    Raise ScriptError for an invalid header.
    """
    name = summary = ""
    sections: dict[str, str] = {}
    includes: list[str] = []
    lazy_factories: list[LazyFactory] = []
    code: list[str] = []
    for line in text.splitlines():
        if line.startswith("--!"):
            match = _HEADER_LINE.match(line)
            if not match:
                raise ScriptError(f"{file_name}: not a header line: {line}")
            if match["name"]:
                name, summary = match["name"], match["summary"]
            else:
                text_before = sections.get(match["section"], "")
                sections[match["section"]] = f"{text_before} {match['text'].strip()}".strip()
        elif line.startswith(_INCLUDE):
            includes += _split_words(line.removeprefix(_INCLUDE))
        elif match := _LAZY.match(line):
            lazy_factories.append(LazyFactory(match["factory"], match["functions"], _split_words(match["libraries"])))
        elif line.startswith("--@"):
            raise ScriptError(f"{file_name}: not a directive: {line}")
        else:
            code.append(line)
    missing = [section for section in REQUIRED_SECTIONS if section not in sections]
    if missing or not name:
        raise ScriptError(f"{file_name}: the header lacks {', '.join(missing) or 'its name'}")
    header = Header(
        name=name,
        summary=summary,
        sections=sections,
        keys=_parse_parameters(sections["KEYS"], file_name),
        args=_parse_parameters(sections["ARGV"], file_name),
        includes=includes,
        lazy_factories=lazy_factories,
    )
    return header, "\n".join(code).strip("\n")


def _split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _parse_parameters(text: str, file_name: str) -> Parameters:
    fixed, _, repeated = text.partition("{")
    if repeated and not repeated.endswith("}*"):
        raise ScriptError(f"{file_name}: a repeated group is written {{…}}* and comes last")

    def parse(words: str) -> tuple[Parameter, ...]:
        parameters = []
        for word in words.split():
            match = _PARAMETER.match(word)
            if not match:
                raise ScriptError(f"{file_name}: {word!r} is not a name")
            parameters.append(Parameter(match["name"], int(match["length"]) if match["length"] else None))
        return tuple(parameters)

    return Parameters(parse(fixed), parse(repeated.removesuffix("}*")))
