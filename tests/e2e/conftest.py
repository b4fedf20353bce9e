"""The real default model, fetched once into the user's cache as `octavo pull` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.models.loading import LoadedModel, load_model
from octavo.weights.hub import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(resolve_model(str(smollm2_path)))
