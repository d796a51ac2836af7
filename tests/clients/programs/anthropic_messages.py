import base64
from pathlib import Path
from typing import Any, Literal

from anthropic import Anthropic, NotFoundError, beta_tool
from anthropic.types import Base64ImageSourceParam, MessageParam
from pydantic import BaseModel

client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
source: Base64ImageSourceParam = {"type": "base64", "media_type": "image/jpeg", "data": data}
question: list[MessageParam] = [
    {
        "role": "user",
        "content": [
            {"type": "image", "source": source},
            {"type": "text", "text": "What is in the picture?"},
        ],
    }
]

# text
blind: list[MessageParam] = [{"role": "user", "content": "What is in the picture?"}]
answer = client.messages.create(model="shapes", max_tokens=100, messages=blind)
print(*(block.text for block in answer.content if block.type == "text"))

# image
answer = client.messages.create(model="shapes", max_tokens=100, messages=question)
print(*(block.text for block in answer.content if block.type == "text"))

# stream
with client.messages.stream(model="shapes", max_tokens=100, messages=question) as stream:
    print("|".join(stream.text_stream))


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


parsed = client.messages.parse(
    model="shapes", max_tokens=1000, messages=question, output_format=Thing
)
if thing := parsed.parsed_output:
    print(thing.model_dump_json())


# tool
@beta_tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


task: list[Any] = [*question, {"role": "user", "content": "Report the colour of the picture."}]
runner = client.beta.messages.tool_runner(
    model="shapes", max_tokens=1000, messages=task, tools=[report_colour], thread=False
)
print(*(block.text for block in runner.until_done().content if block.type == "text"))

# usage
cached = answer.usage.cache_read_input_tokens or 0
print(answer.usage.input_tokens + cached, answer.usage.output_tokens)

# errors
try:
    client.messages.create(model="another", max_tokens=100, messages=question)
except NotFoundError as error:
    print(error.status_code, error.type, error.message)
