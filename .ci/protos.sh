#!/usr/bin/env bash
# Regenerate the Python code of protos/ and the records of the coordinator's core with the pinned tools, which generate for the oldest
# protobuf that we support. With an argument, write all of it below that folder.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-protos}
core=${1:-services/rollmesh/services/coordinator/core}
PATH="$(dirname "$(command -v "$python")"):$PATH" # protoc-gen-mypy is beside the interpreter
export PATH
mkdir -p "$out"
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" protos/rollmesh/v1/*.proto
set=$(mktemp)
trap 'rm -f "$set"' EXIT
"$python" -m grpc_tools.protoc -I protos --include_imports --include_source_info --descriptor_set_out="$set" protos/rollmesh/v1/coordinator.proto
"$python" .ci/facts.py "$set" "$core"
# Files without a service get no gRPC module.
for proto in protos/rollmesh/v1/*.proto; do
  name=$(basename "$proto" .proto)
  grep -q '^service ' "$proto" || rm -f "$out/rollmesh/v1/${name}_pb2_grpc.py" "$out/rollmesh/v1/${name}_pb2_grpc.pyi"
done
