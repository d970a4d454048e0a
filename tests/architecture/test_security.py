"""What the product never does, searched for in its text; docs/security.md names real tests.

A search of the text also finds what hides from a syntax tree: strings, scripts of the chart, names
that were imported under another one.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = sorted(
    path
    for folder in ("attention", "workers", "service", "helm")
    for path in (ROOT / folder).rglob("*.py")
)
SECURITY = ROOT / "docs" / "security.md"

_PICKLES = r"(c?pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
FORBIDDEN = {
    "pickle": rf"\b(import|from) +{_PICKLES}|\b{_PICKLES}\.(un)?(load|dump|Pickl|open)",
    "eval": r"(?<![\w.])eval\(",
    "exec": r"(?<![\w.])exec\(",
    "yaml.load": r"\byaml\.(load|unsafe_load|full_load)(_all)?\(",
    "torch.load": r"\btorch\.load\(|\bfrom torch import .*\bload\b|weights_only\s*=\s*False",
    "shell": r"shell\s*=\s*True|\bos\.(system|popen)\(",
    "unverified": r"\bverify\s*=\s*False|\bCERT_NONE\b|_create_unverified_context|ssl\s*=\s*False",
    "remote code": r"trust_remote_code\s*=\s*(?!False)",
    "unsandboxed": r"\bjinja2\.(Environment|Template)\(|\bfrom jinja2 import .*\b(Env|Temp)",
}

# (file, rule): why it is no danger there. An entry that nothing needs any more fails a test.
ALLOWED: dict[tuple[str, str], str] = {}


def findings(text: str) -> set[str]:
    return {name for name, pattern in FORBIDDEN.items() if re.search(pattern, text)}


@pytest.fixture(scope="module")
def found() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), name)
        for path in PRODUCT
        for name in findings(path.read_text())
    }


def test_the_product_executes_and_unpickles_nothing(found):
    assert found - ALLOWED.keys() == set()


def test_every_exception_is_needed_and_has_a_reason(found):
    assert ALLOWED.keys() - found == set()
    assert all(reason.strip() for reason in ALLOWED.values())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import pickle as p", "pickle"),
        ("from cloudpickle import loads", "pickle"),
        ("ray.cloudpickle.loads(data)", "pickle"),
        ("x = eval(text)", "eval"),
        ("exec(code)", "exec"),
        ("yaml.load(file)", "yaml.load"),
        ("torch.load(path, weights_only=True)", "torch.load"),
        ("subprocess.run(command, shell=True)", "shell"),
        ("os.system(command)", "shell"),
        ("httpx.get(url, verify=False)", "unverified"),
        ("context.verify_mode = ssl.CERT_NONE", "unverified"),
        ("from_pretrained(name, trust_remote_code=True)", "remote code"),
        ("jinja2.Environment()", "unsandboxed"),
        ("from jinja2 import Template", "unsandboxed"),
    ],
)
def test_the_search_finds_what_it_looks_for(text, rule):
    assert findings(text) == {rule}


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "never pickle",
        "yaml.safe_load(file)",
        "trust_remote_code=False",
        "verify_mode = CERT_REQUIRED",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
    ],
)
def test_the_search_leaves_the_safe_ways_alone(text):
    assert findings(text) == set()


def table_rows(text: str) -> list[list[str]]:
    """Cells of the threat model's rows: those whose last cell names tests."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [cells for cells in rows if "::" in cells[-1]]


def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


ROWS = table_rows(SECURITY.read_text())


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0])
def test_every_test_that_the_threat_model_names_exists(cells):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cells[-1])
    assert len(named) == cells[-1].count("::")
    for file, name in named:
        assert name in functions_of(ROOT / file), (file, name)


def test_the_threat_model_covers_every_class_and_says_the_design():
    assert {cells[0][0] for cells in ROWS} == set("ABCDE")
    assert all(len(cells) == 4 and all(cells) for cells in ROWS)
    assert len({cells[0] for cells in ROWS}) == len(ROWS)
