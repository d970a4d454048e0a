"""What the model reads: which files, which split, which conversations."""

from pathlib import Path

import pytest

from workers.builtin.chat_examples import conversations, persona_conversations
from workers.builtin.corpus import Document, collect_corpus, corpus_digest, is_held_out

_SOURCE = '''"""Ways to greet.

They are few.
"""


class Greeter:
    """Greets people."""

    def greet(self, name):
        """Return a greeting for the name."""
        # politely
        words = ["Hello", name]
        return " ".join(words)

    def leave(self):
        return "Goodbye"


def _hidden(value):
    value += 1
    value += 1
    return value
'''


def _stdlib(folder: Path) -> Path:
    for name, text in {
        "greet.py": _SOURCE,
        "test/test_greet.py": "secret = 1",
        "encodings/cp1.py": "secret = 2",
        "site-packages/other.py": "secret = 3",
        "pkg/__init__.py": "x = 1",
        "empty.py": "",
        "pydoc_data/topics.py": "topics = {'while': 'The while\\n*****\\n\\nIt loops.'}",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_tests_tables_and_other_packages_are_not_read(tmp_path: Path) -> None:
    documents = collect_corpus(_stdlib(tmp_path))
    assert [d.module for d in documents if d.kind == "source"] == ["greet", "pkg"]
    assert [d.text for d in documents if d.kind == "topic"] == ["The while\n*****\n\nIt loops."]
    assert not any("secret" in d.text for d in documents)


def test_compiled_builtins_are_read_under_their_public_names(tmp_path: Path) -> None:
    compiled = {d.module for d in collect_corpus(_stdlib(tmp_path)) if d.kind == "compiled"}
    assert {"len", "str.split", "math.sqrt", "collections.deque", "datetime.date.today"} <= compiled


def test_the_corpus_and_its_digest_repeat(tmp_path: Path) -> None:
    folder = _stdlib(tmp_path)
    first = corpus_digest(collect_corpus(folder))
    assert first == corpus_digest(collect_corpus(folder))
    (folder / "greet.py").write_text(_SOURCE + "\nx = 1\n")
    assert first != corpus_digest(collect_corpus(folder))


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no standard library sources"):
        collect_corpus(tmp_path)


def test_the_split_is_by_whole_groups_and_never_moves() -> None:
    assert [
        n for n in ("argparse", "codecs", "locale", "typing", "tempfile") if is_held_out(n)
    ] == [
        "codecs",
        "locale",
        "tempfile",
    ]
    share = sum(is_held_out(str(i)) for i in range(20_000)) / 20_000
    assert 0.04 < share < 0.06


def test_a_module_and_its_private_twin_share_a_group(tmp_path: Path) -> None:
    for name in ("_pydatetime.py", "datetime.py"):
        (tmp_path / name).write_text("x = 1")
    documents = collect_corpus(tmp_path)
    assert {d.group for d in documents if "datetime" in d.module} == {"datetime"}


def test_conversations_answer_with_docstrings_and_source() -> None:
    chats = conversations([Document("greet", "greet", "source", _SOURCE)], seed=3)
    answers = {m.content for chat in chats for m in chat if m.role == "assistant"}
    assert "Ways to greet.\n\nThey are few." in answers
    assert "Return a greeting for the name." in answers
    assert "The class greet.Greeter has the methods greet and leave." in answers
    assert any(a.startswith('```python\ndef greet(self, name):\n    """Return') for a in answers)
    assert not any("_hidden" in a for a in answers)


def test_conversations_take_turns_and_repeat_for_a_seed() -> None:
    documents = [Document("greet", "greet", "source", _SOURCE)]
    for chat in conversations(documents, seed=0) + persona_conversations(seed=0):
        roles = [m.role for m in chat if m.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(m.content == m.content.strip() != "" for m in chat)
    assert conversations(documents, seed=0) == conversations(documents, seed=0)
    assert conversations(documents, seed=0) != conversations(documents, seed=1)


def test_an_answer_is_whole_paragraphs_within_its_limit() -> None:
    text = "First.\n\nSecond:\n\n" + "x" * 2000
    document = Document("g", "thing", "compiled", text)
    answers = {m.content for c in conversations([document], 0) for m in c if m.role == "assistant"}
    assert answers == {"First."}
