"""Scripted answers for clients that write their prompts themselves."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.plan import SampleSpec
from support.live_server import LiveServer

# Tells of tools and calls, in the format of Hermes.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call><|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] }}({{ c['function']['arguments'] | tojson }})"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CITY = '{"name": "Bern", "population": 134000}'
ANSWERS = {
    "Who?": "I am Octavo.",
    "Count!": "one two three",
    "Weather?": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>',
    "2 day of rain in Bern": "Take an umbrella.",
    "Chat!": "I would rather talk.",
    "City!": CITY,
    "City by a call!": f'<tool_call>\n{{"name": "City", "arguments": {CITY}}}\n</tool_call>',
}


def answer_questions(live: LiveServer, answers: Mapping[str, str] = ANSWERS) -> None:
    """From now on a prompt is answered by what it asks last: `answers` has texts that occur in prompts."""
    end = live.token_id("<|im_end|>")

    def next_token(spec: SampleSpec) -> int:
        prompt = bytes(t for t in spec.token_ids[: spec.num_prompt] if t < 256).decode()
        place, question = max((prompt.rfind(question), question) for question in answers)
        assert place >= 0, f"a prompt that asks nothing: {prompt}"
        script = [*answers[question].encode(), end]
        done = len(spec.token_ids) - spec.num_prompt
        return script[done] if done < len(script) else end

    live.model.script = next_token
