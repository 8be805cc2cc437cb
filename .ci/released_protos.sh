#!/usr/bin/env bash
# At a release: store the descriptors of protos/, with which `make verify` compares later ones.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
rm -f protos/released-*.binpb
"$python" -m grpc_tools.protoc -I protos --include_imports \
  --descriptor_set_out="protos/released-$("$python" -c "from rollmesh.shared.domain.protocol import PROTOCOL; print(PROTOCOL)").binpb" \
  protos/rollmesh/v1/*.proto
