import base64
from pathlib import Path
from typing import Any, Literal

from openai import NotFoundError, OpenAI, pydantic_function_tool
from openai.types.responses import ResponseInputItemParam
from pydantic import BaseModel

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
url = f"data:image/jpeg;base64,{data}"
question: list[ResponseInputItemParam] = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_text", "text": "What is in the picture?"},
        ],
    }
]

# text
answer = client.responses.create(model="shapes", input="What is in the picture?")
print(answer.output_text)

# image
answer = client.responses.create(model="shapes", input=question)
print(answer.output_text)

# stream
with client.responses.stream(model="shapes", input=question) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


parsed = client.responses.parse(model="shapes", input=question, text_format=Thing)
if thing := parsed.output_parsed:
    print(thing.model_dump_json())


# tool
class Report(BaseModel):
    """Report the colour of the picture."""

    colour: str


tools = [pydantic_function_tool(Report, name="report_colour")]
task: list[Any] = [*question, {"role": "user", "content": "Report the colour of the picture."}]
called = client.responses.parse(model="shapes", input=task, tools=tools)
task += called.output
for item in called.output:
    if item.type == "function_call":
        print(item.parsed_arguments)
        task.append({"type": "function_call_output", "call_id": item.call_id, "output": "ok"})
final = client.responses.create(model="shapes", input=task)
print(final.output_text)

# usage
if usage := answer.usage:
    print(usage.input_tokens, usage.output_tokens)

# errors
try:
    client.responses.create(model="another", input=question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
