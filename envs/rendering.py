"""What a person would see of a program's output: ``render``."""

import re

# Columns and rows a control sequence may move to; a hostile one cannot ask for more memory.
MAX_COLUMN = 4096
MAX_ROWS_UP = 1000

_PLAIN = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f\x80-\x9f]*\Z")
_TOKEN = re.compile(
    r"\x1b\[(?P<params>[0-?]*)(?P<middle>[ -/]*)(?P<final>[@-~])"  # CSI
    r"|\x1b[\]PX^_](?:[^\x07\x1b]|\x1b(?!\\))*(?:\x07|\x1b\\|\Z)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"  # other escapes
    r"|(?P<text>[^\x00-\x1f\x7f\x80-\x9f]+)"
    r"|(?P<control>[\x00-\x1f\x7f\x80-\x9f])",
)
_TAB = 8


class _Screen:
    """Lines without a bottom or a right edge, and a cursor."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.row = 0
        self.column = 0
        self.saved: tuple[list[list[str]], int, int] | None = None

    @property
    def line(self) -> list[str]:
        return self.lines[self.row]

    def put(self, text: str) -> None:
        line = self.line
        if len(line) < self.column:
            line += " " * (self.column - len(line))
        line[self.column : self.column + len(text)] = text
        self.column += len(text)

    def down(self, count: int, *, grow: bool) -> None:
        last = len(self.lines) - 1
        if grow:
            self.lines += [[] for _ in range(self.row + count - last)]
            self.row += count
        else:
            self.row = min(self.row + count, last)

    def move(self, column: int) -> None:
        self.column = max(0, min(column, MAX_COLUMN))

    def control(self, char: str) -> None:
        if char == "\n":
            self.down(1, grow=True)
            self.column = 0
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char == "\t":
            # Kept where nothing is overwritten: a tab is what the program printed.
            if self.column >= len(self.line):
                self.put("\t")
            else:
                self.move(self.column + _TAB - self.column % _TAB)
        elif char in "\v\f":
            self.down(1, grow=True)

    def csi(self, params: str, final: str) -> None:
        numbers = [int(n[:6]) if n.isdigit() else 0 for n in params.lstrip("?>=").split(";")]
        first = min(numbers[0], MAX_COLUMN)
        count = max(1, first)
        if final == "A":
            self.row = max(0, self.row - min(count, MAX_ROWS_UP))
        elif final == "F":
            self.row, self.column = max(0, self.row - min(count, MAX_ROWS_UP)), 0
        elif final == "B":
            self.down(count, grow=False)
        elif final == "E":
            self.down(count, grow=False)
            self.column = 0
        elif final == "C":
            self.move(self.column + count)
        elif final == "D":
            self.move(self.column - count)
        elif final in "G`":
            self.move(count - 1)
        elif final == "K":
            self.erase_line(first)
        elif final == "J":
            self.erase_screen(first)
        elif final == "P":
            del self.line[self.column : self.column + count]
        elif final in "Hf":
            self.row = min(count, len(self.lines)) - 1
            self.move((numbers[1] if len(numbers) > 1 else 1) - 1)
        elif final in "hl" and params in ("?1049", "?1047", "?47"):
            self.alternate(final == "h")

    def erase_line(self, how: int) -> None:
        if how == 0:
            del self.line[self.column :]
        elif how == 1:
            end = min(self.column + 1, len(self.line))
            self.line[:end] = " " * end
        else:
            self.line.clear()

    def erase_screen(self, how: int) -> None:
        if how == 0:
            self.erase_line(0)
            del self.lines[self.row + 1 :]
        elif how in (2, 3):
            self.lines, self.row = [[]], 0

    def alternate(self, enter: bool) -> None:
        """A full-screen program's own screen: gone when it leaves."""
        if enter and self.saved is None:
            self.saved = (self.lines, self.row, self.column)
            self.lines, self.row, self.column = [[]], 0, 0
        elif not enter and self.saved is not None:
            self.lines, self.row, self.column = self.saved
            self.saved = None


def render(output: str) -> str:
    """The text left on an endless screen after ``output`` was shown on it.

    Carriage returns and backspaces overwrite, cursor and erase sequences act, colours and
    every other escape or control character are dropped. Text without any comes back as it
    is. A trailing newline stays.
    """
    if _PLAIN.match(output):
        return output
    screen = _Screen()
    for token in _TOKEN.finditer(output):
        if (text := token["text"]) is not None:
            screen.put(text)
        elif (char := token["control"]) is not None:
            screen.control(char)
        elif (final := token["final"]) is not None and not token["middle"]:
            screen.csi(token["params"], final)
    return "\n".join("".join(line).rstrip(" ") if line else "" for line in screen.lines)
