"""Fixtures: one tiny checkpoint for the session, and cores on it."""

import functools

import pytest
import torch

from .builders import Build, TinyModel, build_stepper, tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stepper(tiny: TinyModel) -> Build:
    return functools.partial(build_stepper, tiny)
