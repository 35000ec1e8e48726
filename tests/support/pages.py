"""Documentation pages: their code blocks, commands, tables and headings."""

import re
from pathlib import Path

from tests.support.paths import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = ROOT / "README.md"
STANDALONE = ROOT / "docs/standalone.md"
NEEDS_VLLM = ROOT / "docs/vllm.md"
NEEDS_TORCH = ROOT / "docs/runner.md"
# Matches the blocks of other pages that need vLLM. tests/vllm/test_*.py run these blocks.
NEEDS_VLLM_TOO = re.compile(r"^from vllm", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """Return line number and text of each code block in one of the languages."""
    text = page.read_text()
    found = [(text.count("\n", 0, match.start(2)), match) for match in BLOCK.finditer(text)]
    return [(line, match[2]) for line, match in found if match[1] in languages]


def commands(page: Path, program: str) -> list[tuple[str, str]]:
    """Return each command of the page that runs the program, with the output shown below it (empty if none)."""
    found: list[tuple[str, str]] = []
    for _, text in blocks(page, "console", "sh", "bash"):
        shown = False
        for line in text.replace("\\\n", " ").splitlines(keepends=True):
            if line.startswith("$ ") or not text.startswith("$ "):
                command = line.removeprefix("$ ").strip()
                shown = re.match(rf"{program}\b", command) is not None
                if shown:
                    found.append((command, ""))
            elif shown:
                found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def table(page: Path, *header: str) -> list[list[str]]:
    """Return the rows of the table whose first columns have these names, reduced to those columns."""
    lines = iter(page.read_text().splitlines())
    for line in lines:
        if cells(line)[: len(header)] == list(header):
            next(lines)  # the rule below the header
            return [cells(row)[: len(header)] for row in iter(lambda: next(lines), "")]
    raise AssertionError(f"{page.name} has no table {header}")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, formed as on GitHub."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
