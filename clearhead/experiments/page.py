"""A result as Markdown: what was asked, tables, figure, and what was found."""

from __future__ import annotations

from clearhead.experiments.result import Cell, Finding, Result, Table

MARKS = {
    "agrees": "Agrees with what is commonly said",
    "contradicts": "Contradicts what is commonly said",
    "not told apart": "Not told apart here",
}


def page(question: str, measured_on: str, result: Result, figure: str) -> str:
    """Without headings: the page stands inside a chapter, too."""
    parts = [f"**{question[0].upper()}{question[1:]}**", findings_markdown(result.findings), f"![{question}]({figure})"]
    return "\n\n".join([*parts, *map(table_markdown, result.tables), measured_on]) + "\n"


def findings_markdown(findings: tuple[Finding, ...]) -> str:
    return "\n".join(f"- **{MARKS[each.verdict]}.** *{each.claim}* {each.measured}" for each in findings)


def table_markdown(table: Table) -> str:
    rule = ["---", *("---:" for _ in table.columns[1:])]
    lines = [table.columns, rule, *([spell_cell(cell) for cell in row] for row in table.rows)]
    return "\n".join([f"**{table.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def spell_cell(cell: Cell) -> str:
    """Numbers to three digits, large ones with commas."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or (abs(cell) >= 1000 and abs(cell) < 1e7):
        return f"{cell:,.0f}"
    return f"{cell:.3g}"
