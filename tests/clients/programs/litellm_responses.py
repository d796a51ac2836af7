import base64
from pathlib import Path
from typing import Literal

import litellm
from pydantic import BaseModel

server = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "none"}
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
picture = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{data}"}
text = {"type": "input_text", "text": "What is in the picture?"}
question = [{"role": "user", "content": [picture, text]}]

# text
answer = litellm.responses(model="openai/shapes", input="What is in the picture?", **server)
print(answer.output_text)

# image
answer = litellm.responses(model="openai/shapes", input=question, **server)
print(answer.output_text)

# stream
for event in litellm.responses(model="openai/shapes", input=question, stream=True, **server):
    if event.type == "response.output_text.delta":
        print(event.delta, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


parsed = litellm.responses(model="openai/shapes", input=question, text_format=Thing, **server)
print(Thing.model_validate_json(parsed.output_text).model_dump_json())

# tool
schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
tools = [{"type": "function", "name": "report_colour", "parameters": schema}]
task = [*question, {"role": "user", "content": "Report the colour of the picture."}]
called = litellm.responses(model="openai/shapes", input=task, tools=tools, **server)
for call in called.output:
    print(call.name, call.arguments)
    task.append(call.model_dump(exclude_none=True))
    task.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok"})
final = litellm.responses(model="openai/shapes", input=task, tools=tools, **server)
print(final.output_text)

# usage
print(answer.usage.input_tokens, answer.usage.output_tokens)

# errors
try:
    litellm.responses(model="openai/another", input=question, **server)
except litellm.NotFoundError as error:
    print(error.status_code, error.message)
