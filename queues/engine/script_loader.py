"""Loader of `lua/*.lua`, which parses the header of each script as its contract.

    --! claim: summary in one line
    --! KEYS    due queues {ready[10] delayed inprog}*      names become locals; `name[n]` is a table; `{…}*` repeats
    --! ARGV    worker lease_ms {command}*
    --! FLAGS   allow-oom                                   optional: the flags of `#!lua`
    --! RETURNS …   --! EFFECTS …   --! COST …              for the reader; required
    --@ include write, now                                  files of lua/lib, each once, in this order
    --@ lazy maintenance(reap_expired): end_attempt, reap   `local reap_expired = maintenance()` builds it on demand

Python passes the same names as keyword arguments (`script.bind(due=…, worker=…)`) and the repeated groups as `keys`
and `args`. In the script, the first repeated key is KEYS[keys_from] and the first repeated argument ARGV[args_from].
A script that includes `write` runs inside lua/lib/rollback.lua, which reverts its writes when it fails.
A script is called by the SHA of its text, so two releases can run side by side on one server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha1
from operator import itemgetter
from pathlib import Path
from typing import Any

from core.redis.script_call import Bound
from queues.engine import keys as key_builders

# The directories of `<name>.lua` and `lib/<name>.lua`. An app with scripts of its own adds its directory.
DIRECTORIES = [Path(__file__).parent / "lua"]
SECTIONS = ("KEYS", "ARGV", "RETURNS", "EFFECTS", "COST")
_HEADER = re.compile(r"^--! (?:(?P<section>[A-Z]+) +(?P<text>.*)|(?P<name>[a-z_]+): (?P<summary>.+))$")
_NAME = re.compile(r"^([a-z_]+)(?:\[(\d+)\])?$")

_COMMENT = re.compile(r"--.*")
_FUNCTION = re.compile(r"^local function (\w+)\((?:[^\n]* end|.*?^end)$\n?", re.M | re.S)

_KIT = re.compile(r"^--@ lazy (?P<name>\w+)\((?P<gives>[\w, ]+)\): (?P<of>[\w, ]+)$")


class ScriptError(Exception):
    """A Lua file has an invalid header."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names in KEYS or ARGV: fixed names, then optionally a repeated group."""

    fixed: tuple[tuple[str, int], ...] = ()  # (name, size); size 0 = a single value
    repeated: tuple[tuple[str, int], ...] = ()

    @property
    def width(self) -> int:
        return sum(size or 1 for _, size in self.fixed)


@dataclass(frozen=True, slots=True)
class Script:
    """A parsed script: its header, the source that Redis runs, and its SHA."""

    name: str
    summary: str
    sections: dict[str, str]
    keys: Names
    args: Names
    body: str
    source: str
    sha: str
    _pick: Callable[[dict[str, Any]], tuple[Any, ...]] = field(repr=False)
    _count: int = field(repr=False)
    _width: int = field(repr=False)

    def bind(self, *, keys: Iterable[str] = (), args: Iterable[Any] = (), **named: Any) -> Bound:
        """Return the arguments of EVALSHA. Raise TypeError for a missing or unknown name."""
        if len(named) != self._count:
            raise TypeError(f"{self.name} takes {', '.join(self.names)}; got {', '.join(named)}")
        try:
            fixed = self._pick(named)
        except KeyError as error:
            raise TypeError(f"{self.name} needs {error}") from None
        count, repeated = self._width, tuple(keys)
        return (self.sha, count + len(repeated), *fixed[:count], *repeated, *fixed[count:], *args)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.keys.fixed + self.args.fixed]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _kit(kit: re.Match[str], library: str, there: str, keys: Names, args: Names) -> str:
    """Return a Lua function that creates other functions on demand.

    A script pays for these functions only when it needs them. Functions of the script's `library` that only they use
    (not in `there`) are created with them. So are the locals for the names they use: each local of `main` that an
    inner function refers to costs 50 ns per call, used or not.
    """
    gives = f"return {kit['gives']}"
    made = _needed(_text(kit["of"]), gives)
    own = "".join(function[0] for function in _FUNCTION.finditer(library) if function[0] not in there)
    text = _needed(own, made) + made
    return f"local function {kit['name']}()\n{_declared(keys, args, text)}\n{text}\n{gives}\nend"


def _text(libraries: str) -> str:
    return "\n".join(map(_library, _words(libraries)))


def _names(text: str, where: str) -> Names:
    fixed, _, repeated = text.partition("{")
    if repeated and not repeated.endswith("}*"):
        raise ScriptError(f"{where}: a repeated group is written {{…}}* and comes last")

    def parse(words: str) -> tuple[tuple[str, int], ...]:
        parsed = []
        for word in words.split():
            match = _NAME.match(word)
            if not match:
                raise ScriptError(f"{where}: {word!r} is not a name")
            parsed.append((match[1], int(match[2] or 0)))
        return tuple(parsed)

    return Names(parse(fixed.replace("-", "")), parse(repeated.removesuffix("}*")))


def _declared(keys: Names, args: Names, text: str) -> str:
    """Return Lua locals for the names of KEYS and ARGV that this text uses."""
    code = _COMMENT.sub("", text)
    return "\n".join([*_locals(keys, "KEYS", "keys_from", code), *_locals(args, "ARGV", "args_from", code)])


def _locals(names: Names, table: str, first_repeated: str, code: str) -> Iterator[str]:
    at = 1
    for name, size in names.fixed:
        if re.search(rf"\b{name}\b", code):
            value = f"{{{', '.join(f'{table}[{at + i}]' for i in range(size))}}}" if size else f"{table}[{at}]"
            yield f"local {name} = {value}"
        at += size or 1
    if names.repeated and first_repeated in code:
        yield f"local {first_repeated} = {at}"


def parse(text: str, where: str = "script") -> Script:
    """Build a script from the text of its file."""
    name = summary = ""
    sections: dict[str, str] = {}
    includes: list[str] = []
    kits: list[re.Match[str]] = []
    body: list[str] = []
    for line in text.splitlines():
        if line.startswith("--@"):
            if kit := _KIT.match(line):
                kits.append(kit)
            elif line.startswith("--@ include "):
                includes += _words(line.removeprefix("--@ include "))
            else:
                raise ScriptError(f"{where}: not an include line: {line}")
        elif line.startswith("--!"):
            match = _HEADER.match(line)
            if not match:
                raise ScriptError(f"{where}: not a header line: {line}")
            if match["name"]:
                name, summary = match["name"], match["summary"]
            else:
                before = sections.get(match["section"], "")
                sections[match["section"]] = f"{before} {match['text'].strip()}".strip()
        else:
            body.append(line)
    missing = [section for section in SECTIONS if section not in sections]
    if missing or not name:
        raise ScriptError(f"{where}: the header lacks {', '.join(missing) or 'its name'}")
    keys, args = _names(sections["KEYS"], where), _names(sections["ARGV"], where)
    flags = sections.get("FLAGS", "")
    library = "\n".join(map(_library, includes))
    text = "\n".join(body).strip("\n")
    there = _needed(library, text)
    made = [_kit(kit, library, there, keys, args) for kit in kits]
    main = "\n".join([_declared(keys, args, there + text), there, *made, text])
    source = "\n".join(
        [
            f"#!lua flags={flags}" if flags else "#!lua",
            "local call = redis.call",
            _library("rollback").replace("--@ script", main) if "write" in includes else main,
        ]
    )
    fixed = [word for word, _ in keys.fixed + args.fixed]
    sizes = {word for word, size in keys.fixed if size}
    return Script(
        name=name,
        summary=summary,
        sections=sections,
        keys=keys,
        args=args,
        body="\n".join(body),
        source=source,
        sha=sha1(source.encode(), usedforsecurity=False).hexdigest(),
        _pick=_picker(fixed, sizes),
        _count=len(fixed),
        _width=keys.width,
    )


def _picker(names: list[str], sizes: set[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if sizes:
        return lambda named: tuple(
            value for name in names for value in (named[name] if name in sizes else (named[name],))
        )
    if len(names) == 1:
        return lambda named: (named[names[0]],)
    getter: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*names)
    return getter


def _needed(library: str, body: str) -> str:
    """Return the library without unused functions: creating one costs 65 ns per run."""
    for function in reversed(list(_FUNCTION.finditer(library))):
        rest = library[function.end() :]
        if not re.search(rf"\b{function[1]}\b", rest + body):
            library = library[: function.start()] + rest
    return library


@cache
def _library(name: str) -> str:
    if name == "keys":
        return key_builders.LUA
    return _find(f"lib/{name}.lua").read_text(encoding="utf-8")


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua`."""
    file = _find(f"{name}.lua")
    script = parse(file.read_text(encoding="utf-8"), file.name)
    if script.name != name:
        raise ScriptError(f"{file.name} calls itself {script.name}")
    return script


def everything() -> list[Script]:
    """Return all scripts, in the order of their names."""
    return [load(name) for name in sorted(file.stem for directory in DIRECTORIES for file in directory.glob("*.lua"))]


def _find(path: str) -> Path:
    for directory in DIRECTORIES:
        if (directory / path).is_file():
            return directory / path
    raise ScriptError(f"{path} is in none of {', '.join(map(str, DIRECTORIES))}")
