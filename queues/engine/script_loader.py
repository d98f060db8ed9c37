"""Loader of the Lua scripts, `lua/<name>.lua`.

Python passes the names in a script's header as keyword arguments, `script.bind(due=…, worker=…)`, and the repeated
groups as `keys` and `args`. In the script, each name is a local; the first repeated key is KEYS[keys_from] and the
first repeated argument ARGV[args_from]. `queues.engine.script_header` describes the header.

A script is called by the SHA of its source, so two releases can run side by side on one server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha1
from operator import itemgetter
from pathlib import Path
from typing import Any

from core.redis.script_call import BoundArguments
from queues.engine import keys as key_builders
from queues.engine import script_source
from queues.engine.script_header import Header, Parameter, ScriptError, split_header

# The directories of `<script>.lua` and `lib/<library>.lua`. An app with scripts of its own adds its directory.
DIRECTORIES = [Path(__file__).parent / "lua"]


@dataclass(frozen=True, slots=True)
class Script:
    """A script: its header, the source that Redis runs, and the SHA of the source."""

    header: Header
    source: str
    sha: str
    _select_values: Callable[[dict[str, Any]], tuple[Any, ...]] = field(repr=False)
    _number_of_names: int = field(repr=False)
    _number_of_keys: int = field(repr=False)  # without the repeated group

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def names(self) -> list[str]:
        """The names of all keyword arguments of `bind`."""
        return [parameter.name for parameter in self.header.keys.fixed + self.header.args.fixed]

    def bind(self, *, keys: Iterable[str] = (), args: Iterable[Any] = (), **named: Any) -> BoundArguments:
        """Return the arguments of EVALSHA. Raise TypeError for a missing or unknown name."""
        if len(named) != self._number_of_names:
            raise TypeError(f"{self.name} takes {', '.join(self.names)}; got {', '.join(named)}")
        try:
            values = self._select_values(named)
        except KeyError as error:
            raise TypeError(f"{self.name} needs {error}") from None
        count, repeated_keys = self._number_of_keys, tuple(keys)
        return (self.sha, count + len(repeated_keys), *values[:count], *repeated_keys, *values[count:], *args)


@cache
def load(name: str) -> Script:
    """Return the script `lua/<name>.lua`."""
    file = _find_file(f"{name}.lua")
    script = build(file.read_text(encoding="utf-8"), file.name)
    if script.name != name:
        raise ScriptError(f"{file.name}: the header has the name {script.name}")
    return script


def load_all() -> list[Script]:
    """Return all scripts, in the order of their names."""
    return [load(name) for name in sorted(file.stem for directory in DIRECTORIES for file in directory.glob("*.lua"))]


def build(text: str, file_name: str = "script") -> Script:
    """Build a script from the text of its file. Raise ScriptError for an invalid header."""
    header, code = split_header(text, file_name)
    source = script_source.assemble(header, code, _read_library)
    fixed = header.keys.fixed + header.args.fixed
    return Script(
        header=header,
        source=source,
        sha=sha1(source.encode(), usedforsecurity=False).hexdigest(),
        _select_values=_value_selector(fixed),
        _number_of_names=len(fixed),
        _number_of_keys=header.keys.width,
    )


def _value_selector(parameters: tuple[Parameter, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return a function that orders the values of keyword arguments like the parameters."""
    if any(parameter.length for parameter in parameters):
        return lambda named: tuple(
            value for name, length in parameters for value in (named[name] if length else (named[name],))
        )
    if len(parameters) == 1:
        return lambda named: (named[parameters[0].name],)
    select: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*(parameter.name for parameter in parameters))
    return select


@cache
def _read_library(name: str) -> str:
    if name == "keys":
        return key_builders.LUA_LIBRARY
    return _find_file(f"lib/{name}.lua").read_text(encoding="utf-8")


def _find_file(path: str) -> Path:
    for directory in DIRECTORIES:
        if (directory / path).is_file():
            return directory / path
    raise ScriptError(f"{path} not found in {', '.join(map(str, DIRECTORIES))}")
