#!/usr/bin/env bash
# Regenerates the Python code of protos/ with the pinned tools. Generated with the oldest protobuf that we support.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-protos}
PATH="$(dirname "$(command -v "$python")"):$PATH" # protoc-gen-mypy lies beside the interpreter
export PATH
mkdir -p "$out"
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" protos/rollmesh/v1/*.proto
# Files without a service get no gRPC module.
for proto in protos/rollmesh/v1/*.proto; do
  name=$(basename "$proto" .proto)
  grep -q '^service ' "$proto" || rm -f "$out/rollmesh/v1/${name}_pb2_grpc.py" "$out/rollmesh/v1/${name}_pb2_grpc.pyi"
done
