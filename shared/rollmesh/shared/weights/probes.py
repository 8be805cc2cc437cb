"""Probes: prompts whose log-probs by the learner tell right weights from wrong ones."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.shared.codec.arrays import decode_floats, decode_ints, encode_floats, encode_ints
from rollmesh.shared.domain.trajectory import FloatArray, IntArray
from rollmesh.v1 import weights_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt and the learner's plain-softmax log-probs of it, [n] each; entry 0 of `logprobs` is 0."""

    token_ids: IntArray
    logprobs: FloatArray

    def encode(self) -> weights_pb2.WeightProbe:
        return weights_pb2.WeightProbe(token_ids=encode_ints(self.token_ids), logprobs=encode_floats(self.logprobs))


def probes_of(manifest: weights_pb2.WeightManifest) -> list[Probe]:
    """Return the probes of a manifest that `check_manifest` has accepted."""
    return [
        Probe(
            token_ids=decode_ints(message.token_ids, f"manifest.probes[{index}].token_ids"),
            logprobs=decode_floats(message.logprobs, f"manifest.probes[{index}].logprobs"),
        )
        for index, message in enumerate(manifest.probes)
    ]
