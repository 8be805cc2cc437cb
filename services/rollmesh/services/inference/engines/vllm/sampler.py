"""The sampler that the engine installs in each worker of vLLM, in place of vLLM's own.

It draws by (seed, position) with the code of the torch engine, so that a request that is resumed on another node
continues identically. The log-probs under the sampling distribution and under the plain softmax, and the outputs, come
from the same logits in the same step. Each token has the serial number of the weights that drew it. `columns` gives the
layout.

Imported in processes of vLLM only. Written for the V1 model runner of vLLM 0.32 without speculative decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from rollmesh.services.inference.engines.common.sampling import Rules, mean_logprob, most_likely, sample, stream_starts
from rollmesh.services.inference.engines.vllm import columns

RequestRules = tuple[int, float, float, int]
"""Seed as int64, temperature, top_p and top_k of a request."""
_SCORING: RequestRules = (0, 0.0, 1.0, 0)
"""Rules of a request that is only scored. Its one token is dropped."""


class KeyedSampler(Sampler):  # type: ignore[misc]
    """Draws the tokens of a worker. `runner` is its model runner; `serial` returns the number of its current
    weights."""

    def __init__(self, runner: Any, serial: Callable[[], int]) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner
        self._serial = serial
        self._requests: list[str] = []
        self._rules: Rules | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *_: Any, **__: Any) -> Any:
        batch, num_rows = self._runner.input_batch, logits.shape[0]
        assert num_rows == batch.num_reqs, "one row of logits per request"
        num_pairs: int | None = sampling_metadata.max_num_logprobs
        rules = self._rules_of(batch.req_ids[:num_rows], logits.device)
        rules = rules._replace(
            streams=stream_starts(rules.streams, self._runner.seq_lens[:num_rows].to(torch.int64)),
            outputs=_outputs_of(num_pairs or 0),
            num_top=max(0, (num_pairs or 0) - columns.NUM_OUTPUTS),
        )
        tokens, found = sample(logits.to(torch.float32), rules)
        logprobs = None if num_pairs is None else _pairs(tokens, found, self._serial(), num_pairs)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=logprobs)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Return the pairs of scored tokens; vLLM calls it for `prompt_logprobs`. `logprobs` [n, vocab] are those of
        the plain softmax."""
        picked = token_ids[:, None].to(torch.int64)
        ids = [picked, torch.full_like(picked, columns.SERIAL_ID - self._serial())]
        values = [logprobs.gather(1, picked), torch.special.entr(logprobs.exp()).sum(dim=-1, keepdim=True)]
        if num_logprobs >= columns.SCORE_MEAN:
            ids.append(torch.full_like(picked, -columns.SCORE_MEAN))
            values.append(mean_logprob(logprobs)[:, None])
        if num_logprobs >= columns.SCORE_TOP:
            top_ids, top_values = most_likely(logprobs, num_logprobs - columns.SCORE_MEAN)
            ids.append(_distinct(top_ids))
            values.append(top_values)
        return _tensors(ids, values)

    def _rules_of(self, requests: Sequence[str], device: torch.device) -> Rules:
        """Return the rules of the requests in the batch. They are built again only if the batch has changed."""
        if self._rules is None or requests != self._requests:
            self._requests = list(requests)
            states = self._runner.requests
            self._rules = _rules([rules_of(states[request].sampling_params) for request in requests], device)
        return self._rules


def rules_of(params: Any) -> RequestRules:
    """Return the rules in the sampling parameters of a request."""
    found: list[Any] | None = (params.extra_args or {}).get(columns.ARGUMENT)
    return _SCORING if found is None else (found[0], found[1], found[2], found[3])


def _rules(rows: list[RequestRules], device: torch.device) -> Rules:
    seeds, temperature, top_p, top_k = zip(*rows, strict=True)
    return Rules(
        streams=torch.tensor(seeds, dtype=torch.int64, device=device),  # the seeds; each step makes streams of them
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
        any_tempered=any(value not in (0.0, 1.0) for value in temperature),
        any_truncated=any(p < 1.0 or k > 0 for p, k in zip(top_p, top_k, strict=True)),
        any_greedy=any(value <= 0 for value in temperature),
        outputs=[],
        num_top=0,
    )


def _outputs_of(num_pairs: int) -> list[str]:
    if num_pairs < columns.NUM_OUTPUTS:
        return []
    return [*columns.VALUES, *(["top_k"] if num_pairs > columns.NUM_OUTPUTS else [])]


def _pairs(tokens: Tensor, found: dict[str, Tensor], serial: int, num_pairs: int) -> Any:
    """Return the pairs of drawn tokens [B] in the layout of `columns`."""
    picked = tokens[:, None]
    ids, values = [picked], [found["logprobs"][:, None]]
    if num_pairs >= columns.WEIGHTS:
        ids.append(torch.full_like(picked, columns.SERIAL_ID - serial))
        values.append(found["logprobs_model"][:, None])
    if num_pairs >= columns.NUM_OUTPUTS:
        ids += [torch.full_like(picked, -column) for column in columns.VALUES.values()]
        values += [found[name][:, None] for name in columns.VALUES]
    if num_pairs > columns.NUM_OUTPUTS:
        ids.append(_distinct(found["top_k_ids"]))
        values.append(found["top_k_logprobs"])
    return _tensors(ids, values)


def _distinct(top_ids: Tensor) -> Tensor:
    """Return the ids of the pairs for alternatives [n, k], all different in a row; ids of places without a token are
    negative."""
    ranks = torch.arange(top_ids.shape[1], device=top_ids.device)
    return torch.where(top_ids < 0, -1 - ranks, top_ids) + columns.TOP_ID


def _tensors(ids: list[Tensor], values: list[Tensor]) -> Any:
    ranks = torch.zeros(len(ids[0]), dtype=torch.int64, device=ids[0].device)  # vLLM's ranks are not used
    return LogprobsTensors(torch.cat(ids, dim=1).to(torch.int32), torch.cat(values, dim=1), ranks)
