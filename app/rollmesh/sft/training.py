"""The training loop of supervised fine-tuning: one update per batch of conversations, checkpoints, held-out loss, and
the model at the end.

RUN/
  config.yaml   the configuration, with absolute paths     metrics.jsonl, tensorboard/   per update
  checkpoints/  as those of a run of reinforcement learning  model/                      the result, in transformers format
  summary.json

The batches are a function of the seed and the update, so a resumed run continues as if it had not stopped. A checkpoint
names the data by its digest, and a resume with other conversations or another batch size is rejected. Collaborators:
`chats` (samples), `rollmesh.trainer` (update, checkpoint).
"""  # noqa: E501, W505

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from rollmesh.services.learner.metrics_log import MetricsLog
from rollmesh.services.rollout.tokenizer import load_tokenizer as load_chat_tokenizer
from rollmesh.sft.chats import EncodedChat, read_chats
from rollmesh.sft.config import SftConfig
from rollmesh.shared.domain.trajectory import Source
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.trainer.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from rollmesh.trainer.checkpoint_files import CheckpointPosition, folder_name
from rollmesh.trainer.forward import logprobs_of
from rollmesh.trainer.memory_plan import plan_start
from rollmesh.trainer.model_config import context_length
from rollmesh.trainer.model_files import load_model, load_tokenizer, read_config, write_model_folder
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.sharding import release
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome

HELDOUT_MAX = 1000
"""Maximum number of held-out conversations that are taken from the data."""


class SftSummary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json. Losses are in nats per trained token; None without held-out conversations."""

    name: str
    outcome: str
    """`finished`, or `interrupted` if it can be resumed."""
    updates: int
    epochs: float
    conversations: int
    """Number of trained ones."""
    conversations_dropped: int
    """Number of those longer than the context, which `too_long: drop` leaves out."""
    tokens_trained: int
    wall_s: float
    """Seconds of this session."""
    loss: float | None
    """Training loss of the last update of this session."""
    heldout_loss_before: float | None
    heldout_loss: float | None
    model: str
    """Folder of the result; empty until it is finished."""
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SftProgress:
    """Progress after an update. `heldout_loss` is set if the update was followed by a measurement."""

    update: int
    updates: int
    epoch: float
    loss: float
    tokens_per_s: float
    heldout_loss: float | None


@dataclass(frozen=True, slots=True)
class Conversations:
    """The data of a run."""

    train: tuple[EncodedChat, ...]
    heldout: tuple[EncodedChat, ...]
    num_dropped: int
    """Number of conversations longer than the context."""

    def batches(self, config: SftConfig) -> Iterator[list[EncodedChat]]:
        """Yield the batch of each update, from the first."""
        for epoch in range(config.epochs):
            order = np.random.default_rng([config.seed, epoch]).permutation(len(self.train)).tolist()
            for start in range(0, len(order), config.batch_size):
                yield [self.train[i] for i in order[start : start + config.batch_size]]


def read_conversations(config: SftConfig, context_max: int | None) -> Conversations:
    """Read and encode the data. `context_max` is the longest sequence of the model, in tokens. Raises InvalidInput and
    ConfigError."""
    tokenizer = load_chat_tokenizer(config.model)
    data = read_chats(Path(config.data), tokenizer, config.rated)
    heldout = read_chats(Path(config.heldout), tokenizer, config.rated) if config.heldout else []
    long = [c for c in (*data, *heldout) if context_max is not None and c.num_tokens > context_max]
    if long and config.too_long == "error":
        raise InvalidInput(
            f"{len(long)} conversations are longer than the model's context of {context_max} tokens, first "
            f"{long[0].name} with {long[0].num_tokens}; shorten them, or set `too_long: drop`"
        )
    data, heldout = (
        [c for c in part if context_max is None or c.num_tokens <= context_max] for part in (data, heldout)
    )
    if not config.heldout:
        order = np.random.default_rng([config.seed]).permutation(len(data)).tolist()
        count = min(HELDOUT_MAX, int(config.heldout_share * len(data)))
        chosen = set(order[:count])
        heldout = [c for n, c in enumerate(data) if n in chosen]
        data = [c for n, c in enumerate(data) if n not in chosen]
    if not data:
        raise InvalidInput(
            f"{config.data}: no conversation is left to train on; lower `heldout_share`, or add conversations"
        )
    return Conversations(tuple(data), tuple(heldout), len(long))


class FineTuning:
    """One session of a run in its folder: from the newest checkpoint, or from the initial model."""

    def __init__(self, config: SftConfig, folder: Path) -> None:
        """Load everything. `config` has absolute paths. Raises InvalidInput for wrong data, and ConfigError for a
        model, settings or a checkpoint that cannot be used."""
        torch.set_num_threads(config.learner.threads)
        self.config, self.folder = config, folder
        self._begin_s = time.monotonic()
        self._checkpoints = folder / "checkpoints"
        try:
            found = latest_checkpoint(self._checkpoints)
            source = Path(config.model) if found is None else found.model_folder(config.learner.lora, config.model)
            context = context_length(read_config(source))
            self._tokenizer = load_tokenizer(config.model)
            self.data = read_conversations(config, context)
            longest = max(c.num_tokens for c in (*self.data.train, *self.data.heldout))
            plan = plan_start(config.learner, source, config.learner.device, Plugins(config.learner), longest=longest)
            model = load_model(source, device=config.learner.device)
            self.trainer = BatchTrainer(
                model,
                config.learner,
                seed=config.seed,
                sources=[Source.DATASET],
                initial_model=lambda: load_model(config.model, device=config.learner.device),
                encode=partial(self._tokenizer.encode, add_special_tokens=False),
            )
        except ValueError as err:  # a CheckpointError is one
            raise ConfigError(f"model: {err}", key="model") from err
        self._planned = (f"memory plan: {plan}",) if plan else ()
        with ExitStack() as undo:
            undo.callback(self.trainer.close)
            self._open(found)
            undo.pop_all()
        self._log = TrainedLog() if found is None else found.trained_log()
        self._checkpoint = "" if found is None else str(found.path)
        self._seconds = {"train": 0.0, "evaluate": 0.0, "checkpoint": 0.0}
        self._tokens = 0
        self._loss: float | None = None
        self._heldout_loss: float | None = None

    def run(
        self,
        on_update: Callable[[SftProgress], None] = lambda _: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> SftSummary:
        """Train until the end, and return the summary, which is also written.

        `stopping` is asked after each update; if true, a checkpoint follows, and the outcome is `interrupted`. Raises
        ConfigError if an update trains nothing, because its loss is not finite.
        """
        before = self._first_heldout_loss()
        first = self.trainer.step + 1
        finished = True
        with closing(MetricsLog(self.folder, tensorboard=self.config.learner.tensorboard)) as metrics:
            for k, batch in enumerate(self.batches[first - 1 :], start=first):
                progress = self._update(k, batch, metrics)
                on_update(progress)
                if stopping() and k < len(self.batches):
                    finished = False
                    break
        if finished and self.data.heldout and self._heldout_loss is None:  # a session without updates
            self._heldout_loss = self._measure()
        if self._log.update and self._checkpoint != str(self._checkpoints / folder_name(self._position())):
            self._save()
        summary = SftSummary(
            name=self.config.name,
            outcome="finished" if finished else "interrupted",
            updates=self.trainer.step,
            epochs=self._epoch(),
            conversations=len(self.data.train),
            conversations_dropped=self.data.num_dropped,
            tokens_trained=self._tokens,
            wall_s=time.monotonic() - self._begin_s,
            loss=self._loss,
            heldout_loss_before=before,
            heldout_loss=self._heldout_loss,
            model=str(self._write_model()) if finished else "",
            checkpoint=self._checkpoint,
        )
        (self.folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return summary

    def close(self) -> None:
        """End what the trainer uses beside memory. The session cannot train afterwards."""
        self.trainer.close()

    def _open(self, found: Checkpoint | None) -> None:
        """Restore the checkpoint, and compare its data with that of the configuration."""
        config, folder = self.config, self.folder
        try:
            of_optimizer = () if found is None else found.restore(self.trainer)
        except ValueError as err:
            raise ConfigError(f"model: {err}", key="model") from err
        self.batches = list(self.data.batches(config))
        self._settings = {
            "batch_size": config.batch_size,
            "data": _digest(self.data.train),
            "heldout": _digest(self.data.heldout),
            "learner": config.learner,
        }
        changed = () if found is None else found.changed_settings(self._settings)
        _check_data(changed, folder)
        if self.trainer.step > len(self.batches):
            raise ConfigError(
                f"{folder} has {self.trainer.step} updates, more than the {len(self.batches)} of this configuration; "
                "raise `epochs`",
                key="epochs",
            )
        changes = tuple(f"changed since the checkpoint: {change}" for change in changed or of_optimizer)
        self.notes = (*self._planned, *changes)

    def _update(self, k: int, batch: Sequence[EncodedChat], metrics: MetricsLog) -> SftProgress:
        """Make update k, with what is due after it."""
        with self._timed("train") as train:
            result = self.trainer.update(k, [c.sample for c in batch], [c.group for c in batch])
            self._log.append(k, result.used_ids, incarnation=0, outcome=result.outcome.name)
        if result.outcome is not UpdateOutcome.APPLIED:
            reasons = sorted({str(verdict.reason) for verdict in result.verdicts})
            raise ConfigError(
                f"update {k} trained nothing ({', '.join(reasons)}); lower `learner.optimizer.lr`, then resume from "
                "the checkpoint",
                key="learner.optimizer.lr",
            )
        self._loss, trained = result.metrics["loss"], int(result.metrics["tokens/trained"])
        self._tokens += trained
        last = k == len(self.batches)
        measured: dict[str, float] = {}
        if self.data.heldout and (last or k % self.config.eval_every == 0):
            self._heldout_loss = measured["heldout_loss"] = self._measure()
        if last or k % self.config.checkpoint_every == 0:
            self._save()
        metrics.append(
            update=k,
            incarnation=0,
            outcome=result.outcome.name,
            time_unix_s=time.time(),
            metrics=result.metrics | measured,
            seconds=self._seconds,
        )
        return SftProgress(
            update=k,
            updates=len(self.batches),
            epoch=self._epoch(),
            loss=self._loss,
            tokens_per_s=trained / train(),
            heldout_loss=measured.get("heldout_loss"),
        )

    def _epoch(self) -> float:
        return self.trainer.step / len(self.batches) * self.config.epochs

    def _measure(self) -> float:
        """Return the mean loss of the held-out conversations, in nats per trained token."""
        with self._timed("evaluate"):
            trainer = self.trainer
            trainer.model.train(False)
            sequences = [c.sequence for c in self.data.heldout]
            values = logprobs_of(
                trainer.model,
                sequences,
                self.config.learner.packing,
                mode=trainer.forward_choice.mode,
                chunk_tokens=self.config.learner.compute.logprob_chunk_tokens,
            )
            release(trainer.model)
            return -float(values.double().mean())

    def _first_heldout_loss(self) -> float | None:
        """Return the held-out loss of the initial model, which a resumed session reads from the folder."""
        if not self.data.heldout:
            return None
        file = self.folder / "heldout_before.json"
        if not file.is_file():
            file.write_bytes(msgspec.json.encode(self._measure()))
        return msgspec.json.decode(file.read_bytes(), type=float)

    def _position(self) -> CheckpointPosition:
        settings = msgspec.json.encode(self.config.learner)
        return CheckpointPosition(
            update=self.trainer.step,
            policy=self.config.name,
            digest=self._log.digest,
            seed=self.config.seed,
            config_digest=hashlib.sha256(settings).hexdigest(),
        )

    def _save(self) -> None:
        with self._timed("checkpoint"):
            saved = save_checkpoint(
                self._checkpoints,
                self.trainer,
                self._tokenizer,
                self._log,
                self._position(),
                settings=self._settings,
                keep_last=self.config.keep_last,
            )
        self._checkpoint = str(saved.path)

    def _write_model(self) -> Path:
        """Write the result. The folder appears complete or not at all."""
        final, temporary = self.folder / "model", self.folder / ".tmp-model"
        for folder in (temporary, final):
            shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir()
        write_model_folder(self.trainer.model, self._tokenizer, temporary)
        if self.trainer.adapters is not None:
            (adapter := self.folder / "adapter").mkdir(exist_ok=True)
            self.trainer.adapters.write(adapter)
        return temporary.rename(final)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[Callable[[], float]]:
        """Add the time inside to the seconds of a phase. Yields a function that returns the time so far."""
        begin_s = time.monotonic()
        yield lambda: time.monotonic() - begin_s
        self._seconds[phase] += time.monotonic() - begin_s


def _digest(chats: Sequence[EncodedChat]) -> str:
    """Return the digest of conversations as they are trained: tokens and targets, in order."""
    digest = hashlib.sha256()
    for chat in chats:
        digest.update(msgspec.msgpack.encode((chat.sequence.token_ids.tobytes(), chat.sequence.target_mask.tobytes())))
    return digest.hexdigest()[:16]


def _check_data(changed: Sequence[str], folder: Path) -> None:
    """Raise ConfigError if a change of the settings gives the remaining updates other batches, or the held-out loss
    other conversations."""
    names = {change.partition(" ")[0]: change for change in changed}
    if "batch_size" in names:
        raise ConfigError(
            f"{folder} cannot be resumed with another batch size: {names['batch_size']}", key="batch_size"
        )
    for name, what in (("data", "trained"), ("heldout", "held-out")):
        if name in names:
            raise ConfigError(
                f"{folder} cannot be resumed with other {what} conversations, whose digest was {names[name]}; restore "
                "the files of `data` and `heldout`, `heldout_share`, `too_long` and the chat template, or begin a new "
                "run whose `model` is the newest checkpoint",
                key=name,
            )
