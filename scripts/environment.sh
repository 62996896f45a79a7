# Sourced by the scripts: makes ./.venv with this package when it is missing or stale.
#   source scripts/environment.sh [extras]        e.g. "dev" (comma-separated)
# Sets VENV. PYTHON chooses the interpreter (3.11 or newer).
VENV="${VENV:-$PWD/.venv}"
_extras="${1:-}"
_stamp="$VENV/.jaxagent-${_extras:-core}"

_find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "jaxagent needs Python 3.11 or newer; install it or set PYTHON=/path/to/python3" >&2
  return 1
}

if [ ! -x "$VENV/bin/python" ]; then
  _python=$(_find_python) || exit 1
  echo "== making $VENV with $("$_python" --version)"
  "$_python" -m venv "$VENV" || {
    echo "could not make $VENV: on Debian and Ubuntu, install the package python3-venv" >&2
    rm -rf "$VENV"
    exit 1
  }
fi
if [ ! -e "$_stamp" ] || [ pyproject.toml -nt "$_stamp" ] || [ constraints.txt -nt "$_stamp" ]; then
  echo "== installing jaxagent${_extras:+[$_extras]}"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${_extras:+[$_extras]}"
  touch "$_stamp"
fi
