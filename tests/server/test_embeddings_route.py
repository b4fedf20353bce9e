"""POST /v1/embeddings with the real openai client on a scripted model with four hidden dimensions."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_server import MODEL, LiveServer, live_server


def embed(live: LiveServer, **body: Any) -> Any:
    response = live.http.post(f"{live.url}/v1/embeddings", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.json()


def vectors(answer: Any) -> list[list[float]]:
    return [entry["embedding"] for entry in answer["data"]]


def test_openai_client(live: LiveServer) -> None:
    answer = live.openai.embeddings.create(model=MODEL, input=["red green", "blue"])  # asks for base64
    assert [entry.index for entry in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len("red green") + len("blue")
    for entry in answer.data:
        assert len(entry.embedding) == 4 and np.linalg.norm(entry.embedding) == pytest.approx(1, abs=1e-6)
    plain = live.openai.embeddings.create(model=MODEL, input="blue", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[1].embedding, abs=1e-7)


def test_all_forms_of_input(live: LiveServer) -> None:
    ids = live.http.post(f"{live.url}/tokenize", json={"prompt": "red"}).json()["tokens"]
    (alone,) = vectors(embed(live, input="red"))
    assert vectors(embed(live, input=["red"])) == [alone]
    assert vectors(embed(live, input=ids)) == [alone]
    assert vectors(embed(live, input=[ids, ids])) == [alone, alone]
    raw = embed(live, input="red", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == alone


def test_pooling_and_length(live: LiveServer) -> None:
    """The scripted hidden states are bytes: the mean of one token is the last; the raw mean is a true mean."""
    assert vectors(embed(live, input="r", pooling="mean")) == vectors(embed(live, input="r", pooling="last"))
    mean = vectors(embed(live, input="red", pooling="mean", normalize=False))[0]
    last = [vectors(embed(live, input=s, pooling="last", normalize=False))[0] for s in ("r", "re", "red")]
    assert mean == pytest.approx(np.mean(last, axis=0).tolist())
    assert all(float(x).is_integer() for v in last for x in v)


def test_truncation_and_limits(live: LiveServer) -> None:
    cut = embed(live, input="x" * 300 + "red", truncate_prompt_tokens=3)
    assert vectors(cut) == vectors(embed(live, input="red")) and cut["usage"]["prompt_tokens"] == 3
    assert embed(live, input="a" * 256)["usage"]["prompt_tokens"] == 256  # no token has to follow
    assert embed(live, input="red", dimensions=4)["data"]
    assert embed(live, input="red", explain=True)["octavo"]["prompts"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [268]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": "a" * 257}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 2}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"stream": True}, "stream"),
    ],
)
def test_refusals(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "input": "a", **fields}
    response = live.http.post(f"{live.url}/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000


def test_unknown_model_and_failed_row(live: LiveServer) -> None:
    assert live.http.post(f"{live.url}/v1/embeddings", json={"model": "x", "input": "a"}).status_code == 404
    live.model.row_error = lambda row: "NaN"
    assert live.http.post(f"{live.url}/v1/embeddings", json={"model": MODEL, "input": "a"}).status_code == 500
    live.model.row_error = None
    live.check_idle_and_live()


def test_the_server_says_how_to_pool(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"pooling": "mean"}) as live:
        assert vectors(embed(live, input="red")) == vectors(embed(live, input="red", pooling="mean"))
        assert vectors(embed(live, input="red")) != vectors(embed(live, input="red", pooling="last"))
