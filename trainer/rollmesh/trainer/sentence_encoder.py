"""A frozen sentence encoder: one vector per text, the mean of the last hidden states over its tokens, of length 1
(Reimers & Gurevych 2019, arXiv:1908.10084)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from rollmesh.shared.errors import ConfigError


class SentenceEncoder:
    """An encoder and its tokenizer, on the CPU, so that all ranks compute the same vectors."""

    def __init__(self, folder: str, tokens_max: int) -> None:
        """Raises ConfigError for a folder that has no encoder."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
        except (OSError, ValueError) as err:
            raise ConfigError(
                f"`learner.estimator.options.encoder`: the encoder {folder} cannot be loaded: {err}; name a folder "
                "with a sentence encoder and its tokenizer in transformers format",
                key="learner.estimator.options.encoder",
            ) from err
        self._tokens_max = tokens_max

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return [n, d]; zeros for an empty text."""
        found = [self._of(text) if text else None for text in texts]
        size = self._model.config.hidden_size
        return np.array([np.zeros(size) if vector is None else vector for vector in found]).reshape(len(texts), size)

    def _of(self, text: str) -> NDArray[np.float64]:
        inputs = self._tokenizer(text, truncation=True, max_length=self._tokens_max, return_tensors="pt")
        mean = self._model(**inputs).last_hidden_state[0].double().mean(0)
        vector: NDArray[np.float64] = (mean / mean.norm().clamp(min=1e-12)).numpy()
        return vector
