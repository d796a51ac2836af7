"""Write the page of all request parameters, ``docs/parameters.md``, from their table.

python -m tools.parameters_page --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import get_args

from afferent.builtin.apis.parameters import (
    CHAT,
    COMPLETIONS,
    GROUPS,
    MESSAGES,
    RESPONSES,
    Only,
    Parameter,
    Use,
)
from afferent.engines.protocol import SamplingExtra, SamplingField
from tools.written_page import DOCS, main

_SHOWN = (CHAT, RESPONSES, MESSAGES, COMPLETIONS)
PAGE = DOCS / "parameters.md"

_ABOUT = """\
# Parameters

Written by `python -m tools.parameters_page --write` from the table in
[`builtin/apis/parameters.py`](../src/afferent/builtin/apis/parameters.py), against which requests
are checked.

[Chat completions](api.md), [Responses](responses.md), [Messages](anthropic.md) and completions
treat each parameter in one of these ways, with every engine:

- **yes**: it has its documented effect.
- **accepted**: any value is accepted; none changes anything.
- **only ...**: accepted with these values and `null`, which change nothing. Any other value is
  refused with `unsupported_parameter`, before any work is done.
- **-**: the API does not know it. A parameter that no API knows is ignored, and the answer's header
  `x-ignored-parameters` names it; with `--unknown-fields refuse` it is refused. A name that
  resembles a known one (`max_token`, `maxTokens`) is always refused, and the refusal gives the
  known name: a misspelt limit must not become a long answer.

A **need** is a field of `Sampling` that the engine has to support. A request that needs an
unsupported field is refused in the same way, by name.

| engine | supports |
|---|---|
| `reference`, the built-in one | all of them |
| one [of yours](writing-an-engine.md) | {taken}, \
except those in `EngineInfo.unsupported`; \
of {extras} those in `EngineInfo.supported` |
| `vllm` | the parameters of vLLM's own API: requests are [passed on](vllm.md), \
and this page does not apply |

Penalties, biases and limits are vLLM's, and are applied in its order: `min_tokens`, `logit_bias`,
`repetition_penalty`, `frequency_penalty`, `presence_penalty`, and where a token is drawn
`temperature`, `min_p`, `top_k`, `top_p`. Log-probabilities are those of the model, before any of
these. With a `seed` the answer is the same each time, independently of other requests.

- A stop string is matched after `min_tokens` tokens, and tokens that end the answer can't be chosen
  before. If `stop` or `stop_token_ids` ended an answer, it has the match as `stop_reason` in chat
  completions, as vLLM does.
- `include_stop_str_in_output` keeps the match in the text; a special token only with
  `"skip_special_tokens": false`.
- `continue_final_message` uses the last message, the assistant's, as the beginning of the answer,
  which contains only the continuation. `add_generation_prompt` is then false. In Messages, a last
  message of the assistant always has this effect.
- `chat_template_kwargs` has up to 64 names and 16,384 characters; special tokens that are spelt
  out in it are plain text, as in messages.
"""

_HEAD = (
    "| parameter | meaning | chat | Responses | Messages | completions | needs |",
    "|---|---|---|---|---|---|---|",
)


def page() -> str:
    """Return the whole page."""
    taken, extras = (
        ", ".join(f"`{name}`" for name in get_args(fields))
        for fields in (SamplingField, SamplingExtra)
    )
    about = _ABOUT.replace("{taken}", taken).replace("{extras}", extras)
    return "\n".join([about, *_tables()])


def _tables() -> Iterable[str]:
    for title, group in GROUPS.items():
        shown = [one for one in group if not one.uses.keys().isdisjoint(_SHOWN)]
        yield "\n".join([f"## {title}", "", *_HEAD, *map(_row, shown), ""])


def _row(one: Parameter) -> str:
    uses = " | ".join(_use(one, api) for api in _SHOWN)
    needs = f"`{one.needs}`" if one.needs else ""
    return f"| `{one.name}` | {one.about} | {uses} | {needs} |"


def _use(one: Parameter, api: str) -> str:
    match one.uses.get(api):
        case None:
            return "-"
        case Use.HONOURED:
            return "yes"
        case Use.ACCEPTED:
            return "accepted"
        case Only(values):
            shown = [f"`{json.dumps(value)}`" for value in values] or ["`null`"]
            return "only " + (", ".join(shown) if len(shown) < 6 else "what asks for plain text")


if __name__ == "__main__":
    sys.exit(main(PAGE, page))
