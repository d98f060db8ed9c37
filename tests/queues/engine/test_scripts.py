"""The script loader, and the rules that every script keeps: header, names, and commands."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from queues.domain import NewResult, TaskStatus
from queues.engine import (
    dead_letter_commands,
    keys,
    maintenance_commands,
    producer_commands,
    script_loader,
    worker_commands,
)
from queues.engine.options import CHUNK
from queues.engine.script_header import REQUIRED_SECTIONS, ScriptError
from queues.engine.script_loader import DIRECTORIES, Script, build
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, Clock, build_task

import_module("ranked.engine")  # adds the scripts of ranked queues
ALL = script_loader.load_all()
BUILT_IN = {
    *("redis", "KEYS", "ARGV", "math", "string", "table"),
    *("tonumber", "tostring", "ipairs", "pairs", "unpack", "pcall", "type"),
}
RESERVED = {
    *("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil", "not"),
    *("or", "repeat", "return", "then", "true", "until", "while"),
}
every_script = pytest.mark.parametrize("script", ALL, ids=[script.name for script in ALL])

HEADER = """\
--! claim: one line
--! KEYS    ready[2] inprog {more}*
--! ARGV    worker now {item}*
--! RETURNS OK
--! EFFECTS none
--! COST    O(1)
"""


def words_of(source: str) -> list[str]:
    """Return the words of a Lua text without comments; a string becomes one empty word."""
    bare = re.sub(r"--[^\n]*|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|^#![^\n]*", " '' ", source, flags=re.M)
    return re.findall(r"\w+|\.\.|[^\w\s]", bare)


def is_name(word: str) -> bool:
    return bool(re.match(r"[A-Za-z_]", word)) and word not in RESERVED


def unknown_names(source: str) -> set[str]:
    """Return names that are used before their declaration: Lua looks them up as globals."""
    words = ["", *words_of(source), ""]
    declared, unknown = set(BUILT_IN), set()
    declares_until = 0
    for at, (before, word, after) in enumerate(zip(words, words[1:], words[2:], strict=False), 1):
        if word == "function":
            declares_until = words.index(")", at)
        elif word == "for":
            declares_until = min(words.index(end, at) for end in ("=", "in") if end in words[at:])
        elif word == "local" and after != "function":
            # `local a, b =`: the names end where no comma follows.
            declares_until = at + 1
            while words[declares_until + 1] == ",":
                declares_until += 2
        if not is_name(word) or before in (".", ":") or (before in ("{", ",") and after == "=" and at > declares_until):
            continue
        if at <= declares_until:
            declared.add(word)
        elif word not in declared:
            unknown.add(word)
    return unknown


@every_script
def test_script_uses_every_name_of_its_header(script: Script) -> None:
    used = words_of(script.source)
    for name in [
        *script.names,
        "keys_from" * bool(script.header.keys.repeated),
        "args_from" * bool(script.header.args.repeated),
    ]:
        assert not name or used.count(name) > 1, f"{name} is declared and not used"


@every_script
def test_script_uses_no_undeclared_name(script: Script) -> None:
    assert unknown_names(script.source) == set()


def test_undeclared_names_are_detected() -> None:
    script = build(
        HEADER + "local function f(a)\n  return a + b\nend\nreturn { f(now), c = ready[1].d, worker, inprog }"
    )
    assert unknown_names(script.source) == {"b"}
    assert unknown_names("local x = f()\nlocal function f() end") == {"f"}
    assert unknown_names("local function f() g = 1 end for a, b in pairs(f) do f(a, b, c) end local d, e = d") == {
        "g",
        "c",
    }


@every_script
def test_header_is_complete_and_only_enqueue_needs_memory(script: Script) -> None:
    assert set(REQUIRED_SECTIONS) <= script.header.sections.keys()
    assert script.header.summary
    flags = script.header.sections.get("FLAGS")
    # A full server must be able to drain: it may refuse only scripts that add tasks.
    assert (flags is None) == (script.name in ("enqueue", "ranked_enqueue"))
    assert flags in (None, "allow-oom", "no-writes")


@every_script
def test_script_calls_no_unbounded_or_nondeterministic_command(script: Script) -> None:
    called = set(re.findall(r"\bcall\('(\w+)'", script.source)) | set(re.findall(r"{ call, '(\w+)'", script.source))
    assert called.isdisjoint({"KEYS", "SCAN", "HGETALL", "SMEMBERS", "SORT", "FLUSHDB", "FLUSHALL", "RANDOMKEY"})
    assert "LRANGE" not in called or script.name in ("peek", "scan")  # a bounded part of a list
    assert script.source.count("redis.call") == 1  # the one line that error injection replaces
    assert not re.search(r"\b(cjson|cmsgpack|loadstring|os\.)", script.source)
    # Redis seeds every script with the same number, so jitter needs a seed from the caller. `abandon` includes the code
    # of the jitter, but sets the delay to 0.
    if "math.random()" in script.source and script.name != "abandon":
        assert "math.randomseed(tonumber(seed))" in script.source
    assert script.source.count("math.randomseed(") == script.source.count("math.randomseed(tonumber(seed))")
    assert "'TIME'" not in script.source or "if clock ~= ''" in script.source


@every_script
def test_script_contains_no_unused_function(script: Script) -> None:
    words = words_of(script.source)
    for name in re.findall(r"local function (\w+)", script.source):
        assert words.count(name) > 1, f"{name} is shipped and not called"


def test_every_library_function_is_used() -> None:
    shipped = {name for script in ALL for name in re.findall(r"local function (\w+)", script.source)}
    texts = [
        library.read_text(encoding="utf-8")
        for directory in DIRECTORIES
        for library in (directory / "lib").glob("*.lua")
    ]
    written = {name for text in [*texts, keys.LUA_LIBRARY] for name in re.findall(r"^local function (\w+)", text, re.M)}
    assert written <= shipped


def test_sha_equals_that_of_the_server(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
        assert [client.script_load(script.source) for script in ALL] == [script.sha for script in ALL]
    assert len({script.sha for script in ALL}) == len(ALL)


def test_bind_maps_names_to_positions() -> None:
    script = build(HEADER + "return { ready[2], inprog, worker, now, KEYS[keys_from], ARGV[args_from] }")
    bound = script.bind(ready=["r0", "r1"], inprog="p", worker="w", now=7, keys=["k"], args=["a", "b"])
    assert bound == (script.sha, 4, "r0", "r1", "p", "k", "w", 7, "a", "b")


def test_script_receives_the_bound_values(valkey: Valkey) -> None:
    script = build(HEADER + "return { ready[2], inprog, worker, now, KEYS[keys_from], ARGV[args_from + 1] }")
    bound = script.bind(ready=["r0", "r1"], inprog="p", worker="w", now=7, keys=["k"], args=["a", "b"])
    with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
        assert client.execute_command("EVAL", script.source, *bound[1:]) == ["r1", "p", "w", "7", "k", "b"]


@pytest.mark.parametrize(
    "named", [{}, {"inprog": "p", "worker": "w", "now": 1}, {"typo": 1}], ids=["none", "few", "typo"]
)
def test_wrong_name_is_a_type_error(named: dict[str, object]) -> None:
    script = build(HEADER + "return { ready, inprog, worker, now }")
    right = {"ready": ["a", "b"], "inprog": "p", "worker": "w", "now": 1}
    with pytest.raises(TypeError):
        script.bind(**named)
    with pytest.raises(TypeError):
        script.bind(**right, more=1)
    with pytest.raises(TypeError):
        script.bind(**{**right, "typo": right.pop("now")})


@pytest.mark.parametrize(
    "text",
    [
        HEADER.replace("--! COST    O(1)\n", ""),
        HEADER.replace("--! claim: one line\n", ""),
        HEADER.replace("worker now", "worker Now"),
        HEADER.replace("{item}*", "{item}"),
        HEADER + "--! not a header line\n",
        HEADER + "--@ includes now\n",
    ],
    ids=["no cost", "no name", "not a name", "open group", "odd line", "wrong directive"],
)
def test_invalid_header_is_an_error(text: str) -> None:
    with pytest.raises(ScriptError):
        build(text + "return 1")


def test_unknown_library_is_an_error() -> None:
    with pytest.raises(ScriptError, match="nothing_of_that_name"):
        build(HEADER + "--@ include nothing_of_that_name\nreturn 1")


def test_header_must_have_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.lua").write_text(HEADER + "return 1")
    monkeypatch.setattr(script_loader, "DIRECTORIES", [tmp_path])
    script_loader.load.cache_clear()
    try:
        with pytest.raises(ScriptError, match="header has the name claim"):
            script_loader.load("other")
    finally:
        script_loader.load.cache_clear()


def test_change_of_one_byte_changes_the_sha() -> None:
    one, other = build(HEADER + "return 1"), build(HEADER + "return  1")
    assert one.sha != other.sha


@pytest.mark.spec("CLM-5", "Every operation handles a thousand tasks in one script")
def test_thousand_tasks_fit_into_one_script(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        checked = CheckedEngine(client, clock=Clock(), backoff="fixed")
        engine = checked.engine
        made = producer_commands.enqueue(
            engine, TID, "acme", [build_task(max_attempts=1)] * CHUNK, retention_ms=DAY_MS
        ).run_sync()
        assert len(made) == CHUNK
        claimed = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=CHUNK).run_sync().tasks
        assert len(claimed) == CHUNK
        results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1") for task in claimed]
        assert not [
            item
            for item in worker_commands.submit(engine, TID, "w1", results, retention_ms=1).run_sync()
            if isinstance(item, Exception)
        ]
        assert all(maintenance_commands.purge(engine, TID, [task.id for task in claimed]).run_sync())
        checked.check()

        delayed = [build_task(max_attempts=1, delay_ms=1, idempotency_key=f"key {n}") for n in range(CHUNK)]
        producer_commands.enqueue(engine, TID, "acme", delayed, retention_ms=DAY_MS).run_sync()
        assert all(producer_commands.find_by_idempotency_key(engine, TID, delayed).run_sync())
        checked.engine.clock.advance(1)  # type: ignore[union-attr]
        assert maintenance_commands.promote(engine, TID, "send", CHUNK).run_sync() == (CHUNK, 0)
        claimed = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=CHUNK).run_sync().tasks
        checked.engine.clock.advance(1)  # type: ignore[union-attr]
        assert maintenance_commands.reap(engine, TID, "send", CHUNK, dead_retention_ms=1).run_sync()[:2] == (
            CHUNK,
            CHUNK,
        )
        ids = [task.id for task in claimed]
        assert not [
            item for item in dead_letter_commands.replay(engine, TID, ids).run_sync() if isinstance(item, Exception)
        ]
        checked.check()
        worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=CHUNK).run_sync()
        checked.engine.clock.advance(1)  # type: ignore[union-attr]
        maintenance_commands.reap(engine, TID, "send", CHUNK, dead_retention_ms=1).run_sync()
        checked.engine.clock.advance(1)  # type: ignore[union-attr]
        now_ms, expired = maintenance_commands.expired(engine, TID, limit=CHUNK).run_sync()
        assert len(expired) == CHUNK
        assert all(maintenance_commands.purge(engine, TID, expired, before_ms=now_ms).run_sync())
        assert not checked.check().tasks
