"""Write the page on clients, ``docs/clients.md``, from their test programs.

python -m tools.clients_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tests.clients.table import CLIENTS, ENVIRONMENTS, FEATURES, STRUCTURED, Client
from tools.clients_env import NODE
from tools.written_page import DOCS, main

PAGE = DOCS / "clients.md"

_LANGUAGES = {".py": "python", ".sh": "sh", ".mjs": "js"}

_ABOUT = """\
# Clients

Written by `python -m tools.clients_page --write` from the
[programs](../tests/clients/table.py) that test each client. Every run of the tests covers OpenAI's
and Anthropic's, `make test-clients` the others, each in its own environment. Each program covers
these features with the built-in engine:

- **text** and **image**: a question without media, and one about a picture;
- **stream**: the answer in pieces, as they are generated;
- **structured**: an answer that is an object of a given schema;
- **usage**: the number of tokens of question and answer;
- **errors**: the server's message about an invalid request, in the client's own exception.
"""

_STRUCTURED = """\
Clients request **structured outputs** in two ways: by a JSON schema, or as the arguments of a tool
that the model has to call. The server supports both; these are the settings for a schema:
"""

_NOT_YET = """\
The built-in engine does not support structured outputs yet: it refuses such requests with
`unsupported_parameter`. In front of vLLM they are vLLM's own.
"""

_BENCHMARKS = """\
## Benchmark clients

Benchmark clients of other servers run unchanged. SGLang's makes the images itself; so does vLLM's
with `random-mm`. Both load the model's tokenizer, and SGLang's its processor, by the served name:
start them in the folder that contains the model's folder, here `src/afferent/builtin/models`.

<!-- fragment: they are packages of others -->
```sh
python -m sglang.bench_serving --backend vllm-chat --base-url http://127.0.0.1:8000 \\
    --model shapes --tokenizer shapes --dataset-name image \\
    --image-count 1 --image-resolution 320x240 \\
    --random-input-len 32 --random-output-len 16 --num-prompts 16 --request-rate 8

vllm bench serve --backend openai-chat --endpoint /v1/chat/completions \\
    --base-url http://127.0.0.1:8000 --model shapes --tokenizer shapes \\
    --dataset-name random-mm --random-mm-base-items-per-request 1 \\
    --random-mm-limit-mm-per-prompt '{"image": 1, "video": 0}' \\
    --random-mm-bucket-config '{(240, 320, 1): 1.0}' \\
    --random-input-len 32 --random-output-len 16 --num-prompts 16 --request-rate 8
```
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([_ABOUT, *_table(), "", *_advice(), _BENCHMARKS, *map(_section, CLIENTS)])


def _table() -> Iterable[str]:
    yield f"| client | API | {' | '.join(FEATURES)} |"
    yield f"|---|---|{'---|' * len(FEATURES)}"
    for client in CLIENTS:
        cells = " | ".join(_cell(client, feature) for feature in FEATURES)
        yield f"| [{client.title}](#{_anchor(client)}) | {client.api} | {cells} |"


def _cell(client: Client, feature: str) -> str:
    if feature in client.lacks:
        return client.lacks[feature]
    return "yes" if feature != "structured" or STRUCTURED else "not yet"


def _advice() -> Iterable[str]:
    yield _STRUCTURED
    yield from (f"- {client.title}: {client.advice}" for client in CLIENTS if client.advice)
    yield ""
    if not STRUCTURED:
        yield _NOT_YET


def _anchor(client: Client) -> str:
    return client.title.lower().replace(",", "").replace("'", "").replace(" ", "-")


def _section(client: Client) -> str:
    packages = " ".join(f"'{each}'" if "[" in each else each for each in _packages(client))
    by = "npm" if client.environment == NODE else "pip"
    return f"""\
## {client.title}

<!-- fragment: a package of others -->
```sh
{by} install {packages}
```

<!-- fragment: the tests of clients run it, part by part -->
```{_LANGUAGES[client.path.suffix]}
{client.path.read_text()}```
"""


def _packages(client: Client) -> tuple[str, ...]:
    """Return the packages; in the default environment, the program has the package's name."""
    return ENVIRONMENTS.get(client.environment) or (client.program.partition("_")[0],)


if __name__ == "__main__":
    sys.exit(main(PAGE, page))
