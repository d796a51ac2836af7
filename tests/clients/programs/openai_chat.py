import base64
from pathlib import Path
from typing import Any, Literal

from openai import NotFoundError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
question: list[ChatCompletionMessageParam] = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}},
            {"type": "text", "text": "What is in the picture?"},
        ],
    }
]

# text
blind: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is in the picture?"}]
answer = client.chat.completions.create(model="shapes", messages=blind)
print(answer.choices[0].message.content)

# image
answer = client.chat.completions.create(model="shapes", messages=question)
print(answer.choices[0].message.content)

# stream
with client.chat.completions.stream(model="shapes", messages=question) as stream:
    for event in stream:
        if event.type == "content.delta":
            print(event.delta, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


parsed = client.chat.completions.parse(model="shapes", messages=question, response_format=Thing)
if thing := parsed.choices[0].message.parsed:
    print(thing.model_dump_json())


# tool
class Report(BaseModel):
    """Report the colour of the picture."""

    colour: str


tools = [pydantic_function_tool(Report, name="report_colour")]
task: list[Any] = [*question, {"role": "user", "content": "Report the colour of the picture."}]
called = client.chat.completions.parse(model="shapes", messages=task, tools=tools)
task.append(called.choices[0].message)
for call in called.choices[0].message.tool_calls or []:
    print(call.function.parsed_arguments)
    task.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
final = client.chat.completions.create(model="shapes", messages=task, tools=tools)
print(final.choices[0].message.content)

# usage
if usage := answer.usage:
    print(usage.prompt_tokens, usage.completion_tokens)

# errors
try:
    client.chat.completions.create(model="another", messages=question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
