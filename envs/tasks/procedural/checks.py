"""Verifier lines: POSIX sh that looks at the file system only and exits 1 at the first fault.

The functions below cost at most two processes each. They refuse links and special files
where a regular file is expected, so a policy can neither point at an answer nor block the
verifier on a pipe, and they read a bounded number of bytes.
"""

import shlex
from collections.abc import Iterable, Mapping

WORKDIR = "/home/agent"

_PRELUDE = f"""\
export LC_ALL=C HOME=/nonexistent
cd {WORKDIR} 2>/dev/null || exit 1
regular() {{ [ -f "$1" ] && [ ! -L "$1" ]; }}
texts() {{
  want=$1; shift
  for path; do regular "$path" || exit 1; done
  [ "$(grep '' /dev/null "$@" 2>&1 | head -c 65536)" = "$want" ] || exit 1
}}
answer() {{
  regular "$1" || exit 1
  want=$2; set -f; set -- $(head -c 4096 "$1"); set +f
  got=$*
  [ "${{got#./}}" = "$want" ] || exit 1
}}
dirs() {{ for path; do [ -d "$path" ] && [ ! -L "$path" ] || exit 1; done; }}
gone() {{ for path; do [ ! -e "$path" ] && [ ! -L "$path" ] || exit 1; done; }}
listing() {{ dirs "$1"; [ "$(ls -A "$1" | head -c 65536)" = "$2" ] || exit 1; }}
mode() {{
  want=$1; shift
  for path; do [ -n "$(find "$path" -prune -perm "$want" 2>/dev/null)" ] || exit 1; done
}}
link() {{ [ -L "$1" ] && [ "$1" -ef "$2" ] || exit 1; }}
same() {{ [ "$(eval "$1" 2>/dev/null | head -c 65536)" = "$2" ] || exit 1; }}
"""


def _words(items: Iterable[str]) -> str:
    return " ".join(shlex.quote(item) for item in items)


def texts(files: Mapping[str, str]) -> str:
    """Each path is a regular file with this text (a missing last newline is forgiven)."""
    want = [
        f"{path}:{line}"
        for path, text in files.items()
        if text
        for line in text.removesuffix("\n").split("\n")
    ]
    return f"texts {shlex.quote(chr(10).join(want))} {_words(files)}" if files else ":"


def answer(path: str, value: object) -> str:
    """A regular file with this answer; white space around words and a leading ./ are forgiven."""
    return f"answer {_words((path, ' '.join(str(value).split())))}"


def dirs(*paths: str) -> str:
    """Each path is a directory."""
    return f"dirs {_words(paths)}"


def gone(*paths: str) -> str:
    """Nothing is left at these paths."""
    return f"gone {_words(paths)}"


def listing(directory: str, names: Iterable[str]) -> str:
    """The directory holds exactly these names."""
    return f"listing {_words((directory, chr(10).join(sorted(names))))}"


def mode(bits: str, *paths: str) -> str:
    """Each path has exactly these octal permissions, or at least these after a ``-``."""
    return f"mode {_words((bits, *paths))}"


def link(path: str, target: str) -> str:
    """``path`` is a symbolic link that leads to ``target``, which exists."""
    return f"link {_words((path, target))}"


def same(command: str, output: str) -> str:
    """``command`` (of the verifier, not the policy) prints ``output``."""
    return f"same {_words((command, output))}"


def verify_script(checks: Iterable[str]) -> str:
    """The whole verifier: exit status 0 when every check holds, 1 otherwise."""
    return _PRELUDE + "\n".join(checks) + "\nexit 0\n"
