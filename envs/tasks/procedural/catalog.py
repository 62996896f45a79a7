"""The table of families in docs/tasks.md: ``python -m envs.tasks.procedural.catalog``."""

from envs.tasks.procedural import FAMILIES, generate


def table() -> str:
    """One Markdown row a family with an example of difficulty 1 (training split, seed 0)."""
    rows = [
        "| family | what it asks | needs | example instruction | reference commands |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES.values():
        task = generate(family.name, 0)
        commands = " then ".join(f"`{command}`" for command in task.solution).replace("|", "\\|")
        needs = ", ".join(family.requires) or "–"
        rows.append(
            f"| {family.name} | {family.description} | {needs} | {task.instruction} | {commands} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
