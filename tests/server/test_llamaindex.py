"""LlamaIndex's client for OpenAI-compatible servers, in an environment of its own: it wants an older openai client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import support
from support.answers import CITY, TOOL_TEMPLATE, answer_questions
from support.live_server import MODEL, live_server

PYTHON = Path(sys.prefix) / "llamaindex" / "bin" / "python"
CALL = ["get_weather", {"city": "Bern", "days": 2}]


@pytest.mark.skipif(not PYTHON.exists(), reason="make test installs LlamaIndex beside the test tools")
def test_llamaindex(tmp_path: Path) -> None:
    script = Path(support.__file__).parent / "llamaindex_client.py"
    with live_server(tmp_path, chat_template=TOOL_TEMPLATE, max_model_len=2048, num_blocks=1024) as live:
        answer_questions(live)
        done = subprocess.run(
            [str(PYTHON), "-I", str(script), live.url, MODEL], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "chat": ["assistant", "I am Octavo.", 13],
        "complete": "I am Octavo.",
        "async": "I am Octavo.",
        "stream": ["one two three", "one two three"],
        "completion": "I am Octavo.",
        "completion stream": "one two three",
        "tools": [CALL],
        "tools stream": [CALL],
        "called": "2 day of rain in Bern",
        "structured by a call": json.loads(CITY),
        "structured": json.loads(CITY),
        "structured stream": json.loads(CITY),
        "structured llm": json.loads(CITY),
    }
