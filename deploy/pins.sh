#!/usr/bin/env bash
# Resolves pyproject.toml in a new environment and writes what was chosen: names and versions only.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"${PYTHON:-python3.11}" -m venv "$fresh"
"$fresh/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[local,dev]'
{
  echo '# What `make setup` installs; written by `make pins`.'
  "$fresh/bin/python" -m pip freeze --exclude-editable | sed -n 's/^\([A-Za-z0-9_.-]*==[^ ;]*\).*/\1/p'
} > deploy/constraints.new
mv deploy/constraints.new deploy/constraints.txt
