"""Write the page on clients, ``docs/clients.md``, from their test programs.

python -m tools.clients_page --write
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping

from tests.clients.table import (
    BENCHMARKS,
    CLIENTS,
    ENVIRONMENTS,
    OPTIONAL,
    Benchmark,
    Client,
)
from tools.clients_env import NODE
from tools.written_page import DOCS, main

PAGE = DOCS / "clients.md"

_LANGUAGES = {".py": "python", ".sh": "sh", ".mjs": "js"}

_ABOUT = """\
# Clients

Written by `python -m tools.clients_page --write` from the
[programs](../tests/clients/table.py) that test each client. Every run of the tests covers OpenAI's
and Anthropic's with the built-in engine. `make test-clients` covers all, each in its own
environment; that of Open WebUI takes 3 GB (`make test-open-webui`). The column *in front of vLLM*
has the results of these programs with vLLM 0.32 behind Afferent and the same small model, once, in
November 2026 (`make test-clients ARGS=--vllm`). Each program covers these features:

- **text** and **image**: a question without media, and one about a picture;
- **stream**: the answer in pieces, as they are generated;
- **structured**: an answer that is an object of a given JSON schema;
- **forced**: such an object as the arguments of a tool that the model has to call. Some clients
  have this way of structured output beside a schema, or by default;
- **tool**: the model calls a function, and answers with its result;
- **session**: a conversation that the server keeps. Few clients have it;
- **usage**: the number of tokens of question and answer;
- **errors**: the server's message about an invalid request, in the client's own exception.

To run a program, [start the built-in model](quick-starts.md#try-it-without-a-gpu). Install the
client into an environment of its own, and run the program in the clone: it reads
`docs/pictures/one.jpg`. A program in JavaScript is a file `NAME.mjs` in the folder of its
`node_modules`. With another server, write its URL and its model's name in the place of
`http://127.0.0.1:8000` and `shapes`.
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
    benchmarks = (_BENCHMARKS, *map(_benchmark, BENCHMARKS))
    return "\n".join([_ABOUT, *_table(), "", *_missing(), *benchmarks, *map(_section, CLIENTS)])


def _table() -> Iterable[str]:
    yield "| client | API | built-in | in front of vLLM |"
    yield "|---|---|---|---|"
    for client in CLIENTS:
        built_in = _cell(client, client.lacks)
        before_vllm = _cell(client, {**client.lacks, **client.lacks_before_vllm})
        title = f"[{client.title}](#{_anchor(client)})"
        before_vllm = before_vllm if client.runs_before_vllm else "no result: it did not end"
        yield f"| {title} | {client.api} | {built_in} | {before_vllm} |"


def _cell(client: Client, lacks: Mapping[str, str]) -> str:
    missing = [each for each in lacks if each not in OPTIONAL]
    usual = f"all but {', '.join(missing)}" if missing else "all"
    sections = client.parts()[1]
    extra = [each for each in OPTIONAL if each in sections and each not in lacks]
    return ", ".join([usual, *extra])


def _missing() -> Iterable[str]:
    yield "The reasons of what is missing:"
    yield ""
    for client in CLIENTS:
        for feature, reason in client.lacks.items():
            yield from _point(f"{client.title}, {feature}: {reason}.")
        for feature, reason in client.lacks_before_vllm.items():
            yield from _point(f"{client.title}, {feature}, in front of vLLM: {reason}.")
    yield ""


def _point(text: str) -> Iterable[str]:
    return textwrap.wrap(text, 100, initial_indent="- ", subsequent_indent="  ")


def _anchor(client: Client) -> str:
    return client.title.lower().replace(",", "").replace("'", "").replace(".", "").replace(" ", "-")


def _benchmark(benchmark: Benchmark) -> str:
    return f"""\
{benchmark.title}'s, which the tests run (`{_install(ENVIRONMENTS[benchmark.environment])}`):

<!-- fragment: the tests of clients run it -->
```sh
{benchmark.path.read_text()}```
"""


def _install(packages: tuple[str, ...], by: str = "pip") -> str:
    return f"{by} install " + " ".join(f"'{each}'" if "[" in each else each for each in packages)


def _section(client: Client) -> str:
    by = "npm" if client.environment == NODE else "pip"
    return f"""\
## {client.title}

<!-- fragment: a package of others -->
```sh
{_install(_packages(client), by)}
```

<!-- fragment: the tests of clients run it, part by part -->
```{_LANGUAGES[client.path.suffix]}
{client.path.read_text()}```
"""


def _packages(client: Client) -> tuple[str, ...]:
    """Return the packages; in the default environment, the program has the package's name."""
    packages = ENVIRONMENTS.get(client.environment) or (client.program.partition("_")[0],)
    if client.environment != NODE:
        return packages
    imported = client.path.read_text()
    return tuple(each for each in packages if re.search(f'from "{each}["/]', imported))


if __name__ == "__main__":
    sys.exit(main(PAGE, page))
