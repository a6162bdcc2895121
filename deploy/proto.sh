#!/usr/bin/env bash
# Generates the protobuf and gRPC stubs from api/wire/proto into src (or the folder given).
# Run it after any change of a .proto file; tests/tidy/test_protos.py compares.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:-src}")
# Absolute, for the stubs are made in another folder; -s, since a link is what makes it a venv.
python=$(realpath -s "$(command -v "${PYTHON:-.venv/bin/python}")")
# The mypy plugins are programs beside the interpreter.
PATH="$(dirname "$(command -v "$python")"):$PATH"

cd api/wire/proto
mapfile -t all < <(find . -name '*.proto' | LC_ALL=C sort)
mapfile -t services < <(grep -l '^service ' "${all[@]}")
"$python" -m grpc_tools.protoc -I. --python_out="$out" --mypy_out=quiet:"$out" "${all[@]}"
"$python" -m grpc_tools.protoc -I. --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" "${services[@]}"
# The same with its comments, which the stubs drop: /openapi.json is made of it.
"$python" -m grpc_tools.protoc -I. --include_source_info \
  --descriptor_set_out="$out/mindd/descriptors.binpb" "${all[@]}"
