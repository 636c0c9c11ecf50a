"""Writes the settings table of docs/operations.md from the service's settings."""

from pathlib import Path

from service.settings import Settings

PAGE = Path(__file__).parent / "operations.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def settings_table() -> str:
    """Returns a Markdown table of all settings, in the order of the code."""
    prefix = Settings.model_config["env_prefix"]
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if field.default_factory:
            default = "see meaning"
        elif field.default is None:
            default = "none"
        else:
            default = f"`{field.default}`"
        meaning = " ".join(str(field.description).split())
        lines.append(f"| `{prefix}{name.upper()}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Returns the page with the table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + settings_table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
