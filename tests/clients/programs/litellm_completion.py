import base64
from pathlib import Path
from typing import Literal

import litellm
from pydantic import BaseModel

server = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "none"}
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
picture = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
text = {"type": "text", "text": "What is in the picture?"}
question = [{"role": "user", "content": [picture, text]}]

# text
blind = [{"role": "user", "content": "What is in the picture?"}]
answer = litellm.completion("hosted_vllm/shapes", blind, **server)
print(answer.choices[0].message.content)

# image
answer = litellm.completion("hosted_vllm/shapes", question, **server)
print(answer.choices[0].message.content)

# stream
for chunk in litellm.completion("hosted_vllm/shapes", question, stream=True, **server):
    print(chunk.choices[0].delta.content or "", end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


parsed = litellm.completion("hosted_vllm/shapes", question, response_format=Thing, **server)
print(Thing.model_validate_json(parsed.choices[0].message.content).model_dump_json())

# tool
schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
tools = [{"type": "function", "function": {"name": "report_colour", "parameters": schema}}]
task = [*question, {"role": "user", "content": "Report the colour of the picture."}]
called = litellm.completion("hosted_vllm/shapes", task, tools=tools, **server)
task.append(called.choices[0].message)
for call in called.choices[0].message.tool_calls:
    print(call.function.name, call.function.arguments)
    task.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
final = litellm.completion("hosted_vllm/shapes", task, tools=tools, **server)
print(final.choices[0].message.content)

# usage
print(answer.usage.prompt_tokens, answer.usage.completion_tokens)

# errors
try:
    litellm.completion("hosted_vllm/another", question, **server)
except litellm.NotFoundError as error:
    print(error.status_code, error.message)
