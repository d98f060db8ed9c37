"""The prose check: every rule finds its bad example and leaves the good one alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import prose

# Rule -> (texts with exactly one finding of the rule, texts without a finding).
EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "noun-clause": (
        ["What a task holds.", "It ends. Who asks again waits.", "- Whoever claims it has the lease."],
        ["The fields of a task.", "What happens after a crash?", "The worker knows what to do.", "# What is new"],
    ),
    "by-then": (["The lease has ended by then."], ["It is done by the worker. Then it ends."]),
    "of-which": (["Ten tasks, two of which failed."], ["It selects which of the tasks it returns."]),
    "it-is-who": (["It is codeQ who closed it."], ["It is a worker. Who it is does not matter."]),
    "none": (["It returns none of them.", "The file has none."], ["Returns None.", "The row has None here."]),
    "so-many": (["It allows so many a second."], ["So many tenants use it that the list is long."]),
    "gone": (["The client has gone.", "The task is gone."], ["A 410 Gone is final.", "The client disconnected."]),
    "hang-up": (["The client hung up."], ["A thread that hangs is stopped."]),
    "tell": (["The worker is told."], ["The teller counts."]),
    "mend": (["It is mended later."], ["It is amended later."]),
    "however": (["It runs once, however often it starts."], ["However, it runs once."]),
    "whatever": (["Whatever happens, it ends."], ["Whichever comes first ends it."]),
    "somebody": (["A lease that somebody holds."], ["A lease that a worker holds.", "It runs as `nobody`."]),
    "must-show": (["The list must not show it."], ["The list hides it."]),
    "not-got": (["Redis has not got it.", "It hasn't got it."], ["It has not failed."]),
    "ours": (["The error is ours.", "It belongs to us."], ["It costs 5 us.", "It runs in the US."]),
    "say-so": (["The header says so."], ["The header says what it accepts."]),
    "asked": (["The server is asked again."], ["The user asked."]),
    "over": (["The lease is over."], ["The lease is overwritten."]),
    "knows": (["The parser knows no tabs."], ["The parser knows the tab width."]),
    "in-line": (["It is next in line."], ["It is in line with RFC 9110.", "An inline comment."]),
    "turn": (["It waits for its turn."], ["It returns a task."]),
    "room": (["There is room for two."], ["The chat room closed."]),
    "pace": (["It keeps the pace."], ["A space follows."]),
}


def _phrases(path: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in prose.check_phrases(path, source)]


def test_every_rule_has_examples() -> None:
    assert {rule.name for rule in prose.PHRASES} == set(EXAMPLES)


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule_finds_bad_examples_and_passes_good_ones(rule: str) -> None:
    bad, good = EXAMPLES[rule]
    for text in bad:
        assert rule in [name for _, name in _phrases("docs/page.md", text)], text
    for text in good:
        assert rule not in [name for _, name in _phrases("docs/page.md", text)], text


def test_phrase_across_a_line_break_is_found_on_its_first_line() -> None:
    assert _phrases("docs/page.md", "One line.\n\nIt has not\ngot a value.\n") == [(3, "not-got")]


def test_markdown_code_and_links_are_skipped() -> None:
    text = "Run `whatever`.\n\n```sh\nnobody\n```\n\n[a page](whatever.md) <!-- nobody -->\n"
    assert _phrases("docs/page.md", text) == []


def test_python_docstrings_comments_and_strings_are_read() -> None:
    source = (
        '"""Nobody."""\n'
        "nobody = 1\n"
        "# Fine,\n"
        "# whatever it is.\n"
        "x = 2  # whoever\n"
        "label = 'Nobody works on it'\n"
        "detail = f'{x} tasks that nobody claims'\n"
        "name = 'nobody'\n"
        "sql = 'SELECT nobody from a table'\n"
    )
    expected = [(1, "somebody"), (4, "whatever"), (5, "whatever"), (6, "somebody"), (7, "somebody")]
    assert sorted(_phrases("queues/x.py", source)) == expected


def test_only_spec_texts_of_a_tests_strings_are_read() -> None:
    source = (
        "import pytest\n\n\n"
        "@pytest.mark.spec('TSK-1', 'A task that nobody claims')\n"
        "def test_x():\n"
        "    assert read() == 'The text of somebody else'\n"
    )
    assert _phrases("tests/test_x.py", source) == [(4, "somebody")]


def test_lua_comments_are_read() -> None:
    source = "--! task: reads it.\n-- Whatever it is.\nlocal x = 1 -- of nobody\n"
    assert _phrases("queues/engine/lua/x.lua", source) == [(2, "noun-clause"), (2, "whatever"), (3, "somebody")]


def test_template_text_attributes_and_arguments_are_read() -> None:
    source = (
        '{% include "x.html" with says="A task that nobody claims" %}\n'
        "{# For whoever reads it. #}\n"
        '<p title="Nobody" class="nobody">Nobody {{ nobody }}</p>\n'
        "<script>nobody()</script>\n"
    )
    expected = [(1, "somebody"), (2, "whatever"), (3, "somebody"), (3, "somebody")]
    assert sorted(_phrases("templates/x.html", source)) == expected


def test_javascript_comments_and_texts_are_read() -> None:
    source = "// Whatever it is.\nconst nobody = 1\nlabel = 'Nobody works on it'\n/* nobody */\n"
    assert [line for line, _ in sorted(set(_phrases("queues/static/x.js", source)))] == [1, 1, 3, 4]


@pytest.mark.parametrize(
    ("summary", "is_good"),
    [
        ("Return the task.", True),
        ("Is the task dead?", True),
        ("Return the task", False),
        (f"Return {'the ' * 22}task.", False),
    ],
)
def test_summary_is_one_short_sentence(summary: str, is_good: bool) -> None:
    findings = list(prose.check_summaries("queues/x.py", f'"""{summary}\n\nMore text"""\n'))
    assert (not findings) == is_good


def test_errors_docstring_may_be_long_because_it_is_the_message() -> None:
    source = f'"""The task {"really " * 15} failed."""\n'
    assert not list(prose.check_summaries("core/errors.py", source))


def test_vague_names_are_found_in_production_code_only() -> None:
    source = "found = 1\nfor each in ():\n    pass\n\n\ndef find(told):\n    return x.asked\n"
    assert [finding.words for finding in prose.check_names("queues/x.py", source)] == ["found", "each", "told"]
    assert not list(prose.check_names("tests/x.py", source))


def test_vague_names_are_found_in_lua() -> None:
    source = "local found, ids = 1, 2\nfor _, each in ipairs(ids) do end\nfunction find(told) end\n"
    assert [finding.words for finding in prose.check_lua_names("x.lua", source)] == ["found", "each", "told"]


def test_definition_with_an_old_name_is_found() -> None:
    (finding,) = prose.check_names("queues/x.py", "class Pipe:\n    pass\n\n\nlib.Turn()\n")
    assert (finding.line, finding.instead) == (1, "MultiplexedConnection")


def test_two_classes_of_one_name_are_found() -> None:
    sources = {
        "queues/a.py": "class Page:\n    class Meta: ...\n",
        "tenants/b.py": "class Page:\n    class Meta: ...\n",
        "codeq_client/c.py": "class Page: ...\n",
        "tests/d.py": "class Page: ...\n",
    }
    assert [(finding.path, finding.words) for finding in prose.check_class_names(sources)] == [
        ("queues/a.py", "Page"),
        ("tenants/b.py", "Page"),
    ]


def test_nested_classes_may_share_a_name() -> None:
    nested = {"queues/a.py": "class A:\n    class State: ...\n", "tenants/b.py": "class B:\n    class State: ...\n"}
    assert not list(prose.check_class_names(nested))
    assert len(list(prose.check_class_names({**nested, "webhooks/c.py": "class State: ...\n"}))) == 3


def test_mention_of_a_missing_file_is_found() -> None:
    root = Path(prose.__file__).resolve().parent.parent
    text = "See tests/prose.py, `tests/absent.py` and https://example.com/docs/page.html.\n"
    assert [finding.words for finding in prose.check_mentioned_files("docs/x.md", text, root)] == ["tests/absent.py"]


def test_exception_allows_the_words_at_its_path_only(monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = (rule for rule in prose.PHRASES if rule.name == "pace")
    allowed = prose.Allowed("docs/running.md", "pace", "a page about running")
    monkeypatch.setattr(prose, "PHRASES", (rule._replace(allowed=(allowed,)),))
    assert _phrases("docs/running.md", "The pace.") == []
    assert _phrases("docs/walking.md", "The pace.") == [(1, "pace")]


def test_generated_pages_and_migrations_are_not_checked() -> None:
    assert not prose.is_checked("docs/reference/spec.md", "# Title\n\nGenerated by `make docs` from the marks.")
    assert not prose.is_checked("queues/migrations/0001_initial.py", "")
    assert prose.is_checked("docs/tutorial.md", "# Tutorial")


@pytest.mark.parametrize(("arguments", "status"), [(["--check"], 1), ([], 0), (["--check", "good.md"], 0)])
def test_exit_status_is_1_only_with_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    sources = {"bad.md": "Nobody.", "good.md": "A worker."}
    monkeypatch.setattr(prose, "read_tree", lambda root: sources)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prose", *arguments])
    assert prose.main() == status
