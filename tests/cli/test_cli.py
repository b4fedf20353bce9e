"""The command line: one clear line and exit code 2 for every mistake, and what each command prints."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_assembly import EOS, VOCAB_SIZE, fake_assembly, ids_of
from support.script_backend import HashBackend, ScriptBackend

import octavo.assemble
from octavo.assemble import read_chat_template
from octavo.cli import main
from octavo.cli.bench import Workload, measure
from octavo.cli.serve import serve
from octavo.errors import ConfigError

COMMANDS = ["serve", "run", "pull", "bench", "doctor"]


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def octavo_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in this process; `stdin` is what a pipe would bring."""

    def call(*argv: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            main(list(argv))
        captured = capsys.readouterr()
        return Result(int(caught.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every model name gives a scripted model that says "Paris." and records the options."""
    seen: dict[str, Any] = {}

    def assemble(model: str, options: Any, *, progress: Any = None) -> Any:
        seen.update(model=model, options=options)
        backend = ScriptBackend(vocab_size=VOCAB_SIZE, script=ids_of("Paris."), end_id=EOS)
        return fake_assembly(seen.get("backend") or backend, max_num_waiting=options.max_num_waiting)

    monkeypatch.setattr(octavo.assemble, "assemble", assemble)
    return seen


def assert_one_line_error(result: Result, text: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("octavo: error: ")
    assert result.err.count("\n") == 1
    assert len(result.err) < 400
    assert text in result.err


# ---------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["serv"], "Did you mean 'serve'?"),
        (["x" * 5000], "no such command"),
        (["serve", "--max-modle-len", "5"], "'--max-model-len'"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--port", "eighty"], "--port"),
        (["serve", "--max-model-len", "0"], "max_model_len must be an integer"),
        (["serve", "--kv-cache-memory", "2XB"], "kv_cache_memory: '2XB' is not a size"),
        (["serve", "--kv-cache-memory", "1GiB", "--memory-utilization", "0.5"], "exclude each other"),
        (["serve", "--load-format", "pickle"], "--load-format"),
        (["serve", "--block-size", "17"], "block_size"),
        (["serve", "--chat-template", "/no/such/file"], "chat_template: cannot read '/no/such/file'"),
        (["run"], "MODEL"),
        (["run", "x", "--temperature", "-1", "hi"], "temperature must be"),
        (["run", "x", "--top-k", "1.5", "hi"], "--top-k"),
        (["run", "no-such-model", "hi"], "model 'no-such-model'"),
        (["run", "./missing.gguf", "hi"], "no such file or directory"),
        (["run", "x", "--raw", "--system", "s", "hi"], "--system needs the chat template"),
        (["run", "x", ""], "the prompt is empty"),
        (["pull", "no-such-model"], "model 'no-such-model'"),
        (["bench", "offline", "--num-prompts", "0"], "--num-prompts"),
        (["bench", "online"], "online"),
    ],
)
def test_mistakes(octavo_command: Any, argv: list[str], text: str) -> None:
    assert_one_line_error(octavo_command(*argv), text)


def test_port_in_use(octavo_command: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_line_error(octavo_command("serve", "any", "--port", str(port)), str(port))


def test_wrong_environment_variable(octavo_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_THRAEDS", "2")
    assert_one_line_error(octavo_command("doctor"), "unknown environment variable 'OCTAVO_THRAEDS'")


def test_file_that_is_no_model(octavo_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"this is not a model" * 100)
    assert_one_line_error(octavo_command("run", str(path), "hi"), "model.gguf")


def test_directory_that_is_no_model(octavo_command: Any, tmp_path: Path) -> None:
    assert_one_line_error(octavo_command("run", str(tmp_path), "hi"), "config.json")


def test_error_of_a_real_process_is_one_line_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from octavo.cli import main; main()", "run", "/no/such/dir/", "hi"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert_one_line_error(Result(done.returncode, done.stdout, done.stderr), "no such file or directory")


# ---------------------------------------------------------------------------- help


@pytest.mark.parametrize("argv", [[], ["--help"], *([name, "--help"] for name in COMMANDS), ["bench", "offline", "-h"]])
def test_help(octavo_command: Any, argv: list[str]) -> None:
    result = octavo_command(*argv)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Usage: octavo")
    assert max(map(len, result.out.splitlines())) <= 112


def test_help_groups_flags_and_shows_defaults(octavo_command: Any) -> None:
    text = octavo_command("serve", "--help").out
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Server:", "Model:", "Memory:", "Scheduling:", "Machine:", "Other:"]
    assert "[default: 8000" in text
    assert "[default: 128]" in text


def test_flags_are_those_that_users_know() -> None:
    flags = {flag for p in serve.params for flag in (*p.opts, *p.secondary_opts)}
    assert flags >= {
        *("--max-model-len", "--block-size", "--max-num-seqs", "--max-num-batched-tokens", "--enable-prefix-caching"),
        *("--no-enable-prefix-caching", "--served-model-name", "--api-key", "--host", "--port", "--seed", "--dtype"),
        *("--load-format", "--chat-template", "--scheduling-policy", "--tensor-parallel-size", "--threads"),
        *("--gpu-memory-utilization", "--memory-utilization", "--kv-cache-memory"),
    }


def test_serve_passes_its_flags_on_and_says_where_to_ask(octavo_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.serve as server

    seen: dict[str, Any] = {}

    def run_server(**arguments: Any) -> int:
        seen.update(arguments)
        arguments["on_ready"](
            server.ReadyInfo(
                url="http://0.0.0.0:81",
                host="0.0.0.0",
                port=81,
                model_name="m",
                max_model_len=64,
                report=["Weights: 1 B"],
                seconds=0.5,
            )
        )
        return 0

    monkeypatch.setattr(server, "run_server", run_server)
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    result = octavo_command("serve", "m", "--port", "81", "--max-model-len", "64", "--max-body-size", "1MiB")
    assert (result.code, result.err) == (0, "")
    assert (seen["model"], seen["serve"].port, seen["engine"].max_model_len) == ("m", 81, 64)
    assert (seen["serve"].api_key, seen["serve"].max_body_bytes) == ("secret", 1 << 20)
    report, ready = result.out.splitlines()
    assert report == "Weights: 1 B"
    assert ready.startswith("Ready in 0.5 s. Try: curl http://127.0.0.1:81/v1/chat/completions -H ")
    body = json.loads(ready.partition(" -d '")[2].rstrip("'"))
    assert body["model"] == "m"
    assert "capital of France" in body["messages"][0]["content"]


def test_version(octavo_command: Any) -> None:
    assert octavo_command("--version").out == f"octavo {octavo.__version__}\n"


# ---------------------------------------------------------------------------- run


def test_run_answers_once(octavo_command: Any, fake_model: Any) -> None:
    result = octavo_command("run", "m", "Capital of France?", "--temperature", "0", "--threads", "1")
    assert (result.code, result.out, result.err) == (0, "Paris.\n", "")
    assert (fake_model["model"], fake_model["options"].threads) == ("m", 1)


@pytest.mark.parametrize("argv", [["run", "m"], ["run", "m", "-"]])
def test_run_reads_a_pipe(octavo_command: Any, fake_model: Any, argv: list[str]) -> None:
    assert octavo_command(*argv, stdin="Capital of France?\n").out == "Paris.\n"


def test_run_with_an_empty_pipe(octavo_command: Any, fake_model: Any) -> None:
    assert_one_line_error(octavo_command("run", "m"), "the prompt is empty")


def test_run_stats_go_to_stderr(octavo_command: Any, fake_model: Any) -> None:
    result = octavo_command("run", "m", "x", "--stats", "--max-tokens", "3", "--raw")
    assert result.out == "Par\n"
    assert result.err.startswith("3 tokens in ")


def test_run_stop_string(octavo_command: Any, fake_model: Any) -> None:
    assert octavo_command("run", "m", "x", "--stop", "is").out == "Par\n"


def test_run_prompt_too_long(octavo_command: Any, fake_model: Any) -> None:
    assert_one_line_error(octavo_command("run", "m", "x" * 600), "the context holds 512 tokens")


def test_run_interrupted_stops_the_answer(octavo_command: Any, fake_model: Any) -> None:
    class Interrupting(HashBackend):
        def execute(self, plan: Any) -> Any:
            if self.num_steps == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return super().execute(plan)

    fake_model["backend"] = Interrupting(vocab_size=VOCAB_SIZE)
    # Greedy: a drawn end of the answer may come before the signal.
    assert octavo_command("run", "m", "x", "--raw", "--temperature", "0").code == 130


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat(monkeypatch: pytest.MonkeyPatch, lines: list[Any], *argv: str) -> tuple[int, list[str]]:
    """Types `lines` at the prompt; an exception class stands for Ctrl-C or Ctrl-D."""
    prompts, typed = [], iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        prompts.append(prompt)
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(SystemExit) as caught:
        main(["run", "m", *argv])
    return int(caught.value.code or 0), prompts


def test_chat_goes_on_until_end_of_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_model: Any
) -> None:
    code, prompts = chat(monkeypatch, ["Hello", "", "More"])
    assert (code, len(prompts)) == (0, 4)
    assert capsys.readouterr().out == "Paris.\nParis.\n\n"


def test_chat_remembers_and_resets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_model: Any
) -> None:
    """The context of 512 fills up, the error does not end the chat, /reset makes room again."""
    code, _ = chat(monkeypatch, ["a" * 200, "b" * 200, "c" * 200, "/reset", "d" * 200, "/exit"])
    captured = capsys.readouterr()
    assert code == 0
    assert captured.out.count("Paris.") == 3
    assert "/reset starts a new conversation" in captured.err


def test_interrupt_at_the_prompt_twice_leaves(monkeypatch: pytest.MonkeyPatch, fake_model: Any) -> None:
    assert chat(monkeypatch, [KeyboardInterrupt, "x", KeyboardInterrupt, KeyboardInterrupt, "never"])[0] == 130


# ---------------------------------------------------------------------------- bench


def test_bench_as_json(octavo_command: Any, fake_model: Any) -> None:
    fake_model["backend"] = HashBackend(vocab_size=VOCAB_SIZE)
    argv = ("bench", "offline", "m", "--num-prompts", "5", "--input-len", "20", "--output-len", "7", "--json")
    figures = json.loads(octavo_command(*argv).out)
    assert figures["num_output_tokens"] == 35
    assert figures["workload"] == {"num_prompts": 5, "input_len": 20, "output_len": 7, "temperature": 0.0, "seed": 0}
    assert figures["output_tokens_per_s"] > 0
    assert figures["decode_tokens_per_s"] > 0
    assert figures["peak_rss_bytes"] > 0
    assert figures["config"]["block_size"] == "16"
    fake_model["backend"] = HashBackend(vocab_size=VOCAB_SIZE)
    again = json.loads(octavo_command(*argv, "--warmup", "0").out)
    assert again["output_sha256"] == figures["output_sha256"]


def test_bench_as_table(octavo_command: Any, fake_model: Any) -> None:
    fake_model["backend"] = HashBackend(vocab_size=VOCAB_SIZE)
    text = octavo_command("bench", "offline", "m", "--num-prompts", "2", "--input-len", "8", "--output-len", "4").out
    for name in ("Output  ", "Peak memory", "Output sha256", "max_num_batched_tokens", "2 sequences of 8 + 4 tokens"):
        assert name in text


def test_bench_that_cannot_fit(octavo_command: Any, fake_model: Any) -> None:
    assert_one_line_error(octavo_command("bench", "offline", "m", "--input-len", "500"), "more than max_model_len 512")


def test_bench_work_is_fixed_by_its_seed() -> None:
    work = Workload(num_prompts=3, input_len=5, output_len=4, temperature=0.0, seed=1)
    assert work.prompts(100) == work.prompts(100)
    measured = [measure(fake_assembly(max_num_seqs=n).engine, work, VOCAB_SIZE) for n in (1, 8)]
    assert measured[0].fingerprint == measured[1].fingerprint
    digest = hashlib.sha256(b"".join(struct.pack("<5I", 4, *ids) for ids in measured[0].output_ids)).hexdigest()
    assert measured[0].fingerprint == digest


# ---------------------------------------------------------------------------- doctor, report


def test_doctor_without_a_model(octavo_command: Any) -> None:
    result = octavo_command("doctor")
    assert result.code == 0
    for name in ("CPU features", "Threads", "Memory", "Cache"):
        assert name in result.out


def test_doctor_with_a_wrong_model_still_shows_the_machine(octavo_command: Any) -> None:
    result = octavo_command("doctor", "no-such-model")
    assert "CPU features" in result.out
    assert_one_line_error(Result(result.code, "", result.err), "model 'no-such-model'")


def test_doctor_with_a_model(octavo_command: Any, fake_model: Any) -> None:
    result = octavo_command("doctor", "m")
    assert result.code == 0
    for name in ("architecture", "KV pool", "Requests that fit", "scheduling_policy", "kv_cache_dtype"):
        assert name in result.out


def test_report_says_what_the_memory_holds() -> None:
    report = fake_assembly(kv_cache_memory=64 * 1024).report
    assert report[0] == "Weights: 0 B (fake)"
    assert "KV cache: 64 bytes per token, 1.0 KiB per block of 16 tokens" in report
    assert "KV pool: 64 blocks = 1,024 tokens in 64.0 KiB" in report
    assert "Requests of full length (512 tokens) that fit at once: 2" in report


def test_report_warns_of_a_lowered_context() -> None:
    assembly = fake_assembly(kv_cache_memory=16 * 1024)
    assert assembly.config.max_model_len == 256
    assert "Warning: max_model_len lowered from 512 to 256" in assembly.report[-1]


def test_demanded_context_beyond_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="largest possible max_model_len is 256"):
        fake_assembly(kv_cache_memory=16 * 1024, max_model_len=512)


def test_chat_template_from_file_or_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert read_chat_template(str(path)) == "{{ messages }}"
    assert read_chat_template("{% for m in messages %}{% endfor %}") == "{% for m in messages %}{% endfor %}"
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="chat_template: cannot read"):
        read_chat_template(str(tmp_path))
