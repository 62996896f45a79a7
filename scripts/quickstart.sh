#!/usr/bin/env bash
# Trains a small policy on real terminal episodes; makes ./.venv when there is none.
#   scripts/quickstart.sh [--help | options of experiments/quickstart.py]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
exec "$VENV/bin/python" experiments/quickstart.py "$@"
