"""Render the templates of `templates.json` with `transformers`, and write `prompts.json` beside it.

Run in an environment that has `transformers` and `tokenizers`; the tests have neither at hand.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

HERE = Path(__file__).parent

transformers: Any = import_module("transformers")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'What is the weather <like> in a "city"?',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "größte & beste"}},
            "required": ["city"],
        },
    },
}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "  Be brief.\n"},
            {"role": "user", "content": "Hi <b>&amp;</b> 東京"},
            {"role": "assistant", "content": "Hello!\n\nHow can I help?"},
            {"role": "user", "content": ""},
        ]
    },
    "no prompt for an answer": {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
        ],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Is it raining in Paris?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Paris"}},
                    }
                ],
            },
            {"role": "tool", "content": '{"rain": true}'},
            {"role": "tool", "content": "wet"},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [WEATHER],
    },
}


def main() -> None:
    made: dict[str, dict[str, str]] = {}
    for name, source in json.loads((HERE / "templates.json").read_text()).items():
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()),
            bos_token="<s>",
            eos_token="</s>",
            chat_template=source,
        )
        made[name] = {}
        for title, conversation in CONVERSATIONS.items():
            given = {"add_generation_prompt": True, **conversation}
            messages = given.pop("messages")
            made[name][title] = tokenizer.apply_chat_template(messages, tokenize=False, **given)
    whole = {
        "made with": f"transformers {transformers.__version__}",
        "conversations": CONVERSATIONS,
        "prompts": made,
    }
    (HERE / "prompts.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
