#!/usr/bin/env bash
# Runs the checks and the tests; makes ./.venv when there is none.
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh dev
echo "== ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
echo "== mypy"
"$VENV/bin/mypy"
echo "== pytest"
exec "$VENV/bin/pytest" "$@"
