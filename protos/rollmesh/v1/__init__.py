"""The generated contract: protobuf messages and gRPC stubs of rollmesh.v1."""
