"""Router replay: in the forwards of the policy, routers send tokens to the experts that the engine has recorded.

Rollout Routing Replay (R3; Ma et al., arXiv:2510.11370; implementations in verl, slime, miles and NeMo RL). An engine
and a trainer round differently, so that their routers choose other experts for some tokens, and the log-probs of these
differ much. With I the recorded experts of a token and s the scores of the trainer's own router,

    g_i = I_i exp(s_i) / (sum over j of I_j exp(s_j))

are the weights of the experts, so that the choice is the engine's, and the gradient of the router is that of the
trainer's scores. For models with another rule (sigmoid, a bias or groups that only choose, no normalization) it is the
rule of the model: what replaces the choice is the result of `topk` in the router, with the scores at the recorded
experts as its values. verl, slime and miles do the same in Megatron's routers.

Records are replayed in all forwards of the policy: features under `start`, `step` and `current`, and layers that the
backward pass computes again. The reference model and the sequences of other prompts route themselves, because the
records are of another forward (slime: "fallthrough"). So do tokens without a record (`routes`). In the paper every
token has one, because the engine stores the choices of prompts, too; verl routes tokens outside its mask itself.

Whether the choice of a model can be replaced depends on its code, so that a few tokens are run before the first update:
records of the model's own choice must change nothing, and with records of other experts these must compute.

Collaborators: `forward` (runs a micro-batch with its records), `model_layers` (checkpointing), `update`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.expert_modules import chosen_experts, expert_modules, expert_weights
from rollmesh.trainer.model_config import compute_device, text_config
from rollmesh.trainer.model_layers import decoder_layers
from rollmesh.trainer.packing import MicroBatch
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.routes import RouteShape
from rollmesh.trainer.spread_model import MODEL_ERRORS, model_error

DIFFERING = "router_replay/differing"
"""Statistic of a token: the share of the recorded experts that the trainer's own routers would not have chosen where it
is predicted. NaN without a record."""
_KEY = "learner.router_replay"
_TOLERANCE = 1e-5
_TOPK: Any = (torch.topk, Tensor.topk)
_TOKENS = 8


@dataclass(frozen=True, slots=True)
class _Records:
    """Experts of n positions of one forward."""

    experts: tuple[Tensor, ...]
    """[n, k] per router."""
    recorded: Tensor
    """[n] booleans: whether the position has a record."""


class RouterReplay:
    """Replays records in the forwards of one model."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks = ONE_RANK) -> None:
        """Prepare the layers of a whole model, which may be without values on other ranks than the first. Raises
        ConfigError for a model whose routers cannot be replayed."""
        self._running: _Replaying | None = None
        experts = expert_modules(model)
        layers = decoder_layers(model)
        for layer in layers:
            numbers = [number for number, module in enumerate(experts) if any(module is m for m in layer.modules())]
            if len(numbers) > 1:
                raise _unusable(model, f"a layer has {len(numbers)} routers")
            layer.forward = partial(_inside, self, numbers[0] if numbers else None, layer.forward)
        self.shape = ranks.from_first(lambda: self._tested_shape(model))

    @contextmanager
    def replaying(self, batch: MicroBatch) -> Iterator[Callable[[], Tensor | None]]:
        """Replay the records of a micro-batch in one forward inside. The yielded function returns the statistic
        DIFFERING [m] of its targets after the forward; None for a micro-batch without records."""
        if batch.experts is None or batch.recorded is None:
            yield lambda: None
            return
        flat = batch.experts.reshape(-1, batch.experts.shape[-1]).long()
        records = _Records(torch.split(flat, list(self.shape.chosen), dim=-1), batch.recorded.flatten())
        with self._run(records) as mode:
            yield lambda: mode.differing()[batch.target_row * batch.token_ids.shape[1] + batch.target_col]
        if len(mode.replaced) < len(self.shape.chosen):
            raise RuntimeError(
                f"a forward has called {len(mode.replaced)} of {len(self.shape.chosen)} routers; set `{_KEY}` to false"
            )

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[Any]]:
        """Return the contexts of `torch.utils.checkpoint`: for the forward of a layer, and for its repetition in the
        backward pass, which replays the same records."""
        running = self._running
        return nullcontext(), nullcontext() if running is None else self._run(running.records)

    def enter(self, number: int | None) -> None:
        """Note that the layer with the router `number` begins; None: no router."""
        if self._running is not None:
            self._running.number = number

    @contextmanager
    def _run(self, records: _Records) -> Iterator[_Replaying]:
        before, mode = self._running, _Replaying(records)
        self._running = mode
        try:
            with mode:
                yield mode
        finally:
            self._running = before

    def _tested_shape(self, model: PreTrainedModel) -> RouteShape:
        try:
            return self._test(model)
        except MODEL_ERRORS as error:
            raise _unusable(model, f"a forward that replays records raises {model_error(error)}") from error

    @torch.no_grad()
    def _test(self, model: PreTrainedModel) -> RouteShape:
        modules = expert_modules(model)
        if not modules:
            raise _unusable(model, "it has no routers")
        own, weights, logits = self._observed(model, modules, None)
        if len(own) != len(modules):
            raise _unusable(model, f"{len(own)} of its {len(modules)} routers have chosen experts for a few tokens")
        names = {id(module): name for name, module in model.named_modules()}
        places = [re.search(r"\.(\d+)\.", names[id(module)]) for module in modules]
        shape = RouteShape(
            experts=tuple(int(module.num_experts) for module in modules),
            chosen=tuple(ids.shape[-1] for ids in own),
            layers=tuple(number if found is None else int(found[1]) for number, found in enumerate(places)),
            num_layers=int(text_config(model).num_hidden_layers),
        )
        every = torch.ones(len(own[0]), dtype=torch.bool, device=own[0].device)
        same, same_weights, same_logits = self._observed(model, modules, _Records(own, every))
        others = tuple((ids + 1) % count for ids, count in zip(own, shape.experts, strict=True))
        sent, sent_weights, _ = self._observed(model, modules, _Records(others, every))
        for number, (found, expected) in enumerate(zip((*same, *sent), (*own, *others), strict=True)):
            if not torch.equal(found.sort(-1).values, expected.sort(-1).values):
                raise _unusable(
                    model, f"router {number % len(own)} sends tokens to other experts than the recorded ones"
                )
        scale = float(logits.abs().max())
        close = [(same_logits, logits, scale), *((a, b, 1.0) for a, b in zip(same_weights, weights, strict=True))]
        if any(float((a.float() - b.float()).abs().max()) > _TOLERANCE * size for a, b, size in close):
            raise _unusable(model, "its outputs change if the records are its own choice")
        if not all(bool((values.isfinite() & (values != 0)).all()) for values in sent_weights):
            raise _unusable(model, "a router gives recorded experts that it has not chosen itself no weight")
        return shape

    def _observed(
        self, model: PreTrainedModel, modules: list[Any], records: _Records | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Run a few tokens. Return the ids and the weights [n, k] of the experts per router, and the logits."""
        seen: list[tuple[Tensor, Tensor]] = []

        def hook(_: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            seen.append((chosen_experts(arguments, named), expert_weights(arguments, named)))

        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
        token_ids = torch.arange(_TOKENS, device=compute_device(model))[None] % int(text_config(model).vocab_size)
        try:
            with nullcontext() if records is None else self._run(records):
                logits = model(input_ids=token_ids, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return tuple(ids for ids, _ in seen), tuple(weights for _, weights in seen), logits


class _Replaying(TorchFunctionMode):
    """Replaces the choice of experts in one forward, or in a part of it."""

    def __init__(self, records: _Records) -> None:
        super().__init__()
        self.records = records
        self.number: int | None = None
        """The router of the layer that runs."""
        self.replaced: dict[int, Tensor] = {}
        """Router -> [n]: number of recorded experts that it would not have chosen itself."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if self.number is None or function not in _TOPK:
            return function(*arguments, **named)
        scores: Tensor = arguments[0] if arguments else named["input"]
        experts = self.records.experts[self.number]
        k = arguments[1] if len(arguments) > 1 else named["k"]
        if k != experts.shape[1] or scores.numel() != len(experts) * scores.shape[-1] or scores.dim() < 2:
            return function(*arguments, **named)
        with torch.no_grad():
            own = function(*arguments, **named).indices
            ids = experts.view(own.shape)
            self.replaced[self.number] = (ids[..., None] != own[..., None, :]).all(-1).sum(-1).flatten()
            ids = ids.where(self.records.recorded.view(*own.shape[:-1], 1), own)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def differing(self) -> Tensor:
        """Return [n]: the share of recorded experts that no router has chosen itself; NaN without a record."""
        width = sum(experts.shape[1] for experts in self.records.experts)
        share = torch.stack(list(self.replaced.values())).sum(0) / width
        return share.masked_fill(~self.records.recorded, np.nan)


def _inside(replay: RouterReplay, number: int | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the layer with the router `number`."""
    replay.enter(number)
    try:
        return forward(*args, **kwargs)
    finally:
        replay.enter(None)


def _unusable(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"`{_KEY}`: the experts that an engine has recorded cannot be replayed in {type(model).__name__}: {reason}; "
        "set it to false",
        key=_KEY,
    )
