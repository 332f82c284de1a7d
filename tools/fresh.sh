#!/usr/bin/env bash
# Puts this machine back into the state of one that has never seen AgenticRun. See tools/fresh.py.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/fresh.py" "$@"
