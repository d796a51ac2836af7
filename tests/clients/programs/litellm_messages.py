import asyncio
import base64
import json
from pathlib import Path

import litellm

server = {"api_base": "http://127.0.0.1:8000", "api_key": "none", "max_tokens": 1000}
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
source = {"type": "base64", "media_type": "image/jpeg", "data": data}
text = {"type": "text", "text": "What is in the picture?"}
question = [{"role": "user", "content": [{"type": "image", "source": source}, text]}]


def ask(messages, model="shapes", **more):
    made = litellm.anthropic.messages.acreate(
        model=f"anthropic/{model}", messages=messages, **server, **more
    )
    return asyncio.run(made)


# text
answer = ask([{"role": "user", "content": "What is in the picture?"}])
print(answer["content"][0]["text"])

# image
answer = ask(question)
print(answer["content"][0]["text"])


# stream
async def stream():
    async for chunk in await litellm.anthropic.messages.acreate(
        model="anthropic/shapes", messages=question, stream=True, **server
    ):
        for line in chunk.decode().splitlines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            print(event.get("delta", {}).get("text", ""), end="|")


asyncio.run(stream())

# structured
thing = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue", "yellow"]},
        "shape": {"enum": ["circle", "square", "star", "triangle"]},
    },
    "required": ["colour", "shape"],
    "additionalProperties": False,
}
wanted = {"format": {"type": "json_schema", "schema": thing}}
print(ask(question, output_config=wanted)["content"][0]["text"])

# tool
schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
tools = [{"name": "report_colour", "input_schema": schema}]
task = [*question, {"role": "user", "content": "Report the colour of the picture."}]
called = ask(task, tools=tools)
task.append({"role": "assistant", "content": called["content"]})
for call in called["content"]:
    print(call["name"], call["input"])
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    task.append({"role": "user", "content": [result]})
print(ask(task, tools=tools)["content"][0]["text"])

# usage
cached = answer["usage"].get("cache_read_input_tokens", 0)
print(answer["usage"]["input_tokens"] + cached, answer["usage"]["output_tokens"])

# errors
try:
    ask(question, model="another")
except litellm.NotFoundError as error:
    print(error.status_code, error.message)
